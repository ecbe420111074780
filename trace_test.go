package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// tale is what a trace was told, in order. What is told several times in a row
// stands there once: how often a standby looks is random.
type tale struct{ script }

func (s *tale) tell(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	line := fmt.Sprintf(format, args...)
	if n := len(s.lines); n == 0 || s.lines[n-1] != line {
		s.lines = append(s.lines, line)
	}
}

// since returns what was told since the last call.
func (s *tale) since() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	lines := s.lines
	s.lines = nil
	return lines
}

func (s *tale) trace() *tenure.Trace {
	return &tenure.Trace{
		Attempt: func(_ time.Duration, err error) {
			switch {
			case err == nil:
				s.tell("attempt: got it")
			case errors.Is(err, tenure.ErrHeld):
				s.tell("attempt: held")
			default:
				s.tell("attempt: error")
			}
		},
		Acquired: func(_ *tenure.Term, predecessor *tenure.Holding) {
			if predecessor != nil {
				s.tell("stolen from %s", predecessor.Holder)
				return
			}
			s.tell("acquired")
		},
		Renewed: func(_ *tenure.Term, took, trustLeft time.Duration) {
			s.tell("renewed in %v, with %v left", took, trustLeft)
		},
		RenewalFailed: func(_ *tenure.Term, err error, _ time.Duration) { s.tell("renewal failed: %v", err) },
		Lost:          func(_ *tenure.Term, cause error) { s.tell("lost: %v", cause) },
		Released:      func(_ *tenure.Term, cause error) { s.tell("released: %v", cause) },
		JobStarted:    func(*tenure.Term) { s.tell("job started") },
		JobEnded: func(_ *tenure.Term, cause error, took time.Duration) {
			s.tell("job ended after %v: %v", took, cause)
		},
		JobStuck:      func(_ *tenure.Term, since time.Duration) { s.tell("job stuck for %v", since) },
		HolderChanged: func(holder string) { s.tell("holder: %q", holder) },
	}
}

func wantTold(t *testing.T, when string, tale *tale, want ...string) {
	t.Helper()
	if got := tale.since(); !slices.Equal(got, want) {
		t.Errorf("%s: told\n  %s\nwant\n  %s", when, strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// returnsAfter is a job that takes its time to return.
func returnsAfter(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		<-ctx.Done()
		time.Sleep(d)
		return nil
	}
}

func slowly(d time.Duration) storetest.Hook {
	return func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		time.Sleep(d)
		return do(ctx)
	}
}

func TestATraceIsToldTheWholeLifeOfALeaseInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		var ofA, ofB tale
		a := start(t, nil, store, "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(6 * time.Second), Trace: ofA.trace()})
		synctest.Wait()
		wantTold(t, "a acquires", &ofA, "attempt: got it", "acquired", `holder: "a"`, "job started")

		b := start(t, nil, store, "b", tenure.CoordinatorConfig{Reconcile: returnsAfter(0), Trace: ofB.trace()})
		a.store.SetHook(slowly(30 * time.Millisecond))
		time.Sleep(11 * time.Second)
		wantTold(t, "a renews", &ofA, "renewed in 30ms, with 18.97s left")
		wantTold(t, "b stands by", &ofB, "attempt: held", `holder: "a"`, "attempt: held")

		a.store.SetHook(refuse)
		time.Sleep(14 * time.Second)
		wantTold(t, "a's renewals fail", &ofA, "renewal failed: connection refused")

		a.store.SetHook(nil)
		time.Sleep(5 * time.Second)
		if got := ofA.since(); len(got) != 1 || !strings.HasPrefix(got[0], "renewed in 0s, with ") {
			t.Errorf("a renews again: told %q", got)
		}

		a.store.SetHook(refuse)
		time.Sleep(70 * time.Second)
		wantTold(t, "a loses the lease", &ofA, "renewal failed: connection refused", "lost: lease not renewed in time",
			"renewal failed: connection refused", "job ended after 6s: lease not renewed in time", `holder: ""`, "attempt: error")
		wantTold(t, "b steals it", &ofB, "attempt: held", "attempt: got it", "stolen from a", `holder: "b"`, "job started",
			"renewed in 0s, with 19s left")

		a.store.SetHook(nil)
		time.Sleep(40 * time.Second)
		wantTold(t, "a hears of b", &ofA, "attempt: held", `holder: "b"`, "attempt: held")

		wantErr(t, b.Resign(t.Context()), nil)
		time.Sleep(4 * time.Millisecond) // a, whose term has ended ill, yields
		settle()
		wantTold(t, "b resigns", &ofB, "renewed in 0s, with 19s left", "job ended after 0s: lease resigned",
			"released: lease resigned", `holder: ""`)
		wantTold(t, "a is woken", &ofA, "attempt: got it", "acquired", `holder: "a"`, "job started")

		a.stop()
		wantTold(t, "a is shut down", &ofA, "job ended after 6s: coordinator is shutting down", "released: coordinator is shutting down", `holder: ""`)
	})
}

func TestATraceIsToldOfATermThatAnotherTook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		var told tale
		start(t, nil, store, "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(time.Second), Trace: told.trace()})
		synctest.Wait()
		obj, err := store.Get(t.Context(), leaseKey)
		wantErr(t, err, nil)
		obj.Payload = []byte(`{"holder":"robber","term":"another","ttl_ms":30000}`)
		put(t, store, obj)
		time.Sleep(20 * time.Second)
		wantTold(t, "a is robbed", &told, "attempt: got it", "acquired", `holder: "a"`, "job started",
			"lost: lease lost: reconciler_lease/singleton is held by robber", `holder: "robber"`,
			"job ended after 1s: lease lost: reconciler_lease/singleton is held by robber", "attempt: held")
	})
}

func TestATraceIsToldOfAJobThatIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told tale
		a := start(t, nil, storetest.NewMem(), "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(time.Minute), Trace: told.trace()})
		synctest.Wait()
		told.since()
		wantErr(t, a.Resign(t.Context()), nil)
		wantTold(t, "a's job is stuck", &told, "job stuck for 9s", "job ended after 1m0s: lease resigned",
			"released: lease resigned", `holder: ""`)
	})
}

func TestATraceIsToldOfAJobThatPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told tale
		c, err := tenure.NewCoordinator(newLease(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { panic("broken") },
			Trace:     told.trace(),
		})
		wantErr(t, err, nil)
		defer func() {
			if recover() == nil {
				t.Error("Run did not panic")
			}
			wantTold(t, "a's job panics", &told, "attempt: got it", "acquired", `holder: "a"`, "job started",
				"job ended after 0s: job ended: reconcile panicked: broken", "released: job ended: reconcile panicked: broken", `holder: ""`)
		}()
		c.Run(t.Context())
	})
}

func TestATraceIsToldOfALeaseThatCouldNotBeReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told tale
		a := start(t, nil, storetest.NewMem(), "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(0), Trace: told.trace()})
		synctest.Wait()
		told.since()
		a.store.SetHook(refuse)
		a.stop()
		wantTold(t, "a cannot release", &told, "job ended after 0s: coordinator is shutting down",
			"lost: coordinator is shutting down\nconnection refused", `holder: ""`)
	})
}

func TestATraceIsToldOfALeaseThatIsReleasedAfterItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told tale
		a := start(t, nil, storetest.NewMem(), "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(0), Trace: told.trace()})
		synctest.Wait()
		told.since()
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "put" {
				return errLost
			}
			return do(ctx)
		})
		time.Sleep(21 * time.Second)
		got := told.since()
		if len(got) == 0 || !strings.HasPrefix(got[0], "renewal failed") {
			t.Fatalf("told %q", got)
		}
		want := []string{"lost: lease not renewed in time", "job ended after 0s: lease not renewed in time",
			"released: lease not renewed in time", `holder: ""`}
		if !slices.Equal(got[1:], want) {
			t.Errorf("told %q, want %q", got[1:], want)
		}
	})
}

func TestATermThatNeverBeganIsNotTraced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told tale
		store := storetest.Faulty(storetest.NewMem(), slowly(time.Second))
		c, err := tenure.NewCoordinator(newLease(t, store, tenure.LeaseConfig{}),
			tenure.CoordinatorConfig{Reconcile: returnsAfter(0), Trace: told.trace()})
		wantErr(t, err, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		wantErr(t, c.Run(ctx), nil)
		wantTold(t, "a is shut down while it acquires", &told, "attempt: got it")
	})
}

func TestATermThatIsNotConfirmedRunsNoJobThatATraceCouldBeToldOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told tale
		_, b := takeover(t, newLedger(t), tenure.CoordinatorConfig{Confirmations: 3, Reconcile: returnsAfter(0), Trace: told.trace()})
		told.since()
		b.stop()
		wantTold(t, "b stops before it has confirmed", &told, "released: coordinator is shutting down", `holder: ""`)
	})
}

func TestAFuncOfATraceFindsWhatItIsToldInTheStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c *tenure.Coordinator
		var err error
		roles := map[string]tenure.Role{}
		holders := map[string]string{}
		note := func(what string) { roles[what], holders[what] = c.Status().Role, c.Status().Holder }
		c, err = tenure.NewCoordinator(newLease(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
			Reconcile: returnsAfter(0),
			Trace: &tenure.Trace{
				Acquired:   func(*tenure.Term, *tenure.Holding) { note("acquired") },
				JobStarted: func(*tenure.Term) { note("job started") },
				JobEnded:   func(*tenure.Term, error, time.Duration) { note("job ended") },
				Released:   func(*tenure.Term, error) { note("released") },
			},
		})
		wantErr(t, err, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		wantErr(t, c.Run(ctx), nil)
		if got, want := fmt.Sprint(roles), "map[acquired:confirming job ended:stopping job started:holder released:stopping]"; got != want {
			t.Errorf("roles: got %s, want %s", got, want)
		}
		if got, want := fmt.Sprint(holders), "map[acquired:a job ended:a job started:a released:]"; got != want {
			t.Errorf("holders: got %s, want %s", got, want)
		}
	})
}
