package tenure_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// three replicas, of which the first holds.
func three(t *testing.T, l *ledger, store tenure.Store) (a, b, c *replica) {
	t.Helper()
	a = start(t, l, store, "a", tenure.CoordinatorConfig{})
	synctest.Wait()
	b = start(t, l, store, "b", tenure.CoordinatorConfig{})
	c = start(t, l, store, "c", tenure.CoordinatorConfig{})
	time.Sleep(time.Minute + time.Second) // a second after a renewal
	return a, b, c
}

func TestAHolderThatIsAskedHandsTheLeaseOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a, b, c := three(t, l, store)
		wantErr(t, b.lease.RequestRelease(t.Context()), nil)
		if pollOnly {
			time.Sleep(9 * time.Second) // until the next renewal
		}
		settle()
		time.Sleep(5 * time.Millisecond) // for which a standby is deaf after a hint in vain
		if a.IsHolder() || !b.IsHolder() && !c.IsHolder() {
			t.Errorf("a holds: %v, b: %v, c: %v", a.IsHolder(), b.IsHolder(), c.IsHolder())
		}
		if !strings.Contains(l.String(), "a ends: lease resigned: on request") {
			t.Errorf("a's job was not told why:\n%v", l)
		}
	})
}

func TestTheReplicaThatIsNamedIsNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a, b, c := three(t, l, store)
		for round := range 20 {
			from, to, other := a, b, c
			if round%2 == 1 {
				from, to, other = b, a, c
			}
			before := from.Status().Token
			wantErr(t, other.lease.RequestHandover(t.Context(), to.Status().Replica), nil)
			if pollOnly {
				time.Sleep(9 * time.Second)
			}
			settle()
			time.Sleep(10 * time.Millisecond)
			if got := to.Status(); !to.IsHolder() || got.Token <= before {
				t.Fatalf("round %d: %s does not hold: %+v, the token before was %d\n%v", round, got.Replica, got, before, l)
			}
			holding, err := other.lease.Read(t.Context())
			if err != nil || holding.Offered || len(holding.Labels) > 0 {
				t.Errorf("what is left of the request: %+v, error %v", holding, err)
			}
			time.Sleep(time.Minute + time.Second)
		}
	})
}

func TestAnOfferThatNobodyTakesGoesToAnyReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		cfg := tenure.CoordinatorConfig{
			Confirmations:    3,
			FencePredecessor: func(context.Context, tenure.Holding) error { t.Error("fenced"); return nil },
		}
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, l, store, "b", cfg)
		time.Sleep(time.Minute + time.Second)
		wantErr(t, b.lease.RequestHandover(t.Context(), "a"), nil) // who holds it
		synctest.Wait()
		if !a.IsHolder() {
			t.Fatal("a does not hold any more")
		}
		wantErr(t, b.lease.RequestHandover(t.Context(), "nobody"), nil)
		time.Sleep(6 * time.Second)
		holding, err := b.lease.Read(t.Context())
		if a.IsHolder() || b.IsHolder() || err != nil || holding.Holder != "nobody" || !holding.Offered {
			t.Errorf("while the offer stands: a holds %v, b %v, read %+v, error %v", a.IsHolder(), b.IsHolder(), holding, err)
		}
		time.Sleep(time.Second)
		if a.IsHolder() || !b.IsHolder() {
			t.Errorf("after the offer: a holds %v, b %v", a.IsHolder(), b.IsHolder())
		}
	})
}

func TestAReplicaThatStaysAwayTakesWhatItIsOffered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a, b, c := three(t, l, store)
		for _, to := range []*replica{b, a, b, c, a} {
			wantErr(t, c.lease.RequestHandover(t.Context(), to.Status().Replica), nil)
			time.Sleep(50 * time.Millisecond)
			if !to.IsHolder() {
				t.Fatalf("%s does not hold:\n%v", to.Status().Replica, l)
			}
		}
	})
}

// A request writes to the record, which makes it look younger.
func TestARequestToAHolderThatHasVanishedDelaysNoTakeover(t *testing.T) {
	for _, expiry := range []tenure.ExpiryPolicy{tenure.StoreClock, tenure.Observed} {
		synctest.Test(t, func(t *testing.T) {
			store := storetest.NewMem()
			gone := newLease(t, store, tenure.LeaseConfig{Holder: "gone"})
			mustAcquire(t, gone)
			cfg := tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error { <-ctx.Done(); return nil }}
			b := startWith(t, store, tenure.LeaseConfig{Holder: "b", Expiry: expiry}, cfg)
			for range 28 {
				time.Sleep(time.Second)
				wantErr(t, b.lease.RequestHandover(t.Context(), "c"), nil)
			}
			holding, err := gone.Read(t.Context())
			wantErr(t, err, nil)
			if holding.Age < 27*time.Second || holding.Age > 28*time.Second {
				t.Errorf("after 28 s the record's age is %v", holding.Age)
			}
			time.Sleep(time.Second)
			if b.IsHolder() {
				t.Error("taken over too early")
			}
			time.Sleep(time.Second + 35*time.Millisecond) // and 28 roundings of an age
			if !b.IsHolder() {
				t.Errorf("policy %d: not taken over: %+v", expiry, b.Status())
			}
		})
	}
}

func TestARequestThatCannotBeMetSaysWhy(t *testing.T) {
	store := storetest.NewMem()
	lease := newLease(t, store, tenure.LeaseConfig{Holder: "a"})
	wantErr(t, lease.RequestRelease(t.Context()), tenure.ErrNotFound)
	wantErr(t, lease.RequestHandover(t.Context(), "b\x00"), tenure.ErrInvalid)
	obj := put(t, store, tenure.Object{Key: mustAcquire(t, lease).Key(), Payload: []byte(`{"holder":"another program"}`)})
	wantErr(t, lease.RequestRelease(t.Context()), errors.ErrUnsupported)
	if now, err := store.Get(t.Context(), obj.Key); err != nil || now.Version != obj.Version {
		t.Errorf("its record was written to: %+v, error %v", now, err)
	}
	_, err := tenure.NewLease(store, tenure.LeaseConfig{Labels: map[string]string{"tenure.release": ""}})
	wantErr(t, err, tenure.ErrInvalid)
}

// The answers of its last writes are lost, of all or of the first.
func TestAHandoverWhoseAnswerWasLostIsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a, b, _ := three(t, l, store)
		lost := 0
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if err == nil && call.Op == "put" && strings.Contains(string(call.Object.Payload), "offered") {
				lost++
				return errors.New("connection reset")
			}
			return err
		})
		wantErr(t, b.lease.RequestHandover(t.Context(), "b"), nil)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if !b.IsHolder() || lost != 1 {
			t.Errorf("b does not hold, %d answers were lost:\n%v", lost, l)
		}
	})
}

func TestAWriteFencedByATermThatWasHandedOverIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		fenced := make(chan tenure.Store, 1)
		a := start(t, l, store, "a", tenure.CoordinatorConfig{Watch: func(ctx context.Context) error {
			f, err := tenure.Fence(store, tenure.TermFromContext(ctx))
			wantErr(t, err, nil)
			fenced <- f
			<-ctx.Done()
			return nil
		}})
		wantErr(t, func() error { synctest.Wait(); return a.lease.RequestHandover(t.Context(), "b") }(), nil)
		time.Sleep(time.Second) // offered, and taken by nobody
		_, err := (<-fenced).PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.MustCreate())
		wantErr(t, err, tenure.ErrLost)
	})
}

// Else hints could make a takeover count as confirmed at once.
func TestHintsConfirmNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, b := takeover(t, newLedger(t), tenure.CoordinatorConfig{Confirmations: 2})
		for range 19 {
			wantErr(t, b.store.Wake(t.Context(), tenure.Key{Type: "reconciler_lease", ID: "singleton"}), nil)
			time.Sleep(time.Second)
		}
		if b.IsHolder() {
			t.Error("confirmed after 19 s, by two renewals that come every 10 s")
		}
		time.Sleep(2 * time.Second)
		if !b.IsHolder() {
			t.Error("not confirmed after 21 s")
		}
	})
}

func TestATakeoverThatWasNotConfirmedIsNoneForTheNextReplica(t *testing.T) {
	for name, end := range map[string]func(b *replica){
		"shutdown": func(b *replica) { b.stop() },
		"resigned": func(b *replica) { b.Resign(context.Background()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, s := newLedger(t), &script{}
				cfg := tenure.CoordinatorConfig{FencePredecessor: func(ctx context.Context, prev tenure.Holding) error {
					s.say(tenure.TermFromContext(ctx).Holder() + " fences " + prev.Holder)
					if tenure.TermFromContext(ctx).Holder() == "b" {
						<-ctx.Done()
					}
					return nil
				}}
				_, b := takeover(t, l, cfg)
				c := startWith(t, b.store, tenure.LeaseConfig{Holder: "c"}, tenure.CoordinatorConfig{
					Reconcile: func(ctx context.Context) error { <-ctx.Done(); return nil }, FencePredecessor: cfg.FencePredecessor})
				time.Sleep(time.Second)
				end(b)
				time.Sleep(10 * time.Millisecond)
				if !c.IsHolder() {
					t.Errorf("c does not hold: %+v", c.Status())
				}
				s.want(t, "b fences a", "c fences a")
			})
		})
	}
}
