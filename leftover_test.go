package tenure_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// answersTake is the hook of a replica whose requests arrive at once, and whose
// answers to writes take so long.
func answersTake(d time.Duration) storetest.Hook {
	return func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		err := do(context.WithoutCancel(ctx))
		if call.Op == "get" {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
			return err
		}
	}
}

func TestAReplicaThatIsTooSlowToHoldKeepsTheLeaseFromNobody(t *testing.T) {
	for name, wrap := range map[string]func(tenure.Store) tenure.Store{
		"woken":   func(s tenure.Store) tenure.Store { return s },
		"polling": func(s tenure.Store) tenure.Store { return struct{ tenure.Store }{s} },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, mem := newLedger(t), storetest.NewMem()
				mustAcquire(t, newLease(t, mem, tenure.LeaseConfig{Holder: "dead"}))
				store := wrap(mem)
				slow := start(t, l, store, "slow", tenure.CoordinatorConfig{})
				synctest.Wait()
				slow.store.SetHook(answersTake(6 * time.Second)) // longer than a call may
				time.Sleep(10 * time.Minute)
				start(t, l, store, "healthy", tenure.CoordinatorConfig{})
				time.Sleep(time.Minute)
				if l.holder() != "healthy" {
					t.Errorf("after a minute %q holds:\n%v", l.holder(), l)
				}
			})
		})
	}
}

// The table was restored with the record of a holder that is dead, and the clock of the
// database is behind: one that has seen greater tokens refuses what it gets.
func TestAReplicaThatRefusesATokenLeavesTheLeaseToOneThatMayGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, s := newLedger(t), &script{}
		store := movableStore(storetest.NewMem())
		witness := start(t, l, store, "witness", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		restored := storetest.NewMem()
		restored.Now = func() time.Time { return time.Now().Add(-time.Hour) }
		mustAcquire(t, newLease(t, restored, tenure.LeaseConfig{Holder: "dead"}))
		store.Store(restored)
		time.Sleep(10 * time.Minute)
		if got := witness.Status(); got.Role != tenure.RoleStandby || !strings.Contains(got.LastError, "fencing token") {
			t.Fatalf("the witness has not refused: %+v", got)
		}
		startWith(t, store, tenure.LeaseConfig{Holder: "fresh"}, fencing(s, succeeds))
		time.Sleep(time.Minute)
		s.want(t, "fresh fences dead at ", "fresh works")
	})
}

func TestAReplicaWhoseReleaseFailedIsNotBackBeforeTheOthers(t *testing.T) {
	for name, hook := range map[string]storetest.Hook{
		"it could not ask":     refuse,
		"its answers are late": answersTake(time.Minute),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, store := newLedger(t), storetest.NewMem()
				a := start(t, l, store, "a", tenure.CoordinatorConfig{})
				synctest.Wait()
				b := start(t, l, store, "b", tenure.CoordinatorConfig{})
				time.Sleep(time.Minute)
				b.store.SetHook(refuse) // it hears of the release, and finds it later
				a.store.SetHook(hook)
				if err := a.Resign(t.Context()); err == nil {
					t.Fatal("the lease was released")
				}
				a.store.SetHook(nil)
				time.Sleep(500 * time.Millisecond)
				b.store.SetHook(nil)
				time.Sleep(15 * time.Second)
				if l.holder() != "b" || a.Status().Terms != 1 {
					t.Errorf("%q holds:\n%v", l.holder(), l)
				}
			})
		})
	}
}

func TestAReplicaThatCannotFenceLeavesTheLeaseToAnother(t *testing.T) {
	for name, fails := range map[string]func(context.Context) error{
		"it fails": func(context.Context) error { return errors.New("the switch does not answer") },
		"it hangs": untilDone,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, s := storetest.NewMem(), &script{}
				mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "dead"}))
				var tries atomic.Int32
				b := startWith(t, store, tenure.LeaseConfig{Holder: "b"}, tenure.CoordinatorConfig{
					Reconcile: func(context.Context) error { t.Error("b works"); return nil },
					FencePredecessor: func(ctx context.Context, _ tenure.Holding) error {
						tries.Add(1)
						return fails(ctx)
					},
				})
				time.Sleep(31 * time.Second)
				startWith(t, store, tenure.LeaseConfig{Holder: "c"}, fencing(s, succeeds))
				time.Sleep(6 * time.Minute) // a call may take ten TTLs
				s.want(t, "c fences dead at ", "c works")
				if n := tries.Load(); n < 1 || n > 30 {
					t.Errorf("b has tried %d times", n)
				}
				if own := b.Status().Recent[0]; own.Holder != "b" || !strings.Contains(own.Reason, "dead not fenced") {
					t.Errorf("b's term: %+v", own)
				}
			})
		})
	}
}

func TestALongTTLMakesNobodyWaitForAStoreThatHangs(t *testing.T) {
	for _, ttl := range []time.Duration{10 * time.Minute, time.Hour} {
		t.Run(ttl.String(), func(t *testing.T) {
			long := tenure.LeaseConfig{Holder: "a", TTL: ttl}
			job := tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error { <-ctx.Done(); return nil }}
			wantWithin := func(t *testing.T, most time.Duration, do func()) {
				t.Helper()
				began := time.Now()
				do()
				if took := time.Since(began); took > most {
					t.Errorf("it took %v, more than %v", took, most)
				}
			}
			t.Run("at the shutdown of a holder", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					a := startWith(t, storetest.NewMem(), long, job)
					time.Sleep(time.Minute)
					a.store.SetHook(hang)
					wantWithin(t, 11*time.Second, a.stop)
				})
			})
			t.Run("at the shutdown of a standby", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					store := storetest.NewMem()
					term := mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "b", TTL: 30 * time.Second}))
					a := startWith(t, storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
						if call.Op == "get" {
							return hang(ctx, call, do)
						}
						return do(ctx)
					}), long, job)
					synctest.Wait()
					wantWithin(t, 0, a.stop)
					if !term.Valid() {
						t.Error("it took longer than the term lasts")
					}
				})
			})
			t.Run("when one connection is reset at the release", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					store := storetest.NewMem()
					a := startWith(t, store, long, job)
					time.Sleep(time.Minute)
					var resets atomic.Int32
					a.store.SetHook(func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
						if resets.Add(1) == 1 {
							return errors.New("connection reset by peer")
						}
						return do(ctx)
					})
					wantWithin(t, time.Second, a.stop)
					_, err := store.Get(t.Context(), leaseKey)
					wantErr(t, err, tenure.ErrNotFound)
				})
			})
			t.Run("when the store is back", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					a := startWith(t, storetest.NewMem(), long, job)
					time.Sleep(time.Minute)
					a.store.SetHook(refuse)
					time.Sleep(ttl)
					a.store.SetHook(nil)
					wantWithin(t, 15*time.Second, func() {
						for !a.IsHolder() {
							time.Sleep(time.Second)
						}
					})
				})
			})
		})
	}
}

func TestARecordThatACopyRenewsIsNoLeftover(t *testing.T) {
	for name, try := range map[string]func(*tenure.Lease, context.Context) (*tenure.Term, error){
		"TryAcquire": (*tenure.Lease).TryAcquire, "AcquireOrSteal": (*tenure.Lease).AcquireOrSteal,
	} {
		t.Run(name, func(t *testing.T) {
			ctx, mem := t.Context(), storetest.NewMem()
			store := storetest.Faulty(mem, nil)
			lease := newLease(t, store, tenure.LeaseConfig{Holder: "a"})
			term := mustAcquire(t, lease)
			wantErr(t, lease.Renew(ctx, term), nil) // each renewal was answered
			store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error { return errLost })
			wantErr(t, lease.Release(ctx, term), errLost)
			store.SetHook(nil)
			copyRenews(t, mem)
			if _, err := try(lease, ctx); !errors.Is(err, tenure.ErrHeld) {
				t.Errorf("the copy has just renewed its term; got %v, want ErrHeld", err)
			}
			if obj, err := mem.Get(ctx, leaseKey); err != nil || !strings.Contains(string(obj.Payload), term.ID()) {
				t.Errorf("the copy's record: %s, %v", obj.Payload, err)
			}
		})
	}
}

func TestNobodyWorksBesideACopyThatHasJustRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute + time.Second) // each renewal was answered
		a.store.SetHook(refuse)               // the host is cloned, and this one has no network any more
		if err := a.Resign(t.Context()); err == nil {
			t.Fatal("released")
		}
		l.begin("the copy") // the snapshot was taken before
		copyRenews(t, store)
		a.store.SetHook(nil)
		time.Sleep(15 * time.Second) // the copy's renewal lasts for 29 s
		l.mu.Lock()
		defer l.mu.Unlock()
		l.t.Logf("%v", l.lines)
	})
}

func TestACopyThatVanishesIsConfirmedAndFenced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, s := storetest.NewMem(), &script{}
		a := startWith(t, store, tenure.LeaseConfig{Holder: "a"}, fencing(s, succeeds))
		time.Sleep(time.Second)
		copyRenews(t, store)
		time.Sleep(20 * time.Second)
		if got := a.Status(); got.Role != tenure.RoleStandby {
			t.Fatalf("it has not lost the term to the copy: %+v", got)
		}
		copyRenews(t, store) // its last: its host does not answer any more
		time.Sleep(2 * time.Minute)
		s.want(t, "a works", "a fences a at ", "a works")
	})
}

// An acquire whose answer was lost has begun no work: its own replica need not be
// fenced, however long it is cut off.
func TestAReplicaDoesNotFenceItselfForAnAcquireWhoseAnswerWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, s := storetest.NewMem(), &script{}
		var cut atomic.Bool
		faulty := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if cut.Load() {
				return errors.New("no route to host")
			}
			if call.Op == "put" && cut.CompareAndSwap(false, true) {
				_ = do(ctx) // it lands, and then the network is gone
				return errLost
			}
			return do(ctx)
		})
		startWith(t, faulty, tenure.LeaseConfig{Holder: "a"}, fencing(s, succeeds))
		time.Sleep(2 * time.Minute)
		// From here on the network is there again.
		cut.Store(false)
		faulty.SetHook(nil)
		time.Sleep(2 * time.Minute)
		s.want(t, "a works")
	})
}

func TestAReplicaDoesNotFenceItselfForAStealWhoseAnswerWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, s := storetest.NewMem(), &script{}
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "dead"}))
		var cut atomic.Bool
		faulty := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if cut.Load() {
				return errors.New("no route to host")
			}
			if call.Op == "put" && call.Condition != tenure.MustCreate() && cut.CompareAndSwap(false, true) {
				_ = do(ctx) // it lands, and then the network is gone
				return errLost
			}
			return do(ctx)
		})
		startWith(t, faulty, tenure.LeaseConfig{Holder: "a"}, fencing(s, succeeds))
		time.Sleep(2 * time.Minute)
		faulty.SetHook(nil)
		time.Sleep(2 * time.Minute)
		s.want(t, "a fences dead at ", "a works")
	})
}

func TestAnAcquireThatLandsLateIsRemovedHoweverLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, mem := t.Context(), storetest.NewMem()
		store := storetest.Faulty(mem, nil)
		lease := newLease(t, store, tenure.LeaseConfig{Holder: "a", TTL: time.Second})
		store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			go func() {
				time.Sleep(1500 * time.Millisecond)
				_ = do(context.WithoutCancel(ctx))
			}()
			return errLost
		})
		_, err := lease.TryAcquire(ctx)
		wantErr(t, err, errLost)
		store.SetHook(nil)
		time.Sleep(1600 * time.Millisecond)
		_, err = lease.AcquireOrSteal(ctx)
		wantErr(t, err, nil)
	})
}

func TestALeaseThatCanBeRenewedCanBeAcquired(t *testing.T) {
	for name, wrap := range map[string]func(tenure.Store) tenure.Store{
		"woken":   func(s tenure.Store) tenure.Store { return s },
		"polling": func(s tenure.Store) tenure.Store { return struct{ tenure.Store }{s} },
	} {
		for _, dead := range []bool{false, true} {
			t.Run(name+map[bool]string{false: ", free", true: ", expired"}[dead], func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					l, mem := newLedger(t), storetest.NewMem()
					if dead {
						mustAcquire(t, newLease(t, mem, tenure.LeaseConfig{Holder: "dead"}))
					}
					a := start(t, l, storetest.Faulty(wrap(mem), answersTake(3*time.Second)), "a", tenure.CoordinatorConfig{})
					time.Sleep(time.Hour)
					if !a.IsHolder() {
						t.Errorf("after an hour nobody holds: %+v\n%v", a.Status(), l)
					}
				})
			})
		}
	}
}

func TestAShutdownDoesNotForgetAReleaseThatIsOwed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		a.store.SetHook(refuse)
		if err := a.Resign(t.Context()); err == nil {
			t.Fatal("released")
		}
		a.store.SetHook(nil)
		a.stop() // the store is well again
		time.Sleep(10 * time.Second)
		if l.holder() != "b" {
			t.Errorf("%q holds:\n%v", l.holder(), l)
		}
	})
}

func TestARequestInALeftoverIsObeyed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		start(t, l, store, "b", tenure.CoordinatorConfig{})
		start(t, l, store, "c", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		a.store.SetHook(refuse)
		if err := a.Resign(t.Context()); err == nil {
			t.Fatal("released")
		}
		operator := newLease(t, store, tenure.LeaseConfig{Holder: "operator"})
		wantErr(t, operator.RequestHandover(t.Context(), "c"), nil)
		a.store.SetHook(nil)
		time.Sleep(10 * time.Second)
		if l.holder() != "c" {
			t.Errorf("%q holds:\n%v", l.holder(), l)
		}
	})
}
