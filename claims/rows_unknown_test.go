package claims_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// Another system locks rows in the same column, or the sessions of another release are in another table: they are at work.
func TestARowWhoseOwnerIsNoSessionOfTheStoreIsNotTaken(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		const foreign = "worker-3 on host-a"
		db.exec(`INSERT INTO tasks (id, session, token) VALUES (1, '` + foreign + `', 1)`)
		db.exec(`INSERT INTO tasks (id) VALUES (2)`)
		var log testkit.SyncBuffer
		a := testkit.Must(claims.NewSession(db.open(), claims.SessionConfig{TTL: time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}))
		rows := testkit.Must(newRows(a, tasks))
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- a.Run(ctx) }()
		got, err := rows.Take(ctx, 2)
		require.NoError(db, err)
		require.Len(db, got, 1, "the row without an owner")

		// The owner's process has died, and its record was removed. Its row is found only later.
		db.endedSession("gone")
		// Its processes were down for weeks.
		db.exec(`UPDATE objects_tombstones SET resource_version = resource_version - 50 * 86400000000`)
		db.endedSession("another") // which has old tombstones pruned
		db.exec(`INSERT INTO tasks (id, session, token) VALUES (3, 'gone', 1)`)
		require.Eventually(db, func() bool { return db.count(`SELECT count(*) FROM tasks WHERE session = 'gone'`) == 0 }, 10*time.Second, 10*time.Millisecond)
		time.Sleep(2 * time.Second) // two looks at a random moment
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE session = '`+foreign+`'`))
		require.Equal(db, 1, strings.Count(log.String(), "rows name owners that are no sessions of this store"), log.String())
		stop()
		require.NoError(db, <-ended)
	})
}
