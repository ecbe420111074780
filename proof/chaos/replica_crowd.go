package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure"
)

const (
	crowdWorkers = 6 // per replica
	crowdLeases  = 40
	crowdTTL     = 2 * ttl
	crowdTimeout = crowdTTL / 2 // long enough for a call to join a group
	crowdPace    = 300 * time.Millisecond
	crowdTick    = 50 * time.Millisecond
)

// crowdWorker holds other leases for a moment, without a Coordinator. All workers of a
// replica act at the same times, so that their writes are grouped.
type crowdWorker struct {
	*replica
	holder string
	leases map[string]*tenure.Lease // the leases that it has used so far
	hurry  hurry
}

func (r *replica) crowd(ctx context.Context, worker int) {
	w := &crowdWorker{replica: r, holder: fmt.Sprintf("%s.%d", r.birth, worker), leases: map[string]*tenure.Lease{}}
	for until(ctx, crowdPace) {
		id := fmt.Sprint("crowd-", rand.N(crowdLeases))
		if err := w.hold(ctx, id); err != nil {
			r.tellSetUp(err)
			slog.Debug("crowd", "lease", id, "error", err)
		}
	}
}

// until waits for the next multiple of d. It returns false if ctx is done first.
func until(ctx context.Context, d time.Duration) bool { return pause(ctx, d-monotonic()%d) }

func (w *crowdWorker) lease(id string) (*tenure.Lease, error) {
	if lease := w.leases[id]; lease != nil {
		return lease, nil
	}
	lease, err := tenure.NewLease(w.backend.store(), tenure.LeaseConfig{
		Key: tenure.Key{Type: leaseType, ID: id}, Holder: w.holder, TTL: crowdTTL, Expiry: w.Expiry,
	})
	w.leases[id] = lease
	return lease, err
}

// hold holds a lease for a moment, or until renewals fail. It reports the period in which
// it saw its term valid, and the outcome of the release.
func (w *crowdWorker) hold(ctx context.Context, id string) error {
	lease, err := w.lease(id)
	if err != nil {
		return err
	}
	var term *tenure.Term
	err = w.call(ctx, func(ctx context.Context) (err error) {
		term, err = lease.AcquireOrSteal(ctx)
		return err
	})
	if err != nil {
		return err
	}
	tell := event{Kind: held, From: monotonic(), Term: term.ID(), Token: term.Token(), Note: id}
	calls, toTheEnd := rand.N(4), rand.IntN(8) == 0
	for until(ctx, crowdTick) && (calls > 0 || toTheEnd) {
		if calls--; calls >= 0 {
			if rand.IntN(3) == 0 {
				_ = w.call(ctx, func(ctx context.Context) error {
					return w.backend.fenced(ctx, term, entry{kind: ledgerFenced, term: term.ID(), token: term.Token()}, 0)
				})
			} else {
				w.renew(ctx, lease, term)
			}
		}
		now := monotonic()
		if !term.Valid() {
			break
		}
		tell.At = now
	}
	if tell.At != 0 {
		w.events.write(tell)
	}
	err = w.call(ctx, func(ctx context.Context) error { return lease.Release(ctx, term) })
	switch {
	case err == nil:
		w.events.write(event{Kind: released, Term: term.ID(), Note: id})
	case errors.Is(err, tenure.ErrLost):
		w.events.write(event{Kind: notReleased, Term: term.ID(), Note: id})
	}
	return err
}

// renew renews a term, with hardly any time if this replica hurries, and reports success.
func (w *crowdWorker) renew(ctx context.Context, lease *tenure.Lease, term *tenure.Term) {
	var began time.Duration
	renew := func(ctx context.Context) error {
		began = monotonic()
		return lease.Renew(ctx, term)
	}
	var err error
	if w.Hurry {
		err = w.hurry.untilDone(ctx, renew, term.Valid)
	} else {
		err = w.call(ctx, renew)
	}
	if err == nil {
		w.events.write(event{Kind: renewed, From: began, Term: term.ID(), Note: lease.Key().ID, Until: trustedUntil(term)})
	}
}

func (w *crowdWorker) call(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), crowdTimeout)
	defer cancel()
	return do(ctx)
}
