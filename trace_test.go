package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// tale records the trace's calls in order. Repeated calls in a row are recorded once, because
// how often a standby looks is random.
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
	synctest.Wait() // it is told a moment later
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
		JobStuck: func(_ *tenure.Term, since time.Duration) { s.tell("job stuck for %v", since) },
	}
}

func TestATraceIsToldTheWholeLifeOfALeaseInOrder(t *testing.T) {
	inBubble(t, func(t *scene) {
		var ofA, ofB tale
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: returnsAfter(6 * time.Second), Trace: ofA.trace()})
		require.Equal(t, []string{"attempt: got it", "acquired", "job started"}, ofA.since())

		b := t.start("b", tenure.CoordinatorConfig{Trace: ofB.trace()})
		a.store.SetHook(kit.Slowly(30 * time.Millisecond))
		time.Sleep(11 * time.Second)
		require.Equal(t, []string{"renewed in 30ms, with 18.97s left"}, ofA.since())
		require.Equal(t, []string{"attempt: held"}, ofB.since())

		a.store.SetHook(kit.Refuse)
		time.Sleep(14 * time.Second)
		require.Equal(t, []string{"renewal failed: connection refused"}, ofA.since())

		a.store.SetHook(nil)
		time.Sleep(5 * time.Second)
		got := ofA.since()
		require.Len(t, got, 1)
		require.Contains(t, got[0], "renewed in 0s, with ")

		a.store.SetHook(kit.Refuse)
		time.Sleep(70 * time.Second)
		require.Equal(t, []string{"renewal failed: connection refused", "lost: lease not renewed in time", "renewal failed: connection refused",
			"job ended after 6s: lease not renewed in time", "attempt: error"}, ofA.since())
		require.Equal(t, []string{"attempt: held", "attempt: got it", "stolen from a", "job started", "renewed in 0s, with 19s left"}, ofB.since())

		a.store.SetHook(nil)
		time.Sleep(40 * time.Second)
		require.Equal(t, []string{"attempt: held"}, ofA.since())

		require.NoError(t, b.Resign(t.Context()))
		time.Sleep(4 * time.Millisecond) // a, whose last term it lost, gives others a head start
		synctest.Wait()
		require.Equal(t, []string{"renewed in 0s, with 19s left", "job ended after 0s: lease resigned", "released: lease resigned"}, ofB.since())
		require.Equal(t, []string{"attempt: got it", "acquired", "job started"}, ofA.since())

		a.stop()
		require.Equal(t, []string{"job ended after 6s: replica is shutting down", "released: replica is shutting down"}, ofA.since())
	})
}

func TestATraceIsToldHowATermEnds(t *testing.T) {
	for name, test := range map[string]struct {
		takes time.Duration // of the job, to return
		end   func(t *scene, a *replica)
		want  []string
	}{
		"lost to another": {time.Second, func(t *scene, _ *replica) {
			putRecord(t, t.store, robbersRecord)
			time.Sleep(20 * time.Second)
		}, []string{
			"lost: lease lost: reconciler_lease/singleton is held by robber",
			"job ended after 1s: lease lost: reconciler_lease/singleton is held by robber", "attempt: held"}},
		"job stuck": {time.Minute, func(t *scene, a *replica) { require.NoError(t, a.Resign(t.Context())) }, []string{
			"job stuck for 9s", "job ended after 1m0s: lease resigned", "released: lease resigned"}},
		"not released": {0, func(_ *scene, a *replica) { a.store.SetHook(kit.Refuse); a.stop() }, []string{
			"job ended after 0s: replica is shutting down", "lost: replica is shutting down\nconnection refused"}},
		"released after its deadline": {0, func(_ *scene, a *replica) {
			a.store.SetHook(kit.Only("put", kit.Refuse))
			time.Sleep(21 * time.Second)
		}, []string{
			"renewal failed: connection refused", "lost: lease not renewed in time", "job ended after 0s: lease not renewed in time",
			"released: lease not renewed in time"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				var told tale
				a := t.start("a", tenure.CoordinatorConfig{Reconcile: returnsAfter(test.takes), Trace: told.trace()})
				told.since()
				test.end(t, a)
				require.Equal(t, test.want, told.since())
			})
		})
	}
}

func TestATraceIsToldOfAJobThatPanics(t *testing.T) {
	inBubble(t, func(t *scene) {
		var told tale
		c, err := tenure.NewCoordinator(kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { panic("broken") },
			Trace:     told.trace(),
		})
		require.NoError(t, err)
		require.Panics(t, func() { c.Run(t.Context()) })
		require.Equal(t, []string{"attempt: got it", "acquired", "job started",
			"job ended after 0s: job ended: it panicked: broken", "released: job ended: it panicked: broken"}, told.since())
	})
}

func TestATraceIsToldNothingOfAJobThatDidNotBegin(t *testing.T) {
	inBubble(t, func(t *scene) {
		var told tale
		t.store = storetest.Faulty(t.store, kit.Slowly(time.Second))
		t.start("a", tenure.CoordinatorConfig{Trace: told.trace()}).stop()
		require.Equal(t, []string{"attempt: got it"}, told.since(), "shut down while it acquires")
	})
	inBubble(t, func(t *scene) {
		var told tale
		_, b := t.takeover(tenure.CoordinatorConfig{Confirmations: 3, Trace: told.trace()})
		told.since()
		b.stop()
		require.Equal(t, []string{"released: replica is shutting down"}, told.since(), "shut down while it confirms")
	})
}

func TestTheStatusShowsToATraceWhatItIsTold(t *testing.T) {
	inBubble(t, func(t *scene) {
		var c *tenure.Coordinator
		var seen []string
		note := func(what string) { // the coordinator may have moved on by now
			seen = append(seen, what)
			switch role := c.Status().Role; what {
			case "acquired":
				require.GreaterOrEqual(t, role, tenure.RoleConfirming)
			case "job started":
				require.Equal(t, tenure.RoleHolder, role)
			default:
				require.Contains(t, []tenure.Role{tenure.RoleStopping, tenure.RoleStandby}, role)
			}
		}
		c, err := tenure.NewCoordinator(kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
			Trace: &tenure.Trace{
				Acquired:   func(*tenure.Term, *tenure.Holding) { note("acquired") },
				JobStarted: func(*tenure.Term) { note("job started") },
				JobEnded:   func(*tenure.Term, error, time.Duration) { note("job ended") },
				Released:   func(*tenure.Term, error) { note("released") },
			},
		})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, c.Run(ctx))
		require.Equal(t, []string{"acquired", "job started", "job ended", "released"}, seen)
	})
}
