package main

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure"
)

const (
	crowdWorkers = 6 // of a replica
	crowdLeases  = 8
	crowdTTL     = 2 * ttl
	crowdTimeout = crowdTTL / 2
	crowdPace    = 300 * time.Millisecond
)

// crowd is one of a replica's workers that hold other leases for a moment, by hand.
// All of a replica begin at the same time, so that their writes go in groups.
func (r *replica) crowd(ctx context.Context, worker int) {
	holder := fmt.Sprintf("%s.%d", r.Name, worker)
	for pause(ctx, crowdPace-monotonic()%crowdPace) {
		key := tenure.Key{Type: leaseType, ID: fmt.Sprint("crowd-", rand.N(crowdLeases))}
		lease, err := tenure.NewLease(r.backend.store(), tenure.LeaseConfig{Key: key, Holder: holder, TTL: crowdTTL, Expiry: r.Expiry})
		if err == nil {
			err = r.hold(ctx, lease)
		}
		if err != nil {
			slog.Debug("crowd", "lease", key, "error", err)
		}
	}
}

// hold holds a lease for a moment, in which it writes through the fence, and tells from
// when to when it saw its term valid, whatever has become of the process meanwhile.
func (r *replica) hold(ctx context.Context, lease *tenure.Lease) error {
	limited := func() (context.Context, context.CancelFunc) {
		return context.WithTimeout(context.WithoutCancel(ctx), crowdTimeout)
	}
	acquiring, cancel := limited()
	term, err := lease.AcquireOrSteal(acquiring)
	cancel()
	if err != nil {
		return err
	}
	held := event{Kind: held, From: monotonic(), Term: term.ID(), Token: term.Token(), Note: lease.Key().ID}
	for range rand.N(4) {
		pause(ctx, rand.N(50*time.Millisecond))
		calling, cancel := limited()
		if rand.IntN(2) == 0 {
			err = lease.Renew(calling, term)
		} else {
			err = r.backend.fenced(calling, term, "", 0)
		}
		cancel()
		if err != nil {
			slog.Debug("crowd", "lease", lease.Key(), "error", err)
		}
		if now := monotonic(); term.Valid() {
			held.At = now
		}
	}
	if held.At != 0 {
		r.events.write(held)
	}
	releasing, cancel := limited()
	defer cancel()
	return lease.Release(releasing, term)
}
