package schedule_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/schedule"
	"github.com/tenurelib/tenure/storetest"
)

var (
	quiet = slog.New(slog.NewTextHandler(io.Discard, nil))
	key   = tenure.Key{Type: "schedule", ID: "test"}
)

// hold runs a schedule on a replica that competes for the lease, until the test ends or
// stop is called.
func hold(t *testing.T, store tenure.Store, cfg schedule.Config) (stop func()) {
	t.Helper()
	return holdFor(t, 15*time.Second, store, cfg)
}

func holdFor(t *testing.T, ttl time.Duration, store tenure.Store, cfg schedule.Config) (stop func()) {
	t.Helper()
	return holdLogging(t, quiet, ttl, store, cfg)
}

func holdLogging(t *testing.T, log *slog.Logger, ttl time.Duration, store tenure.Store, cfg schedule.Config) (stop func()) {
	t.Helper()
	cfg.Store, cfg.Key, cfg.Logger = store, key, log
	s, err := schedule.New(cfg)
	require.NoError(t, err)
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "test"}, TTL: ttl, Logger: quiet})
	require.NoError(t, err)
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: s.Run, Logger: log})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { coordinator.Run(ctx) })
	stop = func() { cancel(); done.Wait() }
	t.Cleanup(stop)
	return stop
}

// slots collects the slots that were run, each with its outcome.
type slots struct {
	mu  sync.Mutex
	ran []time.Time
	do  func(ctx context.Context, slot schedule.Slot) error
}

func (s *slots) Do(ctx context.Context, slot schedule.Slot) error {
	s.mu.Lock()
	s.ran = append(s.ran, slot.Time)
	s.mu.Unlock()
	if s.do != nil {
		return s.do(ctx, slot)
	}
	return nil
}

// take returns the slots that ran since the last call, in hours since began.
func (s *slots) take(began time.Time) (hours []float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.ran {
		hours = append(hours, slot.Sub(began).Hours())
	}
	s.ran = nil
	return hours
}

func TestASlotRunsOnceAlthoughTheLeaseChangesHands(t *testing.T) {
	testkit.Slow(t)
	synctest.Test(t, func(t *testing.T) {
		store, ran, began := storetest.NewMem(), &slots{}, time.Now() // midnight
		cfg := schedule.Config{Plan: schedule.Interval(24*time.Hour, 3*time.Hour), Do: ran.Do}
		for range 9 { // three deployments a day, for three days
			stop := hold(t, store, cfg)
			time.Sleep(8 * time.Hour)
			stop()
		}
		require.Equal(t, []float64{3, 27, 51}, ran.take(began))
	})
}

func TestMissedDeterminesWhichMissedSlotsRun(t *testing.T) {
	for missed, want := range map[schedule.Missed][]float64{
		schedule.MissedRunLatest: {9, 10, 11},
		schedule.MissedRunEach:   {3, 4, 5, 6, 7, 8, 9, 10, 11},
		schedule.MissedSkip:      {10, 11},
	} {
		synctest.Test(t, func(t *testing.T) {
			store, ran, began := storetest.NewMem(), &slots{}, time.Now()
			cfg := schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do, Missed: missed}
			stop := hold(t, store, cfg)
			time.Sleep(150 * time.Minute)
			stop()
			require.Equal(t, []float64{1, 2}, ran.take(began))
			time.Sleep(7 * time.Hour) // no replica is running until half past nine
			stop = hold(t, store, cfg)
			time.Sleep(2 * time.Hour)
			stop()
			require.Equal(t, want, ran.take(began), "missed: %d", missed)
		})
	}
}

func TestASlotThatWasInterruptedOrFailedIsRunAgain(t *testing.T) {
	for _, missed := range []schedule.Missed{schedule.MissedRunLatest, schedule.MissedRunEach, schedule.MissedSkip} {
		synctest.Test(t, func(t *testing.T) {
			store, ran, began := storetest.NewMem(), &slots{}, time.Now()
			ran.do = func(ctx context.Context, _ schedule.Slot) error {
				<-ctx.Done()
				return ctx.Err()
			}
			var log testkit.SyncBuffer
			cfg := schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do, Missed: missed, Retry: time.Second}
			stop := holdLogging(t, slog.New(slog.NewTextHandler(&log, nil)), 15*time.Second, store, cfg)
			time.Sleep(61 * time.Minute)
			stop()
			synctest.Wait() // until the log is written
			require.Contains(t, log.String(), `level=INFO msg="slot was interrupted; it will be run again"`)
			require.NotContains(t, log.String(), "slot failed")

			failures := 2
			ran.do = func(context.Context, schedule.Slot) error {
				if failures--; failures >= 0 {
					return errors.New("not yet")
				}
				return nil
			}
			stop = hold(t, store, cfg)
			time.Sleep(30 * time.Minute)
			stop()
			require.Equal(t, []float64{1, 1, 1, 1}, ran.take(began), "missed: %d", missed)
		})
	}
}

func TestASlotWhoseMarkFailsIsMarkedLaterAndNotRunAgain(t *testing.T) {
	for name, fault := range map[string]func(context.Context, func(context.Context) error) error{
		"the request is lost": func(context.Context, func(context.Context) error) error { return errors.New("connection refused") },
		"the answer is lost": func(ctx context.Context, do func(context.Context) error) error {
			_ = do(ctx)
			return errors.New("connection reset")
		},
	} {
		for _, stops := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", the replica stops: ", stops), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ran, began := &slots{}, time.Now()
					var done, failed atomic.Bool
					ran.do = func(context.Context, schedule.Slot) error { done.Store(true); return nil }
					store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
						if call.Op == "put" && call.Key == key && done.Load() && failed.CompareAndSwap(false, true) {
							return fault(ctx, do)
						}
						return do(ctx)
					})
					cfg := schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do}
					stop := hold(t, store, cfg)
					time.Sleep(time.Hour + time.Millisecond)
					if stops {
						stop()
						hold(t, store, cfg)
					}
					time.Sleep(30 * time.Minute)
					require.True(t, failed.Load())
					require.Equal(t, []float64{1}, ran.take(began))
					time.Sleep(time.Hour)
					require.Equal(t, []float64{2}, ran.take(began))
				})
			})
		}
	}
}

// Slots come due while one is running.
func TestAJobMayTakeLongerThanItsInterval(t *testing.T) {
	testkit.Slow(t)
	for missed, want := range map[schedule.Missed][]float64{
		schedule.MissedRunLatest: {1, 3, 6, 8},
		schedule.MissedRunEach:   {1, 2, 3, 4},
		schedule.MissedSkip:      {1, 4, 7},
	} {
		synctest.Test(t, func(t *testing.T) {
			store, ran, began := storetest.NewMem(), &slots{}, time.Now()
			ran.do = func(ctx context.Context, _ schedule.Slot) error {
				time.Sleep(150 * time.Minute)
				return nil
			}
			hold(t, store, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do, Missed: missed})
			time.Sleep(9 * time.Hour)
			require.Equal(t, want, ran.take(began), "missed: %d", missed)
		})
	}
}

// skewed is a store whose clock differs from the replica's.
type skewed struct {
	tenure.Store
	by *atomic.Int64 // a duration
}

func (s skewed) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := s.Store.Get(ctx, key)
	return s.shift(obj), err
}

func (s skewed) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	obj, err := s.Store.PutIf(ctx, obj, cond)
	return s.shift(obj), err
}

var _ tenure.Fencer = skewed{} // or no slot would be marked as done

func (s skewed) Fence(guard tenure.Guard) (tenure.Store, error) {
	store, err := tenure.Fence(s.Store, guard)
	return skewed{store, s.by}, err
}

func (s skewed) shift(obj tenure.Object) tenure.Object {
	obj.CreatedAt, obj.UpdatedAt = obj.CreatedAt.Add(time.Duration(s.by.Load())), obj.UpdatedAt.Add(time.Duration(s.by.Load()))
	return obj
}

func TestTheClockOfTheStoreDecidesWhenASlotIsDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ahead atomic.Int64
		ahead.Store(int64(time.Hour))
		store, ran, began := skewed{storetest.NewMem(), &ahead}, &slots{}, time.Now()
		at := make(chan float64, 10)
		ran.do = func(context.Context, schedule.Slot) error {
			at <- time.Since(began).Round(10 * time.Minute).Hours()
			return nil
		}
		hold(t, store, schedule.Config{Plan: schedule.Interval(time.Hour, 30*time.Minute), Do: ran.Do})
		time.Sleep(time.Hour)
		require.Equal(t, []float64{1.5}, ran.take(began))
		require.Equal(t, 0.5, <-at)

		ahead.Store(0) // it is set back: slot 1.5 is not run again
		time.Sleep(2 * time.Hour)
		require.Equal(t, []float64{2.5}, ran.take(began))
		ahead.Store(int64(3 * time.Hour))
		time.Sleep(6 * time.Minute)
		require.Equal(t, []float64{5.5}, ran.take(began))
	})
}

func TestTheStateHasTheLastSlotsDoneAndBegun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, began := storetest.NewMem(), time.Now()
		var ran []schedule.Slot
		cfg := schedule.Config{Store: store, Key: key, Plan: schedule.Interval(time.Hour, 0), Do: func(ctx context.Context, slot schedule.Slot) error {
			if ran = append(ran, slot); len(ran) > 1 {
				return errors.New("only the first one succeeds")
			}
			return nil
		}}
		_, err := schedule.ReadState(t.Context(), store, key)
		require.ErrorIs(t, err, tenure.ErrNotFound)
		time.Sleep(time.Minute)
		hold(t, store, cfg)
		time.Sleep(150 * time.Minute)
		state, err := schedule.ReadState(t.Context(), store, key)
		require.NoError(t, err)
		require.True(t, state.Done.Equal(began.Add(time.Hour)) && state.Begun.Equal(began.Add(2*time.Hour)), "%+v", state)
	})
}

func TestNewNamesEachInvalidField(t *testing.T) {
	ok := schedule.Config{Store: storetest.NewMem(), Key: key, Plan: schedule.Interval(time.Hour, 0), Do: new(slots).Do}
	for want, spoil := range map[string]func(*schedule.Config){
		"Store is nil":    func(cfg *schedule.Config) { cfg.Store = nil },
		"empty id":        func(cfg *schedule.Config) { cfg.Key.ID = "" },
		"Plan is nil":     func(cfg *schedule.Config) { cfg.Plan = nil },
		"Do is nil":       func(cfg *schedule.Config) { cfg.Do = nil },
		"time.Local":      func(cfg *schedule.Config) { cfg.Location = time.Local },
		"has no name":     func(cfg *schedule.Config) { cfg.Location = time.FixedZone("", 3600) },
		"Missed is 3":     func(cfg *schedule.Config) { cfg.Missed = 3 },
		"Retry -1s is ne": func(cfg *schedule.Config) { cfg.Retry = -time.Second },
	} {
		cfg := ok
		spoil(&cfg)
		_, err := schedule.New(cfg)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		require.ErrorContains(t, err, want)
	}
	s, err := schedule.New(ok)
	require.NoError(t, err)
	require.ErrorIs(t, s.Run(t.Context()), tenure.ErrInvalid, "outside of a job")
	require.Panics(t, func() { schedule.Interval(0, 0) })
}

type planFunc func(time.Time) time.Time

func (f planFunc) Next(after time.Time) time.Time { return f(after) }

func TestAPlanThatDoesNotAdvanceEndsTheJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, ran := storetest.NewMem(), &slots{}
		stands := planFunc(func(after time.Time) time.Time { return after })
		stop := hold(t, store, schedule.Config{Plan: stands, Do: ran.Do})
		time.Sleep(time.Hour)
		stop()
		require.Empty(t, ran.take(time.Now()))
	})
}

// As @every 1h of robfig/cron: each retry would be another slot.
func TestAPlanThatCountsFromTheQuestionIsRefused(t *testing.T) {
	for _, interval := range []time.Duration{2 * time.Second, time.Hour, 1000 * time.Hour} {
		cfg := schedule.Config{Store: storetest.NewMem(), Key: key, Do: new(slots).Do, Plan: planFunc(func(after time.Time) time.Time {
			return after.Add(interval - time.Duration(after.Nanosecond()))
		})}
		_, err := schedule.New(cfg)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		require.ErrorContains(t, err, "use Interval")
		cfg.Plan = schedule.Interval(interval, time.Minute)
		_, err = schedule.New(cfg)
		require.NoError(t, err)
	}
}

func TestAPlanMayEnd(t *testing.T) {
	testkit.Slow(t)
	synctest.Test(t, func(t *testing.T) {
		store, ran, began := storetest.NewMem(), &slots{}, time.Now()
		once := planFunc(func(after time.Time) time.Time {
			if slot := began.Add(time.Hour); slot.After(after) {
				return slot
			}
			return time.Time{}
		})
		hold(t, store, schedule.Config{Plan: once, Do: ran.Do})
		time.Sleep(24 * time.Hour)
		require.Equal(t, []float64{1}, ran.take(began))
	})
}

func TestIntervals(t *testing.T) {
	at := func(text string) time.Time {
		parsed, err := time.Parse(time.RFC3339, text)
		require.NoError(t, err)
		return parsed
	}
	for _, c := range []struct {
		interval, phase time.Duration
		after, want     string
	}{
		{time.Hour, 0, "2026-11-22T10:59:59Z", "2026-11-22T11:00:00Z"},
		{time.Hour, 0, "2026-11-22T11:00:00Z", "2026-11-22T12:00:00Z"},
		{24 * time.Hour, 3 * time.Hour, "2026-11-22T02:00:00+01:00", "2026-11-22T03:00:00Z"},
		{24 * time.Hour, 3 * time.Hour, "2026-11-22T03:00:00Z", "2026-11-23T03:00:00Z"},
		{24 * time.Hour, -time.Hour, "2026-11-22T12:00:00Z", "2026-11-22T23:00:00Z"},
		{7 * 24 * time.Hour, 4 * 24 * time.Hour, "2026-11-22T12:00:00Z", "2026-11-23T00:00:00Z"}, // a Monday
		{24 * time.Hour, 0, "1969-12-31T12:00:00Z", "1970-01-01T00:00:00Z"},
		{24 * time.Hour, 0, "1969-12-30T00:00:00Z", "1969-12-31T00:00:00Z"},
	} {
		require.Equal(t, at(c.want), schedule.Interval(c.interval, c.phase).Next(at(c.after)), "%+v", c)
	}
}

func TestAMillionMissedSlotsCostAFewSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, ran := storetest.NewMem(), &slots{}
		var calls atomic.Int64
		minutely := schedule.Interval(time.Minute, 0)
		counted := planFunc(func(after time.Time) time.Time { calls.Add(1); return minutely.Next(after) })
		cfg := schedule.Config{Plan: counted, Do: ran.Do}
		stop := hold(t, store, cfg)
		time.Sleep(time.Second)
		stop()
		time.Sleep(2 * 365 * 24 * time.Hour)
		calls.Store(0)
		hold(t, store, cfg)
		time.Sleep(time.Second)
		require.Len(t, ran.take(time.Now()), 1)
		require.Less(t, calls.Load(), int64(100))
	})
}

func TestAFormerHolderBeginsNoSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, ran := storetest.NewMem(), &slots{}
		holdFor(t, 10*time.Hour, store, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do})
		time.Sleep(59 * time.Minute)
		// Another program takes the lease; this replica notices that at its next renewal.
		key := tenure.Key{Type: "lease", ID: "test"}
		obj, err := store.Get(t.Context(), key)
		require.NoError(t, err)
		require.NoError(t, store.DeleteIf(t.Context(), key, tenure.IfVersion(obj.Version)))
		other, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Holder: "other", TTL: 10 * time.Hour, Logger: quiet})
		require.NoError(t, err)
		_, err = other.TryAcquire(t.Context())
		require.NoError(t, err)
		time.Sleep(5 * time.Minute)
		require.Empty(t, ran.take(time.Now()))
	})
}

// wrapped is a store as a team wraps it, for metrics.
type wrapped struct{ tenure.Store }

func (w wrapped) Unwrap() tenure.Store { return w.Store }

func TestASlotIsNotDoneUntilItsTransactionIsCommitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, err := tenure.OpenSQLite(t.Context(), ":memory:", tenure.SQLiteConfig{Shared: true, Logger: quiet})
		require.NoError(t, err)
		defer store.Close()
		require.NoError(t, store.Migrate(t.Context()))
		ran, began := &slots{}, time.Now()
		ran.do = func(_ context.Context, slot schedule.Slot) error {
			_, _, err := slot.Statement() // and forgets it
			assert.NoError(t, err)
			return err
		}
		stop := holdFor(t, 15*time.Minute, wrapped{store}, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do})
		time.Sleep(62*time.Minute + 30*time.Second)
		stop()
		require.Equal(t, []float64{1, 1, 1}, ran.take(began))
	})
}

func TestTheStatusOfTheCoordinatorTellsHowTheSlotsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, ran := testkit.OpenSQLite(t, ":memory:"), &slots{}
		testkit.Migrate(t, store)
		ran.do = func(ctx context.Context, slot schedule.Slot) error {
			switch slot.Time.Hour() {
			case 1:
				return errors.New("no such table")
			case 2:
				_, _, err := slot.Statement() // and no transaction is committed
				return err
			case 3:
				query, args, err := slot.Statement()
				assert.NoError(t, err)
				testkit.ExecSQL(t, store.DB(), query, args...)
				return errors.New("the answer was lost")
			}
			return nil
		}
		s, err := schedule.New(schedule.Config{Store: store, Key: key, Plan: schedule.Interval(time.Hour, 0), Do: ran.Do, Retry: time.Hour, Logger: quiet})
		require.NoError(t, err)
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: testkit.LeaseKey, Logger: quiet})
		require.NoError(t, err)
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: s.Run})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 270*time.Minute)
		defer cancel()
		require.NoError(t, c.Run(ctx))
		runs := c.Status().Runs
		require.Len(t, runs, 1)
		got := runs[0]
		require.Equal(t, []any{"schedule/test", 4, 1, 3}, []any{got.Name, got.Started, got.Succeeded, got.Failed})
		require.Contains(t, got.LastError, "the answer was lost", "although the slot is done")
		require.False(t, testkit.IsFailing(got))
	})
}

func TestALogThatBlocksDelaysNoSlotAndNoHandover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		defer close(release)
		store := storetest.NewMem()
		ran := slots{do: func(context.Context, schedule.Slot) error { return errors.New("refused") }}
		s, err := schedule.New(schedule.Config{Store: store, Key: key, Plan: schedule.Interval(time.Hour, 0), Do: ran.Do, Logger: slog.New(testkit.BlockedLog(release))})
		require.NoError(t, err)
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: s.Run})
		require.NoError(t, err)
		stop := testkit.RunCoordinator(t, t.Context(), coordinator)
		time.Sleep(time.Hour + 10*time.Minute)
		stop()
		require.GreaterOrEqual(t, len(ran.ran), 10, "one each minute")
		_, err = lease.Read(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound, "the job has returned, and the lease is released")
	})
}

// moving is a [testkit.Movable] whose fenced stores move with it.
type moving struct{ *testkit.Movable }

func (m moving) Fence(guard tenure.Guard) (tenure.Store, error) { return fencedMoving{m, guard}, nil }

type fencedMoving struct {
	moving
	guard tenure.Guard
}

func (f fencedMoving) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	fenced, err := f.Load().Fence(f.guard)
	if err != nil {
		return tenure.Object{}, err
	}
	return fenced.PutIf(ctx, obj, cond)
}

// A failover loses that a slot is done, or the whole state. The slot's work is elsewhere, and stays.
func TestASlotWhoseMarkAFailoverLosesIsNotRunAgain(t *testing.T) {
	for name, before := range map[string]time.Duration{"its mark": 50 * time.Minute, "the state": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mem, ran, began := storetest.NewMem(), &slots{}, time.Now()
				mem.Lineages = true
				store := moving{testkit.NewMovable(mem)}
				standby := mem.Fork()
				hold(t, store, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do})
				time.Sleep(before)
				if before > 0 {
					standby = mem.Fork()
				}
				time.Sleep(61*time.Minute - before)
				store.Store(standby)
				time.Sleep(2 * time.Hour)
				require.Equal(t, []float64{1, 2, 3}, ran.take(began))
			})
		})
	}
}

func TestASlotRunsAgainIfSomebodySetsTheStateBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ran, began := storetest.NewMem(), &slots{}, time.Now()
		mem.Lineages = true
		hold(t, mem, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do})
		time.Sleep(50 * time.Minute)
		state, err := mem.Get(t.Context(), key)
		require.NoError(t, err)
		time.Sleep(11 * time.Minute)
		_, err = mem.PutIf(t.Context(), state, tenure.Unconditional())
		require.NoError(t, err)
		time.Sleep(10 * time.Minute)
		require.Equal(t, []float64{1, 1}, ran.take(began))
	})
}

// The state has the location in which the schedule was begun, whatever this replica's is.
func TestASlotThatIsMarkedAgainKeepsItsLocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ran := storetest.NewMem(), &slots{}
		mem.Lineages = true
		payload, err := json.Marshal(schedule.State{Done: time.Now(), Location: "Europe/Berlin"})
		require.NoError(t, err)
		_, err = mem.PutIf(t.Context(), tenure.Object{Key: key, Payload: payload}, tenure.IfAbsent())
		require.NoError(t, err)
		store := moving{testkit.NewMovable(mem)}
		hold(t, store, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do})
		time.Sleep(50 * time.Minute)
		standby := mem.Fork()
		time.Sleep(11 * time.Minute)
		before, err := mem.Get(t.Context(), key)
		require.NoError(t, err)
		store.Store(standby)
		time.Sleep(30 * time.Minute)
		after, err := standby.Get(t.Context(), key)
		require.NoError(t, err)
		require.JSONEq(t, string(before.Payload), string(after.Payload))
	})
}

// The clock is a day ahead while the term begins, and is set right a minute later.
func TestSlotsAreNotSkippedBecauseTheClockWasAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ahead atomic.Int64
		store, ran, began := storetest.NewMem(), &slots{}, time.Now()
		store.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
		cfg := schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do, Missed: schedule.MissedSkip}
		stop := hold(t, store, cfg)
		time.Sleep(150 * time.Minute)
		stop()
		ahead.Store(int64(24 * time.Hour))
		hold(t, store, cfg)
		time.Sleep(time.Minute)
		ahead.Store(0)
		time.Sleep(3 * time.Hour)
		require.Equal(t, []float64{1, 2, 3, 4, 5}, ran.take(began))
	})
}

// The primary's clock was a day ahead when a slot was done. The failover loses nothing.
func TestADeletionOfTheStateAfterAFailoverIsNotUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ahead atomic.Int64
		now := func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
		mem, ran, began := storetest.NewMem(), &slots{}, time.Now()
		mem.Now, mem.Lineages = now, true
		store := moving{testkit.NewMovable(mem)}
		ahead.Store(int64(24 * time.Hour))
		hold(t, store, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: ran.Do})
		time.Sleep(90 * time.Minute)
		require.Equal(t, []float64{25}, ran.take(began))
		next := mem.Fork()
		next.Now = now
		ahead.Store(0)
		store.Store(next)
		time.Sleep(time.Hour)
		require.Empty(t, ran.take(began))
		obj, err := next.Get(t.Context(), key)
		require.NoError(t, err)
		require.NoError(t, next.DeleteIf(t.Context(), key, tenure.IfVersion(obj.Version)))
		time.Sleep(time.Hour)
		require.Equal(t, []float64{3}, ran.take(began))
	})
}

// far is a plan with one slot, and another that JSON can't keep.
type far struct{ once time.Time }

func (f far) Next(after time.Time) time.Time {
	if after.Before(f.once) {
		return f.once
	}
	return time.Unix(1<<40, 0)
}

func TestAPlanThatNamesAYearWithFiveDigitsRunsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, ran, began, log := storetest.NewMem(), &slots{}, time.Now(), &testkit.SyncBuffer{}
		holdLogging(t, slog.New(slog.NewTextHandler(log, nil)), 15*time.Second, store, schedule.Config{Plan: far{began.Add(time.Hour)}, Do: ran.Do})
		time.Sleep(3 * time.Hour)
		require.Empty(t, ran.take(began))
		require.Contains(t, log.String(), "return the zero time if no slot follows")
	})
}

func TestAScheduleNeedsAStoreWithAClock(t *testing.T) {
	clockless := storetest.NewMem()
	clockless.Events = true
	_, err := schedule.New(schedule.Config{Store: clockless, Key: key, Plan: schedule.Interval(time.Hour, 0), Do: new(slots).Do})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "Store has no clock")
}
