package tenure_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/proof/kit"
)

// machine can be suspended. Only the wall clock shows its programs how long it was.
type machine struct{ suspended atomic.Int64 }

// onMachine makes the replicas of a scene run on one machine.
func (t *scene) onMachine() *machine {
	m := new(machine)
	t.run = clock.With(t.run, func() clock.Reading {
		now := clock.Process()
		now.Wall = now.Wall.Add(time.Duration(m.suspended.Load()))
		return now
	})
	return m
}

func (m *machine) suspend(d time.Duration) { m.suspended.Add(int64(d)) }

func TestAfterASuspendTheJobIsToldToReturnInTime(t *testing.T) {
	inBubble(t, func(t *scene) {
		m := t.onMachine()
		var told, left time.Duration
		began := time.Now()
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			<-ctx.Done()
			told, left = time.Since(began), tenure.TermFromContext(ctx).Remaining()
			return nil
		}})
		time.Sleep(11 * time.Second) // renewed a second ago
		a.store.SetHook(kit.Hang)    // no network after the resume
		m.suspend(15 * time.Second)
		require.Equal(t, 13*time.Second, a.Status().TrustLeft)
		time.Sleep(time.Minute)
		synctest.Wait()
		// By the wall clock, 20 s after the renewal, give or take half of the margin.
		require.InDelta(t, 15250*time.Millisecond, told, float64(250*time.Millisecond))
		require.InDelta(t, 8750*time.Millisecond, left, float64(250*time.Millisecond))
	})
}

func TestAfterASuspendAnOverdueRenewalIsSent(t *testing.T) {
	inBubble(t, func(t *scene) {
		m, a := t.onMachine(), t.start("a")
		time.Sleep(11 * time.Second)
		m.suspend(15 * time.Second)
		time.Sleep(2500 * time.Millisecond)
		t.wantHolder(a)
		require.GreaterOrEqual(t, a.Status().TrustLeft, 26*time.Second)
		time.Sleep(time.Minute)
		t.wantHolder(a)
		require.Equal(t, 1, a.Status().Terms)
	})
}

func TestATermDoesNotOutlastASuspendThatIsLongerThanItsTrust(t *testing.T) {
	inBubble(t, func(t *scene) {
		m, a := t.onMachine(), t.start("a")
		time.Sleep(11*time.Second + time.Millisecond) // a term looks at the clock every half second
		m.suspend(33 * time.Second)
		require.Error(t, a.Healthy(time.Second))
		require.NoError(t, a.Healthy(0), "the trust ended five seconds ago")
		m.suspend(time.Hour)
		t.wantHolder(nil)
		require.Zero(t, a.Status().TrustLeft)
		require.Error(t, a.Healthy(time.Minute))
		time.Sleep(time.Minute)
		t.wantHolder(a)
		require.Equal(t, 2, a.Status().Terms)
	})
}

// With Observed no clock decides; a wall clock that is set may only end a term early.
func TestAWallClockThatIsSetShortensNoConfirmation(t *testing.T) {
	inBubble(t, func(t *scene) {
		lc := tenure.LeaseConfig{TTL: 30 * time.Second, Expiry: tenure.Observed, Holder: "dead", Logger: kit.Quiet}
		cc := tenure.CoordinatorConfig{RenewInterval: 10 * time.Second, Confirmations: 3}
		kit.MustAcquire(t, kit.NewLease(t, t.store, lc))
		m := t.onMachine()
		var stolen, works time.Time
		cc.Trace = &tenure.Trace{Acquired: func(*tenure.Term, *tenure.Holding) { stolen = time.Now() }}
		cc.Reconcile = func(ctx context.Context) error { works = time.Now(); return kit.UntilDone(ctx) }
		lc.Holder = "laptop"
		t.startWith(lc, cc)
		time.Sleep(31 * time.Second) // until it is stolen
		for range 3 {                // each makes a renewal come early, and leaves some trust
			m.suspend(12 * time.Second)
			time.Sleep(3 * time.Second)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		require.GreaterOrEqual(t, works.Sub(stolen), 29*time.Second, "three intervals of 10s")
	})
}

func TestAfterAShortSuspendTheJobOfAShortLeaseIsToldInTime(t *testing.T) {
	for _, ttl := range []time.Duration{300 * time.Millisecond, time.Second, 3 * time.Second} {
		inBubble(t, func(t *scene) {
			m := t.onMachine()
			var left time.Duration
			a := t.startWith(tenure.LeaseConfig{Holder: "a", TTL: ttl}, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
				<-ctx.Done()
				left = tenure.TermFromContext(ctx).Remaining()
				return nil
			}})
			a.store.SetHook(kit.Hang)
			m.suspend(ttl * 6 / 10)
			time.Sleep(ttl)
			synctest.Wait()
			margin := ttl / 30
			require.GreaterOrEqual(t, left, ttl-margin-ttl*2/3-margin, "with a TTL of %v", ttl)
		})
	}
}
