package claims_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func TestRowsWhoseAnswerTheWorkerNeverGotAreReturnedFirst(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 9)
		queue := testkit.Must(claims.NewQueue(db.open(), tasks))
		remote, other := db.remote("w", time.Hour), db.remote("other", time.Hour)
		take := func(n int, have ...claims.Claim) []claims.Claim {
			db.Helper()
			got, err := takeFor(db.Context(), queue, remote, claims.TakeOptions{N: n, Have: append([]claims.Claim{}, have...)})
			require.NoError(db, err)
			return got
		}
		lost := take(3)
		require.Equal(db, []string{"1", "2", "3"}, takenIDs(lost))
		require.Equal(db, lost, take(5), "and nothing is taken")
		require.Equal(db, lost[:2], take(2))
		require.Equal(db, lost[2:], take(5, lost[:2]...))
		require.Equal(db, lost[1:2], take(5, lost[0], lost[2]))
		require.Equal(db, 3, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))

		// A row of which the worker has an earlier claim is one that it does not know.
		require.NoError(db, queue.Release(db.Context(), lost[0]))
		again := take(1, lost...)
		require.Equal(db, []string{"1"}, takenIDs(again))
		require.Equal(db, again, take(5, lost...))
		fourth := take(1, append(lost, again[0])...)
		require.Equal(db, []string{"4"}, takenIDs(fourth))

		got, err := queue.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: 1})
		require.NoError(db, err)
		require.Equal(db, []string{"5"}, takenIDs(got), "without Have nothing is looked up")
		got, err = queue.TryTakeFor(db.Context(), other, claims.TakeOptions{N: 1, Have: lost})
		require.NoError(db, err)
		require.Equal(db, []string{"6"}, takenIDs(got), "another session's rows are not this one's")
	})
}

// The process that took it died before it could do that.
func TestAnUnknownRowWithoutAttemptsLeftIsRetired(t *testing.T) {
	cfg := tasks
	cfg.MaxAttempts, cfg.Exhausted = 2, "status = 'failed'"
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 2)
		queue := testkit.Must(claims.NewQueue(db.open(), cfg))
		remote := db.remote("w", time.Hour)
		known, err := queue.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: 1})
		require.NoError(db, err)
		db.exec(`UPDATE tasks SET session = 'w', token = 7, attempts = 3`)
		known[0].Token = 7
		got, err := queue.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: 5, Have: known})
		require.NoError(db, err)
		require.Empty(db, got)
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE id = 2 AND status = 'failed' AND session IS NULL`))
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE id = 1 AND status = 'queued' AND session = 'w'`), "the worker works on it")
	})
}

func TestARemoteTakeWhoseStatementIsNotAnsweredLosesNoRow(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 40)
		store := storetest.Faulty(db.open(), nil)
		queue := testkit.Must(claims.NewQueue(store, tasks))
		remote := db.remote("w", time.Hour)
		have, lost := []claims.Claim{}, 0
		for len(have) < 40 {
			if len(have)%3 == 0 {
				store.SetHook(testkit.Only("queue.take", testkit.Once(testkit.LoseAnswer)))
			}
			ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
			got, err := takeFor(ctx, queue, remote, claims.TakeOptions{N: 4, Have: have})
			cancel()
			if err != nil {
				require.ErrorIs(db, err, testkit.ErrReset)
				lost++
			}
			have = append(have, got...)
			store.SetHook(nil)
		}
		require.Greater(db, lost, 2)
		require.NoError(db, queue.Finish(db.Context(), have...))
		require.Equal(db, 40, db.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND attempts = 1`))
		store.SetHook(testkit.Only("queue.owned", testkit.Once(testkit.Refuse)))
		_, err := queue.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: 1, Have: have})
		require.False(db, err == nil || errors.Is(err, tenure.ErrLost), "what it owns can't be read")
	})
}
