package tenure_test

import (
	"database/sql"
	"path/filepath"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/fencerace"
	"github.com/tenurelib/tenure/storetest"
)

const fenceRaces = 334 // at each of three isolation levels

func TestNoTransactionWithAFenceStatementCommitsAfterTheNextTermBegan(t *testing.T) {
	t.Run("Postgres, pgx's stdlib", func(t *testing.T) {
		url := postgresURL(t)
		store := openPostgres(t, url, tenure.PostgresConfig{})
		migrate(t, store)
		db := openSQL(t, "pgx", url)
		_, err := db.Exec(fencerace.Setup)
		require.NoError(t, err)
		for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			fencerace.Run(t, store, db, level, `INSERT INTO ledger VALUES ($1)`, fenceRaces)
		}
	})
	t.Run("SQLite", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "tenure.db")
		store := openSQLite(t, path)
		migrate(t, store)
		// Its transactions begin without the write lock.
		db := openSQL(t, "sqlite", "file:"+path+"?_pragma=busy_timeout(10000)")
		_, err := db.Exec(fencerace.Setup)
		require.NoError(t, err)
		fencerace.Run(t, store, db, sql.LevelDefault, `INSERT INTO ledger VALUES (?)`, fenceRaces)
	})
}

func TestAFenceStatementIsRefusedForATermThatIsNone(t *testing.T) {
	postgres := must(tenure.NewPostgresStore(postgresPool(t, "postgres://nobody@127.0.0.1:1/none"), tenure.PostgresConfig{Logger: quiet}))
	defer postgres.Close()
	sqlite := must(tenure.NewSQLiteStore(sql.OpenDB(untouched{t}), tenure.SQLiteConfig{}))
	lease := newLease(t, storetest.NewMem(), tenure.LeaseConfig{})
	over := mustAcquire(t, lease)
	require.NoError(t, lease.Release(t.Context(), over))
	for _, store := range []fencerace.Store{postgres, sqlite} {
		_, _, err := store.FenceStatement(nil)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		_, _, err = store.FenceStatement(over)
		require.ErrorIs(t, err, tenure.ErrLost)
	}
	require.NoError(t, tenure.FenceError(nil))
}
