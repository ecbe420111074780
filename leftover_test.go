package tenure_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// slowAnswers returns the hook of a replica whose requests arrive at once and whose writes are
// answered late.
func slowAnswers(d time.Duration) storetest.Hook {
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

// failToResign makes the replica resign while it cannot release its lease.
func (t *scene) failToResign(r *replica, fault storetest.Hook) {
	t.Helper()
	r.store.SetHook(fault)
	require.Error(t, r.Resign(t.Context()))
}

func TestAReplicaThatIsTooSlowToHoldDoesNotBlockTheLease(t *testing.T) {
	inBubbles(t, func(t *scene) {
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead"}))
		slow := t.start("slow")
		slow.store.SetHook(slowAnswers(6 * time.Second)) // longer than a call may take
		time.Sleep(10 * time.Minute)
		healthy := t.start("healthy")
		time.Sleep(time.Minute)
		t.wantHolder(healthy)
	})
}

func TestALeaseThatCanBeRenewedCanBeAcquired(t *testing.T) {
	for name, held := range map[string]bool{"free": false, "expired": true} {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				if held {
					kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead"}))
				}
				t.store = storetest.Faulty(t.store, slowAnswers(3*time.Second))
				a := t.start("a")
				time.Sleep(time.Hour)
				t.wantHolder(a)
			})
		})
	}
}

func TestAReplicaWhoseReleaseFailedIsNotBackBeforeTheOthers(t *testing.T) {
	for name, fault := range map[string]storetest.Hook{
		"it could not ask":     kit.Refuse,
		"its answers are late": slowAnswers(time.Minute),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				a, b := t.start("a"), t.start("b")
				time.Sleep(time.Minute)
				b.store.SetHook(kit.Refuse) // it is woken by the release, and sees it later
				t.failToResign(a, fault)
				a.store.SetHook(nil)
				time.Sleep(500 * time.Millisecond)
				b.store.SetHook(nil)
				time.Sleep(15 * time.Second)
				t.wantHolder(b)
				require.Equal(t, 1, a.Status().Terms)
			})
		})
	}
}

func TestAShutdownMakesUpForAReleaseThatFailed(t *testing.T) {
	for name, standsDown := range map[string]bool{"when it competes": false, "when it stands down": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				a, b := t.start("a"), t.start("b")
				time.Sleep(time.Minute)
				t.failToResign(a, kit.Refuse)
				if standsDown {
					require.NoError(t, a.StandDown(t.Context()))
					synctest.Wait()
				}
				a.store.SetHook(nil)
				a.stop()
				time.Sleep(10 * time.Second)
				t.wantHolder(b)
			})
		})
	}
}

func TestAReplicaWhoseReleaseFailedObeysARequest(t *testing.T) {
	inBubble(t, func(t *scene) {
		a, b, c := t.three()
		t.failToResign(a, kit.Refuse)
		t.request(b, c)
		a.store.SetHook(nil)
		time.Sleep(10 * time.Second)
		t.wantHolder(c)
	})
}

func TestAReplicaThatCannotFenceLeavesTheLeaseToAnother(t *testing.T) {
	for name, fence := range map[string]func(context.Context) error{
		"it fails": func(context.Context) error { return errors.New("the switch does not answer") },
		"it hangs": kit.UntilDone,
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead"}))
				var fails script
				b := t.start("b", fails.fencing(fence))
				time.Sleep(31 * time.Second)
				t.start("c", t.fencing(kit.Succeeds))
				time.Sleep(6 * time.Minute) // a call may take ten TTLs
				require.Equal(t, []string{"c fences dead at ", "c works"}, t.said())
				require.Contains(t, fails.said(), "b fences dead at ")
				require.NotContains(t, fails.said(), "b works")
				require.LessOrEqual(t, len(fails.said()), 30)
				own := b.Status().Recent[0]
				require.Equal(t, "b", own.Holder)
				require.Contains(t, own.Reason, "dead not fenced")
			})
		})
	}
}

func TestALongTTLMakesNobodyWaitForAStoreThatHangs(t *testing.T) {
	const ttl = time.Hour
	long := tenure.LeaseConfig{Holder: "a", TTL: ttl}
	within := func(t *scene, most time.Duration, do func()) {
		t.Helper()
		began := time.Now()
		do()
		require.LessOrEqual(t, time.Since(began), most)
	}
	for name, test := range map[string]func(t *scene){
		"at the shutdown of a holder": func(t *scene) {
			a := t.startWith(long, tenure.CoordinatorConfig{})
			time.Sleep(time.Minute)
			a.store.SetHook(kit.Hang)
			within(t, 11*time.Second, a.stop)
		},
		"at the shutdown of a standby": func(t *scene) {
			kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"}))
			t.store = storetest.Faulty(t.store, kit.Only("get", kit.Hang))
			a := t.startWith(long, tenure.CoordinatorConfig{})
			within(t, 0, a.stop)
		},
		"when one connection is reset at the release": func(t *scene) {
			a := t.startWith(long, tenure.CoordinatorConfig{})
			time.Sleep(time.Minute)
			a.store.SetHook(kit.Once(kit.Refuse))
			within(t, time.Second, a.stop)
			_, err := t.store.Get(t.Context(), kit.LeaseKey)
			require.ErrorIs(t, err, tenure.ErrNotFound)
		},
		"when the store is back": func(t *scene) {
			a := t.startWith(long, tenure.CoordinatorConfig{})
			time.Sleep(time.Minute)
			a.store.SetHook(kit.Refuse)
			time.Sleep(ttl)
			a.store.SetHook(nil)
			time.Sleep(15 * time.Second)
			t.wantHolder(a)
		},
	} {
		t.Run(name, func(t *testing.T) { inBubble(t, test) })
	}
}

func TestARecordThatACopyRenewsIsNoLeftover(t *testing.T) {
	for name, try := range acquires {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				ctx, store := t.Context(), storetest.Faulty(t.store, nil)
				lease := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
				term := kit.MustAcquire(t, lease)
				require.NoError(t, lease.Renew(ctx, term)) // each renewal was answered
				store.SetHook(kit.Refuse)
				require.Error(t, lease.Release(ctx, term))
				store.SetHook(nil)
				renewAsCopy(t, t.store)
				_, err := try(lease, ctx)
				require.ErrorIs(t, err, tenure.ErrHeld)
				require.Contains(t, string(kit.Get(t, t.store, kit.LeaseKey).Payload), term.ID())
			})
		})
	}
}

func TestNobodyWorksBesideACopyThatHasJustRenewed(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		t.start("b")
		time.Sleep(time.Minute + time.Second) // each renewal was answered
		t.failToResign(a, kit.Refuse)         // the host is cloned, and this one has lost its network
		t.jobs.Begin("the copy")              // the snapshot was taken before
		renewAsCopy(t, t.store)
		a.store.SetHook(nil)
		time.Sleep(15 * time.Second) // the copy's renewal lasts for 29 s
		require.Equal(t, "the copy", t.jobs.Holder())
	})
}

func TestACopyThatVanishesIsConfirmedAndFenced(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", t.fencing(kit.Succeeds))
		time.Sleep(time.Second)
		renewAsCopy(t, t.store)
		time.Sleep(20 * time.Second)
		require.Equal(t, tenure.RoleStandby, a.Status().Role, "it has lost the term to the copy")
		renewAsCopy(t, t.store) // its last: its host vanishes
		time.Sleep(2 * time.Minute)
		require.Equal(t, []string{"a works", "a fences a at ", "a works"}, t.said())
	})
}

// An acquire or steal whose answer was lost has begun no job: the replica need not fence
// itself, however long it is cut off.
func TestAReplicaDoesNotFenceItselfForATermThatItDidNotKnowOf(t *testing.T) {
	for name, test := range map[string]struct {
		predecessor string
		want        []string
	}{
		"acquired": {"", []string{"a works"}},
		"stolen":   {"dead", []string{"a fences dead at ", "a works"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				if test.predecessor != "" {
					kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: test.predecessor}))
				}
				var cut atomic.Bool
				store := storetest.Faulty(t.store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
					if cut.Load() {
						return errors.New("no route to host")
					}
					if err := do(ctx); call.Op != "put" || err != nil {
						return err
					}
					cut.Store(true) // it lands, and then the network is gone
					return kit.ErrReset
				})
				t.store = store
				t.start("a", t.fencing(kit.Succeeds))
				time.Sleep(2 * time.Minute)
				require.True(t, cut.Load())
				store.SetHook(nil)
				time.Sleep(2 * time.Minute)
				require.Equal(t, test.want, t.said())
			})
		})
	}
}

func TestAnAcquireThatLandsLateIsRemovedHoweverLate(t *testing.T) {
	inBubbles(t, func(t *scene) {
		store := storetest.Faulty(t.store, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			go func() {
				time.Sleep(1500 * time.Millisecond)
				_ = do(context.WithoutCancel(ctx))
			}()
			return kit.ErrReset
		})
		lease := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "a", TTL: time.Second})
		_, err := lease.TryAcquire(t.Context())
		require.ErrorIs(t, err, kit.ErrReset)
		store.SetHook(nil)
		time.Sleep(1600 * time.Millisecond)
		kit.Get(t, t.store, kit.LeaseKey)
		kit.MustAcquire(t, lease)
	})
}

// Each attempt whose answer is lost may be the one that landed.
func TestAnAcquireThatLandedIsRemovedAfterManyMoreThatMayHaveLanded(t *testing.T) {
	inBubble(t, func(t *scene) {
		store := storetest.Faulty(t.store, kit.Only("put", kit.LoseAnswer))
		lease := kit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
		for range 500 {
			_, err := lease.TryAcquire(t.Context())
			require.ErrorIs(t, err, kit.ErrReset)
		}
		store.SetHook(nil)
		kit.MustAcquire(t, lease)
	})
}
