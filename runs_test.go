package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
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
		require.Equal(t, tenure.RunStats{Name: "reconcile", Running: 1, Started: 1, LastStart: began}, a.only(t))
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

// A gate that has seen a token of other data refuses each write of a term that stands.
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

// reentrant is an error whose text asks the coordinator, as one with a lock of the program's
// might.
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
