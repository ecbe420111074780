package tenure_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/internal/testkit"
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
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead"}))
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
					testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead"}))
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
		"it could not ask":     testkit.Refuse,
		"its answers are late": slowAnswers(time.Minute),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				a, b := t.start("a"), t.start("b")
				time.Sleep(time.Minute)
				b.store.SetHook(testkit.Refuse) // it is woken by the release, and sees it later
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
				t.failToResign(a, testkit.Refuse)
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
		t.failToResign(a, testkit.Refuse)
		t.request(b, c)
		a.store.SetHook(nil)
		time.Sleep(10 * time.Second)
		t.wantHolder(c)
	})
}

func TestAReplicaThatCannotFenceLeavesTheLeaseToAnother(t *testing.T) {
	for name, fence := range map[string]func(context.Context) error{
		"it fails": func(context.Context) error { return errors.New("the switch does not answer") },
		"it hangs": testkit.UntilDone,
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead"}))
				var fails script
				b := t.start("b", fails.fencing(fence))
				time.Sleep(31 * time.Second)
				t.start("c", t.fencing(testkit.Succeeds))
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
			a.store.SetHook(testkit.Hang)
			within(t, 11*time.Second, a.stop)
		},
		"at the shutdown of a standby": func(t *scene) {
			testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"}))
			t.store = storetest.Faulty(t.store, testkit.Only("get", testkit.Hang))
			a := t.startWith(long, tenure.CoordinatorConfig{})
			within(t, 0, a.stop)
		},
		"when one connection is reset at the release": func(t *scene) {
			a := t.startWith(long, tenure.CoordinatorConfig{})
			time.Sleep(time.Minute)
			a.store.SetHook(testkit.Once(testkit.Refuse))
			within(t, time.Second, a.stop)
			_, err := t.store.Get(t.Context(), testkit.LeaseKey)
			require.ErrorIs(t, err, tenure.ErrNotFound)
		},
		"when the store is back": func(t *scene) {
			a := t.startWith(long, tenure.CoordinatorConfig{})
			time.Sleep(time.Minute)
			a.store.SetHook(testkit.Refuse)
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
				lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
				term := testkit.MustAcquire(t, lease)
				require.NoError(t, lease.Renew(ctx, term)) // each renewal was answered
				store.SetHook(testkit.Refuse)
				require.Error(t, lease.Release(ctx, term))
				store.SetHook(nil)
				renewAsCopy(t, t.store)
				_, err := try(lease, ctx)
				require.ErrorIs(t, err, tenure.ErrHeld)
				require.Contains(t, string(testkit.Get(t, t.store, testkit.LeaseKey).Payload), term.ID())
			})
		})
	}
}

func TestNobodyWorksBesideACopyThatHasJustRenewed(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		t.start("b")
		time.Sleep(time.Minute + time.Second) // each renewal was answered
		t.failToResign(a, testkit.Refuse)     // the host is cloned, and this one has lost its network
		t.jobs.Begin("the copy")              // the snapshot was taken before
		renewAsCopy(t, t.store)
		a.store.SetHook(nil)
		time.Sleep(15 * time.Second) // the copy's renewal lasts for 29 s
		require.Equal(t, "the copy", t.jobs.Holder())
	})
}

func TestACopyThatVanishesIsConfirmedAndFenced(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", t.fencing(testkit.Succeeds))
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
					testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: test.predecessor}))
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
					return testkit.ErrReset
				})
				t.store = store
				t.start("a", t.fencing(testkit.Succeeds))
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
			return testkit.ErrReset
		})
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a", TTL: time.Second})
		_, err := lease.TryAcquire(t.Context())
		require.ErrorIs(t, err, testkit.ErrReset)
		store.SetHook(nil)
		time.Sleep(1600 * time.Millisecond)
		testkit.Get(t, t.store, testkit.LeaseKey)
		testkit.MustAcquire(t, lease)
	})
}

// Each attempt whose answer is lost may be the one that landed.
func TestAnAcquireThatLandedIsRemovedAfterManyMoreThatMayHaveLanded(t *testing.T) {
	inBubble(t, func(t *scene) {
		store := storetest.Faulty(t.store, testkit.Only("put", testkit.LoseAnswer))
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
		for range 500 {
			_, err := lease.TryAcquire(t.Context())
			require.ErrorIs(t, err, testkit.ErrReset)
		}
		store.SetHook(nil)
		testkit.MustAcquire(t, lease)
	})
}

func TestAfterATakeoverTheJobBeginsOnceItIsConfirmedAndThePredecessorFenced(t *testing.T) {
	inBubble(t, func(t *scene) {
		cfg := t.fencing(testkit.Succeeds)
		cfg.Confirmations = 2
		_, b := t.takeover(cfg)
		b.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			t.say(call.Op)
			return do(ctx)
		})
		time.Sleep(19 * time.Second)
		got := b.Status()
		require.Equal(t, tenure.RoleConfirming, got.Role)
		require.NotZero(t, got.Token)
		require.NotZero(t, got.TrustLeft)
		require.False(t, b.IsHolder())
		require.Equal(t, []string{"put"}, t.said())
		time.Sleep(2 * time.Second)
		require.Equal(t, tenure.RoleHolder, b.Status().Role)
		t.wantHolder(b)
		require.Equal(t, []string{"put", "put", "b fences a at ", "put", "b works"}, t.said()) // the third drops a from the record
	})
}

func TestWithoutATakeoverThereIsNothingToConfirm(t *testing.T) {
	inBubble(t, func(t *scene) {
		cfg := t.fencing(testkit.Succeeds)
		cfg.Confirmations = 3
		a := t.start("a", cfg)
		t.wantHolder(a)
		b := t.start("b", cfg)
		time.Sleep(time.Minute)
		a.stop()
		synctest.Wait()
		t.wantHolder(b)
		require.Equal(t, []string{"a works", "b works"}, t.said())
	})
}

func TestAPredecessorIsFencedUntilThatSucceeds(t *testing.T) {
	inBubble(t, func(t *scene) {
		tries := 0
		_, b := t.takeover(t.fencing(func(context.Context) error {
			if tries++; tries < 5 {
				return errors.New("the power switch does not answer")
			}
			return nil
		}))
		require.Equal(t, tenure.RoleConfirming, b.Status().Role)
		require.Contains(t, b.Status().LastError, "power switch")
		time.Sleep(15 * time.Second)
		t.wantHolder(b)
		require.Equal(t, 5, tries)
	})
}

// Hints make a holder renew; otherwise they could confirm a takeover at once.
func TestHintsConfirmNothing(t *testing.T) {
	inBubble(t, func(t *scene) {
		_, b := t.takeover(tenure.CoordinatorConfig{Confirmations: 2})
		for range 19 {
			require.NoError(t, b.store.Wake(t.Context(), testkit.LeaseKey))
			time.Sleep(time.Second)
		}
		t.wantHolder(nil) // two renewals take 20 s
		time.Sleep(2 * time.Second)
		t.wantHolder(b)
	})
}

func TestATermThatEndsBeforeItIsConfirmedRunsNoJob(t *testing.T) {
	for name, end := range map[string]struct {
		act   func(t *scene, b *replica)
		cause error
		until time.Duration // the job is told to return
	}{
		"shutdown": {func(_ *scene, b *replica) { go b.stop() }, tenure.ErrShutdown, 0},
		"resigned": {func(t *scene, b *replica) { go b.Resign(t.Context()) }, tenure.ErrResigned, 0},
		"deadline": {func(_ *scene, b *replica) { b.store.SetHook(testkit.Refuse) }, tenure.ErrDeadline, 20 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				cause := make(chan error, 1)
				_, b := t.takeover(t.fencing(func(ctx context.Context) error {
					<-ctx.Done()
					time.Sleep(3 * time.Second) // as a job may
					cause <- context.Cause(ctx)
					return nil
				}))
				end.act(t, b)
				time.Sleep(end.until + 2*time.Second)
				b.store.SetHook(nil)
				_, err := b.lease.Read(t.Context())
				require.NoError(t, err, "the lease stands while the predecessor is being fenced")
				time.Sleep(2 * time.Second)
				require.ErrorIs(t, <-cause, end.cause)
				require.Equal(t, []string{"b fences a at "}, t.said())
			})
		})
	}
}

func TestAPanicWhileFencingGivesTheLeaseBackAndPanicsOutOfRun(t *testing.T) {
	inBubble(t, func(t *scene) {
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}))
		time.Sleep(30 * time.Second)
		lease := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
		c, err := tenure.NewCoordinator(lease, t.fencing(func(context.Context) error { panic("boom") }))
		require.NoError(t, err)
		defer func() {
			p, ok := recover().(*report.Panic)
			require.True(t, ok)
			require.Equal(t, "boom", p.Value)
			holding, err := lease.Read(context.Background())
			require.NoError(t, err)
			require.Equal(t, "", holding.Holder+holding.OfferedTo, "any replica may take it")
			require.Equal(t, []string{"b fences a at "}, t.said())
		}()
		c.Run(t.Context())
	})
}

// A predecessor that a term did not fence is fenced in the next one, however the term ends.
func TestAPredecessorThatWasNotFencedIsFencedInTheNextTerm(t *testing.T) {
	type act = func(t *scene, b *replica)
	crash := func(_ *scene, b *replica) { b.store.SetHook(testkit.Hang) }
	for name, test := range map[string]struct {
		act  act
		next tenure.LeaseConfig
		want []string // from then on
	}{
		"shutdown":         {func(_ *scene, b *replica) { b.stop() }, tenure.LeaseConfig{}, nil},
		"resigned":         {func(t *scene, b *replica) { b.Resign(t.Context()) }, tenure.LeaseConfig{}, nil},
		"asked to release": {func(t *scene, b *replica) { b.lease.RequestRelease(t.Context()) }, tenure.LeaseConfig{}, nil},
		"asked for c":      {func(t *scene, b *replica) { b.lease.RequestHandover(t.Context(), "c") }, tenure.LeaseConfig{}, nil},
		"release refused": {func(t *scene, b *replica) { // and as it has resigned, it is not back before c
			b.store.SetHook(testkit.Refuse)
			go b.Resign(t.Context())
			time.Sleep(10 * time.Second)
			b.store.SetHook(nil)
		}, tenure.LeaseConfig{}, nil},
		"crash": {crash, tenure.LeaseConfig{}, []string{"c fences a at 10.0.0.1", "c fences b at 10.0.0.2", "c works"}},
		"crash and restart": {crash, tenure.LeaseConfig{Holder: "b", AssumeUniqueHolder: true},
			[]string{"b fences a at 10.0.0.1", "b works"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				if test.want == nil {
					test.want = []string{"c fences a at 10.0.0.1", "c works"}
				}
				addr := func(a string) map[string]string { return map[string]string{"addr": a} }
				testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a", Labels: addr("10.0.0.1")}))
				var tries atomic.Int32
				b := t.startWith(tenure.LeaseConfig{Holder: "b", Labels: addr("10.0.0.2")}, t.fencing(func(ctx context.Context) error {
					if tries.Add(1) > 1 {
						return nil
					}
					return testkit.UntilDone(ctx)
				}))
				time.Sleep(45 * time.Second) // and a renewal
				require.Equal(t, []string{"b fences a at 10.0.0.1"}, t.said())
				if test.next.AssumeUniqueHolder { // the next b finds the first one gone
					test.act(t, b)
					record.Restart()
					t.startWith(test.next, t.fencing(testkit.Succeeds))
				} else {
					t.start("c", t.fencing(testkit.Succeeds))
					test.act(t, b)
				}
				time.Sleep(time.Minute)
				require.Equal(t, test.want, t.said()[1:])
			})
		})
	}
}

func TestATakeoverWhoseAnswerWasLostIsConfirmed(t *testing.T) {
	inBubble(t, func(t *scene) {
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}))
		b := t.start("b", t.fencing(testkit.Succeeds))
		lost := false
		b.store.SetHook(testkit.Only("put", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if err == nil && !lost {
				lost, err = true, testkit.ErrReset
			}
			return err
		}))
		time.Sleep(time.Minute)
		require.Equal(t, []string{"b fences a at ", "b works"}, t.said())
	})
}

func TestAReplicaMayReclaimTheLeaseOfItsEarlierLife(t *testing.T) {
	inBubble(t, func(t *scene) {
		unique := tenure.LeaseConfig{Holder: "pod-0", AssumeUniqueHolder: true}
		term := testkit.MustAcquire(t, testkit.NewLease(t, t.store, unique))
		for _, other := range []tenure.LeaseConfig{{Holder: "pod-1", AssumeUniqueHolder: true}, {Holder: "pod-0"}} {
			_, err := testkit.NewLease(t, t.store, other).AcquireOrSteal(t.Context())
			require.ErrorIs(t, err, tenure.ErrHeld)
		}
		record.Restart()
		restarted := testkit.NewLease(t, t.store, unique)
		require.Greater(t, testkit.MustAcquire(t, restarted).Token(), term.Token())
		_, err := restarted.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld) // its own term, of this life

		cfg := t.fencing(testkit.Succeeds) // but it does not fence itself, nor wait
		cfg.Confirmations = 2
		record.Restart()
		t.startWith(unique, cfg)
		require.Equal(t, []string{"pod-0 works"}, t.said())
	})
}

// began returns a term that another process has begun, its lease, and the lease of a process
// that will continue the term.
func (t *scene) began(cfg tenure.LeaseConfig) (term *tenure.Term, former, next *tenure.Lease) {
	t.Helper()
	former = testkit.NewLease(t, t.store, cfg)
	return testkit.MustAcquire(t, former), former, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "next"})
}

func (t *scene) resume(lease *tenure.Lease, term *tenure.Term) *tenure.Term {
	t.Helper()
	resumed, err := lease.Resume(t.Context(), term.ID(), term.Token())
	require.NoError(t, err)
	return resumed
}

// wantExpiryNow fails unless a record that was just written expires after the TTL.
func (t *scene) wantExpiryNow(ttl time.Duration) {
	t.Helper()
	thief := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "thief"})
	t.wantHeld(thief) // on a store without a clock, silence counts from the first look
	time.Sleep(ttl - time.Millisecond)
	t.wantHeld(thief)
	time.Sleep(5 * time.Millisecond) // stores stamp in milliseconds
	testkit.MustAcquire(t, thief)
}

func TestATermGoesOnInAnotherProcess(t *testing.T) {
	inBubbles(t, func(t *scene) {
		labels := map[string]string{"addr": "10.0.0.1"}
		term, former, next := t.began(tenure.LeaseConfig{Holder: "former", TTL: time.Minute, Labels: labels})
		time.Sleep(20 * time.Second)
		for range 3 {
			resumed := t.resume(next, term)
			require.Equal(t, []any{term.ID(), term.Token(), "former", term.Record(), true},
				[]any{resumed.ID(), resumed.Token(), resumed.Holder(), resumed.Record(), resumed.AcquiredAt().Equal(term.AcquiredAt())})
			require.Equal(t, 58*time.Second, resumed.Remaining(), "the record's TTL less 1/30 of it")
			time.Sleep(45 * time.Second)
		}
		resumed := t.resume(next, term)
		time.Sleep(45 * time.Second)
		require.NoError(t, next.Renew(t.Context(), resumed))
		holding, err := next.Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, []any{"former", term.ID(), time.Minute, labels}, []any{holding.Holder, holding.Term, holding.TTL, holding.Labels})
		require.Zero(t, holding.Age)

		require.ErrorIs(t, former.Renew(t.Context(), term), tenure.ErrLost)
		require.ErrorIs(t, former.Release(t.Context(), term), tenure.ErrLost)
		require.NoError(t, next.Renew(t.Context(), resumed), "the former process has removed the record")
		require.NoError(t, next.Release(t.Context(), resumed))
		_, err = next.Read(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound)
	})
}

func TestTheTrustInAResumedTermCountsFromBeforeItWasSent(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, _, _ := t.began(tenure.LeaseConfig{})
		slow := storetest.Faulty(t.store, testkit.AnswerAfter(5*time.Second))
		next := testkit.NewLease(t, slow, tenure.LeaseConfig{})
		require.Equal(t, 24*time.Second, t.resume(next, term).Remaining())
		slow.SetHook(testkit.AnswerAfter(time.Minute))
		_, err := next.Resume(t.Context(), term.ID(), term.Token())
		require.ErrorIs(t, err, tenure.ErrDeadline)
	})
}

func TestATermThatIsOverIsNotResumed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, former, next := t.began(tenure.LeaseConfig{Holder: "former"})
		refused := func(why string) {
			t.Helper()
			resumed, err := next.Resume(t.Context(), term.ID(), term.Token())
			require.Nil(t, resumed)
			require.ErrorIs(t, err, tenure.ErrLost)
			require.ErrorContains(t, err, why)
		}
		require.NoError(t, former.Seal(t.Context(), term))
		refused("is being ended by the process that began it")
		require.NoError(t, former.Renew(t.Context(), term))
		refused("is being ended by the process that began it")
		require.NoError(t, former.Release(t.Context(), term))
		refused("is gone")
		testkit.MustAcquire(t, former)
		refused("is held by former")
		putRecord(t, t.store, `{"holder":"x","term":"`+term.ID()+`","ttl_ms":30000,"offered":true}`)
		refused("is offered to x")
	})
}

// The worker is late, and no replica has taken the lease over.
func TestARecordThatHasExpiredIsResumed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, _, next := t.began(tenure.LeaseConfig{})
		time.Sleep(time.Hour)
		require.True(t, t.resume(next, term).Valid())
		t.wantExpiryNow(30 * time.Second)
		_, err := next.Resume(t.Context(), term.ID(), term.Token())
		require.ErrorIs(t, err, tenure.ErrLost)
	})
}

// S5: what a process gives up before it releases the lease must not belong to another process
// by then.
func TestATermThatWasResumedElsewhereCannotBeSealed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		unsure := storetest.Faulty(t.store, nil)
		former := testkit.NewLease(t, unsure, tenure.LeaseConfig{})
		next := testkit.NewLease(t, t.store, tenure.LeaseConfig{})
		term := testkit.MustAcquire(t, former)
		unsure.SetHook(testkit.Refuse) // the former process does not know what became of its renewal
		require.Error(t, former.Renew(t.Context(), term))
		unsure.SetHook(nil)
		resumed := t.resume(next, term)
		err := former.Seal(t.Context(), term)
		require.ErrorIs(t, err, tenure.ErrLost, "it took the other's renewal for its own")
		require.ErrorContains(t, err, "was resumed elsewhere")
		require.False(t, term.Valid())
		require.ErrorIs(t, next.Seal(t.Context(), resumed), tenure.ErrInvalid)
		require.NoError(t, next.Renew(t.Context(), resumed))
	})
}

// A request left in the record would make it look as old as it was when the request was
// written.
func TestAResumedRecordIsAsYoungAsItsRenewal(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, former, next := t.began(tenure.LeaseConfig{})
		for range 3 {
			time.Sleep(20 * time.Second)
			require.NoError(t, former.RequestRelease(t.Context()))
			t.resume(next, term)
		}
		t.wantExpiryNow(30 * time.Second)
	})
}

func TestACoordinatorHoldsAResumedTerm(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, former, next := t.began(tenure.LeaseConfig{Holder: "former"})
		require.NoError(t, former.RequestHandover(t.Context(), "other"))
		began := make(chan *tenure.Term, 1)
		c, err := tenure.NewCoordinator(next, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			began <- tenure.TermFromContext(ctx)
			return testkit.UntilDone(ctx)
		}})
		require.NoError(t, err)
		require.ErrorIs(t, c.Hold(t.Context(), t.resume(next, term)), tenure.ErrResigned, "it was requested")
		require.Equal(t, term.Token(), (<-began).Token())

		term, err = testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "other"}).AcquireOrSteal(t.Context())
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.NoError(t, c.Hold(ctx, t.resume(next, term)))
		require.Equal(t, term.Token(), (<-began).Token())
		_, err = next.Read(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound)

		short := testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{TTL: 20 * time.Second}))
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.ErrorIs(t, c.Hold(ctx, t.resume(next, short)), tenure.ErrInvalid)
	})
}

// Two processes that hold one term find out.
func TestAResumedTermThatIsResumedAgainElsewhereIsLost(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, _, next := t.began(tenure.LeaseConfig{})
		held := t.resume(next, term)
		t.resume(testkit.NewLease(t, t.store, tenure.LeaseConfig{}), term)
		require.ErrorIs(t, next.Renew(t.Context(), held), tenure.ErrLost)
	})
}

func TestAPredecessorIsFencedAlthoughTheTermWasResumed(t *testing.T) {
	inBubble(t, func(t *scene) {
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead"}))
		time.Sleep(30*time.Second + time.Millisecond)
		crashes := t.start("crashes", tenure.CoordinatorConfig{FencePredecessor: func(context.Context, tenure.Holding) error { return errors.New("not yet") }})
		time.Sleep(10 * time.Second)
		crashes.store.SetHook(testkit.Hang)
		next := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "next"})
		holding, err := next.Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, "crashes", holding.Holder)
		c, err := tenure.NewCoordinator(next, t.fencing(testkit.Succeeds))
		require.NoError(t, err)
		for range 2 { // it stays in the record
			_, err = next.Resume(t.Context(), holding.Term, holding.Version)
			require.NoError(t, err)
		}
		resumed, err := next.Resume(t.Context(), holding.Term, holding.Version)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, c.Hold(ctx, resumed))
		require.Equal(t, "crashes fences dead at ", t.said()[0])
	})
}

// Servers that relay heartbeats do not get in each other's way.
func TestAWorkersHeartbeatsMayArriveAnywhere(t *testing.T) {
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		lease := testkit.NewLease(t, open(), tenure.LeaseConfig{})
		term := testkit.MustAcquire(t, lease)
		var servers sync.WaitGroup
		for range 4 {
			server := testkit.NewLease(t, open(), tenure.LeaseConfig{})
			servers.Go(func() {
				for range 25 {
					resumed, err := server.Resume(t.Context(), term.ID(), term.Token())
					if err != nil || resumed.Token() != term.Token() {
						t.Error(resumed, err)
					}
				}
			})
		}
		servers.Wait()
		require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrLost)

		server := testkit.NewLease(t, open(), tenure.LeaseConfig{})
		resumed, err := server.Resume(t.Context(), term.ID(), term.Token())
		require.NoError(t, err)
		before, err := server.Read(t.Context())
		require.NoError(t, err)
		time.Sleep(5 * time.Millisecond)
		require.NoError(t, server.RequestRelease(t.Context()))
		_, err = server.Resume(t.Context(), term.ID(), term.Token())
		require.NoError(t, err)
		after, err := server.Read(t.Context())
		require.NoError(t, err)
		require.True(t, after.RenewedAt.After(before.RenewedAt), "the record looks as old as the request found it")
		require.ErrorIs(t, server.Release(t.Context(), resumed), tenure.ErrLost, "another has resumed it since")
		resumed, err = server.Resume(t.Context(), term.ID(), term.Token())
		require.NoError(t, err)
		fenced, err := tenure.Fence(open(), resumed)
		require.NoError(t, err)
		_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "result", ID: "1"}}, tenure.IfAbsent())
		require.NoError(t, err)
		require.NoError(t, server.Release(t.Context(), resumed), "the worker said goodbye")
	})
}

// S5: if one process ends a term and another continues it, exactly one succeeds.
func TestATermIsEitherSealedOrResumed(t *testing.T) {
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		store := open()
		former, next := testkit.NewLease(t, store, tenure.LeaseConfig{}), testkit.NewLease(t, open(), tenure.LeaseConfig{})
		sealedFirst, resumedFirst := 0, 0
		for trial := range 200 {
			term := testkit.MustAcquire(t, former)
			var both sync.WaitGroup
			var sealed, resumed error
			both.Go(func() {
				time.Sleep(rand.N(2 * time.Millisecond))
				sealed = former.Seal(t.Context(), term)
			})
			both.Go(func() {
				time.Sleep(rand.N(2 * time.Millisecond))
				_, resumed = next.Resume(t.Context(), term.ID(), term.Token())
			})
			both.Wait()
			switch {
			case sealed == nil && errors.Is(resumed, tenure.ErrLost):
				sealedFirst++
			case resumed == nil && errors.Is(sealed, tenure.ErrLost):
				resumedFirst++
			default:
				t.Fatalf("trial %d: sealed: %v; resumed: %v", trial, sealed, resumed)
			}
			testkit.RemoveRecord(t, store)
		}
		t.Logf("%d sealed, %d resumed", sealedFirst, resumedFirst)
		if sealedFirst == 0 || resumedFirst == 0 {
			t.Error("they never raced")
		}
	})
}

// queries counts what is sent to Postgres.
type queries struct{ n atomic.Int64 }

func (q *queries) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	q.n.Add(1)
	return ctx
}
func (q *queries) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestOnPostgresAHeartbeatIsOneStatement(t *testing.T) {
	config, err := pgxpool.ParseConfig(testkit.PostgresURL(t))
	require.NoError(t, err)
	var sent queries
	config.ConnConfig.Tracer = &sent
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store, err := tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet})
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Labels: map[string]string{"addr": "10.0.0.1"}})
	term := testkit.MustAcquire(t, lease)
	resume := func() {
		_, err := lease.Resume(t.Context(), term.ID(), term.Token())
		require.NoError(t, err)
	}
	resume()
	sent.n.Store(0)
	for range 10 {
		resume()
	}
	require.EqualValues(t, 10, sent.n.Load())
	holding, err := lease.Read(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]string{"addr": "10.0.0.1"}, holding.Labels)
	before, err := store.Get(t.Context(), lease.Key())
	require.NoError(t, err)
	_, err = lease.Resume(t.Context(), "another", 1)
	require.ErrorIs(t, err, tenure.ErrLost)
	after, err := store.Get(t.Context(), lease.Key())
	require.NoError(t, err)
	require.Equal(t, before.Version, after.Version, "the record is another term's")
}

func TestBadInputToResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), nil)
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		term := testkit.MustAcquire(t, lease)
		store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error {
			t.Error("the store was called")
			return nil
		})
		for _, bad := range []struct {
			id    string
			token int64
		}{{"", 1}, {"\xff", 1}, {term.ID(), 0}, {term.ID(), -1}} {
			_, err := lease.Resume(t.Context(), bad.id, bad.token)
			require.ErrorIs(t, err, tenure.ErrInvalid)
		}
		require.ErrorIs(t, lease.Seal(t.Context(), nil), tenure.ErrInvalid)
		require.ErrorIs(t, testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "a", ID: "b"}}).Seal(t.Context(), term), tenure.ErrInvalid)
		store.SetHook(nil)
		_, err := lease.Resume(t.Context(), term.ID(), term.Token()+time.Hour.Microseconds())
		require.ErrorIs(t, err, tenure.ErrInvalid)
		_, err = lease.Resume(t.Context(), `"`, 1)
		require.ErrorIs(t, err, tenure.ErrLost)
	})
}

// Each may take the other's renewal for its own unanswered one.
func TestOfTwoThatHaveResumedATermOnlyTheLaterHasIt(t *testing.T) {
	for name, try := range map[string]func(*tenure.Lease, context.Context, *tenure.Term) error{
		"renew": (*tenure.Lease).Renew, "release": (*tenure.Lease).Release,
	} {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				term, _, c := t.began(tenure.LeaseConfig{})
				unsure := storetest.Faulty(t.store, nil)
				b := testkit.NewLease(t, unsure, tenure.LeaseConfig{Holder: "b"})
				resumed := t.resume(b, term)
				unsure.SetHook(testkit.Refuse)
				require.Error(t, b.Renew(t.Context(), resumed))
				unsure.SetHook(nil)
				later := t.resume(c, term)
				require.ErrorIs(t, try(b, t.Context(), resumed), tenure.ErrLost)
				require.NoError(t, c.Renew(t.Context(), later))
				t.wantHeld(testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "thief"}))
			})
		})
	}
}

// The record names the replica that began the term, which may have been restarted since.
func TestAResumedTermIsNotReclaimed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		cfg := tenure.LeaseConfig{Holder: "pod-0", AssumeUniqueHolder: true}
		term, _, next := t.began(cfg)
		t.resume(next, term)
		record.Restart()
		restarted := testkit.NewLease(t, t.store, cfg)
		_, err := restarted.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
		t.resume(restarted, term)
		_, err = restarted.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
	})
}
