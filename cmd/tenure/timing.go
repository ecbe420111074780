//go:build unix

package main

import (
	"cmp"
	"time"
)

// timing divides the time from the last renewal to the lease's expiry:
//
//	last renewal     told to end        SIGKILL      trust ends    others may begin
//	|----------------|------------------|------------|-------------|
//	  RenewDeadline    --stop-timeout     slack        Margin
type timing struct {
	renewDeadline time.Duration
	stop          time.Duration // from telling the program to end to SIGKILL
	slack         time.Duration // for SIGKILL to take effect
	ask           time.Duration // between two questions of the guard
	patient       bool          // the guard may take longer, because it stops a service
}

// newTiming divides a TTL. If stopTimeout is 0, it takes the time that the rest leaves; a
// longer one shortens the renew deadline. A check that may last for long, which comes before each
// renewal, moves the renew deadline towards the expiry. If check is 0, there is none, or it has the default timeout.
func newTiming(ttl, renew, stopTimeout, check time.Duration) (timing, error) {
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
	least := renew + ttl/10 // so that a renewal that hangs can be retried
	if stopTimeout == 0 && t.renewDeadline < least {
		return t, usageError("--renew %v does not fit: with --ttl %v it is at most %v",
			renew, ttl, (t.renewDeadline - ttl/10).Truncate(time.Millisecond))
	}
	if t.renewDeadline < least {
		return t, usageError("--stop-timeout %v does not fit: with --ttl %v and --renew %v it is at most %v",
			stopTimeout, ttl, renew, (trusted - least).Truncate(time.Millisecond))
	}
	// The coordinator wants a thirtieth for the job to return. A program that has no
	// --stop-timeout of its own keeps at least a tenth.
	latest := min(trusted-cmp.Or(stopTimeout, ttl/10), ttl-margin(ttl)-ttl/30)
	if most := max(latest-ttl/10, t.renewDeadline-renew-1); check > most {
		return t, usageError("--check-timeout %v does not fit: with --ttl %v and --stop-timeout %v it is at most %v",
			check, ttl, cmp.Or(stopTimeout, ttl/10), most.Truncate(time.Millisecond))
	}
	t.renewDeadline = max(t.renewDeadline, min(check+ttl/10, latest))
	if stopTimeout == 0 {
		t.stop = trusted - t.renewDeadline
	}
	return t, nil
}

// margin is the default of [tenure.LeaseConfig.Margin].
func margin(ttl time.Duration) time.Duration { return ttl / 30 }

// left returns what to tell a guard, given the result of [tenure.Term.Remaining], which
// looks at both clocks.
func (t timing) left(remaining time.Duration) trust {
	if remaining <= 0 {
		return trust{}
	}
	hard := remaining - t.slack
	// The guard acts a little later than tenure itself would, because it may not know of
	// the last renewal yet.
	return trust{Hard: hard, Soft: hard - t.stop + min(2*t.ask, t.stop/2)}
}
