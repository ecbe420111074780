package tenure_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// fitness is a Check that the test decides.
type fitness struct {
	standby, holder atomic.Bool // not fit for it
	asked           atomic.Int32
}

var errUnfit = errors.New("the disk is gone")

func (f *fitness) check(_ context.Context, role tenure.Role) error {
	f.asked.Add(1)
	if role == tenure.RoleStandby && f.standby.Load() || role != tenure.RoleStandby && f.holder.Load() {
		return errUnfit
	}
	return nil
}

func TestAStandbyThatIsNotFitDoesNotCompete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fit fitness
		fit.standby.Store(true)
		b := start(t, newLedger(t), storetest.NewMem(), "b", tenure.CoordinatorConfig{Check: fit.check})
		time.Sleep(time.Minute)
		if got := b.Status(); got.Terms != 0 || !strings.Contains(got.LastError, errUnfit.Error()) {
			t.Errorf("status %+v", got)
		}
		fit.standby.Store(false)
		time.Sleep(5 * time.Second)
		if !b.IsHolder() || b.Status().LastError != "" {
			t.Errorf("b is fit and does not hold: %+v", b.Status())
		}
	})
}

func TestAHolderThatIsNotFitGivesTheLeaseToOneThatIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		var fit fitness
		a := start(t, l, store, "a", tenure.CoordinatorConfig{Check: fit.check})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{Check: new(fitness).check})
		time.Sleep(time.Minute + time.Second)
		fit.holder.Store(true)
		time.Sleep(9 * time.Second) // until the next renewal
		synctest.Wait()
		if a.IsHolder() || !b.IsHolder() {
			t.Errorf("b does not hold:\n%v", l)
		}
		if got := l.String(); !strings.Contains(got, "a ends: "+tenure.ErrUnhealthy.Error()+": "+errUnfit.Error()) {
			t.Errorf("the job is not told why:\n%v", got)
		}
	})
}

func TestAHolderMayFailItsCheckSoManyTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(t)
		var fit fitness
		a := start(t, l, storetest.NewMem(), "a", tenure.CoordinatorConfig{Check: fit.check, CheckFailures: 3})
		time.Sleep(11 * time.Second)
		before := fit.asked.Load()
		fit.holder.Store(true)
		for fit.asked.Load() < before+2 {
			time.Sleep(100 * time.Millisecond)
		}
		fit.holder.Store(false)
		time.Sleep(time.Minute)
		if !a.IsHolder() || a.Status().Terms != 1 || a.Status().LastError != "" {
			t.Errorf("two failures cost the term: %+v", a.Status())
		}
		fit.holder.Store(true)
		time.Sleep(15 * time.Second)
		if !strings.Contains(l.String(), "a ends: "+tenure.ErrUnhealthy.Error()) {
			t.Errorf("three failures did not end the term:\n%v", l)
		}
	})
}

func TestAHolderThatStaysUnfitIsNotRenewedPastItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(t)
		var fit fitness
		start(t, l, storetest.NewMem(), "a", tenure.CoordinatorConfig{Check: fit.check, CheckFailures: 1000})
		time.Sleep(11 * time.Second) // renewed a second ago
		fit.holder.Store(true)
		time.Sleep(18 * time.Second)
		if l.holder() != "a" {
			t.Error("the term ended before its RenewDeadline")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if l.holder() != "" || !strings.Contains(l.String(), "30s a ends: "+tenure.ErrUnhealthy.Error()) {
			t.Errorf("got:\n%v", l)
		}
	})
}

func TestACheckThatHangsCountsAsFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		var hangs atomic.Bool
		let := make(chan struct{})
		a := start(t, l, store, "a", tenure.CoordinatorConfig{CheckTimeout: 2 * time.Second,
			Check: func(context.Context, tenure.Role) error { // and does not heed its context
				if hangs.Load() {
					<-let
				}
				return nil
			}})
		time.Sleep(time.Second)
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		hangs.Store(true)
		time.Sleep(9*time.Second + 2*time.Second)
		synctest.Wait()
		if a.IsHolder() || !b.IsHolder() {
			t.Errorf("b does not hold:\n%v", l)
		}
		b.stop()
		time.Sleep(5 * time.Minute)
		if got := a.Status(); got.Terms != 1 || !strings.Contains(got.LastError, "has not returned") {
			t.Errorf("a competed while its check hung: %+v", got)
		}
		hangs.Store(false)
		close(let)
		time.Sleep(5 * time.Second)
		if !a.IsHolder() {
			t.Errorf("a does not hold once its check has returned: %+v", a.Status())
		}
	})
}

func TestALeaseIsRenewedUncheckedWhileTheJobReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fit fitness
		a := start(t, newLedger(t), storetest.NewMem(), "a", tenure.CoordinatorConfig{
			Check:         fit.check,
			RenewInterval: 2 * time.Second,
			RenewDeadline: 4 * time.Second, // so the job has 25 s to return
			Reconcile: func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(20 * time.Second)
				return nil
			},
		})
		time.Sleep(time.Second)
		fit.holder.Store(true)
		time.Sleep(2 * time.Second) // the job is told to return
		asked := fit.asked.Load()
		time.Sleep(18 * time.Second)
		h, err := a.lease.Read(t.Context())
		if err != nil || h.Age > 2*time.Second || a.Status().Role != tenure.RoleStopping {
			t.Errorf("got %+v, %v, %v; want a lease renewed not longer than 2 s ago", h, err, a.Status().Role)
		}
		if got := fit.asked.Load(); got != asked {
			t.Errorf("checked %d times since the job was told to return", got-asked)
		}
	})
}

func TestAReplicaWhoseCheckFlapsStaysAwayForLongerEachTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fit fitness
		fit.holder.Store(true) // fit to compete, and not to hold
		var began []time.Time
		a := start(t, newLedger(t), storetest.NewMem(), "a", tenure.CoordinatorConfig{
			Check:     fit.check,
			Reconcile: func(ctx context.Context) error { began = append(began, time.Now()); <-ctx.Done(); return nil },
		})
		time.Sleep(10 * time.Minute)
		a.stop()
		const term = 10 * time.Second // each, until its first renewal
		// The first is longer than any who has resigned stays away, 10 s.
		for i, least := range []time.Duration{11 * time.Second, 22 * time.Second, 45 * time.Second, 90 * time.Second, 90 * time.Second} {
			if away := began[i+1].Sub(began[i]) - term; away < least || away > 120*time.Second {
				t.Errorf("away for %v after term %d, want at least %v and at most 4 TTLs", away, i+1, least)
			}
		}
	})
}

func TestAReplicaThatHasBeenFitForLongStaysAwayForAsShortAsAtFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fit fitness
		a := start(t, newLedger(t), storetest.NewMem(), "a", tenure.CoordinatorConfig{Check: fit.check})
		for range 5 {
			time.Sleep(5 * time.Minute)
			fit.holder.Store(true)
			for a.Status().Role != tenure.RoleStandby {
				time.Sleep(time.Second)
			}
			fit.holder.Store(false)
			time.Sleep(16 * time.Second) // 3 AcquireIntervals, and a second
			if !a.IsHolder() {
				t.Error("still away")
			}
		}
	})
}

func TestALeaseIsReleasedThoughTheChecksErrorSaysThatItIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		var unfit atomic.Bool
		a := start(t, l, store, "a", tenure.CoordinatorConfig{Check: func(context.Context, tenure.Role) error {
			if unfit.Load() {
				return &tenure.LostError{Key: leaseKey} // of another lease, or of a fenced write that was mistaken
			}
			return nil
		}})
		synctest.Wait()
		unfit.Store(true)
		time.Sleep(11 * time.Second)
		_, err := store.Get(t.Context(), leaseKey)
		wantErr(t, err, tenure.ErrNotFound)
		if a.IsHolder() {
			t.Error("a holds although it is not fit")
		}
	})
}

func TestWhileTheJobReturnsTheLeaseIsRenewedWithoutACheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		var fit fitness
		a := start(t, newLedger(t), store, "a", tenure.CoordinatorConfig{
			Check: fit.check,
			Reconcile: func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(8 * time.Second)
				return nil
			},
		})
		time.Sleep(25 * time.Second) // the next renewal is due in 5 s
		asked := fit.asked.Load()
		fit.holder.Store(true)
		stopped := make(chan struct{})
		go func() { a.stop(); close(stopped) }()
		time.Sleep(7 * time.Second)
		holding, err := a.lease.Read(t.Context())
		if err != nil || holding.Age > 2*time.Second {
			t.Errorf("the lease was renewed %v ago: %v", holding.Age, err)
		}
		if got := fit.asked.Load() - asked; got != 0 {
			t.Errorf("asked %d times whether it is fit to hold what it gives back", got)
		}
		<-stopped
	})
}
