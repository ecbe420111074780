package claims_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
)

func TestRowsThatATransactionHasLockedKeepNoOtherFromBeingTakenPerKey(t *testing.T) {
	db := rowsTableOnPostgres(t, perKey)
	const locked = 100
	for id := range locked + 1 {
		db.addFor(id, id, id)
	}
	tx, err := db.pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(t.Context(), `SELECT FROM tasks WHERE id < $1 FOR UPDATE`, locked)
	require.NoError(t, err)
	w := db.worker(claims.SessionConfig{}, perKey)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	got, err := w.rows.Take(ctx, 1)
	require.NoError(t, err)
	require.Equal(t, []string{"100"}, takenIDs(got))
}

// The text of its ID is another row's ID.
func TestARowWithABlobForAnIDGivesNobodyTheRowOfAnother(t *testing.T) {
	db := rowsOnSQLite(t)
	db.exec(`CREATE TABLE tasks (id TEXT NOT NULL PRIMARY KEY, status TEXT NOT NULL DEFAULT 'queued', priority INTEGER NOT NULL DEFAULT 0, payload TEXT,
		session TEXT, token INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, not_before INTEGER)`)
	db.exec(`CREATE INDEX tasks_session ON tasks (session, id) WHERE session IS NOT NULL`)
	db.exec(`INSERT INTO tasks (id) VALUES ('1')`)
	a, b := db.worker(claims.SessionConfig{}, tasks), db.worker(claims.SessionConfig{}, tasks)
	got := a.take(1)
	db.exec(`INSERT INTO tasks (id) VALUES (X'31'), ('2')`)
	require.Equal(t, []string{"2"}, takenIDs(b.take(2)))
	require.NoError(t, a.rows.Finish(t.Context(), got[0]))
}
