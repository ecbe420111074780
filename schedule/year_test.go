package schedule_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/schedule"
	"github.com/tenurelib/tenure/storetest"
)

// replica is one life of a process. It may be cut off from the store, as by a crash, and its
// clock, which on SQLite is the store's clock, may be wrong.
type replica struct {
	*tenure.SQLiteStore
	crashed atomic.Bool
	ahead   atomic.Int64 // how far its clock is ahead, a duration
}

var errCrashed = errors.New("crashed")

// store returns the shared store as the replica sees it.
func (r *replica) store() tenure.Store {
	faulty := storetest.Faulty(skewed{r.SQLiteStore, &r.ahead}, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		if r.crashed.Load() {
			return errCrashed
		}
		return do(ctx)
	})
	return &visible{faulty, r}
}

// visible also has the store's statements.
type visible struct {
	*storetest.FaultyStore
	r *replica
}

func (v *visible) PutStatement(obj tenure.Object, version int64) (string, []any, error) {
	return v.r.SQLiteStore.PutStatement(obj, version)
}

var days = flag.Int("schedule.days", 30, "how many virtual days of slots; make sim runs a year")

// Each hourly slot inserts a row in the transaction that marks the slot as done, while
// replicas shut down, crash before, during and after that transaction, and have clocks that
// are wrong by minutes. Each slot must appear exactly once.
func TestEachSlotOfAYearTakesEffectExactlyOnce(t *testing.T) {
	const ttl = 15 * time.Minute // with a shorter one, the test would spend most of its time on renewals
	synctest.Test(t, func(t *testing.T) {
		db, err := sql.Open("sqlite", ":memory:")
		require.NoError(t, err)
		db.SetMaxOpenConns(1)
		defer db.Close()
		store, err := tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true, Logger: quiet})
		require.NoError(t, err)
		defer store.Close()
		require.NoError(t, store.Migrate(t.Context()))
		_, err = db.Exec(`CREATE TABLE done (slot integer)`) // no unique key, because that would hide a second run
		require.NoError(t, err)

		random := rand.New(rand.NewPCG(1, 2))
		chance := func(one int) bool { return random.IntN(one) == 0 }
		var crashes, shutdowns, attempts int
		began := time.Now()
		for time.Since(began) < time.Duration(*days)*24*time.Hour {
			r := &replica{SQLiteStore: store}
			r.ahead.Store(int64(time.Duration(random.IntN(600)-300) * time.Second))
			life := time.Duration(random.IntN(int(20 * time.Hour)))
			crash := chance(2)
			do := func(ctx context.Context, slot schedule.Slot) error {
				attempts++
				if chance(4) {
					time.Sleep(time.Duration(random.IntN(int(90 * time.Minute)))) // sometimes longer than the interval
				}
				if chance(20) {
					return errors.New("this time it fails")
				}
				if chance(20) {
					r.crashed.Store(true)
				}
				query, args, err := slot.Statement()
				if err != nil {
					return err
				}
				// Like a paused process, it goes on even if it has crashed or lost the lease.
				tx, err := db.Begin()
				if err != nil {
					return err
				}
				defer tx.Rollback()
				if _, err := tx.Exec(`INSERT INTO done VALUES (?)`, slot.Time.Unix()); err != nil {
					return err
				}
				if _, err := tx.Exec(query, args...); err != nil {
					return err
				}
				if chance(20) {
					r.crashed.Store(true) // it can't tell whether that was before or after the commit
					if chance(2) {
						return errCrashed
					}
				}
				return tx.Commit()
			}
			stop := holdFor(t, ttl, r.store(), schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: do, Missed: schedule.MissedRunEach})
			for end := time.Now().Add(life); time.Now().Before(end) && !r.crashed.Load(); {
				time.Sleep(time.Minute)
			}
			if crash {
				r.crashed.Store(true)
				crashes++
			} else {
				shutdowns++
			}
			stop()
			time.Sleep(time.Duration(random.IntN(int(3 * time.Hour))))
		}
		last := &replica{SQLiteStore: store}
		// The remaining slots run immediately.
		stop := holdFor(t, ttl, last.store(), schedule.Config{Plan: schedule.Interval(time.Hour, 0), Missed: schedule.MissedRunEach, Do: func(ctx context.Context, slot schedule.Slot) error {
			_, err := db.Exec(`INSERT INTO done VALUES (?)`, slot.Time.Unix())
			return err
		}})
		time.Sleep(time.Hour)
		stop()

		rows, err := db.Query(`SELECT slot, count(*) FROM done GROUP BY slot ORDER BY slot`)
		require.NoError(t, err)
		defer rows.Close()
		var before, slot, times int64
		n := 0
		for ; rows.Next(); n++ {
			require.NoError(t, rows.Scan(&slot, &times))
			require.EqualValues(t, 1, times, "slot %v", time.Unix(slot, 0).UTC())
			if n > 0 {
				require.Equal(t, before+3600, slot, "a slot is missing")
			}
			before = slot
		}
		require.NoError(t, rows.Err())
		require.Greater(t, n, *days*24-30)
		t.Logf("%d slots, %d attempts, %d crashes, %d shutdowns", n, attempts, crashes, shutdowns)
		require.Greater(t, attempts, n+n/20, "nothing was interrupted")
	})
}
