package tenure_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

var (
	leaseKey = tenure.Key{Type: "reconciler_lease", ID: "singleton"}

	errLost = errors.New("connection reset") // an answer that never came
)

func newLease(t testing.TB, store tenure.Store, cfg tenure.LeaseConfig) *tenure.Lease {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = quiet
	}
	lease, err := tenure.NewLease(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

func mustAcquire(t testing.TB, lease *tenure.Lease) *tenure.Term {
	t.Helper()
	term, err := lease.AcquireOrSteal(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return term
}

// wantErr fails unless err is want; nil wants none.
func wantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

// losingAnswers is a store of which each write lands and no answer arrives,
// while on is true.
func losingAnswers(store tenure.Store, ops ...string) (faulty *storetest.FaultyStore, lose *bool) {
	lose = new(bool)
	return storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		err := do(ctx)
		if *lose && strings.Contains(strings.Join(ops, " "), call.Op) {
			return errLost
		}
		return err
	}), lose
}

func TestALeaseIsAcquiredRenewedReadAndReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, store := t.Context(), storetest.NewMem()
		a := newLease(t, store, tenure.LeaseConfig{Holder: "a", Labels: map[string]string{"addr": "10.0.0.1"}})
		began := time.Now()
		term, err := a.TryAcquire(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := term.Deadline(), began.Add(29*time.Second); !got.Equal(want) {
			t.Errorf("got deadline %v, want %v: TTL 30s less Margin 1s", got, want)
		}
		time.Sleep(20 * time.Second)
		if err := a.Renew(ctx, term); err != nil {
			t.Fatal(err)
		}
		if got, want := term.Remaining(), 29*time.Second; got != want {
			t.Errorf("after a renewal %v are left, want %v", got, want)
		}

		h, err := newLease(t, store, tenure.LeaseConfig{Holder: "b"}).Read(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if h.Holder != "a" || h.Term != term.ID() || h.TTL != 30*time.Second || h.Labels["addr"] != "10.0.0.1" ||
			h.Age != 0 || !h.AcquiredAt.Equal(began) || !h.RenewedAt.Equal(began.Add(20*time.Second)) {
			t.Errorf("got %+v", h)
		}

		if err := a.Release(ctx, term); err != nil {
			t.Fatal(err)
		}
		if term.Valid() || term.Remaining() != 0 {
			t.Error("a released term is valid")
		}
		_, err = a.Read(ctx)
		wantErr(t, err, tenure.ErrNotFound)
		wantErr(t, a.Renew(ctx, term), tenure.ErrLost)
		wantErr(t, a.Release(ctx, term), tenure.ErrLost)
	})
}

func TestAHeldLeaseIsRefusedAndSaysWhoHoldsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, store := t.Context(), storetest.NewMem()
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "a"}))
		b := newLease(t, store, tenure.LeaseConfig{Holder: "b"})
		for name, try := range map[string]func(context.Context) (*tenure.Term, error){
			"TryAcquire": b.TryAcquire, "StealExpired": b.StealExpired, "AcquireOrSteal": b.AcquireOrSteal,
		} {
			_, err := try(ctx)
			var held *tenure.HeldError
			if !errors.As(err, &held) || !errors.Is(err, tenure.ErrHeld) || held.Holding.Holder != "a" {
				t.Errorf("%s: got %v, want a HeldError by a", name, err)
			}
		}
		_, err := newLease(t, storetest.NewMem(), tenure.LeaseConfig{}).StealExpired(ctx)
		wantErr(t, err, tenure.ErrNotFound)
	})
}

func TestTrustCountsFromTheAttemptNotFromTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			time.Sleep(5 * time.Second)
			return err
		})
		lease := newLease(t, store, tenure.LeaseConfig{})
		began := time.Now()
		term := mustAcquire(t, lease)
		if got, want := term.Deadline(), began.Add(29*time.Second); !got.Equal(want) {
			t.Errorf("acquire: got deadline %v, want %v", got, want)
		}
		attempt := time.Now()
		if err := lease.Renew(t.Context(), term); err != nil {
			t.Fatal(err)
		}
		if got, want := term.Deadline(), attempt.Add(29*time.Second); !got.Equal(want) {
			t.Errorf("renewal: got deadline %v, want %v", got, want)
		}
	})
}

func TestAnAcquireAnsweredTooLateIsNoTermAndNoObstacle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			time.Sleep(29 * time.Second)
			return err
		})
		lease := newLease(t, store, tenure.LeaseConfig{})
		term, err := lease.TryAcquire(t.Context())
		if term != nil || !errors.Is(err, tenure.ErrDeadline) {
			t.Fatalf("got %v, %v, want ErrDeadline", term, err)
		}
		store.SetHook(nil)
		mustAcquire(t, lease)
	})
}

func TestARenewalAnsweredAfterTheTermWasOverIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), nil)
		lease := newLease(t, store, tenure.LeaseConfig{})
		term := mustAcquire(t, lease)
		time.Sleep(28 * time.Second)
		store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			time.Sleep(time.Second)
			return err
		})
		wantErr(t, lease.Renew(t.Context(), term), tenure.ErrDeadline)
		if term.Valid() {
			t.Error("a term that was over came back")
		}
	})
}

// Known fault 6: the thief's TTL is used instead of the holder's.
func TestAThiefGoesByTheHoldersTTL(t *testing.T) {
	for _, test := range []struct {
		name          string
		holder, thief time.Duration
	}{
		{"longer than the thief's", 60 * time.Second, 6 * time.Second},
		{"shorter than the thief's", 6 * time.Second, 60 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := storetest.NewMem()
				mustAcquire(t, newLease(t, store, tenure.LeaseConfig{TTL: test.holder}))
				thief := newLease(t, store, tenure.LeaseConfig{TTL: test.thief})
				time.Sleep(test.holder - time.Millisecond)
				_, err := thief.StealExpired(t.Context())
				wantErr(t, err, tenure.ErrHeld)
				time.Sleep(2 * time.Millisecond)
				_, err = thief.StealExpired(t.Context())
				wantErr(t, err, nil)
			})
		})
	}
}

func TestARecordNeverNamesLessThanItsHoldersTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 10*time.Millisecond + time.Microsecond
		lease := newLease(t, storetest.NewMem(), tenure.LeaseConfig{TTL: ttl})
		mustAcquire(t, lease)
		if h, err := lease.Read(t.Context()); err != nil || h.TTL < ttl {
			t.Errorf("got %v, %v; want at least %v", h.TTL, err, ttl)
		}
	})
}

// Known fault 7: a record stamped in the future can never be stolen.
func TestARecordFromTheFutureIsStolenOnceItWasSeenToStandStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ahead := 24 * time.Hour
		store := storetest.NewMem()
		store.Now = func() time.Time { return time.Now().Add(ahead) }
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{}))
		ahead = 0

		standby := newLease(t, store, tenure.LeaseConfig{})
		_, err := standby.StealExpired(t.Context())
		wantErr(t, err, tenure.ErrHeld)
		time.Sleep(30*time.Second - time.Millisecond)
		_, err = standby.StealExpired(t.Context())
		wantErr(t, err, tenure.ErrHeld)
		time.Sleep(time.Millisecond)
		_, err = standby.StealExpired(t.Context())
		wantErr(t, err, nil)
	})
}

// Known fault 8: an undecodable payload blocks the lease for ever.
func TestAPayloadThatCannotBeDecodedExpiresAndIsLoggedOnce(t *testing.T) {
	for _, payload := range []string{"", "not JSON", `[]`, `{"holder": 7}`, `"x"`, "\xff\x00"} {
		t.Run(payload, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, store := t.Context(), storetest.NewMem()
				put(t, store, tenure.Object{Key: leaseKey, Payload: []byte(payload)})
				var log bytes.Buffer
				lease := newLease(t, store, tenure.LeaseConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})

				h, err := lease.Read(ctx)
				if err != nil || h.Holder != "unknown" || h.TTL != 30*time.Second {
					t.Fatalf("got %+v, %v", h, err)
				}
				_, err = lease.AcquireOrSteal(ctx)
				wantErr(t, err, tenure.ErrHeld)
				time.Sleep(30 * time.Second)
				_, err = lease.AcquireOrSteal(ctx)
				wantErr(t, err, nil)
				if got := strings.Count(log.String(), "cannot be decoded"); got != 1 {
					t.Errorf("logged %d times, want once:\n%s", got, &log)
				}
			})
		})
	}
}

func TestARecordThatLacksWhatAReaderNeedsIsReadAsFarAsItGoes(t *testing.T) {
	for payload, want := range map[string]tenure.Holding{
		`{}`:                                {Holder: "unknown", TTL: 30 * time.Second},
		`null`:                              {Holder: "unknown", TTL: 30 * time.Second},
		`{"holder":"a","acquired_at_ms":5}`: {Holder: "a", TTL: 30 * time.Second, AcquiredAt: time.UnixMilli(5)},
		`{"holder":"a","term":"t","ttl_ms":1500,"shoe_size":44}`: {Holder: "a", Term: "t", TTL: 1500 * time.Millisecond},
		`{"holder":"a","ttl_ms":0}`:                              {Holder: "a", TTL: 30 * time.Second},
		`{"holder":"a","ttl_ms":-1}`:                             {Holder: "a", TTL: 30 * time.Second},
		`{"holder":"a","ttl_ms":9223372036854775807}`:            {Holder: "a", TTL: 30 * time.Second},
	} {
		store := storetest.NewMem()
		put(t, store, tenure.Object{Key: leaseKey, Payload: []byte(payload)})
		got, err := newLease(t, store, tenure.LeaseConfig{}).Read(t.Context())
		if err != nil || got.Holder != want.Holder || got.Term != want.Term || got.TTL != want.TTL || !got.AcquiredAt.Equal(want.AcquiredAt) {
			t.Errorf("%s: got %+v, %v; want %+v", payload, got, err, want)
		}
	}
}

func TestARecordOfAnotherProgramIsStolenOnlyAfterItWasSeenToStandStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, store := t.Context(), storetest.NewMem()
		put(t, store, tenure.Object{Key: leaseKey, Payload: []byte(`{"holder":"x","acquired_at_ms":1}`)})
		time.Sleep(time.Hour) // its age, by a clock that nobody knows
		lease := newLease(t, store, tenure.LeaseConfig{})
		_, err := lease.AcquireOrSteal(ctx)
		wantErr(t, err, tenure.ErrHeld)
		time.Sleep(30*time.Second - time.Millisecond)
		_, err = lease.AcquireOrSteal(ctx)
		wantErr(t, err, tenure.ErrHeld)
		time.Sleep(time.Millisecond)
		_, err = lease.AcquireOrSteal(ctx)
		wantErr(t, err, nil)
	})
}

func TestSilenceIsCountedFromTheAnswerThatBeganIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		mem := storetest.NewMem()
		mustAcquire(t, newLease(t, mem, tenure.LeaseConfig{}))
		store := storetest.Faulty(mem, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			time.Sleep(10 * time.Second)
			return do(ctx)
		})
		standby := newLease(t, store, tenure.LeaseConfig{Expiry: tenure.Observed})
		_, err := standby.AcquireOrSteal(ctx) // asks at 0 s, is answered after 20 s: a create, and a read
		wantErr(t, err, tenure.ErrHeld)
		store.SetHook(nil)
		time.Sleep(30*time.Second - time.Millisecond)
		_, err = standby.AcquireOrSteal(ctx)
		wantErr(t, err, tenure.ErrHeld)
		time.Sleep(time.Millisecond)
		_, err = standby.AcquireOrSteal(ctx)
		wantErr(t, err, nil)
	})
}

func TestObservedExpiryTakesNoNoticeOfTheStoresClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		ahead := time.Duration(0)
		store := storetest.NewMem()
		store.Now = func() time.Time { return time.Now().Add(ahead) }
		holder := newLease(t, store, tenure.LeaseConfig{})
		term := mustAcquire(t, holder)
		standby := newLease(t, store, tenure.LeaseConfig{Expiry: tenure.Observed})
		for _, ahead = range []time.Duration{time.Hour, -time.Hour, 72 * time.Hour} {
			for range 5 {
				_, err := standby.AcquireOrSteal(ctx)
				wantErr(t, err, tenure.ErrHeld)
				time.Sleep(10 * time.Second)
				wantErr(t, holder.Renew(ctx, term), nil)
			}
		}
		_, err := standby.AcquireOrSteal(ctx)
		wantErr(t, err, tenure.ErrHeld)
		time.Sleep(30 * time.Second)
		_, err = standby.AcquireOrSteal(ctx)
		wantErr(t, err, nil)
	})
}

// I7.
func TestARenewalWhoseAnswerWasLostCostsNoTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		store, lose := losingAnswers(storetest.NewMem(), "put")
		lease := newLease(t, store, tenure.LeaseConfig{})
		term := mustAcquire(t, lease)
		token := term.Token()

		*lose = true
		wantErr(t, lease.Renew(ctx, term), errLost)
		*lose = false
		time.Sleep(20 * time.Second)
		wantErr(t, lease.Renew(ctx, term), nil)
		if got := term.Remaining(); got != 29*time.Second {
			t.Errorf("%v are left, want 29s", got)
		}
		if got := term.Token(); got != token {
			t.Errorf("token went from %d to %d within a term", token, got)
		}

		*lose = true
		wantErr(t, lease.Renew(ctx, term), errLost)
		*lose = false
		wantErr(t, lease.Release(ctx, term), nil)
		_, err := lease.Read(ctx)
		wantErr(t, err, tenure.ErrNotFound)
	})
}

// Known fault 9: a process has to wait out its own row after a lost answer.
func TestOfTwoRenewalsAtOnceTheLaterCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), nil)
		lease := newLease(t, store, tenure.LeaseConfig{})
		term, err := lease.TryAcquire(t.Context())
		wantErr(t, err, nil)
		store.SetHook(func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			time.Sleep(3 * time.Second)
			return err
		})
		earlier := make(chan error)
		go func() { earlier <- lease.Renew(t.Context(), term) }()
		time.Sleep(time.Second)
		store.SetHook(nil)
		wantErr(t, lease.Renew(t.Context(), term), nil)
		deadline := term.Deadline()
		wantErr(t, <-earlier, nil)
		if !term.Deadline().Equal(deadline) {
			t.Errorf("the answer to the earlier renewal moves the deadline by %v", term.Deadline().Sub(deadline))
		}
	})
}

func TestAReadDuringAnAcquireDoesNotSpoilIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "put" {
				time.Sleep(time.Second)
			}
			return err
		})
		lease := newLease(t, store, tenure.LeaseConfig{})
		go func() {
			time.Sleep(time.Millisecond)
			if _, err := lease.Read(t.Context()); err != nil {
				t.Error(err)
			}
		}()
		_, err := lease.TryAcquire(t.Context())
		wantErr(t, err, nil)
	})
}

func TestAnAcquireWhoseAnswerWasLostCostsNoWait(t *testing.T) {
	for _, try := range []struct {
		name string
		try  func(*tenure.Lease, context.Context) (*tenure.Term, error)
	}{
		{"TryAcquire", (*tenure.Lease).TryAcquire},
		{"AcquireOrSteal", (*tenure.Lease).AcquireOrSteal},
	} {
		t.Run(try.name, func(t *testing.T) {
			ctx := t.Context()
			mem := storetest.NewMem()
			store, lose := losingAnswers(mem, "put")
			lease := newLease(t, store, tenure.LeaseConfig{})
			*lose = true
			_, err := try.try(lease, ctx)
			wantErr(t, err, errLost)
			*lose = false

			_, err = newLease(t, mem, tenure.LeaseConfig{Holder: "another"}).AcquireOrSteal(ctx)
			wantErr(t, err, tenure.ErrHeld)
			term, err := try.try(lease, ctx)
			wantErr(t, err, nil)
			wantErr(t, lease.Renew(ctx, term), nil)
		})
	}
}

func TestAReleaseWhoseAnswerWasLostCanBeRepeated(t *testing.T) {
	ctx := t.Context()
	store, lose := losingAnswers(storetest.NewMem(), "delete")
	lease := newLease(t, store, tenure.LeaseConfig{})
	term := mustAcquire(t, lease)
	*lose = true
	wantErr(t, lease.Release(ctx, term), errLost)
	*lose = false
	wantErr(t, lease.Release(ctx, term), nil)
}

func TestATermThatCouldNotBeReleasedIsReleasedByTheNextAcquire(t *testing.T) {
	for name, try := range map[string]func(*tenure.Lease, context.Context) (*tenure.Term, error){
		"TryAcquire": (*tenure.Lease).TryAcquire, "AcquireOrSteal": (*tenure.Lease).AcquireOrSteal,
	} {
		t.Run(name, func(t *testing.T) {
			ctx, mem := t.Context(), storetest.NewMem()
			var refuses atomic.Bool
			store := storetest.Faulty(mem, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
				if refuses.Load() && call.Op == "delete" {
					return errLost
				}
				return do(ctx)
			})
			lease := newLease(t, store, tenure.LeaseConfig{})
			first := mustAcquire(t, lease)
			refuses.Store(true)
			wantErr(t, lease.Release(ctx, first), errLost)
			_, err := try(lease, ctx)
			wantErr(t, err, errLost)
			_, err = newLease(t, mem, tenure.LeaseConfig{Holder: "another"}).AcquireOrSteal(ctx)
			wantErr(t, err, tenure.ErrHeld)
			refuses.Store(false)
			second, err := try(lease, ctx)
			wantErr(t, err, nil)
			if second.Token() <= first.Token() {
				t.Errorf("token %d follows %d", second.Token(), first.Token())
			}
			wantErr(t, lease.Renew(ctx, first), tenure.ErrLost)
			wantErr(t, lease.Renew(ctx, second), nil)
		})
	}
}

// A machine is restored from a snapshot while the one it was taken of runs on. Each of
// the two renews the record of the same term, as the other left it.
func TestATermEndsWhenACopyOfItsProcessRenewsIt(t *testing.T) {
	ctx := t.Context()
	copyRenews := func(store *storetest.Mem) {
		obj, err := store.Get(ctx, leaseKey)
		wantErr(t, err, nil)
		_, err = store.PutIf(ctx, obj, tenure.MatchVersion(obj.Version))
		wantErr(t, err, nil)
	}
	isOver := func(t *testing.T, term *tenure.Term, err error) {
		t.Helper()
		var lost *tenure.LostError
		if !errors.As(err, &lost) || lost.To == nil || lost.To.Term != term.ID() || !strings.Contains(err.Error(), "copy") || term.Valid() {
			t.Errorf("got %v, valid: %v; want a term that is lost to a copy", err, term.Valid())
		}
	}
	t.Run("at its renewal", func(t *testing.T) {
		mem := storetest.NewMem()
		lease := newLease(t, mem, tenure.LeaseConfig{})
		term := mustAcquire(t, lease)
		wantErr(t, lease.Renew(ctx, term), nil)
		copyRenews(mem)
		isOver(t, term, lease.Renew(ctx, term))
	})
	t.Run("at its release", func(t *testing.T) {
		mem := storetest.NewMem()
		lease := newLease(t, mem, tenure.LeaseConfig{})
		term := mustAcquire(t, lease)
		copyRenews(mem)
		isOver(t, term, lease.Release(ctx, term))
		if h, err := lease.Read(ctx); err != nil || h.Term != term.ID() {
			t.Errorf("the copy's record: %+v, %v", h, err)
		}
	})
	t.Run("asked to release it", func(t *testing.T) {
		mem := storetest.NewMem()
		lease := newLease(t, mem, tenure.LeaseConfig{})
		term := mustAcquire(t, lease)
		copyRenews(mem)
		wantErr(t, lease.RequestRelease(ctx), nil)
		isOver(t, term, lease.Renew(ctx, term))
	})
	t.Run("after an answer was lost, at the renewal after the next", func(t *testing.T) {
		mem := storetest.NewMem()
		store, lose := losingAnswers(mem, "put")
		lease := newLease(t, store, tenure.LeaseConfig{})
		term := mustAcquire(t, lease)
		*lose = true
		wantErr(t, lease.Renew(ctx, term), errLost)
		*lose = false
		copyRenews(mem)
		wantErr(t, lease.Renew(ctx, term), nil) // it may have been that renewal
		copyRenews(mem)
		isOver(t, term, lease.Renew(ctx, term))
	})
	t.Run("a request is no copy", func(t *testing.T) {
		mem := storetest.NewMem()
		lease, other := newLease(t, mem, tenure.LeaseConfig{Holder: "a"}), newLease(t, mem, tenure.LeaseConfig{Holder: "b"})
		term := mustAcquire(t, lease)
		for _, to := range []string{"", "b", "c"} {
			wantErr(t, other.RequestHandover(ctx, to), nil)
			wantErr(t, other.RequestHandover(ctx, to+"'"), nil)
			wantErr(t, lease.Renew(ctx, term), nil)
		}
	})
	t.Run("nor are two renewals at once", func(t *testing.T) {
		lease := newLease(t, storetest.NewMem(), tenure.LeaseConfig{})
		term := mustAcquire(t, lease)
		var renewals sync.WaitGroup
		for range 8 {
			renewals.Go(func() {
				for range 100 {
					if err := lease.Renew(ctx, term); err != nil && !errors.Is(err, tenure.ErrConflict) {
						t.Error(err)
					}
				}
			})
		}
		renewals.Wait()
	})
}

// Known fault 5: after a delete and re-create a stale renewal succeeds (ABA).
func TestAStaleTermNeverTouchesALaterOne(t *testing.T) {
	eachStore(t, func(t *testing.T, open func() tenure.Store) {
		ctx := t.Context()
		a, b := newLease(t, open(), tenure.LeaseConfig{Holder: "a"}), newLease(t, open(), tenure.LeaseConfig{Holder: "b"})
		old := mustAcquire(t, a)
		h, err := a.Read(ctx)
		wantErr(t, err, nil)
		wantErr(t, open().DeleteIf(ctx, leaseKey, h.Version), nil) // an operator, say
		mustAcquire(t, b)

		err = a.Renew(ctx, old)
		var lost *tenure.LostError
		if !errors.As(err, &lost) || lost.To == nil || lost.To.Holder != "b" {
			t.Errorf("renew: got %v, want a LostError to b", err)
		}
		wantErr(t, a.Release(ctx, old), tenure.ErrLost)
		if h, err := a.Read(ctx); err != nil || h.Holder != "b" {
			t.Errorf("after the stale renewal and release: got %+v, %v; want b's", h, err)
		}
	})
}

func TestATermIsLostWhenItsRecordIsGone(t *testing.T) {
	ctx, store := t.Context(), storetest.NewMem()
	lease := newLease(t, store, tenure.LeaseConfig{})
	term := mustAcquire(t, lease)
	h, err := lease.Read(ctx)
	wantErr(t, err, nil)
	wantErr(t, store.DeleteIf(ctx, leaseKey, h.Version), nil)
	err = lease.Renew(ctx, term)
	var lost *tenure.LostError
	if !errors.As(err, &lost) || lost.To != nil {
		t.Errorf("got %v, want a LostError to nobody", err)
	}
	if term.Valid() {
		t.Error("the term is valid")
	}
}

// I3.
func TestTokensIncreaseOverEveryKindOfTakeover(t *testing.T) {
	eachStore(t, func(t *testing.T, open func() tenure.Store) {
		ctx := t.Context()
		store := open()
		lease := newLease(t, store, tenure.LeaseConfig{})
		var last int64
		ttl := 10 * time.Millisecond
		next := func(how string) (term *tenure.Term) {
			t.Helper()
			lease, term, ttl = acquireBriefly(t, store, tenure.LeaseConfig{TTL: ttl})
			if term.Token() <= last {
				t.Fatalf("%s: token %d follows %d", how, term.Token(), last)
			}
			last = term.Token()
			return term
		}
		for range 20 {
			term := next("first, or after a steal")
			_ = lease.Renew(ctx, term)
			_ = lease.Release(ctx, term)
			next("after a release")
			next("after an expiry")
			h, err := lease.Read(ctx)
			wantErr(t, err, nil)
			wantErr(t, store.DeleteIf(ctx, leaseKey, h.Version), nil)
			next("after a delete")
		}
	})
}

func TestALeaseRefusesWhatItCannotWorkWith(t *testing.T) {
	_, err := tenure.NewLease(nil, tenure.LeaseConfig{})
	wantErr(t, err, tenure.ErrInvalid)
	store := storetest.NewMem()
	for name, test := range map[string]struct {
		cfg  tenure.LeaseConfig
		says []string
	}{
		"empty id":     {tenure.LeaseConfig{Key: tenure.Key{Type: "x"}}, []string{"empty id"}},
		"empty type":   {tenure.LeaseConfig{Key: tenure.Key{ID: "x"}}, []string{"empty type"}},
		"negative TTL": {tenure.LeaseConfig{TTL: -time.Second}, []string{"TTL -1s"}},
		"tiny TTL":     {tenure.LeaseConfig{TTL: time.Millisecond}, []string{"TTL 1ms"}},
		"Margin":       {tenure.LeaseConfig{TTL: time.Second, Margin: time.Second}, []string{"Margin 1s"}},
		"expiry":       {tenure.LeaseConfig{Expiry: 7}, []string{"Expiry 7"}},
		"all at once": {tenure.LeaseConfig{Key: tenure.Key{Type: "x"}, TTL: time.Second, Margin: -1, Holder: "a\x00", Expiry: 7},
			[]string{"empty id", "Margin -1ns", "holder", "Expiry 7"}},
	} {
		_, err := tenure.NewLease(store, test.cfg)
		if !errors.Is(err, tenure.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", name, err)
			continue
		}
		for _, want := range test.says {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not name %q", name, err, want)
			}
		}
	}

	lease := newLease(t, store, tenure.LeaseConfig{})
	wantErr(t, lease.Renew(t.Context(), nil), tenure.ErrInvalid)
	wantErr(t, lease.Release(t.Context(), nil), tenure.ErrInvalid)
	other := mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "other", ID: "lease"}}))
	wantErr(t, lease.Renew(t.Context(), other), tenure.ErrInvalid)
	wantErr(t, lease.Release(t.Context(), other), tenure.ErrInvalid)
}

func put(t testing.TB, store tenure.Store, obj tenure.Object) tenure.Object {
	t.Helper()
	obj, err := store.PutIf(context.Background(), obj, tenure.Unconditional())
	if err != nil {
		t.Fatal(err)
	}
	return obj
}

// The other finds a record of its own replica's, which is none that a crash has left.
func TestAnAcquireUnderWayIsNotTakenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "put" && err == nil {
				time.Sleep(200 * time.Millisecond)
			}
			return err
		})
		lease := newLease(t, slow, tenure.LeaseConfig{Holder: "a", AssumeUniqueHolder: true})
		acquired := make(chan error, 1)
		go func() {
			_, err := lease.AcquireOrSteal(t.Context())
			acquired <- err
		}()
		time.Sleep(5 * time.Millisecond)
		_, err := lease.AcquireOrSteal(t.Context())
		wantErr(t, err, tenure.ErrHeld)
		wantErr(t, <-acquired, nil)
	})
}
