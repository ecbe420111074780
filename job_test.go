package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func TestEverySweepsAtOnceAndThenAnIntervalAfterEachEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var at []time.Duration
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
		defer cancel()
		require.NoError(t, tenure.Every(10*time.Second, func(context.Context) error {
			at = append(at, time.Since(began))
			time.Sleep(20 * time.Second)
			return errors.New("this one failed")
		})(ctx))
		require.Equal(t, []time.Duration{0, 30 * time.Second, 60 * time.Second, 90 * time.Second}, at)
	})
}

func TestASweepThatFailsAsBeforeIsLoggedEveryTenMinutes(t *testing.T) {
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		var failure atomic.Pointer[error]
		fails := func(err error) { failure.Store(&err) }
		fails(errors.New("no table: port 4711"))
		t.start("a", tenure.CoordinatorConfig{Logger: log, Reconcile: tenure.Every(time.Minute, func(context.Context) error {
			return *failure.Load()
		})})
		during := func(d time.Duration) (swept []string) {
			time.Sleep(d)
			for line := range strings.Lines(lines()) {
				if strings.Contains(line, `msg="sweep `) {
					swept = append(swept, line)
				}
			}
			return swept
		}
		require.Len(t, during(time.Second), 1)
		fails(errors.New("no table: port 4712"))
		require.Empty(t, during(9*time.Minute), "the same error but for a number")
		again := during(time.Minute)
		require.Len(t, again, 1, "ten minutes later")
		require.Contains(t, again[0], `msg="sweep failed"`)
		require.Contains(t, again[0], "port 4712")
		require.Contains(t, again[0], "failures=11")
		fails(errors.New("no index"))
		other := during(time.Minute)
		require.Len(t, other, 1, "another error")
		require.Contains(t, other[0], `error="no index"`)
		fails(nil)
		better := during(3 * time.Minute)
		require.Len(t, better, 1, "one line for the end of it")
		require.Contains(t, better[0], `level=INFO msg="sweep succeeds again"`)
		require.Contains(t, better[0], "failures=12 after=12m0s")
		fails(errors.New("no index"))
		require.Len(t, during(time.Minute), 1, "the same error after a success")
	})
}

func TestEveryPanicsAtAProgrammersMistake(t *testing.T) {
	require.Panics(t, func() { tenure.Every(0, testkit.Succeeds) })
	require.Panics(t, func() { tenure.Every(-time.Second, testkit.Succeeds) })
	require.Panics(t, func() { tenure.Every(time.Second, nil) })
}

func TestDoRunsOnceUnderATermAndReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		other := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"})
		held := testkit.MustAcquire(t, other)
		time.AfterFunc(10*time.Second, func() { _ = other.Release(context.Background(), held) })
		began, failed, calls := time.Now(), errors.New("this went wrong"), 0
		var waited time.Duration
		var ended error
		err := tenure.Do(t.Context(), testkit.NewLease(t, store, tenure.LeaseConfig{}), func(ctx context.Context) error {
			calls++
			waited = time.Since(began)
			time.Sleep(time.Minute) // it is renewed meanwhile
			ended = ctx.Err()
			if !tenure.TermFromContext(ctx).Valid() {
				ended = errors.New("the term is over")
			}
			return failed
		})
		require.Equal(t, failed, err)
		require.Equal(t, 1, calls)
		require.Equal(t, 10*time.Second, waited.Truncate(time.Second))
		require.NoError(t, ended)
		testkit.MustAcquire(t, other) // it is free
	})
}

func TestDoSaysThatTheLeaseWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, calls := storetest.NewMem(), 0
		var removed error
		err := tenure.Do(t.Context(), testkit.NewLease(t, store, tenure.LeaseConfig{}), func(ctx context.Context) error {
			calls++
			removed = store.DeleteIf(ctx, testkit.LeaseKey, tenure.IfVersion(tenure.TermFromContext(ctx).Token()))
			<-ctx.Done()
			return nil
		})
		require.NoError(t, removed)
		require.ErrorIs(t, err, tenure.ErrLost)
		require.Equal(t, 1, calls)
	})
}

func TestDoEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		lease, other := testkit.NewLease(t, store, tenure.LeaseConfig{}), testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"})
		enough := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		var meanwhile error
		err := tenure.Do(ctx, lease, func(ctx context.Context) error {
			time.AfterFunc(time.Second, func() { cancel(enough) })
			<-ctx.Done()
			_, meanwhile = other.TryAcquire(context.Background())
			return nil
		})
		require.NoError(t, err)
		require.ErrorIs(t, meanwhile, tenure.ErrHeld, "it is kept until the work has returned")
		require.ErrorIs(t, tenure.Do(ctx, lease, func(context.Context) error { t.Error("called"); return nil }), enough)
	})
}

func TestDoPassesAPanicOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		require.Panics(t, func() {
			_ = tenure.Do(t.Context(), testkit.NewLease(t, store, tenure.LeaseConfig{}), func(context.Context) error { panic("oops") })
		})
		testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"}))
		require.ErrorIs(t, tenure.Do(t.Context(), testkit.NewLease(t, store, tenure.LeaseConfig{}), nil), tenure.ErrInvalid)
		require.ErrorIs(t, tenure.Do(t.Context(), nil, testkit.Succeeds), tenure.ErrInvalid)
	})
}

func TestDoCallsAFuncThatEndsByGoexitOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, calls := storetest.NewMem(), 0
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		err := tenure.Do(ctx, testkit.NewLease(t, store, tenure.LeaseConfig{}), func(context.Context) error {
			calls++
			runtime.Goexit() // as t.FailNow does
			return nil
		})
		require.ErrorContains(t, err, "tenure: do: runtime.Goexit was called")
		require.Equal(t, 1, calls)
		require.NoError(t, ctx.Err(), "Do returns at once")
		testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"})) // it is free
	})
}

func TestHoldRunsTheJobForATermThatWasAcquiredBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		var of *tenure.Term
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			of = tenure.TermFromContext(ctx)
			<-ctx.Done()
			return nil
		}})
		require.NoError(t, err)

		term := testkit.MustAcquire(t, lease)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.NoError(t, c.Hold(ctx, term), "it is renewed for an hour")
		require.Same(t, term, of)
		require.ErrorIs(t, c.Hold(t.Context(), nil), tenure.ErrInvalid)

		lost := testkit.MustAcquire(t, lease) // it is free
		time.AfterFunc(time.Minute, func() { testkit.RemoveRecord(t, store) })
		began := time.Now()
		require.ErrorIs(t, c.Hold(t.Context(), lost), tenure.ErrLost)
		require.Less(t, time.Since(began), 2*time.Minute)
		_, err = lease.Read(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound, "it has not competed again")
		require.ErrorIs(t, c.Hold(t.Context(), lost), tenure.ErrLost, "a term that is over")
	})
}

func TestATermThatWasNotRenewedInTimeBeginsNoJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lease := testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{})
		began := 0
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			began++
			<-ctx.Done()
			return nil
		}})
		require.NoError(t, err)
		for _, age := range []time.Duration{tenure.DefaultTTL, c.Config().RenewDeadline} { // trust is left, but less than the job may take to stop
			term := testkit.MustAcquire(t, lease)
			time.Sleep(age)
			require.ErrorIs(t, c.Hold(t.Context(), term), tenure.ErrDeadline)
			require.Zero(t, began, "after %v", age)
		}
	})
}

// only returns the runs of a replica, all of which have one name.
func (r *replica) only(t testing.TB) tenure.RunStats {
	t.Helper()
	runs := r.Status().Runs
	require.Len(t, runs, 1)
	return runs[0]
}

func TestTheStatusTellsHowTheSweepsOfEveryEnd(t *testing.T) {
	inBubble(t, func(t *scene) {
		began := time.Now()
		var ok atomic.Bool
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: tenure.Every(9*time.Second, func(context.Context) error {
			time.Sleep(time.Second)
			if !ok.Load() {
				return errors.New("no such table")
			}
			return nil
		})})
		require.Equal(t, tenure.RunStats{Name: "reconcile", Running: 1, Started: 1, RunningSince: began, LastStart: began}, a.only(t))
		time.Sleep(25 * time.Second)
		got := a.only(t)
		require.True(t, testkit.IsFailing(got))
		require.Equal(t, tenure.RunStats{Name: "reconcile", Started: 3, Failed: 3, LastError: "no such table",
			LastStart: began.Add(20 * time.Second), LastFailure: began.Add(21 * time.Second)}, got)
		ok.Store(true)
		time.Sleep(10 * time.Second)
		got = a.only(t)
		require.False(t, testkit.IsFailing(got))
		require.Equal(t, tenure.RunStats{Name: "reconcile", Started: 4, Failed: 3, Succeeded: 1, LastError: "no such table",
			LastStart: began.Add(30 * time.Second), LastFailure: began.Add(21 * time.Second), LastSuccess: began.Add(31 * time.Second)}, got)
	})
}

func TestATraceIsToldOfEachRunWhenItBeginsAndEnds(t *testing.T) {
	inBubble(t, func(t *scene) {
		began := time.Now()
		var a *replica
		var told script
		reason := errors.New("refused")
		cfg := tenure.CoordinatorConfig{
			Trace: &tenure.Trace{JobRun: func(run tenure.JobRun) {
				synctest.Wait() // until start has returned
				s := a.Status() // a lock would be in the way
				told.say(fmt.Sprintf("%s %s from %v for %v: %v, %d running", run.Name, run.Outcome, run.Began.Sub(began), max(0, run.Ended.Sub(run.Began)), run.Err, s.Runs[0].Running))
			}},
			Watch: func(ctx context.Context) error {
				time.Sleep(time.Second)
				first := tenure.RecordRun(ctx, "import", func(context.Context) error { time.Sleep(time.Second); return nil })
				time.Sleep(time.Second) // while the trace looks at the status
				return errors.Join(first,
					tenure.RecordRun(ctx, "import", func(context.Context) error { time.Sleep(time.Second); return reason }))
			},
		}
		a = t.begin(tenure.LeaseConfig{Holder: "a"}, cfg)
		time.Sleep(5 * time.Second)
		require.Equal(t, []string{
			"import began from 1s for 0s: <nil>, 1 running", "import succeeded from 1s for 1s: <nil>, 0 running",
			"import began from 3s for 0s: <nil>, 1 running", "import failed from 3s for 1s: refused, 0 running",
			"watch failed from 0s for 4s: refused, 0 running",
		}, told.said())
	})
}

func TestAFuncOfTheJobThatReturnsAnErrorIsAFailedRun(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", tenure.CoordinatorConfig{Watch: func(context.Context) error {
			time.Sleep(time.Minute)
			return errors.New("stream closed")
		}, Reconcile: testkit.UntilDone}) // which is told to return, and then returns an error
		began := time.Now()
		require.Empty(t, a.Status().Runs)
		time.Sleep(61 * time.Second)
		require.Equal(t, tenure.RunStats{Name: "watch", Failed: 1, LastFailure: began.Add(time.Minute), LastError: "stream closed"}, a.only(t))
	})
}

func TestARunThatTheEndOfItsTermInterruptsHasNotFailed(t *testing.T) {
	for name, end := range map[string]func(t *scene, ctx context.Context) error{
		"told to return": func(_ *scene, ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"fenced out": func(t *scene, ctx context.Context) error {
			putRecord(t, t.store, robbersRecord)
			fenced, err := tenure.Fence(t.store, tenure.TermFromContext(ctx))
			require.NoError(t, err)
			_, err = fenced.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.IfAbsent())
			require.ErrorIs(t, err, tenure.ErrLost)
			return err
		},
	} {
		inBubble(t, func(t *scene) {
			a := t.start("a", tenure.CoordinatorConfig{Reconcile: tenure.Every(time.Hour, func(ctx context.Context) error { return end(t, ctx) })})
			a.stop()
			got := a.only(t)
			require.Equal(t, tenure.RunStats{Name: "reconcile", Started: 1, LastStart: got.LastStart}, got, name)
		})
	}
}

func TestTheStatusTellsSinceWhenTheOldestRunIsRunning(t *testing.T) {
	inBubble(t, func(t *scene) {
		began := time.Now()
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			for i := range 3 { // the first runs for 3 s, the others for 1 s and for 10 s
				go tenure.RecordRun(ctx, "import", lasting([]time.Duration{3 * time.Second, time.Second, 10 * time.Second}[i]))
				time.Sleep(time.Second)
			}
			<-ctx.Done()
			return nil
		}})
		for i, want := range []struct {
			running int
			since   time.Duration
		}{{1, 0}, {2, 0}, {2, 0}, {1, 2 * time.Second}} {
			time.Sleep(time.Duration(min(i, 1))*time.Second + time.Millisecond)
			got := a.only(t)
			require.Equal(t, want.running, got.Running, i)
			require.Equal(t, began.Add(want.since), got.RunningSince, i)
		}
		time.Sleep(20 * time.Second)
		require.Zero(t, a.only(t).RunningSince)
	})
}

// The race detector watches.
func TestARenewalTellsOfRunsWhileTheyBeginAndEnd(t *testing.T) {
	store := storetest.NewMem()
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: 20 * time.Millisecond})
	var renewed atomic.Int32
	trace := &tenure.Trace{Renewed: func(*tenure.Term, time.Duration, time.Duration) { renewed.Add(1) }}
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{RenewInterval: time.Millisecond, Trace: trace, Reconcile: func(ctx context.Context) error {
		var runs sync.WaitGroup
		for ctx.Err() == nil {
			runs.Go(func() { _ = tenure.RecordRun(ctx, "import", lasting(30*time.Millisecond)) })
			time.Sleep(100 * time.Microsecond)
		}
		runs.Wait()
		return nil
	}})
	require.NoError(t, err)
	stop := testkit.RunCoordinator(t, t.Context(), c)
	testkit.Await(t, "the record tells of a run", func() bool {
		holding, err := lease.Read(t.Context())
		return err == nil && !holding.RunningSince.IsZero() && renewed.Load() > 1000
	})
	stop()
}

// lasting returns a run that takes its time, even if its context ends.
func lasting(d time.Duration) func(context.Context) error {
	return func(context.Context) error { time.Sleep(d); return nil }
}

// The lease is renewed and the term is valid, so nothing else shows that the job hangs.
func TestAJobThatHangsIsSeen(t *testing.T) {
	inBubble(t, func(t *scene) {
		began, hangs := time.Now(), make(chan struct{})
		log, lines := textLog()
		a := t.start("a", tenure.CoordinatorConfig{Logger: log, Reconcile: tenure.Every(15*time.Second, func(ctx context.Context) error {
			<-hangs
			return nil
		})})
		b := t.start("b")
		seen := func() tenure.Holding {
			holding, err := b.lease.Read(t.Context())
			require.NoError(t, err)
			return holding
		}
		warnings := func() int { return strings.Count(lines(), `level=WARN msg="sweep has not returned"`) }
		time.Sleep(25 * time.Second)
		require.Zero(t, seen().RunningSince, "the record tells of runs that have lasted for a TTL")
		var statuses atomic.Int32
		go func() {
			for range a.Changes(t.Context()) {
				statuses.Add(1)
			}
		}()
		time.Sleep(34 * time.Second)
		require.True(t, began.Truncate(time.Millisecond).Equal(seen().RunningSince))
		require.False(t, a.only(t).Overdue)
		require.Zero(t, warnings())
		require.EqualValues(t, 1, statuses.Load())
		time.Sleep(2 * time.Second)
		require.True(t, a.only(t).Overdue)
		require.EqualValues(t, 2, statuses.Load())
		require.Equal(t, began, a.only(t).RunningSince)
		require.Equal(t, 1, warnings(), "after a minute")
		time.Sleep(30 * time.Minute)
		require.Equal(t, 3, warnings(), "every ten minutes")
		require.Equal(t, tenure.RoleHolder, a.Status().Role)
		require.Equal(t, 1, a.Status().Terms)

		close(hangs)
		time.Sleep(15 * time.Second)
		require.Zero(t, seen().RunningSince)
		require.False(t, a.only(t).Overdue)
		time.Sleep(time.Hour)
		require.Zero(t, warnings())
	})
}

func TestASweepThatIsNoLongerOverdueIsNotShownAsOverdue(t *testing.T) {
	inBubble(t, func(t *scene) {
		hangs := make(chan struct{})
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			go tenure.Every(time.Second, func(context.Context) error { <-hangs; return nil })(ctx)
			return tenure.Every(time.Millisecond, func(context.Context) error { time.Sleep(50 * time.Second); return nil })(ctx)
		}})
		time.Sleep(2 * time.Minute)
		require.True(t, a.only(t).Overdue)
		close(hangs)
		time.Sleep(time.Second)
		require.Equal(t, 1, a.only(t).Running)
		require.False(t, a.only(t).Overdue)
	})
}

func TestASweepThatIsGoneIsNotLogged(t *testing.T) {
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		sweeps := 0
		a := t.start("a", tenure.CoordinatorConfig{Logger: log, Reconcile: tenure.Every(time.Second, func(ctx context.Context) error {
			if sweeps++; sweeps == 1 {
				runtime.Goexit()
			}
			<-ctx.Done()
			return nil
		})})
		time.Sleep(65 * time.Second) // the second term begins 10 s after the first has ended
		require.True(t, a.IsHolder(), "%+v", a.Status())
		require.NotContains(t, lines(), "sweep has not returned")
	})
}

// A resource that has seen a token of another lease refuses every write of a valid term.
func TestARunThatReturnsErrLostWhileItsTermStandsHasFailed(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: tenure.Every(time.Hour, func(context.Context) error {
			return fmt.Errorf("%w: the resource has seen a greater token", tenure.ErrLost)
		})})
		require.True(t, testkit.IsFailing(a.only(t)))
		require.Equal(t, 1, a.only(t).Failed)
	})
}

// reentrant is an error whose Error method calls the coordinator, as one that takes the
// program's locks might.
type reentrant struct{ ask func() }

func (e reentrant) Error() string { e.ask(); return "asked" }

func TestTheTextOfAnErrorIsMadeWithoutALock(t *testing.T) {
	inBubble(t, func(t *scene) {
		var a *replica
		err := reentrant{func() { synctest.Wait(); a.Status() }}
		a = t.begin(tenure.LeaseConfig{Holder: "a"}, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			time.Sleep(time.Second)
			_ = tenure.RecordRun(ctx, "import", func(context.Context) error { return err })
			return err
		}})
		time.Sleep(2 * time.Second)
		require.Equal(t, "asked", a.Status().Runs[0].LastError)
	})
}

func TestARunThatTakesLongerThanItsOwnTimeoutHasFailed(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			brief, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			require.ErrorIs(t, tenure.RecordRun(brief, "import", testkit.UntilDone), context.DeadlineExceeded)
			<-ctx.Done()
			return nil
		}})
		time.Sleep(2 * time.Second)
		require.Equal(t, 1, a.only(t).Failed)
	})
}

func TestARunThatPanicsHasFailed(t *testing.T) {
	inBubble(t, func(t *scene) {
		c, err := tenure.NewCoordinator(testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
			Reconcile: tenure.Every(time.Second, func(context.Context) error { panic("broken") }),
		})
		require.NoError(t, err)
		require.Panics(t, func() { c.Run(t.Context()) })
		got := c.Status().Runs[0]
		require.Equal(t, []int{1, 1, 0}, []int{got.Started, got.Failed, got.Running})
		require.Contains(t, got.LastError, "panicked")
	})
}

func TestRunsOfDifferentNamesAreCountedApart(t *testing.T) {
	inBubble(t, func(t *scene) {
		fails := func(context.Context) error { return errors.New("refused") }
		a := t.start("a", tenure.CoordinatorConfig{
			Watch:     tenure.Every(time.Second, testkit.Succeeds),
			Reconcile: tenure.Every(time.Minute, fails),
		})
		time.Sleep(10 * time.Second)
		failing := map[string]bool{}
		for _, runs := range a.Status().Runs {
			failing[runs.Name] = testkit.IsFailing(runs)
		}
		require.Equal(t, map[string]bool{"watch": false, "reconcile": true}, failing)
	})
}

func TestARunOutsideAJobIsNotRecorded(t *testing.T) {
	reason := errors.New("refused")
	require.Equal(t, reason, tenure.RecordRun(t.Context(), "import", func(context.Context) error { return reason }))
}

func TestAJobThatEndsByTheLossOfAnotherLeaseSaysNothingOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
		other := tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "other"}, Holder: "a"}
		lost := testkit.MustAcquire(t, testkit.NewLease(t, store, other))
		c := testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Logger:    testkit.Quiet,
			Reconcile: func(ctx context.Context) error { <-ctx.Done(); time.Sleep(time.Second); return nil },
			Watch: func(ctx context.Context) error {
				time.Sleep(tenure.DefaultTTL)
				other.Holder = "x"
				testkit.Must(testkit.NewLease(t, store, other).StealExpired(ctx))
				other.Holder = "a"
				return testkit.NewLease(t, store, other).Renew(ctx, lost)
			},
		}))
		defer testkit.RunCoordinator(t, t.Context(), c)()
		time.Sleep(tenure.DefaultTTL + time.Second/2)
		stopping := c.Status()
		require.Equal(t, tenure.RoleStopping, stopping.Role)
		require.Equal(t, "a", stopping.Holder)
		time.Sleep(time.Second)
		require.Regexp(t, "^released: .*lease/other is held by x", c.Status().Recent[0].Reason)
	})
}
