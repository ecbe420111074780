package main

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/tenurelib/tenure"
)

// promote commits only while the term is the lease's. The job calls it with its own context.
func promote(ctx context.Context, store *tenure.SQLiteStore, id string) error {
	return store.Fenced(ctx, nil, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE deployments SET phase = 'promoted' WHERE id = ?", id)
		return err
	})
}

func TestTheFencedWriteOfTheREADME(t *testing.T) {
	ctx := t.Context()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := store.DB().ExecContext(ctx, "CREATE TABLE deployments (id TEXT, phase TEXT); INSERT INTO deployments VALUES ('api', 'canary'), ('web', 'canary')"); err != nil {
		t.Fatal(err)
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	if err != nil {
		t.Fatal(err)
	}

	_ = tenure.Do(ctx, lease, func(ctx context.Context) error { // its error is about the term that is taken away below
		ctx = context.WithoutCancel(ctx) // as if the process did not yet know that its term is over
		if err := promote(ctx, store, "api"); err != nil {
			t.Errorf("the holder's write: %v", err)
		}
		held, err := lease.Read(ctx)
		if err == nil {
			err = store.DeleteIf(ctx, held.Key, tenure.IfVersion(held.Version))
		}
		if err != nil {
			t.Error(err)
		}
		if err := promote(ctx, store, "web"); !errors.Is(err, tenure.ErrLost) {
			t.Errorf("the former holder's write: %v", err)
		}
		return nil
	})
	var promoted int
	if err := store.DB().QueryRowContext(ctx, "SELECT count(*) FROM deployments WHERE phase = 'promoted'").Scan(&promoted); err != nil || promoted != 1 {
		t.Errorf("%d deployments are promoted, not one: %v", promoted, err)
	}
}
