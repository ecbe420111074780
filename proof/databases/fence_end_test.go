package databases_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// What it wrote before is committed or rolled back alone, and what it wrote after may be unfenced.
func TestAFuncThatEndsItsTransactionBySQLIsNeverToldThatItsWritesAreFenced(t *testing.T) {
	t.Run("Fenced on Postgres", func(t *testing.T) {
		f := newFencedPostgres(t)
		fenced := func(ending string) error {
			return f.store.Fenced(t.Context(), f.term, func(tx pgx.Tx) error {
				exec := func(ctx context.Context, query string) error { _, err := tx.Exec(ctx, query); return err }
				return errors.Join(exec(t.Context(), `INSERT INTO ledger VALUES ('before')`),
					testkit.SendEnding(t.Context(), ending, exec), exec(t.Context(), `INSERT INTO ledger VALUES ('after')`))
			})
		}
		for _, ending := range testkit.TxEndings {
			require.ErrorIs(t, fenced(ending), tenure.ErrInvalid, ending)
		}
		testkit.ExecPostgres(t, f.pool, `DELETE FROM ledger`)
		for _, harmless := range testkit.HarmlessSQL {
			require.NoError(t, fenced(harmless), harmless)
		}
		require.Equal(t, 2*len(testkit.HarmlessSQL), f.written())
		require.ErrorIs(t, f.store.Fenced(t.Context(), f.term, func(tx pgx.Tx) error {
			_, _ = tx.Exec(t.Context(), `SELECT 1/0`)
			return nil
		}), pgx.ErrTxCommitRollback)
		require.NoError(t, f.lease.Renew(t.Context(), f.term))
	})
	t.Run("FencedTx on Postgres", func(t *testing.T) {
		url := testkit.PostgresURL(t)
		store, db := testkit.OpenPostgres(t, url, tenure.PostgresConfig{}), testkit.OpenSQL(t, "pgx", url)
		testkit.Migrate(t, store)
		testkit.ExecSQL(t, db, testkit.CreateLedger)
		testkit.RunFenceEndings(t, store, db, `INSERT INTO ledger VALUES ($1)`)
	})
	t.Run("on SQLite", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "tenure.db")
		store, db := testkit.OpenSQLite(t, path), testkit.OpenSQL(t, "sqlite", "file:"+path)
		testkit.Migrate(t, store)
		testkit.ExecSQL(t, db, testkit.CreateLedger)
		testkit.RunFenceEndings(t, store, db, `INSERT INTO ledger VALUES (?)`)

		term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
		fenced := func(ending string) error {
			return store.Fenced(t.Context(), term, func(tx *sql.Tx) error {
				exec := func(ctx context.Context, query string) error { _, err := tx.ExecContext(ctx, query); return err }
				return errors.Join(exec(t.Context(), `INSERT INTO ledger VALUES (1)`),
					testkit.SendEnding(t.Context(), ending, exec), exec(t.Context(), `INSERT INTO ledger VALUES (2)`))
			})
		}
		for _, ending := range testkit.TxEndings {
			if !strings.Contains(ending, "CHAIN") {
				require.Error(t, fenced(ending), ending)
			}
		}
		for _, harmless := range testkit.HarmlessSQL {
			require.NoError(t, fenced(harmless), harmless)
		}
	})
}
