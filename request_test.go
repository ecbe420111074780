package tenure_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestAHolderThatIsAskedHandsTheLeaseOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a, b, c := three(t, l, store)
		wantErr(t, b.lease.RequestRelease(t.Context()), nil)
		if pollOnly {
			time.Sleep(10 * time.Second) // until the next renewal
		}
		settle()
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
				time.Sleep(10 * time.Second)
			}
			settle()
			time.Sleep(10 * time.Millisecond) // for which one who has just resigned hears nothing
			synctest.Wait()
			if got := to.Status(); !to.IsHolder() || got.Token <= before {
				t.Fatalf("round %d: %s does not hold: %+v, the token before was %d\n%v", round, got.Replica, got, before, l)
			}
			holding, err := other.lease.Read(t.Context())
			if err != nil || holding.Holder == "" || len(holding.Labels) > 0 {
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
		if a.IsHolder() || b.IsHolder() || err != nil || holding.Holder != "" || holding.OfferedTo != "nobody" {
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
	wantErr(t, lease.RequestHandover(t.Context(), strings.Repeat("b", tenure.MaxPayload)), tenure.ErrInvalid)
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

// Its record keeps our label, and its renewals don't touch that.
func TestAProgramThatTookOverAnAskedLeaseIsNotTakenToBeSilent(t *testing.T) {
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		ours, _, ttl := acquireBriefly(t, store, tenure.LeaseConfig{Holder: "ours", TTL: 200 * time.Millisecond})
		wantErr(t, ours.RequestRelease(t.Context()), nil)
		time.Sleep(ttl) // it has a clock of its own
		theirs := &peer{t: t, db: db, ttl: ttl}
		if !theirs.acquire() {
			t.Fatal("no takeover")
		}
		for end := time.Now().Add(3 * ttl); time.Now().Before(end); time.Sleep(ttl / 20) {
			if !theirs.renew() {
				t.Fatal("it lost its lease")
			}
			if term, err := ours.AcquireOrSteal(t.Context()); err == nil {
				t.Fatalf("stolen, with token %d, from one that has just renewed", term.Token())
			}
		}
	})
}

func TestTheReplicaThatIsNamedIsNextAlsoWhereTheHolderShutsDownFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 10 {
			l, store := newLedger(t), storetest.NewMem()
			a, b, c := three(t, l, store)
			unheard := newLease(t, struct{ tenure.Store }{store}, tenure.LeaseConfig{})
			wantErr(t, unheard.RequestHandover(t.Context(), "b"), nil)
			a.stop()
			time.Sleep(time.Second)
			if !b.IsHolder() {
				t.Errorf("b does not hold:\n%v", l)
			}
			b.stop()
			c.stop()
		}
	})
}

func TestTheReplicaThatIsNamedIsNextAlsoWhereATakeoverWasNotConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 10 {
			l := newLedger(t)
			_, b := takeover(t, l, tenure.CoordinatorConfig{FencePredecessor: func(ctx context.Context, _ tenure.Holding) error { return untilDone(ctx) }})
			c := start(t, l, b.store, "c", tenure.CoordinatorConfig{})
			d := start(t, l, b.store, "d", tenure.CoordinatorConfig{})
			time.Sleep(time.Second)
			wantErr(t, c.lease.RequestHandover(t.Context(), "d"), nil)
			time.Sleep(12 * time.Second)
			if !d.IsHolder() {
				t.Errorf("d does not hold:\n%v", l)
			}
			c.stop()
			d.stop()
			b.stop()
		}
	})
}

func TestNobodyWaitsForAnOfferForLongerThanTheTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		cfg := tenure.CoordinatorConfig{AcquireInterval: 10 * time.Minute}
		start(t, l, store, "a", cfg)
		synctest.Wait()
		b := start(t, l, store, "b", cfg)
		time.Sleep(time.Minute)
		wantErr(t, b.lease.RequestHandover(t.Context(), "a misspelt one"), nil)
		time.Sleep(31 * time.Second)
		if !b.IsHolder() {
			t.Errorf("b does not hold:\n%v", l)
		}
	})
}

// As if the request had not been written, whatever the clock said to who wrote it.
func TestARequestLeavesTheRecordAsOldAsItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		var ahead atomic.Int64
		store.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
		lease := newLease(t, storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "get" {
				ahead.Store(int64(time.Hour))
				defer ahead.Store(0)
			}
			return do(ctx)
		}), tenure.LeaseConfig{})
		mustAcquire(t, lease)
		time.Sleep(20 * time.Second)
		wantErr(t, lease.RequestRelease(t.Context()), nil)
		holding, err := newLease(t, store, tenure.LeaseConfig{}).Read(t.Context())
		wantErr(t, err, nil)
		if ago := time.Since(holding.RenewedAt); holding.Age != 20*time.Second || ago != 20*time.Second {
			t.Errorf("renewed 20 s ago, not %v, at an age of %v", ago, holding.Age)
		}
	})
}

func TestWhatIsAskedAlreadyOrIsSoIsNotWrittenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		_, _, c := three(t, l, store)
		read := func() tenure.Object {
			obj, err := store.Get(t.Context(), leaseKey)
			wantErr(t, err, nil)
			return obj
		}
		silent := newLease(t, struct{ tenure.Store }{store}, tenure.LeaseConfig{})
		was := read()
		wantErr(t, c.lease.RequestHandover(t.Context(), "a"), nil) // who holds it
		if got := read(); got.Version != was.Version {
			t.Error("written for nothing")
		}
		wantErr(t, silent.RequestHandover(t.Context(), "gone"), nil)
		was = read()
		wantErr(t, silent.RequestHandover(t.Context(), "gone"), nil)
		if got := read(); got.Version != was.Version {
			t.Error("written twice")
		}
		wantErr(t, silent.RequestHandover(t.Context(), "a"), nil) // which takes the other one back
		time.Sleep(time.Minute)
		if strings.Contains(l.String(), "a ends") {
			t.Errorf("a was to stay:\n%v", l)
		}
		wantErr(t, c.lease.RequestHandover(t.Context(), "gone"), nil)
		time.Sleep(time.Second)
		wantErr(t, c.lease.RequestHandover(t.Context(), "gone"), tenure.ErrNotFound)
		wantErr(t, c.lease.RequestHandover(t.Context(), "c"), tenure.ErrNotFound)
	})
}

func TestHintsInVainMakeAHolderRenewLittleMore(t *testing.T) {
	for _, every := range []time.Duration{time.Millisecond, 11 * time.Millisecond, time.Second} {
		synctest.Test(t, func(t *testing.T) {
			store := storetest.NewMem()
			a := start(t, newLedger(t), store, "a", tenure.CoordinatorConfig{})
			synctest.Wait()
			var puts atomic.Int32
			a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
				puts.Add(1)
				return do(ctx)
			})
			for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); time.Sleep(every) {
				wantErr(t, store.Wake(t.Context(), leaseKey), nil)
			}
			if n := puts.Load(); n < 60 || n > 125 {
				t.Errorf("a hint each %v: %d renewals in 60 intervals", every, n)
			}
		})
	}
}

func TestAReplicaWhoseLastTryFailedTakesWhatItIsOffered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		var tries atomic.Int32
		b := start(t, l, storetest.Faulty(store, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			if tries.Add(1) == 1 {
				return errors.New("connection refused")
			}
			return do(ctx)
		}), "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Second)
		wantErr(t, newLease(t, store, tenure.LeaseConfig{}).RequestHandover(t.Context(), "b"), nil)
		time.Sleep(time.Second)
		if !b.IsHolder() {
			t.Errorf("b does not hold after %d calls:\n%v", tries.Load(), l)
		}
	})
}

// One that has just ended a term, one that is not woken, and one whose look fails.
func TestAReplicaThatStaysAwayIsFoundByItsName(t *testing.T) {
	t.Run("right after its term", func(t *testing.T) {
		for _, gap := range []time.Duration{0, time.Millisecond, 4 * time.Millisecond, 6 * time.Millisecond, 20 * time.Millisecond} {
			synctest.Test(t, func(t *testing.T) {
				l, store := newLedger(t), storetest.NewMem()
				a, b, c := three(t, l, store)
				wantErr(t, c.lease.RequestHandover(t.Context(), "b"), nil)
				synctest.Wait()
				time.Sleep(gap)
				if !b.IsHolder() {
					t.Fatalf("b does not hold:\n%v", l)
				}
				wantErr(t, c.lease.RequestHandover(t.Context(), "a"), nil)
				time.Sleep(20 * time.Millisecond)
				if !a.IsHolder() {
					t.Errorf("a does not hold 20 ms after it was asked for, %v after b was:\n%v", gap, l)
				}
			})
		}
	})
	t.Run("by polling", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l, store := newLedger(t), storetest.Faulty(storetest.NewMem(), nil)
			a, _, c := three(t, l, struct{ tenure.Store }{store})
			wantErr(t, a.ResignFor(t.Context(), time.Hour), nil)
			time.Sleep(time.Minute)
			wantErr(t, c.lease.RequestHandover(t.Context(), "a"), nil)
			time.Sleep(10*time.Second + 5*time.Second) // until the holder's next renewal, and a's next look
			if !a.IsHolder() {
				t.Errorf("a does not hold:\n%v", l)
			}
		})
	})
	t.Run("when its look fails", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l, store := newLedger(t), storetest.NewMem()
			var down atomic.Bool
			a := start(t, l, storetest.Faulty(store, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
				if down.Load() {
					return errors.New("connection refused")
				}
				return do(ctx)
			}), "a", tenure.CoordinatorConfig{})
			synctest.Wait()
			b := start(t, l, store, "b", tenure.CoordinatorConfig{})
			time.Sleep(time.Second)
			wantErr(t, a.ResignFor(t.Context(), time.Hour), nil)
			time.Sleep(time.Minute)
			down.Store(true)
			wantErr(t, b.lease.RequestHandover(t.Context(), "a"), nil)
			time.Sleep(time.Second)
			down.Store(false)
			time.Sleep(2 * time.Second) // it looks again within a quarter of the AcquireInterval
			if !a.IsHolder() {
				t.Errorf("a does not hold:\n%v", l)
			}
		})
	})
}
