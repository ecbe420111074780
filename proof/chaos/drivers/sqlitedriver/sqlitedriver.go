// Package sqlitedriver tests a store on a caller's SQLite database, by whatever driver.
package sqlitedriver

import (
	"context"
	"database/sql"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// Run runs the rules of a store, the race of late fenced writes, and a wait for a lock, on
// files that are opened by the DSN, in which data.db is replaced.
func Run(t *testing.T, driver, dsn string) {
	open := func(t *testing.T, path, dsn string) *sql.DB {
		db, err := sql.Open(driver, strings.Replace(dsn, "data.db", path, 1))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		return db
	}
	newStore := func(t *testing.T, db *sql.DB) *tenure.SQLiteStore {
		store, err := tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true})
		if err == nil {
			err = store.Migrate(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { store.Close() })
		return store
	}
	t.Run("Rules", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) tenure.Store { return newStore(t, open(t, t.TempDir()+"/t.db", dsn)) })
	})
	t.Run("Race", func(t *testing.T) {
		path := t.TempDir() + "/t.db"
		db := open(t, path, dsn)
		store := newStore(t, db)
		if _, err := db.Exec(testkit.CreateLedger); err != nil {
			t.Fatal(err)
		}
		testkit.RunFenceRaces(t, store, open(t, path, dsn), sql.LevelDefault, `INSERT INTO ledger VALUES (?)`, 334)
		testkit.RunFenceEndings(t, store, open(t, path, dsn), `INSERT INTO ledger VALUES (?)`)
	})
	t.Run("Lock", func(t *testing.T) { // longer than the driver's own busy timeout
		path := t.TempDir() + "/t.db"
		store := newStore(t, open(t, path, dsn))
		tx, err := open(t, path, dsn).Begin()
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(200*time.Millisecond, func() { tx.Rollback() })
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.IfAbsent()); err != nil {
			t.Errorf("a write while another program has the lock: %v", err)
		}
		if _, err := os.Stat(path); err != nil {
			t.Errorf("the DSN opens another file: %v", err)
		}
	})
}
