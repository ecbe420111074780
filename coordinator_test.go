package tenure_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func TestOneReplicaHoldsAndTheOthersStandBy(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		for range 100 {
			time.Sleep(7 * time.Second)
			t.wantHolder(a)
			require.Equal(t, "a", t.jobs.Holder())
		}
		got := a.Status()
		require.Equal(t, tenure.RoleHolder, got.Role)
		require.Equal(t, "a", got.Holder)
		require.NotZero(t, got.Token)
		require.GreaterOrEqual(t, got.TrustLeft, 19*time.Second)
		require.Equal(t, 1, got.Terms)
		got = b.Status()
		require.Equal(t, tenure.RoleStandby, got.Role)
		require.Equal(t, "a", got.Holder)
		require.Zero(t, got.Token)
		require.Zero(t, got.TrustLeft)
	})
}

func TestAtAShutdownTheLeaseGoesToAnotherReplicaAtOnce(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		time.Sleep(time.Minute)
		a.stop()
		require.False(t, a.IsHolder())
		require.Contains(t, t.jobs.String(), "1m0s a ends: "+tenure.ErrShutdown.Error())
		t.settle()
		t.wantHolder(b)
		require.Equal(t, "b", t.jobs.Holder())
	})
}

func TestAVanishedHolderIsReplacedWithinTenMillisecondsOfItsTTL(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		time.Sleep(time.Minute + time.Second) // the last renewal was a second ago
		a.store.SetHook(testkit.Hang)
		time.Sleep(29*time.Second + 10*time.Millisecond)
		t.wantHolder(b)
		require.Equal(t, "b", t.jobs.Holder())
	})
}

func TestALeaseIsReleasedOnlyWhenNoRenewalIsUnderWay(t *testing.T) {
	inBubbles(t, func(t *scene) {
		var s script
		a := t.start("a")
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			s.say(call.Op)
			if call.Op == "put" {
				defer s.say("renewed")
				return testkit.Hang(ctx, call, do)
			}
			return do(ctx)
		})
		time.Sleep(11 * time.Second)
		require.Equal(t, []string{"put"}, s.said())
		a.stop()
		require.Equal(t, []string{"put", "renewed", "delete"}, s.said())
	})
}

func TestTheLeaseIsReleasedOnlyAfterTheJobHasReturned(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a := t.start("a", tenure.CoordinatorConfig{
			Watch: returnsAfter(0),
			Reconcile: func(ctx context.Context) error {
				t.jobs.Begin("a")
				<-ctx.Done()
				time.Sleep(8 * time.Second) // longer than any standby waits to acquire
				if _, err := t.store.Get(context.Background(), testkit.LeaseKey); err != nil {
					t.Errorf("while the job runs: %v", err)
				}
				t.jobs.End("a", context.Cause(ctx))
				return nil
			},
		})
		b := t.start("b")
		time.Sleep(time.Minute)
		a.stop()
		t.settle()
		t.wantHolder(b)
		require.Equal(t, "b", t.jobs.Holder())
	})
}

func TestRenewalsThatFailForAWhileCostNothing(t *testing.T) {
	for name, fault := range map[string]storetest.Hook{"refused": testkit.Refuse, "hanging": testkit.Hang, "answers lost": testkit.LoseAnswer} {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				a := t.start("a")
				t.start("b")
				time.Sleep(31 * time.Second)
				a.store.SetHook(fault) // a second after a renewal; the deadline is 19 s away
				time.Sleep(14*time.Second + 300*time.Millisecond)
				require.NotEmpty(t, a.Status().LastError)
				a.store.SetHook(nil)
				time.Sleep(time.Minute)
				t.wantHolder(a)
				require.Equal(t, 1, a.Status().Terms)
				require.Empty(t, a.Status().LastError)
			})
		})
	}
}

// The pauses between attempts are random, so that each round meets others.
func TestAnOutageThatEndsASecondBeforeTheRenewDeadlineCostsNothing(t *testing.T) {
	const rounds = 200
	for name, fault := range map[string]storetest.Hook{"refused": testkit.Refuse, "hanging": testkit.Hang} {
		for _, before := range []time.Duration{time.Second, 2 * time.Second, 5 * time.Second} {
			t.Run(fmt.Sprintf("%s until %v before", name, before), func(t *testing.T) {
				lost, calls := 0, new(testkit.Calls)
				for range rounds {
					inBubble(t, func(t *scene) {
						a := t.start("a")
						a.store.SetHook(calls.Count("", fault))
						time.Sleep(20*time.Second - before)
						a.store.SetHook(nil)
						time.Sleep(10 * time.Second)
						if a.Status().Terms != 1 || !a.IsHolder() {
							lost++
						}
					})
				}
				t.Logf("lost: %d of %d; calls in an outage: %.1f", lost, rounds, float64(calls.Take()["put"])/rounds)
				require.Zero(t, lost)
			})
		}
	}
}

func TestARenewalThatHangsEndsTheJobAtTheRenewDeadline(t *testing.T) {
	for name, fault := range map[string]storetest.Hook{
		"until its context ends": testkit.Hang,
		"for ever, whatever its context": func(context.Context, storetest.Call, func(context.Context) error) error {
			time.Sleep(10 * time.Minute)
			return testkit.ErrReset
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				a, b := t.start("a"), t.start("b")
				a.store.SetHook(fault)
				time.Sleep(20*time.Second - time.Millisecond)
				require.Equal(t, "a", t.jobs.Holder(), t.jobs)
				time.Sleep(time.Millisecond)
				synctest.Wait()
				require.Contains(t, t.jobs.String(), "20s a ends: "+tenure.ErrDeadline.Error())
				time.Sleep(15 * time.Second)
				t.wantHolder(b)
			})
		})
	}
}

func TestAJobThatEndsGivesTheLeaseToAnotherReplica(t *testing.T) {
	broken := errors.New("broken")
	for name, job := range map[string]func(context.Context) error{
		"by returning":     testkit.Succeeds,
		"by an error":      func(context.Context) error { return broken },
		"by a false alarm": func(context.Context) error { return tenure.ErrLost },
		"by Goexit":        func(context.Context) error { runtime.Goexit(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				cause := make(chan error, 10)
				t.start("a", tenure.CoordinatorConfig{
					Watch: func(ctx context.Context) error {
						time.Sleep(10 * time.Second)
						return job(ctx)
					},
					Reconcile: func(ctx context.Context) error {
						t.jobs.Run(ctx, "a")
						cause <- context.Cause(ctx)
						return nil
					},
				})
				b := t.start("b")
				time.Sleep(15 * time.Second)
				err := <-cause
				require.ErrorIs(t, err, tenure.ErrJobEnded)
				require.ErrorContains(t, err, "watch")
				if name == "by an error" {
					require.ErrorIs(t, err, broken)
				}
				t.wantHolder(b)
			})
		})
	}
}

func TestAJobThatPanicsReleasesTheLeaseAndPanicsOutOfRun(t *testing.T) {
	inBubbles(t, func(t *scene) {
		broken := errors.New("broken")
		c, err := tenure.NewCoordinator(testkit.NewLease(t, t.store, tenure.LeaseConfig{}), tenure.CoordinatorConfig{
			Watch:     returnsAfter(0),
			Reconcile: func(context.Context) error { panic(broken) },
		})
		require.NoError(t, err)
		defer func() {
			p, ok := recover().(*report.Panic)
			require.True(t, ok)
			require.ErrorIs(t, p, broken)
			require.ErrorContains(t, p, "coordinator_test.go", "the stack of the job")
			_, err := t.store.Get(t.Context(), testkit.LeaseKey)
			require.ErrorIs(t, err, tenure.ErrNotFound)
			require.False(t, c.IsHolder())
			require.Equal(t, tenure.RoleStandby, c.Status().Role)
		}()
		c.Run(t.Context())
	})
}

func TestAReplicaThatLostTheLeaseCompetesAgain(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a := t.start("a")
		for i := range 5 {
			a.store.SetHook(testkit.Hang)
			time.Sleep(time.Minute)
			t.wantHolder(nil)
			a.store.SetHook(nil)
			time.Sleep(11 * time.Second)
			t.wantHolder(a)
			require.Equal(t, i+2, a.Status().Terms)
		}
	})
}

func TestAStolenLeaseEndsTheJobAtTheNextRenewal(t *testing.T) {
	inBubbles(t, func(t *scene) {
		var cause error
		var term *tenure.Term
		t.start("a", tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			term = tenure.TermFromContext(ctx)
			<-ctx.Done()
			cause = context.Cause(ctx)
			return nil
		}})
		putRecord(t, t.store, robbersRecord)
		time.Sleep(10*time.Second + time.Millisecond)
		synctest.Wait()
		testkit.WantLost(t, cause, term, "robber")
	})
}

func TestAJobThatIgnoresItsContextIsReportedAndKeepsItsReplicaFromCompeting(t *testing.T) {
	inBubbles(t, func(t *scene) {
		stuck := make(chan time.Duration, 1)
		returnNow := make(chan struct{})
		first := true
		a := t.start("a", tenure.CoordinatorConfig{
			Reconcile: func(ctx context.Context) error {
				if !first {
					return testkit.UntilDone(ctx)
				}
				first = false
				<-returnNow
				return nil
			},
			Trace: &tenure.Trace{JobStuck: func(_ *tenure.Term, since time.Duration) { stuck <- since }},
		})
		b := t.start("b")

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, a.Resign(ctx), context.DeadlineExceeded)
		time.Sleep(9 * time.Second) // TTL − Margin − RenewDeadline, less the second
		require.Equal(t, 9*time.Second, <-stuck)
		require.True(t, a.Status().Stuck)
		require.Equal(t, tenure.RoleStopping, a.Status().Role)
		testkit.Get(t, t.store, testkit.LeaseKey) // the job runs, so its lease stands

		time.Sleep(40 * time.Second) // and expires, because it is not renewed
		t.wantHolder(b)
		require.Equal(t, 1, a.Status().Terms)
		close(returnNow)
		b.stop()
		time.Sleep(11 * time.Second)
		require.False(t, a.Status().Stuck)
		t.wantHolder(a)
	})
}

func TestResignHandsTheLeaseToAnotherReplica(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		time.Sleep(time.Minute)
		require.NoError(t, b.Resign(t.Context())) // has nothing to resign
		require.NoError(t, a.Resign(t.Context()))
		require.False(t, a.IsHolder())
		require.NotEqual(t, "a", t.jobs.Holder())
		t.settle()
		t.wantHolder(b)
		require.Contains(t, t.jobs.String(), "a ends: "+tenure.ErrResigned.Error())
	})
}

func TestAReplicaThatIsToldToResignWhileItStopsStaysAwayAllTheSame(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: returnsAfter(time.Second)})
		a.store.SetHook(testkit.Hang)
		time.Sleep(20*time.Second + time.Millisecond) // its renewals have failed for too long
		a.store.SetHook(nil)
		require.NoError(t, a.Resign(t.Context()))
		time.Sleep(7 * time.Second)
		t.wantHolder(nil) // before every standby has tried
		time.Sleep(3 * time.Second)
		t.wantHolder(a)
	})
}

func TestAShutdownDuringAnAcquireLeavesNoRecord(t *testing.T) {
	inBubbles(t, func(t *scene) {
		store := t.store
		t.store = storetest.Faulty(store, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Second): // the time that the answer takes
				return err
			}
		})
		a := t.start("a")
		testkit.Get(t, store, testkit.LeaseKey)
		a.stop()
		_, err := store.Get(t.Context(), testkit.LeaseKey)
		require.ErrorIs(t, err, tenure.ErrNotFound)
		require.Empty(t, t.jobs.String(), "the job ran")
	})
}

// A process that is paused within an acquire sees the answer late.
func TestAnAcquireAnsweredAfterTheRenewDeadlineBeginsNoJob(t *testing.T) {
	inBubbles(t, func(t *scene) {
		// The trust lasts for 8 s more, and a job may take 9.
		t.store = storetest.Faulty(t.store, testkit.Only("put", testkit.Once(testkit.AnswerAfter(21*time.Second))))
		b := t.start("b")
		time.Sleep(21*time.Second + time.Millisecond)
		require.Empty(t, t.jobs.String())
		require.Zero(t, b.Status().Terms, "no term begins that has no time for a job")
		_, err := t.store.Get(t.Context(), testkit.LeaseKey)
		require.ErrorIs(t, err, tenure.ErrNotFound, "the lease is given back")
		time.Sleep(5 * time.Second)
		t.wantHolder(b)
	})
}

func TestTheJobsContextCarriesTheTermAndTheCallersValues(t *testing.T) {
	inBubbles(t, func(t *scene) {
		type key struct{}
		t.run = context.WithValue(t.run, key{}, "value")
		jobs := make(chan context.Context, 1)
		t.start("a", tenure.CoordinatorConfig{Watch: func(ctx context.Context) error {
			jobs <- ctx
			return testkit.UntilDone(ctx)
		}})
		job := <-jobs
		require.Equal(t, "value", job.Value(key{}))
		term := tenure.TermFromContext(job)
		require.True(t, term.Valid())
		require.Equal(t, "a", term.Holder())
		require.NotZero(t, term.Token())
		require.Nil(t, tenure.TermFromContext(t.Context()), "a term outside a job")
	})
}

func TestASingleReplicaRunsItsJobWithoutLeaseTraffic(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) tenure.Store{
		"Static": func(*testing.T) tenure.Store { return tenure.Static() },
		"SQLite": func(t *testing.T) tenure.Store {
			store, err := tenure.OpenSQLite(t.Context(), ":memory:", tenure.SQLiteConfig{Logger: testkit.Quiet})
			require.NoError(t, err)
			t.Cleanup(func() { store.Close() })
			return store
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				var traffic testkit.Calls
				t.store = storetest.Faulty(open(t.T), traffic.Count("", nil))
				jobs := 0
				a := t.start("a", tenure.CoordinatorConfig{Confirmations: 2, Reconcile: func(ctx context.Context) error {
					term := tenure.TermFromContext(ctx)
					if !term.Valid() || term.Token() == 0 {
						t.Errorf("got term %+v", term)
					}
					if jobs++; jobs == 1 {
						return errors.New("fails once")
					}
					t.jobs.Run(ctx, "a")
					return nil
				}})
				time.Sleep(time.Hour)
				t.wantHolder(a)
				require.Equal(t, 2, a.Status().Terms)
				a.stop()
				t.wantHolder(nil)
				require.Empty(t, t.jobs.Holder())
				require.Empty(t, traffic.Take())
			})
		})
	}
}

// alone returns stores that no other process can reach, each with a second handle of the same store.
func alone(t *testing.T) map[string]func(t *testing.T) (a, b tenure.Store) {
	opened := func(path func(t *testing.T) string) func(t *testing.T) (a, b tenure.Store) {
		return func(t *testing.T) (a, b tenure.Store) {
			store, err := tenure.OpenSQLite(t.Context(), path(t), tenure.SQLiteConfig{Logger: testkit.Quiet})
			require.NoError(t, err)
			t.Cleanup(func() { store.Close() })
			return store, store
		}
	}
	return map[string]func(t *testing.T) (a, b tenure.Store){
		"SQLite in memory": opened(func(*testing.T) string { return ":memory:" }),
		"a SQLite file":    opened(func(t *testing.T) string { return filepath.Join(t.TempDir(), "tenure.db") }),
		"two stores in one database": func(t *testing.T) (a, b tenure.Store) {
			db := testkit.OpenSQL(t, "sqlite", ":memory:")
			return testkit.Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Logger: testkit.Quiet})),
				testkit.Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Table: "Objects", Logger: testkit.Quiet}))
		},
		"Static": func(t *testing.T) (a, b tenure.Store) { a = tenure.Static(); return a, a },
		"a wrapper": func(t *testing.T) (a, b tenure.Store) {
			a = tenure.Static()
			return struct{ tenure.Store }{a}, struct{ tenure.Store }{a}
		},
	}
}

func TestCoordinatorsWithoutALeaseTakeTurns(t *testing.T) {
	for name, open := range alone(t) {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				storeA, storeB := open(t.T)
				t.store = storeA
				a := t.start("a")
				t.store = storeB
				b := t.start("b")
				time.Sleep(time.Hour)
				t.wantHolder(a)
				require.Equal(t, "a", t.jobs.Holder())
				got := b.Status()
				require.Equal(t, "a", got.Holder)
				require.Equal(t, tenure.RoleStandby, got.Role)
				require.False(t, got.Stale)
				token := a.Status().Token
				a.stop()
				synctest.Wait()
				time.Sleep(5 * time.Millisecond)
				t.wantHolder(b)
				require.Equal(t, "b", t.jobs.Holder())
				require.Greater(t, b.Status().Token, token)
			})
		})
	}
}

func TestAJobThatFailsWithoutALeaseLeavesTheTurnToAnother(t *testing.T) {
	inBubble(t, func(t *scene) {
		t.store = tenure.Static()
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			time.Sleep(time.Minute)
			return errors.New("fails")
		}})
		b := t.start("b")
		time.Sleep(time.Minute + 5*time.Millisecond)
		t.wantHolder(b)
		b.stop()
		time.Sleep(10 * time.Second)
		t.wantHolder(a)
	})
}

func TestCoordinatorsWithoutALeaseTakeTurnsInRealTime(t *testing.T) {
	for name, open := range alone(t) {
		t.Run(name, func(t *testing.T) {
			stores := [2]tenure.Store{}
			stores[0], stores[1] = open(t)
			var log bytes.Buffer
			logger := slog.New(slog.NewTextHandler(&log, nil)) // which locks the buffer
			var jobs atomic.Int32
			began := make(chan int)
			stops := [2]func(){}
			for i, store := range stores {
				lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: fmt.Sprint(i), Logger: logger})
				c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
					if jobs.Add(1) != 1 {
						t.Error("two jobs at once")
					}
					began <- i
					<-ctx.Done()
					jobs.Add(-1)
					return nil
				}})
				require.NoError(t, err)
				stops[i] = testkit.RunCoordinator(t, t.Context(), c)
			}
			first := <-began
			select {
			case <-began:
				t.Fatal("a second job has begun")
			case <-time.After(100 * time.Millisecond):
			}
			stopped := time.Now()
			go stops[first]()
			require.Equal(t, 1-first, <-began)
			t.Logf("taken over %v after the stop", time.Since(stopped))
			stops[0]()
			stops[1]()
			require.Equal(t, 2, strings.Count(log.String(), "runs without a lease"), "%s", log.String())
			require.NotRegexp(t, "lease (acquired|released)", log.String())
		})
	}
}

func TestAStaticStoreHasNoObjectsAndTakesNone(t *testing.T) {
	_, err := testkit.NewLease(t, tenure.Static(), tenure.LeaseConfig{}).Read(t.Context())
	require.ErrorIs(t, err, tenure.ErrNotFound)
	_, err = tenure.Static().PutIf(t.Context(), tenure.Object{Key: testkit.LeaseKey}, tenure.IfAbsent())
	require.ErrorIs(t, err, errors.ErrUnsupported)
}

func TestAReplicaWithoutAJobOnlyHolds(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a := t.begin(tenure.LeaseConfig{Holder: "a"}, tenure.CoordinatorConfig{})
		synctest.Wait()
		b := t.begin(tenure.LeaseConfig{Holder: "b"}, tenure.CoordinatorConfig{})
		time.Sleep(time.Hour)
		t.wantHolder(a)
		require.Equal(t, 1, a.Status().Terms)
		require.NoError(t, a.Resign(t.Context()))
		t.settle()
		t.wantHolder(b)
		b.store.SetHook(testkit.Refuse)
		time.Sleep(20*time.Second + time.Second)
		require.False(t, b.IsHolder(), "b holds past its RenewDeadline")
	})
}

func TestACoordinatorRunsOnceAtATime(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a := t.start("a")
		require.ErrorIs(t, a.Run(t.Context()), tenure.ErrInvalid)
		a.stop()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.NoError(t, a.Run(ctx))
	})
}

func TestAStoreThatNeedsAPersonIsAskedRarely(t *testing.T) {
	inBubbles(t, func(t *scene) {
		var asked testkit.Calls
		store := storetest.Faulty(t.store, asked.Count("", func(context.Context, storetest.Call, func(context.Context) error) error {
			return fmt.Errorf("password authentication failed: %w", tenure.ErrSetup)
		}))
		t.store = store
		a := t.start("a")
		time.Sleep(10 * time.Minute)
		require.InDelta(t, 25, asked.Take()["put"], 5, "once in 30 s")
		require.Contains(t, a.Status().LastError, "password")
		store.SetHook(nil)
		time.Sleep(30 * time.Second)
		t.wantHolder(a)
	})
}

func TestManyReplicasUnderFaultsNeverOverlap(t *testing.T) {
	testkit.Slow(t)
	inBubbles(t, func(t *scene) {
		for i := range 5 {
			t.start(fmt.Sprint("r", i))
		}
		faults := []storetest.Hook{testkit.Hang, testkit.Refuse, nil, nil, testkit.AnswerAfter(3 * time.Second)}
		held := 0
		for i := range 400 {
			t.replicas[i*7%5].store.SetHook(faults[i*3%len(faults)])
			time.Sleep(time.Duration(i%41) * time.Second)
			if t.jobs.Holder() != "" {
				held++
			}
		}
		require.Greater(t, held, 200, "samples of 400 in which a job ran")
	})
}

func TestACoordinatorNamesEveryContradictionInItsConfig(t *testing.T) {
	job := func(context.Context) error { return nil }
	_, err := tenure.NewCoordinator(nil, tenure.CoordinatorConfig{Watch: job})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	for name, test := range map[string]struct {
		ttl  time.Duration
		cfg  tenure.CoordinatorConfig
		says []string
	}{
		"defaults":              {0, tenure.CoordinatorConfig{Watch: job}, nil},
		"no job":                {0, tenure.CoordinatorConfig{}, nil},
		"renewal after TTL":     {time.Second, tenure.CoordinatorConfig{Watch: job, RenewInterval: time.Second}, []string{"RenewInterval 1s"}},
		"deadline beyond TTL":   {time.Second, tenure.CoordinatorConfig{Watch: job, RenewDeadline: time.Second}, []string{"RenewDeadline 1s"}},
		"no time for a renewal": {0, tenure.CoordinatorConfig{Watch: job, RenewInterval: 20*time.Second - time.Millisecond}, []string{"RenewDeadline 20s", "RenewInterval 19.999s"}},
		"no time to return":     {0, tenure.CoordinatorConfig{Watch: job, RenewDeadline: 29*time.Second - time.Millisecond}, []string{"RenewDeadline 28.999s", "no time to return"}},
		"deadline before next":  {0, tenure.CoordinatorConfig{Watch: job, RenewDeadline: 9 * time.Second}, []string{"RenewDeadline 9s", "RenewInterval 10s"}},
		"everything": {time.Second, tenure.CoordinatorConfig{RenewInterval: -1, AcquireInterval: -1, RenewDeadline: time.Hour},
			[]string{"RenewInterval -1ns", "AcquireInterval -1ns", "RenewDeadline 1h"}},
	} {
		lease := testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{TTL: test.ttl})
		_, err := tenure.NewCoordinator(lease, test.cfg)
		if test.says == nil {
			require.NoError(t, err, name)
			continue
		}
		require.ErrorIs(t, err, tenure.ErrInvalid, name)
		for _, says := range test.says {
			require.ErrorContains(t, err, says, name)
		}
	}
}

func TestAReplicaThatStandsDownDoesNotCompeteUntilItIsAskedTo(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		require.NoError(t, a.StandDown(t.Context()))
		t.settle()
		t.wantHolder(b)
		b.stop()
		time.Sleep(10 * time.Hour)
		t.wantHolder(nil)
		status := a.Status()
		require.True(t, status.StandsDown)
		require.Equal(t, 1, status.Terms, "it has not taken the lease in between either")
		require.Equal(t, tenure.RoleStandby, status.Role)
		require.Empty(t, status.Holder, "it still sees who holds the lease")
		a.Compete()
		t.settle()
		t.wantHolder(a)
		require.False(t, a.Status().StandsDown)
		require.NoError(t, a.StandDown(t.Context()))
		a.stop()
		require.Empty(t, t.jobs.Holder())
	})
}

func TestAStandbyAndAReplicaThatDoesNotRunCanStandDown(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		require.NoError(t, b.StandDown(t.Context()))
		require.NoError(t, b.StandDown(t.Context()))
		a.stop()
		time.Sleep(time.Hour)
		t.wantHolder(nil)

		c, err := tenure.NewCoordinator(b.lease, tenure.CoordinatorConfig{})
		require.NoError(t, err)
		require.NoError(t, c.StandDown(t.Context()))
		testkit.RunCoordinator(t.T, t.run, c)
		time.Sleep(time.Hour)
		require.False(t, c.IsHolder())
		c.Compete()
		t.settle()
		require.True(t, c.IsHolder())
		require.NoError(t, c.StandDown(t.Context()))
		require.False(t, c.IsHolder())
	})
}

func TestAHandoverByNameAsksAReplicaThatStandsDown(t *testing.T) {
	inBubble(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		require.NoError(t, b.StandDown(t.Context()))
		time.Sleep(time.Hour)
		t.request(a, b)
		synctest.Wait()
		t.wantHolder(b)
		require.False(t, b.Status().StandsDown)
	})
}

// No other replica took the lease that was once offered to it.
func TestAnOldOfferAsksNoReplicaThatStandsDown(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		b := t.begin(tenure.LeaseConfig{Holder: "b"}, tenure.CoordinatorConfig{})
		b.stop()
		t.request(a, b)
		synctest.Wait()
		a.stop()
		time.Sleep(24 * time.Hour)
		c, err := tenure.NewCoordinator(b.lease, tenure.CoordinatorConfig{})
		require.NoError(t, err)
		require.NoError(t, c.StandDown(t.Context()))
		testkit.RunCoordinator(t.T, t.run, c)
		time.Sleep(time.Hour)
		require.False(t, c.IsHolder())
		require.True(t, c.Status().StandsDown)
	})
}

// A replica that is told to stand down while its predecessor is fenced begins no job either.
func TestNoJobBeginsAfterAReplicaWasToldToStandDownWhileItFenced(t *testing.T) {
	for range 40 {
		inBubble(t, func(t *scene) {
			var b *replica
			begun := make(chan struct{})
			a := t.start("a")
			a.store.SetHook(testkit.Refuse)
			b = t.begin(tenure.LeaseConfig{Holder: "b"}, tenure.CoordinatorConfig{
				FencePredecessor: func(context.Context, tenure.Holding) error {
					<-begun
					go b.StandDown(context.Background())
					for !b.Status().StandsDown {
						runtime.Gosched()
					}
					return nil
				},
				Reconcile: func(context.Context) error { t.Error("the job begins"); return nil },
			})
			close(begun)
			time.Sleep(5 * time.Minute)
			require.Equal(t, 1, b.Status().Terms)
			require.False(t, b.IsHolder())
		})
	}
}

// The attempt is under way when the replica stands down.
func TestNoJobBeginsAfterAReplicaWasToldToStandDown(t *testing.T) {
	inBubble(t, func(t *scene) {
		server := t.store
		t.store = storetest.Faulty(server, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "put" {
				time.Sleep(time.Second)
			}
			return err
		})
		a := t.begin(tenure.LeaseConfig{Holder: "a"}, tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { t.Error("the job begins"); return nil },
		})
		t.store = server
		time.Sleep(time.Second / 2)
		require.NoError(t, a.StandDown(t.Context()))
		time.Sleep(time.Minute)
		t.wantHolder(nil)
		b := t.start("b")
		t.wantHolder(b)
	})
}

// It may be told to do so between the answer to its attempt and the start of its term.
func TestATermOfAReplicaThatStandsDownEndsBeforeItsJobBegins(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		lease := a.lease
		a.stop()
		term, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { t.Error("the job begins"); return nil },
		})
		require.NoError(t, err)
		require.NoError(t, c.StandDown(t.Context()))
		require.ErrorIs(t, c.Hold(t.Context(), term), tenure.ErrResigned)
		require.False(t, term.Valid())
	})
}

func TestStandingDownIsInTheStatusAsJSON(t *testing.T) {
	data, err := json.Marshal(tenure.Status{StandsDown: true})
	require.NoError(t, err)
	require.Contains(t, string(data), `"stands_down":true`)
	data, err = json.Marshal(tenure.Status{})
	require.NoError(t, err)
	require.NotContains(t, string(data), "stands_down")
}

func TestEachRenewalIsLoggedAtDebug(t *testing.T) {
	inBubble(t, func(t *scene) {
		var log bytes.Buffer
		a := t.start("a", tenure.CoordinatorConfig{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
		time.Sleep(time.Hour)
		a.stop()
		lines := 0
		for line := range strings.Lines(log.String()) {
			if strings.Contains(line, `msg="lease renewed"`) {
				require.Contains(t, line, "level=DEBUG")
				require.Contains(t, line, " replica=a holder=a token=")
				lines++
			}
		}
		require.GreaterOrEqual(t, lines, 350) // every 10 s
	})
}

// No code of the user's runs between a renewal and its deadline.
func TestALogThatBlocksDelaysNoRenewal(t *testing.T) {
	inBubble(t, func(t *scene) {
		blocks := make(chan struct{})
		a := t.start("a", tenure.CoordinatorConfig{Logger: slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
			if bytes.Contains(p, []byte("lease renewed")) {
				<-blocks
			}
			return len(p), nil
		}), &slog.HandlerOptions{Level: slog.LevelDebug}))})
		time.Sleep(10 * time.Hour)
		t.wantHolder(a)
		require.Equal(t, 1, a.Status().Terms)
		close(blocks)
	})
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// traceOf returns a trace whose funcs all call do.
func traceOf(do func(what string)) *tenure.Trace {
	return &tenure.Trace{
		Attempt:       func(time.Duration, error) { do("attempt") },
		Acquired:      func(*tenure.Term, *tenure.Holding) { do("acquired") },
		Renewed:       func(*tenure.Term, time.Duration, time.Duration) { do("renewed") },
		RenewalFailed: func(*tenure.Term, error, time.Duration) { do("renewal failed") },
		Lost:          func(*tenure.Term, error) { do("lost") },
		Released:      func(*tenure.Term, error) { do("released") },
		JobStarted:    func(*tenure.Term) { do("job started") },
		JobEnded:      func(*tenure.Term, error, time.Duration) { do("job ended") },
		JobStuck:      func(*tenure.Term, time.Duration) { do("job stuck") },
		JobRun:        func(tenure.JobRun) { do("run") },
	}
}

// callbackLog is a handler that calls a func for each record.
type callbackLog func(slog.Record)

func (callbackLog) Enabled(context.Context, slog.Level) bool        { return true }
func (h callbackLog) WithAttrs([]slog.Attr) slog.Handler            { return h }
func (h callbackLog) WithGroup(string) slog.Handler                 { return h }
func (h callbackLog) Handle(_ context.Context, r slog.Record) error { h(r); return nil }

// blocked is a config of a replica whose log and trace block from the first line on, like a
// pipe without a reader, until the test ends.
func (t *scene) blocked() tenure.CoordinatorConfig {
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	return tenure.CoordinatorConfig{
		Logger: slog.New(testkit.BlockedLog(release)),
		Trace:  traceOf(func(string) { <-release }),
	}
}

func TestALogAndATraceThatBlockDelayNeitherTheEndOfAJobNorTheNextTerm(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a", t.blocked()), t.start("b", t.blocked())
		time.Sleep(time.Minute + time.Second)
		t.wantHolder(a)
		a.store.SetHook(testkit.Hang)
		time.Sleep(19*time.Second + time.Millisecond) // the renew deadline
		synctest.Wait()
		require.Equal(t, tenure.RoleStopping, a.Status().Role)
		time.Sleep(16 * time.Second) // the rest of the TTL, and one AcquireInterval
		synctest.Wait()
		t.wantHolder(b) // the ledger would fail the test if jobs overlapped
		a.store.SetHook(nil)
		b.stop()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		t.wantHolder(a)
	})
}

func TestALogAndATraceThatBlockDelayNoRenewalAndNoRunOfTheJob(t *testing.T) {
	inBubbles(t, func(t *scene) {
		cfg := t.blocked()
		cfg.Reconcile = tenure.Every(time.Minute, func(context.Context) error { return errors.New("refused") })
		a := t.start("a", cfg)
		for range 100 {
			time.Sleep(time.Minute)
			require.True(t, a.IsHolder())
		}
		synctest.Wait()
		require.Equal(t, 101, a.only(t).Failed)
	})
}

func TestACheckWhoseErrorBlocksDelaysNoEndOfAJob(t *testing.T) {
	for name, texts := range map[string]int{"at once": 0, "when it is asked for again": 1} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				release := make(chan struct{})
				defer close(release)
				var sick atomic.Bool
				a := t.start("a", tenure.CoordinatorConfig{Check: func(context.Context, tenure.Role) error {
					if !sick.Load() {
						return nil
					}
					err := &blockingError{release: release}
					err.texts.Store(int64(texts))
					return err
				}})
				b := t.start("b", tenure.CoordinatorConfig{})
				sick.Store(true)
				time.Sleep(16 * time.Second) // less than the renew deadline
				synctest.Wait()
				require.Equal(t, tenure.RoleStandby, a.Status().Role)
				t.wantHolder(b)
			})
		})
	}
}

// blockingError is an error whose text can be read a number of times; after that, reading it
// blocks.
type blockingError struct {
	texts   atomic.Int64
	release chan struct{}
}

func (e *blockingError) Error() string {
	if e.texts.Add(-1) < 0 {
		<-e.release
	}
	return "at last"
}

func TestAPanicOfTheLogOrTheTraceEndsTheTermInOrder(t *testing.T) {
	run := func(t *testing.T, what string, panics tenure.CoordinatorConfig) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			store := storetest.Faulty(storetest.NewMem(), nil)
			panics.Reconcile = tenure.Every(5*time.Second, func(ctx context.Context) error {
				select {
				case <-ctx.Done():
					time.Sleep(8 * time.Second) // which Run waits for
				case <-time.After(time.Second):
				}
				return nil
			})
			if what == "renewal failed" || what == "lost" {
				time.AfterFunc(15*time.Second, func() { store.SetHook(testkit.Only("put", testkit.Refuse)) })
			}
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
			c, err := tenure.NewCoordinator(lease, panics)
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
			defer cancel()
			func() {
				defer func() {
					var p *report.Panic
					require.ErrorAs(t, recover().(error), &p)
					require.Equal(t, "broken", p.Value)
					require.Contains(t, p.Error(), "the logger or the trace panicked: broken")
				}()
				_ = c.Run(ctx)
			}()
			if !slices.Contains([]string{"released", "job ended"}, what) {
				require.NoError(t, ctx.Err(), "the panic was what ended Run")
			}
			require.False(t, c.IsHolder())
			store.SetHook(nil)
			_, err = lease.Read(t.Context())
			testkit.WantErr(t, err, tenure.ErrNotFound) // it is released
			calls := 0
			store.SetHook(func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
				calls++
				return do(ctx)
			})
			time.Sleep(10 * time.Minute)
			require.Zero(t, calls, "nothing renews")
			store.SetHook(nil)
			ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			panics.Trace, panics.Logger = nil, testkit.Quiet
			c, err = tenure.NewCoordinator(lease, panics)
			require.NoError(t, err)
			require.NoError(t, c.Run(ctx))
		})
	}
	for _, what := range []string{"attempt", "acquired", "renewed", "renewal failed", "lost", "released", "job started", "job ended", "run"} {
		t.Run("trace "+what, func(t *testing.T) {
			run(t, what, tenure.CoordinatorConfig{Trace: traceOf(func(now string) {
				if now == what {
					panic("broken")
				}
			})})
		})
	}
	for _, line := range []string{"lease acquired", "lease renewed", "lease released"} {
		t.Run("log "+line, func(t *testing.T) {
			run(t, strings.TrimPrefix(line, "lease "), tenure.CoordinatorConfig{Logger: slog.New(callbackLog(func(r slog.Record) {
				if r.Message == line {
					panic("broken")
				}
			}))})
		})
	}
}

func TestATraceThatEndsItsGoroutineEndsNoTerm(t *testing.T) {
	inBubble(t, func(t *scene) {
		var told atomic.Int64
		a := t.start("a", tenure.CoordinatorConfig{Trace: traceOf(func(string) { told.Add(1); runtime.Goexit() })})
		time.Sleep(time.Hour)
		t.wantHolder(a)
		require.Greater(t, told.Load(), int64(1))
	})
}

func TestAPanicOfTheJobIsPassedOnAlthoughTheTracePanicsToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lease := testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"})
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { panic("the job") },
			Trace:     &tenure.Trace{JobEnded: func(*tenure.Term, error, time.Duration) { panic("the trace") }},
		})
		require.NoError(t, err)
		defer func() { require.Equal(t, "the job", recover().(*report.Panic).Value) }()
		_ = c.Run(t.Context())
	})
}
