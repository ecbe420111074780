package tenure_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
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
		time.Sleep(11 * time.Second)  // renewed a second ago
		a.store.SetHook(testkit.Hang) // no network after the resume
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

// With ExpiryObserved no clock decides; a wall clock that is set may only end a term early.
func TestAWallClockThatIsSetShortensNoConfirmation(t *testing.T) {
	inBubble(t, func(t *scene) {
		lc := tenure.LeaseConfig{TTL: 30 * time.Second, Expiry: tenure.ExpiryObserved, Holder: "dead", Logger: testkit.Quiet}
		cc := tenure.CoordinatorConfig{RenewInterval: 10 * time.Second, Confirmations: 3}
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, lc))
		m := t.onMachine()
		var stolen, works time.Time
		cc.Trace = &tenure.Trace{Acquired: func(*tenure.Term, *tenure.Holding) { stolen = time.Now() }}
		cc.Reconcile = func(ctx context.Context) error { works = time.Now(); return testkit.UntilDone(ctx) }
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
			a.store.SetHook(testkit.Hang)
			m.suspend(ttl * 6 / 10)
			time.Sleep(ttl)
			synctest.Wait()
			margin := ttl / 30
			require.GreaterOrEqual(t, left, ttl-margin-ttl*2/3-margin, "with a TTL of %v", ttl)
		})
	}
}

// fitness is a Check that the test decides.
type fitness struct {
	standby, holder atomic.Bool // true: unfit for the role
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

func TestAnUnfitStandbyDoesNotCompete(t *testing.T) {
	inBubble(t, func(t *scene) {
		var fit fitness
		fit.standby.Store(true)
		b := t.start("b", tenure.CoordinatorConfig{Check: fit.check})
		time.Sleep(time.Minute)
		require.Zero(t, b.Status().Terms)
		require.Contains(t, b.Status().LastError, errUnfit.Error())
		fit.standby.Store(false)
		time.Sleep(5 * time.Second)
		t.wantHolder(b)
		require.Empty(t, b.Status().LastError)
	})
}

func TestAnUnfitHolderGivesTheLeaseToAReplicaThatIsFit(t *testing.T) {
	inBubble(t, func(t *scene) {
		var fit fitness
		t.start("a", tenure.CoordinatorConfig{Check: fit.check})
		b := t.start("b", tenure.CoordinatorConfig{Check: new(fitness).check})
		time.Sleep(time.Minute + time.Second)
		fit.holder.Store(true)
		time.Sleep(9 * time.Second) // until the next renewal
		synctest.Wait()
		t.wantHolder(b)
		require.Contains(t, t.jobs.String(), "a ends: "+tenure.ErrUnhealthy.Error()+": "+errUnfit.Error())
	})
}

func TestATermEndsWhenCheckFailuresChecksInARowHaveFailed(t *testing.T) {
	inBubble(t, func(t *scene) {
		var fit fitness
		a := t.start("a", tenure.CoordinatorConfig{Check: fit.check, CheckFailures: 3})
		time.Sleep(11 * time.Second)
		before := fit.asked.Load()
		fit.holder.Store(true)
		for fit.asked.Load() < before+2 {
			time.Sleep(100 * time.Millisecond)
		}
		fit.holder.Store(false)
		time.Sleep(time.Minute)
		t.wantHolder(a)
		require.Equal(t, 1, a.Status().Terms)
		require.Empty(t, a.Status().LastError)
		fit.holder.Store(true)
		time.Sleep(15 * time.Second)
		require.Contains(t, t.jobs.String(), "a ends: "+tenure.ErrUnhealthy.Error())
	})
}

func TestAHolderThatStaysUnfitIsNotRenewedPastItsDeadline(t *testing.T) {
	inBubble(t, func(t *scene) {
		var fit fitness
		a := t.start("a", tenure.CoordinatorConfig{Check: fit.check, CheckFailures: 1000})
		time.Sleep(11 * time.Second) // renewed a second ago
		fit.holder.Store(true)
		time.Sleep(18 * time.Second)
		t.wantHolder(a)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Contains(t, t.jobs.String(), "30s a ends: "+tenure.ErrUnhealthy.Error())
	})
}

func TestACheckThatMayLastForLongBeginsEarlyAndDelaysNoRenewal(t *testing.T) {
	for name, test := range map[string]struct{ timeout, took, earlier time.Duration }{
		"nearly the deadline":        {19 * time.Second, 18 * time.Second, 10 * time.Second},
		"longer than is left":        {12 * time.Second, 11 * time.Second, 7 * time.Second},
		"quick, and could take long": {12 * time.Second, 0, 7 * time.Second},
		"quick, nearly the deadline": {19 * time.Second, 0, 10 * time.Second},
		"the default":                {5 * time.Second, 4 * time.Second, 0},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				var mu sync.Mutex
				var renewed, asked time.Time
				var requested atomic.Bool
				a := t.start("a", tenure.CoordinatorConfig{CheckTimeout: test.timeout,
					Trace: &tenure.Trace{
						Acquired: func(*tenure.Term, *tenure.Holding) {
							mu.Lock()
							defer mu.Unlock()
							renewed = time.Now()
						},
						Renewed: func(*tenure.Term, time.Duration, time.Duration) {
							mu.Lock()
							defer mu.Unlock()
							due := max(10*time.Second, 10*time.Second-test.earlier+test.took)
							if !requested.Load() {
								require.InDelta(t, due, time.Since(renewed), float64(100*time.Millisecond), "the renewal")
								require.False(t, asked.Before(renewed), "the check is older than the last renewal")
							}
							renewed = time.Now()
						},
					},
					Check: func(ctx context.Context, role tenure.Role) error {
						if role == tenure.RoleStandby || requested.Load() {
							return nil
						}
						time.Sleep(time.Millisecond) // until the trace has been told of the last renewal
						mu.Lock()
						asked = time.Now()
						require.InDelta(t, 10*time.Second-test.earlier, asked.Sub(renewed), float64(100*time.Millisecond), "the check")
						mu.Unlock()
						time.Sleep(test.took)
						return nil
					}})
				time.Sleep(10 * time.Minute)
				t.wantHolder(a)
				require.Equal(t, 1, a.Status().Terms)

				// A request does not wait for the next renewal.
				b := t.start("b")
				time.Sleep(time.Second)
				requested.Store(true)
				require.NoError(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "c"}).RequestRelease(t.Context()))
				time.Sleep(time.Second)
				if test.took > 0 {
					time.Sleep(test.took)
				}
				t.wantHolder(b)
			})
		})
	}
}

// A long check is not repeated before a renewal that is repeated.
func TestARenewalThatFailsOnceEndsNoTermThoughTheCheckTakesLong(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", tenure.CoordinatorConfig{CheckTimeout: 12 * time.Second, Check: func(_ context.Context, role tenure.Role) error {
			if role == tenure.RoleHolder {
				time.Sleep(9 * time.Second)
			}
			return nil
		}})
		for range 10 {
			var failed atomic.Bool
			a.store.SetHook(testkit.Only("put", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
				if failed.Swap(true) {
					return do(ctx)
				}
				return testkit.Refuse(ctx, call, do)
			}))
			time.Sleep(time.Minute)
			require.True(t, failed.Load())
		}
		t.wantHolder(a)
		require.Equal(t, 1, a.Status().Terms)
	})
}

func TestHintsDoNotHurryACheckThatFails(t *testing.T) {
	inBubble(t, func(t *scene) {
		var fit fitness
		a := t.start("a", tenure.CoordinatorConfig{CheckFailures: 5, Check: fit.check})
		time.Sleep(time.Minute + time.Second)
		fit.holder.Store(true)
		for range 200 {
			require.NoError(t, a.store.Wake(t.Context(), testkit.LeaseKey))
			time.Sleep(time.Millisecond)
		}
		t.wantHolder(a)
	})
}

func TestACheckThatHangsCountsAsFailed(t *testing.T) {
	inBubble(t, func(t *scene) {
		var hangs atomic.Bool
		released, causes := make(chan struct{}), make(chan error, 2)
		a := t.start("a", tenure.CoordinatorConfig{CheckTimeout: 2 * time.Second,
			Check: func(context.Context, tenure.Role) error { // and ignores its context
				if hangs.Load() {
					<-released
				}
				return nil
			},
			Reconcile: func(ctx context.Context) error {
				t.jobs.Run(ctx, "a")
				causes <- context.Cause(ctx)
				return nil
			}})
		time.Sleep(time.Second)
		b := t.start("b")
		hangs.Store(true)
		time.Sleep(9*time.Second + 2*time.Second)
		synctest.Wait()
		t.wantHolder(b)
		cause := <-causes
		require.ErrorIs(t, cause, tenure.ErrUnhealthy)
		require.ErrorIs(t, cause, context.DeadlineExceeded)
		b.stop()
		time.Sleep(5 * time.Minute)
		require.Equal(t, 1, a.Status().Terms)
		require.Contains(t, a.Status().LastError, "has not returned")
		hangs.Store(false)
		close(released)
		time.Sleep(5 * time.Second)
		t.wantHolder(a)
	})
}

func TestWhileTheJobReturnsItsLeaseIsRenewedWithoutAnyCheck(t *testing.T) {
	for name, end := range map[string]func(t *scene, a *replica){
		"unfit":    func(*scene, *replica) {},
		"resigned": func(t *scene, a *replica) { go a.Resign(t.Context()) },
		"shutdown": func(_ *scene, a *replica) { go a.stop() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				var fit fitness
				a := t.start("a", tenure.CoordinatorConfig{
					Check:         fit.check,
					RenewInterval: 2 * time.Second,
					RenewDeadline: 4 * time.Second, // so the job has 25 s to return
					Reconcile:     returnsAfter(20 * time.Second),
				})
				time.Sleep(time.Second)
				fit.holder.Store(true)
				end(t, a)
				time.Sleep(time.Second) // the first renewal is due
				synctest.Wait()
				asked := fit.asked.Load()
				if name != "unfit" {
					require.EqualValues(t, 1, asked, "once as a standby")
				}
				for range 9 {
					time.Sleep(2 * time.Second)
					require.Equal(t, tenure.RoleStopping, a.Status().Role)
					require.False(t, a.IsHolder())
					got, err := a.lease.Read(t.Context())
					require.NoError(t, err)
					require.LessOrEqual(t, got.Age, 2*time.Second)
				}
				require.Equal(t, asked, fit.asked.Load())
			})
		})
	}
}

func TestAReplicaWhoseCheckFlapsStaysAwayForLongerEachTime(t *testing.T) {
	inBubble(t, func(t *scene) {
		var fit fitness
		fit.holder.Store(true) // fit to compete, and not to hold
		var began []time.Time
		a := t.start("a", tenure.CoordinatorConfig{Check: fit.check, Reconcile: func(ctx context.Context) error {
			began = append(began, time.Now())
			return testkit.UntilDone(ctx)
		}})
		time.Sleep(10 * time.Minute)
		a.stop()
		const term = 10 * time.Second // each, until its first renewal
		// The first is longer than the 10 s for which a replica that has resigned stays away.
		for i, least := range []time.Duration{11 * time.Second, 22 * time.Second, 45 * time.Second, 90 * time.Second, 90 * time.Second} {
			away := began[i+1].Sub(began[i]) - term
			require.GreaterOrEqual(t, away, least, "after term %d", i+1)
			require.LessOrEqual(t, away, 4*30*time.Second, "after term %d", i+1)
		}
	})
}

func TestAReplicaThatHasBeenFitForLongStaysAwayOnlyBriefly(t *testing.T) {
	inBubble(t, func(t *scene) {
		var fit fitness
		a := t.start("a", tenure.CoordinatorConfig{Check: fit.check})
		for range 5 {
			time.Sleep(5 * time.Minute)
			fit.holder.Store(true)
			for a.Status().Role != tenure.RoleStandby {
				time.Sleep(time.Second)
			}
			fit.holder.Store(false)
			time.Sleep(16 * time.Second) // 3 AcquireIntervals, and a second
			t.wantHolder(a)
		}
	})
}

func TestTheLeaseIsReleasedEvenIfTheChecksErrorSaysThatItIsLost(t *testing.T) {
	inBubble(t, func(t *scene) {
		var unfit atomic.Bool
		t.start("a", tenure.CoordinatorConfig{Check: func(context.Context, tenure.Role) error {
			if unfit.Load() {
				return tenure.LostTerm(testkit.LeaseKey) // as from another lease, or from a mistaken fenced write
			}
			return nil
		}})
		unfit.Store(true)
		time.Sleep(11 * time.Second)
		_, err := t.store.Get(t.Context(), testkit.LeaseKey)
		require.ErrorIs(t, err, tenure.ErrNotFound)
		t.wantHolder(nil)
	})
}

// Otherwise its status would show a holder that is long gone for hours.
func TestAReplicaThatDoesNotCompeteSeesWhoHolds(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		var fit fitness
		fit.standby.Store(true)
		var log bytes.Buffer
		unfit := t.start("unfit", tenure.CoordinatorConfig{Check: fit.check, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		time.Sleep(45 * time.Second) // a TTL, the time between two checks, and a bit
		require.Equal(t, "a", unfit.Status().Holder)
		require.Contains(t, unfit.Status().LastError, errUnfit.Error())
		b := t.start("b")
		time.Sleep(time.Second)
		require.NoError(t, a.StandDown(t.Context()))
		time.Sleep(45 * time.Second)
		t.wantHolder(b)
		for _, r := range []*replica{a, unfit} {
			require.Equal(t, "b", r.Status().Holder)
			require.NotZero(t, r.Status().RenewedAt)
		}
		b.stop()
		time.Sleep(45 * time.Second)
		require.Empty(t, a.Status().Holder)
		require.Empty(t, unfit.Status().Holder)
		unfit.stop()
		require.Equal(t, 1, strings.Count(log.String(), "replica is unhealthy and does not compete"), &log)
	})
}

var counterKey = tenure.Key{Type: "counter", ID: "1"}

func TestNoConcurrentUpdateIsLost(t *testing.T) {
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		store := open()
		testkit.Put(t, store, tenure.Object{Key: counterKey, Name: "one", Labels: map[string]string{"a": "b"}, Payload: []byte("0")})
		const writers, each = 4, 10
		var all sync.WaitGroup
		for range writers {
			all.Go(func() {
				for range each {
					err := testkit.Update(t.Context(), store, counterKey, func(obj tenure.Object) (tenure.Object, error) {
						n, err := strconv.Atoi(string(obj.Payload))
						obj.Payload = strconv.AppendInt(nil, int64(n+1), 10)
						return obj, err
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		got := testkit.Get(t, store, counterKey)
		require.Equal(t, strconv.Itoa(writers*each), string(got.Payload))
		require.Equal(t, "one", got.Name)
		require.Equal(t, map[string]string{"a": "b"}, got.Labels)
	})
}
