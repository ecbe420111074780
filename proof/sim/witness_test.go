package sim

import (
	"context"
	"errors"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// bury has the witness of a process that has crashed release its lease: at once or late, through a network that loses
// requests and answers, again and again, and sometimes only if the term was not young. Other witnesses, whose processes
// may live, look as well: nothing is theirs to release.
func (l *life) bury() {
	if l.witness == "" {
		return
	}
	r, dice := l.r, l.r.burials
	older := time.Duration(0)
	if dice.One(3) {
		older = dice.UpTo(r.w.ttl)
	}
	store := storetest.Faulty(r.w.journal.handle("witness of "+r.name, l, true), func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		f := testkit.Fate{Request: dice.UpTo(r.w.ttl / 20), Answer: dice.UpTo(r.w.ttl / 20)}
		if dice.One(3) {
			f.In(testkit.Weathers[dice.N(len(testkit.Weathers))], dice, r.lateness())
		}
		return f.Carry(ctx, dice, &r.w.running, do)
	})
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: leaseKey, TTL: r.ttl, Expiry: tenure.ExpiryObserved, Logger: testkit.Quiet})
	if err != nil {
		panic(err)
	}
	r.w.running.Go(func() {
		for looks := 1 + dice.N(4); looks > 0 && r.w.sleep(dice.UpTo(r.w.ttl)); looks-- {
			ctx, cancel := timed(r.w.ttl / 6)
			released, err := lease.ReleaseDead(clock.With(ctx, r.clocks.Now), l.witness, older)
			cancel()
			switch {
			case released:
				r.w.line.Say(r.name, "its witness has released the lease")
				r.w.locked(func() { testkit.Count(&r.w.judge.judged, "releases by a witness") })
			case errors.Is(err, tenure.ErrHeld):
				r.w.locked(func() { testkit.Count(&r.w.judge.judged, "terms that a witness left") })
			}
		}
	})
}
