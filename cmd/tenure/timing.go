//go:build unix

package main

import "time"

// timing is how the end of a term is divided:
//
//	last renewal     told to end        SIGKILL      trust ends    others may begin
//	|----------------|------------------|------------|-------------|
//	  RenewDeadline    -stop-timeout      slack        Margin
type timing struct {
	renewDeadline time.Duration
	stop          time.Duration // from being told to SIGKILL
	slack         time.Duration // for SIGKILL to have its effect
	ask           time.Duration // from one question of the guard to the next
	patient       bool          // the guard may take longer: it stops a service
}

// newTiming divides a TTL. Without a stop timeout it is as long as the rest
// allows; a longer one comes at the expense of the renew deadline.
func newTiming(ttl, renew, stopTimeout time.Duration) (timing, error) {
	t := timing{
		renewDeadline: ttl * 2 / 3,
		stop:          stopTimeout,
		slack:         min(max(ttl/30, 50*time.Millisecond), time.Second),
		ask:           min(max(ttl/60, 20*time.Millisecond), 500*time.Millisecond),
	}
	trusted := ttl - margin(ttl) - t.slack
	if stopTimeout == 0 {
		t.stop = trusted - t.renewDeadline
	}
	t.renewDeadline = min(t.renewDeadline, trusted-t.stop)
	least := renew + ttl/10 // in which a renewal may hang, and be tried again
	if stopTimeout == 0 && t.renewDeadline < least {
		return t, usageError("-renew %v does not fit: with -ttl %v it is at most %v",
			renew, ttl, (t.renewDeadline - ttl/10).Truncate(time.Millisecond))
	}
	if t.renewDeadline < least {
		return t, usageError("-stop-timeout %v does not fit: with -ttl %v and -renew %v it is at most %v",
			stopTimeout, ttl, renew, (trusted - least).Truncate(time.Millisecond))
	}
	return t, nil
}

// margin is the default of [tenure.LeaseConfig.Margin].
func margin(ttl time.Duration) time.Duration { return ttl / 30 }

// left is what a guard is told where so much trust is left in the term: what
// [tenure.Term.Remaining] says, which asks both clocks.
func (t timing) left(remaining time.Duration) trust {
	if remaining <= 0 {
		return trust{}
	}
	hard := remaining - t.slack
	// A little after tenure itself would have told it, since the guard may not
	// have heard of the last renewal yet.
	return trust{Hard: hard, Soft: hard - t.stop + min(2*t.ask, t.stop/2)}
}
