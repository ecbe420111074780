package databases_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func TestNoTransactionWithAFenceStatementCommitsAfterTheNextTermBegan(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	const races = 334 // at each of three isolation levels
	t.Run("Postgres, pgx's stdlib", func(t *testing.T) {
		url := testkit.PostgresURL(t)
		store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
		testkit.Migrate(t, store)
		db := testkit.OpenSQL(t, "pgx", url)
		testkit.ExecSQL(t, db, testkit.CreateLedger)
		for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			testkit.RunFenceRaces(t, store, db, level, `INSERT INTO ledger VALUES ($1)`, races)
		}
	})
	t.Run("SQLite", func(t *testing.T) {
		path := t.TempDir() + "/t.db"
		store := testkit.OpenSQLite(t, path)
		testkit.Migrate(t, store)
		db := testkit.OpenSQL(t, "sqlite", "file:"+path+"?_pragma=busy_timeout(10000)") // its transactions begin without the write lock
		testkit.ExecSQL(t, db, testkit.CreateLedger)
		testkit.RunFenceRaces(t, store, db, sql.LevelDefault, `INSERT INTO ledger VALUES (?)`, races)
	})
}

func TestNoFenceStatementIsMadeForATermThatIsOver(t *testing.T) {
	postgres := testkit.Must(tenure.NewPostgresStore(testkit.PostgresPool(t, "postgres://nobody@127.0.0.1:1/none"), tenure.PostgresConfig{Logger: testkit.Quiet}))
	defer postgres.Close()
	sqlite := testkit.Must(tenure.NewSQLiteStore(testkit.OpenSQL(t, "sqlite", t.TempDir()), tenure.SQLiteConfig{})) // a directory, and no server: neither is asked
	lease := testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{})
	over := testkit.MustAcquire(t, lease)
	require.NoError(t, lease.Release(t.Context(), over))
	for _, store := range []tenure.SQLStore{postgres, sqlite} {
		_, _, err := store.FenceStatement(nil)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		_, _, err = store.FenceStatement(over)
		require.ErrorIs(t, err, tenure.ErrLost)
	}
	require.NoError(t, tenure.FenceError(nil))
}

func TestAFencedTxWritesAllOrNothing(t *testing.T) {
	stores := map[string]func(t *testing.T) (tenure.Database, *sql.DB){
		"postgres": func(t *testing.T) (tenure.Database, *sql.DB) {
			url := testkit.PostgresURL(t)
			return testkit.OpenPostgres(t, url, tenure.PostgresConfig{}), testkit.OpenSQL(t, "pgx", url)
		},
		"sqlite": func(t *testing.T) (tenure.Database, *sql.DB) {
			path := filepath.Join(t.TempDir(), "tenure.db")
			return testkit.OpenSQLite(t, path), testkit.OpenSQL(t, "sqlite", "file:"+path)
		},
	}
	for name, open := range stores {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			store, db := open(t)
			testkit.Migrate(t, store)
			testkit.ExecSQL(t, db, `CREATE TABLE ledger (line bigint)`)
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
			term := testkit.MustAcquire(t, lease)
			insert := func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, `INSERT INTO ledger VALUES (1)`)
				return err
			}
			require.NoError(t, tenure.FencedTx(ctx, store, term, db, nil, insert))
			require.Equal(t, 1, countRows(t, db))

			mistake := errors.New("a mistake")
			require.Equal(t, mistake, tenure.FencedTx(ctx, store, term, db, nil, func(tx *sql.Tx) error {
				require.NoError(t, insert(tx))
				return mistake
			}))
			require.PanicsWithValue(t, "oops", func() {
				_ = tenure.FencedTx(ctx, store, term, db, nil, func(tx *sql.Tx) error { _ = insert(tx); panic("oops") })
			})
			err := tenure.FencedTx(ctx, store, term, db, nil, func(tx *sql.Tx) error { return tx.Rollback() })
			require.ErrorIs(t, err, sql.ErrTxDone)
			require.ErrorContains(t, err, "fn has ended the transaction itself")
			ended, cancel := context.WithCancel(ctx)
			err = tenure.FencedTx(ended, store, term, db, nil, func(tx *sql.Tx) error { defer cancel(); return insert(tx) })
			require.ErrorIs(t, err, context.Canceled)
			require.Equal(t, 1, countRows(t, db), "of one transaction")
			require.True(t, term.Valid())

			elsewhere, otherDB := open(t)
			testkit.Migrate(t, elsewhere)
			testkit.ExecSQL(t, otherDB, `CREATE TABLE ledger (line bigint)`)
			err = tenure.FencedTx(ctx, store, term, otherDB, nil, insert)
			require.ErrorIs(t, err, tenure.ErrInvalid)
			require.ErrorContains(t, err, "db is not the database that has it")
			require.True(t, term.Valid(), "after a transaction of the wrong database")
			require.Zero(t, countRows(t, otherDB))

			held, err := lease.Read(ctx)
			require.NoError(t, err)
			require.NoError(t, store.DeleteIf(ctx, held.Key, tenure.IfVersion(held.Version)))
			require.ErrorContains(t, tenure.FencedTx(ctx, store, term, db, nil, insert), "is gone")
			require.False(t, term.Valid(), "the refused write ends the term")
			require.ErrorIs(t, tenure.FencedTx(ctx, store, term, db, nil, func(*sql.Tx) error { panic("not called") }), tenure.ErrLost)
			require.Equal(t, 1, countRows(t, db))
		})
	}
}

func TestAPutStatementWritesOnlyWhatHasTheVersion(t *testing.T) {
	type putter interface {
		tenure.Store
		Migrate(context.Context) error
		PutStatement(obj tenure.Object, version int64) (string, []any, error)
	}
	for name, open := range map[string]func(t *testing.T) (putter, *sql.DB){
		"postgres": func(t *testing.T) (putter, *sql.DB) {
			url := testkit.PostgresURL(t)
			return testkit.OpenPostgres(t, url, tenure.PostgresConfig{}), testkit.OpenSQL(t, "pgx", url)
		},
		"sqlite": func(t *testing.T) (putter, *sql.DB) {
			path := filepath.Join(t.TempDir(), "tenure.db")
			return testkit.OpenSQLite(t, path), testkit.OpenSQL(t, "sqlite", "file:"+path)
		},
	} {
		t.Run(name, func(t *testing.T) {
			store, db := open(t)
			testkit.Migrate(t, store)
			testkit.ExecSQL(t, db, `CREATE TABLE work (id bigint)`)
			key := tenure.Key{Type: "slot", ID: "a"}
			obj := tenure.Object{Key: key, Name: "n", Labels: map[string]string{"l": "v"}, Payload: []byte("new")}
			write := func(version int64) error {
				query, args, err := store.PutStatement(obj, version)
				require.NoError(t, err)
				tx, err := db.Begin()
				require.NoError(t, err)
				defer tx.Rollback()
				_, err = tx.Exec(`INSERT INTO work VALUES (1)`)
				require.NoError(t, err)
				if _, err := tx.Exec(query, args...); err != nil {
					return err
				}
				return tx.Commit()
			}
			require.Error(t, write(1), "the table is empty")
			old := testkit.Put(t, store, tenure.Object{Key: key, Payload: []byte("old")})
			require.Error(t, write(old.Version-1))
			require.NoError(t, write(old.Version))
			require.Error(t, write(old.Version), "a second time")

			now := testkit.Get(t, store, key)
			require.Equal(t, obj.Payload, now.Payload)
			require.Equal(t, obj.Labels, now.Labels)
			require.Equal(t, obj.Name, now.Name)
			require.Greater(t, now.Version, old.Version)
			require.Equal(t, old.CreatedAt, now.CreatedAt)
			require.NoError(t, store.DeleteIf(t.Context(), key, tenure.IfVersion(now.Version)))
			testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "slot", ID: "b"}})
			require.Error(t, write(now.Version), "the object is gone")
			var rows int
			require.NoError(t, db.QueryRow(`SELECT count(*) FROM work`).Scan(&rows))
			require.Equal(t, 1, rows)

			_, _, err := store.PutStatement(tenure.Object{}, 0)
			require.ErrorIs(t, err, tenure.ErrInvalid)
			fenced, err := tenure.Fence(store, testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{})))
			require.NoError(t, err)
			_, _, err = fenced.(putter).PutStatement(obj, 1)
			require.ErrorIs(t, err, errors.ErrUnsupported)
		})
	}
}
