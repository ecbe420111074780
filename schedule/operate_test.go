package schedule_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/schedule"
	"github.com/tenurelib/tenure/storetest"
)

// runOnce runs a schedule under a lease of its own for a while. It returns how the schedule ended.
func runOnce(t *testing.T, cfg schedule.Config, lease tenure.Key, d time.Duration) (ended error) {
	s, err := schedule.New(cfg)
	require.NoError(t, err)
	l, err := tenure.NewLease(cfg.Store, tenure.LeaseConfig{Key: lease, Logger: quiet})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	c, err := tenure.NewCoordinator(l, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
		ended = s.Run(ctx)
		cancel()
		return ended
	}})
	require.NoError(t, err)
	_ = c.Run(ctx)
	return ended
}

func TestAScheduleSaysWhenItsNextSlotsAre(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.SyncBuffer
		holdLogging(t, slog.New(slog.NewTextHandler(&log, nil)), time.Minute, storetest.NewMem(), schedule.Config{Plan: schedule.Daily(3, 0), Do: new(slots).Do})
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Contains(t, log.String(), `slots="[2000-01-01 03:00:00 +0000 UTC 2000-01-02 03:00:00 +0000 UTC 2000-01-03 03:00:00 +0000 UTC]"`)
		require.Equal(t, 1, strings.Count(log.String(), "the next slots of the schedule"))
	})
}

func TestAPlanWithoutASlotEndsTheSchedule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		never := planFunc(func(time.Time) time.Time { return time.Time{} })
		err := runOnce(t, schedule.Config{Store: storetest.NewMem(), Key: key, Plan: never, Do: new(slots).Do, Logger: quiet}, testkit.LeaseKey, time.Hour)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		require.ErrorContains(t, err, "is it for a date that does not exist?")
	})
}

// The record of a lease, its own or another one, is not taken for the state of a schedule, and stays as it is.
func TestAKeyThatIsALeasesIsRefused(t *testing.T) {
	for name, lease := range map[string]tenure.Key{"its own": key, "another one": testkit.LeaseKey} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, ran := storetest.NewMem(), &slots{}
				if lease != key {
					other, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key})
					require.NoError(t, err)
					testkit.MustAcquire(t, other)
				}
				err := runOnce(t, schedule.Config{Store: store, Key: key, Plan: schedule.Interval(time.Second, 0), Do: ran.Do, Logger: quiet}, lease, time.Hour)
				require.ErrorIs(t, err, tenure.ErrInvalid)
				require.Empty(t, ran.take(time.Now()))
				if lease != key {
					obj, err := store.Get(t.Context(), key)
					require.NoError(t, err)
					require.NotContains(t, string(obj.Payload), "done")
				}
			})
		})
	}
}

func TestAScheduleThatCannotUseTheStoreIsFailing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var broken atomic.Bool
		store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if broken.Load() && call.Key == key {
				return errors.New("permission denied")
			}
			return do(ctx)
		})
		s, err := schedule.New(schedule.Config{Store: store, Key: key, Plan: schedule.Daily(3, 0), Do: new(slots).Do, Logger: quiet})
		require.NoError(t, err)
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: testkit.LeaseKey, Logger: quiet})
		require.NoError(t, err)
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: s.Run})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- c.Run(ctx) }()
		failing := func() (names []string) {
			for _, run := range c.Status().Runs {
				if testkit.IsFailing(run) {
					names = append(names, run.Name+": "+run.LastError)
				}
			}
			return names
		}
		time.Sleep(10 * time.Minute)
		require.Empty(t, c.Status().Runs)
		broken.Store(true)
		time.Sleep(10 * time.Minute)
		require.Len(t, failing(), 1)
		require.Contains(t, failing()[0], "schedule/test state: ")
		require.Contains(t, failing()[0], "permission denied")
		broken.Store(false)
		time.Sleep(10 * time.Minute)
		require.Empty(t, failing())
		cancel()
		require.NoError(t, <-done)
	})
}

func TestASlotThatIsDoneRunsAgainWhenAnOperatorAsks(t *testing.T) {
	for _, missed := range []schedule.Missed{schedule.MissedRunLatest, schedule.MissedRunEach, schedule.MissedSkip} {
		synctest.Test(t, func(t *testing.T) {
			store, ran, began := storetest.NewMem(), &slots{}, time.Now()
			again := func() error {
				_, err := schedule.RunAgain(t.Context(), store, key)
				return err
			}
			ran.do = func(context.Context, schedule.Slot) error { time.Sleep(time.Minute); return nil }
			require.ErrorIs(t, again(), tenure.ErrNotFound)
			var log testkit.SyncBuffer
			holdLogging(t, slog.New(slog.NewTextHandler(&log, nil)), time.Minute, store, schedule.Config{Plan: schedule.Interval(2*time.Hour, time.Hour), Missed: missed, Do: ran.Do})
			time.Sleep(time.Minute)
			require.ErrorContains(t, again(), "no slot has been run yet")
			time.Sleep(90 * time.Minute)
			require.NoError(t, again())
			synctest.Wait()
			require.ErrorContains(t, again(), "is running")
			time.Sleep(5 * time.Minute)
			require.Equal(t, []float64{1, 1}, ran.take(began), "at once, and once")
			time.Sleep(4 * time.Hour)
			require.Equal(t, []float64{3, 5}, ran.take(began))
			require.NotContains(t, log.String(), "the plan has changed")
			require.Equal(t, 1, strings.Count(log.String(), "slot runs again"))
		})
	}
}

// On a SQLite file each write wakes the watches of the object, also the schedule's own.
func TestASlotThatFailsWaitsForItsRetryAlsoWhereWritesWake(t *testing.T) {
	store, ran := testkit.OpenSQLite(t, filepath.Join(t.TempDir(), "tenure.db")), &slots{}
	testkit.Migrate(t, store)
	failed := make(chan bool, 10)
	ran.do = func(context.Context, schedule.Slot) error { failed <- true; return errors.New("not yet") }
	stop := hold(t, store, schedule.Config{Plan: schedule.Interval(2*time.Second, 0), Do: ran.Do, Retry: time.Hour})
	<-failed
	select {
	case <-failed:
		t.Error("the slot runs again at once")
	case <-time.After(500 * time.Millisecond):
	}
	stop()
}

// A shared plan, or the same schedule twice, would run a slot beside itself.
func TestAllRefusesSchedulesThatShareAKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		s, err := schedule.New(schedule.Config{Store: store, Key: key, Plan: schedule.Daily(3, 0), Do: new(slots).Do, Logger: quiet})
		require.NoError(t, err)
		err = schedule.All(s, s)(t.Context())
		require.ErrorIs(t, err, tenure.ErrInvalid)
		require.ErrorContains(t, err, "each needs its own")
		require.ErrorIs(t, schedule.All()(t.Context()), tenure.ErrInvalid)
	})
}

// One schedule of several whose plan has ended, before it was first run, leaves the others alone.
func TestAPlanThatHasEndedBeforeTheFirstRunIsNoError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		past := planFunc(func(after time.Time) time.Time {
			if slot := began.Add(-time.Hour); slot.After(after) {
				return slot
			}
			return time.Time{}
		})
		err := runOnce(t, schedule.Config{Store: storetest.NewMem(), Key: key, Plan: past, Do: new(slots).Do, Logger: quiet}, testkit.LeaseKey, time.Hour)
		require.NoError(t, err)
	})
}

// A failover that the holder has not noticed yet may come between the request and the next look.
func TestARequestThatAFailoverKeepsIsNotUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ran, began := storetest.NewMem(), &slots{}, time.Now()
		mem.Lineages = true
		store := moving{testkit.NewMovable(mem)}
		hold(t, store, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do})
		time.Sleep(61 * time.Minute)
		_, err := schedule.RunAgain(t.Context(), store, key)
		require.NoError(t, err)
		store.Store(mem.Fork())
		time.Sleep(20 * time.Minute)
		require.Equal(t, []float64{1, 1}, ran.take(began))
	})
}

// The holder remembers what it has marked, for a failover that loses it. What an operator has changed by hand since is not lost.
func TestAFailoverLaterDoesNotUndoWhatAnOperatorHasChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ran, began := storetest.NewMem(), &slots{}, time.Now()
		mem.Lineages = true
		store := moving{testkit.NewMovable(mem)}
		runs := 0
		ran.do = func(context.Context, schedule.Slot) error {
			if runs++; runs == 2 {
				return errors.New("not yet")
			}
			return nil
		}
		hold(t, store, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do, Retry: 10 * time.Minute})
		time.Sleep(61 * time.Minute)
		err := testkit.Update(t.Context(), mem, key, func(obj tenure.Object) (tenure.Object, error) {
			obj.Payload = bytes.Replace(obj.Payload, []byte(`"done":"2000-01-01T01:00`), []byte(`"done":"2000-01-01T00:30`), 1)
			return obj, nil
		})
		require.NoError(t, err)
		time.Sleep(6 * time.Minute)
		store.Store(mem.Fork())
		time.Sleep(20 * time.Minute)
		require.Equal(t, []float64{1, 1, 1}, ran.take(began))
	})
}

func TestSeveralSchedulesUnderOneLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, a, b, began := storetest.NewMem(), &slots{}, &slots{}, time.Now()
		var all []*schedule.Schedule
		for id, do := range map[string]*slots{"a": a, "b": b} {
			s, err := schedule.New(schedule.Config{Store: store, Key: tenure.Key{Type: "schedule", ID: id}, Plan: schedule.Interval(time.Hour, 0), Do: do.Do, Logger: quiet})
			require.NoError(t, err)
			all = append(all, s)
		}
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: testkit.LeaseKey, Logger: quiet})
		require.NoError(t, err)
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: schedule.All(all...)})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 150*time.Minute)
		defer cancel()
		require.NoError(t, c.Run(ctx))
		require.Equal(t, []float64{1, 2}, a.take(began))
		require.Equal(t, []float64{1, 2}, b.take(began))
	})
}
