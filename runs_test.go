package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

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
		require.True(t, got.Failing())
		require.Equal(t, tenure.RunStats{Name: "reconcile", Started: 3, Failed: 3, LastError: "no such table",
			LastStart: began.Add(20 * time.Second), LastFailure: began.Add(21 * time.Second)}, got)
		ok.Store(true)
		time.Sleep(10 * time.Second)
		got = a.only(t)
		require.False(t, got.Failing())
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
		}, Reconcile: kit.UntilDone}) // which is told to return, and then returns an error
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
	lease := kit.NewLease(t, store, tenure.LeaseConfig{TTL: 20 * time.Millisecond})
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
	stop := kit.RunCoordinator(t, t.Context(), c)
	kit.Await(t, "the record tells of a run", func() bool {
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

func TestARunThatReachesItsLimitHasFailed(t *testing.T) {
	refused := errors.New("refused")
	for name, test := range map[string]struct {
		run    func(context.Context) error
		failed bool
		is     error
		text   string
	}{
		"one that is done in time":        {lasting(59 * time.Second), false, nil, ""},
		"one that returns its own error":  {func(context.Context) error { return refused }, true, refused, "refused"},
		"one that returns its context's":  {kit.UntilDone, true, context.DeadlineExceeded, "not done within 1m0s: context deadline exceeded"},
		"one that returns nil after that": {func(ctx context.Context) error { <-ctx.Done(); return nil }, true, context.DeadlineExceeded, "not done within 1m0s: context deadline exceeded"},
		"one that returns another error after that": {func(ctx context.Context) error { <-ctx.Done(); return refused }, true, refused,
			"not done within 1m0s: context deadline exceeded: refused"},
	} {
		inBubble(t, func(t *scene) {
			var got error
			a := t.start("a", tenure.CoordinatorConfig{Reconcile: tenure.Every(time.Second, func(ctx context.Context) error {
				got = tenure.AtMost(time.Minute, test.run)(ctx)
				return got
			})})
			time.Sleep(60*time.Second + time.Millisecond)
			stats := a.only(t)
			require.Equal(t, test.failed, stats.Failing(), name)
			require.Equal(t, test.text, stats.LastError, name)
			require.ErrorIs(t, got, test.is, name)
			require.Equal(t, tenure.RoleHolder, a.Status().Role, name)
			a.stop()
			require.Equal(t, stats.Failed, a.only(t).Failed, "%s: the end of its term interrupts a run", name)
		})
	}
	require.Panics(t, func() { tenure.AtMost(0, kit.Succeeds) })
	require.Panics(t, func() { tenure.AtMost(time.Second, nil) })
}

// A gate that has seen a token of another lease refuses every write of a valid term.
func TestARunThatReturnsErrLostWhileItsTermStandsHasFailed(t *testing.T) {
	inBubble(t, func(t *scene) {
		var gate tenure.Gate
		require.NoError(t, gate.Admit(math.MaxInt64))
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: tenure.Every(time.Hour, func(ctx context.Context) error {
			return gate.Admit(tenure.TermFromContext(ctx).Token())
		})})
		require.True(t, a.only(t).Failing())
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
			require.ErrorIs(t, tenure.RecordRun(brief, "import", kit.UntilDone), context.DeadlineExceeded)
			<-ctx.Done()
			return nil
		}})
		time.Sleep(2 * time.Second)
		require.Equal(t, 1, a.only(t).Failed)
	})
}

func TestARunThatPanicsHasFailed(t *testing.T) {
	inBubble(t, func(t *scene) {
		c, err := tenure.NewCoordinator(kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
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
			Watch:     tenure.Every(time.Second, kit.Succeeds),
			Reconcile: tenure.Every(time.Minute, fails),
		})
		time.Sleep(10 * time.Second)
		failing := map[string]bool{}
		for _, runs := range a.Status().Runs {
			failing[runs.Name] = runs.Failing()
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
		lease := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
		other := tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "other"}, Holder: "a"}
		lost := kit.MustAcquire(t, kit.NewLease(t, store, other))
		c := kit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Logger:    kit.Quiet,
			Reconcile: func(ctx context.Context) error { <-ctx.Done(); time.Sleep(time.Second); return nil },
			Watch: func(ctx context.Context) error {
				time.Sleep(tenure.DefaultTTL)
				other.Holder = "x"
				kit.Must(kit.NewLease(t, store, other).StealExpired(ctx))
				other.Holder = "a"
				return kit.NewLease(t, store, other).Renew(ctx, lost)
			},
		}))
		defer kit.RunCoordinator(t, t.Context(), c)()
		time.Sleep(tenure.DefaultTTL + time.Second/2)
		stopping := c.Status()
		require.Equal(t, tenure.RoleStopping, stopping.Role)
		require.Equal(t, "a", stopping.Holder)
		time.Sleep(time.Second)
		require.Regexp(t, "^released: .*lease/other is held by x", c.Status().Recent[0].Reason)
	})
}
