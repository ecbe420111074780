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

func TestAfterATakeoverTheJobBeginsOnceItIsConfirmedAndThePredecessorFenced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, s := newLedger(t), &script{}
		cfg := tenure.CoordinatorConfig{
			Confirmations: 2,
			FencePredecessor: func(ctx context.Context, prev tenure.Holding) error {
				s.say("fenced " + prev.Holder)
				if term := tenure.TermFromContext(ctx); term == nil || term.Holder() != "b" {
					t.Errorf("the context has the term %v", term)
				}
				return nil
			},
		}
		cfg.Reconcile = func(ctx context.Context) error { s.say("job"); <-ctx.Done(); return nil }
		_, b := takeover(t, l, cfg)
		b.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			s.say(call.Op)
			return do(ctx)
		})
		time.Sleep(19 * time.Second)
		if got := b.Status(); got.Role != tenure.RoleConfirming || b.IsHolder() || got.Token == 0 || got.TrustLeft == 0 {
			t.Errorf("while it confirms: %+v, IsHolder %v", got, b.IsHolder())
		}
		s.want(t, "put")
		time.Sleep(2 * time.Second)
		if got := b.Status(); got.Role != tenure.RoleHolder || !b.IsHolder() {
			t.Errorf("after it has confirmed: %+v", got)
		}
		s.want(t, "put", "put", "fenced a", "put", "job") // the third says that all is well now
	})
}

func TestWithoutATakeoverThereIsNothingToConfirm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		cfg := tenure.CoordinatorConfig{
			Confirmations:    3,
			FencePredecessor: func(context.Context, tenure.Holding) error { t.Error("fenced"); return nil },
		}
		a := start(t, l, store, "a", cfg)
		synctest.Wait()
		if !a.IsHolder() {
			t.Error("the first term ever waits")
		}
		b := start(t, l, store, "b", cfg)
		time.Sleep(time.Minute)
		a.stop()
		settle()
		if !b.IsHolder() {
			t.Error("a term after a release waits")
		}
	})
}

func TestAPredecessorIsFencedUntilThatSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var tries atomic.Int32
		_, b := takeover(t, newLedger(t), tenure.CoordinatorConfig{
			FencePredecessor: func(context.Context, tenure.Holding) error {
				if tries.Add(1) < 5 {
					return errors.New("the power switch does not answer")
				}
				return nil
			},
		})
		if got := b.Status(); got.Role != tenure.RoleConfirming || !strings.Contains(got.LastError, "power switch") {
			t.Errorf("while it fences: %+v", got)
		}
		time.Sleep(15 * time.Second)
		if tries.Load() != 5 || !b.IsHolder() {
			t.Errorf("%d tries, %+v", tries.Load(), b.Status())
		}
	})
}

func TestATermThatEndsBeforeItIsConfirmedRunsNoJob(t *testing.T) {
	for name, end := range map[string]struct {
		act   func(t *testing.T, b *replica)
		cause error
		until time.Duration // the job is told to return
	}{
		"shutdown": {func(t *testing.T, b *replica) { go b.stop() }, tenure.ErrShutdown, 0},
		"resigned": {func(t *testing.T, b *replica) { go b.Resign(t.Context()) }, tenure.ErrResigned, 0},
		"deadline": {func(t *testing.T, b *replica) { b.store.SetHook(refuse) }, tenure.ErrDeadline, 20 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, s := newLedger(t), &script{}
				_, b := takeover(t, l, tenure.CoordinatorConfig{
					FencePredecessor: func(ctx context.Context, _ tenure.Holding) error {
						<-ctx.Done()
						time.Sleep(3 * time.Second) // as a job may
						if errors.Is(context.Cause(ctx), end.cause) {
							s.say("told")
						}
						return nil
					},
				})
				end.act(t, b)
				time.Sleep(end.until + 2*time.Second)
				b.store.SetHook(nil)
				if _, err := b.lease.Read(t.Context()); err != nil {
					t.Errorf("the lease is released while its predecessor is being fenced: %v", err)
				}
				time.Sleep(2 * time.Second)
				s.want(t, "told")
				if strings.Contains(l.String(), "b begins") {
					t.Errorf("b's job ran:\n%v", l)
				}
			})
		})
	}
}

func TestAPanicWhileFencingPutsTheLeaseBackAndPanicsOutOfRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "a"}))
		time.Sleep(30 * time.Second)
		c, err := tenure.NewCoordinator(newLease(t, store, tenure.LeaseConfig{Holder: "b"}), tenure.CoordinatorConfig{
			Reconcile:        func(context.Context) error { t.Error("the job runs"); return nil },
			FencePredecessor: func(context.Context, tenure.Holding) error { panic("boom") },
		})
		wantErr(t, err, nil)
		defer func() {
			if p, ok := recover().(*tenure.JobPanic); !ok || p.Value != "boom" {
				t.Errorf("got %v", p)
			}
			holding, err := newLease(t, store, tenure.LeaseConfig{}).Read(context.Background())
			wantErr(t, err, nil)
			if holding.Holder != "" || holding.OfferedTo != "" {
				t.Errorf("the lease is not left to anybody: %+v", holding)
			}
		}()
		c.Run(t.Context())
	})
}

// However the term ends in which a predecessor was to be fenced, the next one fences it.
func TestAPredecessorThatWasNotFencedIsFencedInTheNextTerm(t *testing.T) {
	for name, scene := range map[string]struct {
		act  func(t *testing.T, b *replica)
		want []string // from then on
	}{
		"shutdown":         {func(_ *testing.T, b *replica) { b.stop() }, []string{"c fences a at 10.0.0.1", "c works"}},
		"resigned":         {func(t *testing.T, b *replica) { b.Resign(t.Context()) }, []string{"c fences a at 10.0.0.1", "c works"}},
		"asked to release": {func(t *testing.T, b *replica) { b.lease.RequestRelease(t.Context()) }, []string{"c fences a at 10.0.0.1", "c works"}},
		"asked for c":      {func(t *testing.T, b *replica) { b.lease.RequestHandover(t.Context(), "c") }, []string{"c fences a at 10.0.0.1", "c works"}},
		"crash": {func(_ *testing.T, b *replica) { b.store.SetHook(hang) },
			[]string{"c fences a at 10.0.0.1", "c fences b at 10.0.0.2", "c works"}},
		"crash and reclaim": {func(_ *testing.T, b *replica) { b.store.SetHook(hang) },
			[]string{"b fences a at 10.0.0.1", "b works"}},
		"release refused": {func(t *testing.T, b *replica) {
			b.store.SetHook(refuse)
			go b.Resign(t.Context())
			time.Sleep(10 * time.Second)
			b.store.SetHook(nil)
		}, []string{"c fences a at 10.0.0.1", "c works"}}, // b has resigned, and is not back before c
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, s := storetest.NewMem(), &script{}
				addr := func(a string) map[string]string { return map[string]string{"addr": a} }
				mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "a", Labels: addr("10.0.0.1")}))
				var tries atomic.Int32
				b := startWith(t, store, tenure.LeaseConfig{Holder: "b", Labels: addr("10.0.0.2")},
					fencing(s, func(ctx context.Context) error {
						if tries.Add(1) > 1 {
							return nil
						}
						return untilDone(ctx)
					}))
				time.Sleep(45 * time.Second) // and a renewal
				s.want(t, "b fences a at 10.0.0.1")
				if name == "crash and reclaim" {
					scene.act(t, b)
					startWith(t, store, tenure.LeaseConfig{Holder: "b", AssumeUniqueHolder: true}, fencing(s, succeeds))
				} else {
					startWith(t, store, tenure.LeaseConfig{Holder: "c"}, fencing(s, succeeds))
					synctest.Wait()
					scene.act(t, b)
				}
				time.Sleep(time.Minute)
				s.want(t, append([]string{"b fences a at 10.0.0.1"}, scene.want...)...)
			})
		})
	}
}

func TestATakeoverWhoseAnswerWasLostIsConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, s := storetest.NewMem(), &script{}
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "a"}))
		b := startWith(t, store, tenure.LeaseConfig{Holder: "b"}, fencing(s, succeeds))
		synctest.Wait()
		var lost atomic.Bool
		b.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "put" && err == nil && !lost.Swap(true) {
				return errors.New("connection reset")
			}
			return err
		})
		time.Sleep(time.Minute)
		s.want(t, "b fences a at ", "b works")
	})
}

// Once the takeover is confirmed, only the confirming replica is its successor's concern.
func TestAPredecessorThatWasFencedIsNotFencedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, s := storetest.NewMem(), &script{}
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "a"}))
		b := startWith(t, store, tenure.LeaseConfig{Holder: "b"}, fencing(s, succeeds))
		time.Sleep(time.Minute)
		startWith(t, store, tenure.LeaseConfig{Holder: "c"}, fencing(s, succeeds))
		b.store.SetHook(hang)
		time.Sleep(time.Minute)
		s.want(t, "b fences a at ", "b works", "c fences b at ", "c works")
	})
}

func TestAReplicaMayReclaimTheLeaseOfItsEarlierLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, store := t.Context(), storetest.NewMem()
		unique := tenure.LeaseConfig{Holder: "pod-0", AssumeUniqueHolder: true}
		term := mustAcquire(t, newLease(t, store, unique))
		for _, other := range []tenure.LeaseConfig{{Holder: "pod-1", AssumeUniqueHolder: true}, {Holder: "pod-0"}} {
			_, err := newLease(t, store, other).AcquireOrSteal(ctx)
			wantErr(t, err, tenure.ErrHeld)
		}

		anew := newLease(t, store, unique) // after a restart
		again := mustAcquire(t, anew)
		if again.Token() <= term.Token() {
			t.Errorf("token %d follows %d", again.Token(), term.Token())
		}
		_, err := anew.AcquireOrSteal(ctx)
		wantErr(t, err, tenure.ErrHeld) // its own term, of this life

		_, err = tenure.NewLease(store, tenure.LeaseConfig{AssumeUniqueHolder: true})
		wantErr(t, err, tenure.ErrInvalid)
	})
}

func TestAReclaimedLeaseNeedsNoConfirmation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		unique := tenure.LeaseConfig{Holder: "pod-0", AssumeUniqueHolder: true}
		mustAcquire(t, newLease(t, store, unique))
		ran := false
		c, err := tenure.NewCoordinator(newLease(t, store, unique), tenure.CoordinatorConfig{
			Reconcile:        func(ctx context.Context) error { ran = true; <-ctx.Done(); return nil },
			Confirmations:    2,
			FencePredecessor: func(context.Context, tenure.Holding) error { t.Error("it fences itself"); return nil },
		})
		wantErr(t, err, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantErr(t, c.Run(ctx), nil)
		if !ran {
			t.Error("the job did not run")
		}
	})
}

