package tenure_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/storetest"
)

// machine is one that can be suspended. It is seen from within: of the time for which
// it was suspended, nothing but the wall clock tells.
type machine struct{ suspended atomic.Int64 }

func (m *machine) now() clock.Reading {
	now := clock.Process()
	now.Wall = now.Wall.Add(time.Duration(m.suspended.Load()))
	return now
}

func (m *machine) suspend(d time.Duration) { m.suspended.Add(int64(d)) }

// startOn runs a coordinator on a machine until the test ends.
func (m *machine) start(t *testing.T, store tenure.Store, cfg tenure.CoordinatorConfig) *replica {
	t.Helper()
	faulty := storetest.Faulty(store, nil)
	lease := newLease(t, faulty, tenure.LeaseConfig{Holder: "laptop"})
	c, err := tenure.NewCoordinator(lease, cfg)
	wantErr(t, err, nil)
	ctx, cancel := context.WithCancel(clock.With(context.Background(), m.now))
	done := make(chan struct{})
	go func() { defer close(done); c.Run(ctx) }()
	stop := func() { cancel(); <-done }
	t.Cleanup(stop)
	return &replica{c, lease, faulty, stop}
}

func TestAfterASuspendTheJobIsToldToReturnInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m machine
		var told, left time.Duration
		began := time.Now()
		a := m.start(t, storetest.NewMem(), tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			<-ctx.Done()
			told, left = time.Since(began), tenure.TermFromContext(ctx).Remaining()
			return nil
		}})
		time.Sleep(11 * time.Second) // renewed a second ago
		a.store.SetHook(hang)        // no network after the resume
		m.suspend(15 * time.Second)
		if got := a.Status().TrustLeft; got != 13*time.Second {
			t.Errorf("right after the resume %v of trust is left, want 13s", got)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		// By the wall clock 20 s after the renewal, but for half of the margin.
		if told < 15*time.Second || told > 15*time.Second+500*time.Millisecond || left < 8500*time.Millisecond || left > 9*time.Second {
			t.Errorf("the job is told after %v awake, with %v of trust left; want 15s and 9s", told, left)
		}
	})
}

func TestAfterASuspendARenewalThatIsOverdueIsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m machine
		a := m.start(t, storetest.NewMem(), tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error { <-ctx.Done(); return nil }})
		time.Sleep(11 * time.Second)
		m.suspend(15 * time.Second)
		time.Sleep(2500 * time.Millisecond)
		if got := a.Status(); !a.IsHolder() || got.TrustLeft < 26*time.Second {
			t.Errorf("2.5 s after the resume %v of trust is left: %+v", got.TrustLeft, got)
		}
		time.Sleep(time.Minute)
		if got := a.Status(); !a.IsHolder() || got.Terms != 1 {
			t.Errorf("the term has not outlasted the suspend: %+v", got)
		}
	})
}

func TestATermDoesNotOutlastASuspendThatIsLongerThanItsTrust(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m machine
		a := m.start(t, storetest.NewMem(), tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error { <-ctx.Done(); return nil }})
		time.Sleep(11 * time.Second)
		m.suspend(time.Hour)
		if a.IsHolder() || a.Status().TrustLeft != 0 || a.Healthy(time.Minute) == nil {
			t.Errorf("right after the resume: holder %v, %v left, healthy: %v", a.IsHolder(), a.Status().TrustLeft, a.Healthy(time.Minute))
		}
		time.Sleep(time.Minute)
		if got := a.Status(); got.Terms != 2 {
			t.Errorf("it does not compete again: %+v", got)
		}
	})
}

// With ObservedConfig no clock decides; a wall clock that is set may only end a term
// early.
func TestAWallClockThatIsSetShortensNoConfirmation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		lc, cc, err := tenure.ObservedConfig(10*time.Second, 3, 3)
		wantErr(t, err, nil)
		lc.Holder, lc.Logger = "dead", quiet
		mustAcquire(t, newLease(t, store, lc))
		var m machine
		var stolen, works time.Time
		cc.Trace = &tenure.Trace{Acquired: func(*tenure.Term, *tenure.Holding) { stolen = time.Now() }}
		cc.Reconcile = func(ctx context.Context) error { works = time.Now(); <-ctx.Done(); return nil }
		lc.Holder = "laptop"
		faulty := storetest.Faulty(store, nil)
		c, err := tenure.NewCoordinator(newLease(t, faulty, lc), cc)
		wantErr(t, err, nil)
		runOn(t, &m, c)
		time.Sleep(31 * time.Second) // until it is stolen
		for range 3 {                // each step is less than the trust that is left
			m.suspend(12 * time.Second)
			time.Sleep(time.Second)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := works.Sub(stolen); got < 29*time.Second {
			t.Errorf("the job began %v after the takeover, want three intervals of 10s", got)
		}
	})
}

func TestAfterAShortSuspendTheJobOfAShortLeaseIsTold(t *testing.T) {
	for _, ttl := range []time.Duration{300 * time.Millisecond, time.Second, 3 * time.Second} {
		t.Run(ttl.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var m machine
				var left time.Duration
				store := storetest.Faulty(storetest.NewMem(), nil)
				c, err := tenure.NewCoordinator(newLease(t, store, tenure.LeaseConfig{TTL: ttl}), tenure.CoordinatorConfig{
					Reconcile: func(ctx context.Context) error {
						<-ctx.Done()
						left = tenure.TermFromContext(ctx).Remaining()
						return nil
					}})
				wantErr(t, err, nil)
				runOn(t, &m, c)
				synctest.Wait()
				store.SetHook(hang)
				m.suspend(ttl * 6 / 10)
				time.Sleep(ttl)
				synctest.Wait()
				want := ttl - ttl/30 - ttl*2/3
				if left < want-ttl/30 {
					t.Errorf("the job was told with %v of trust left, want %v less the margin of %v", left, want, ttl/30)
				}
			})
		})
	}
}

func runOn(t *testing.T, m *machine, c *tenure.Coordinator) {
	ctx, cancel := context.WithCancel(clock.With(context.Background(), m.now))
	done := make(chan struct{})
	go func() { defer close(done); c.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}
