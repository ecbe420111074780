package fencerace

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/tenurelib/tenure"
)

// Endings are the ways in which a func can end its transaction by SQL, so that another one, or
// none, follows. Those with AND CHAIN are for Postgres.
var Endings = []string{
	"COMMIT AND CHAIN", "ROLLBACK AND CHAIN", "COMMIT; BEGIN", "ROLLBACK; BEGIN", "COMMIT", "ROLLBACK",
	"COMMIT; BEGIN; SAVEPOINT own", "ROLLBACK; BEGIN; SAVEPOINT own; RELEASE own",
}

// Harmless are statements on savepoints of a func's own, which it may send.
var Harmless = []string{"SAVEPOINT own; ROLLBACK TO own", "SAVEPOINT own; RELEASE own"}

// RunEndings makes funcs in transactions of db that [tenure.FencedTx] fences end the
// transaction by SQL, and go on to write. Each must get an error.
func RunEndings(t *testing.T, store Store, db *sql.DB, insert string) {
	t.Helper()
	lease := newLease(t, store, tenure.Key{Type: "lease", ID: "endings"}, "holder")
	term, err := lease.TryAcquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	fenced := func(ending string) error {
		return tenure.FencedTx(t.Context(), store, term, db, nil, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(t.Context(), insert, 1)
			return errors.Join(err, Send(t.Context(), ending, func(ctx context.Context, query string) error {
				_, err := tx.ExecContext(ctx, query)
				return err
			}), func() error {
				_, err := tx.ExecContext(t.Context(), insert, 2)
				return err
			}())
		})
	}
	_, postgres := store.(*tenure.PostgresStore)
	for _, ending := range Endings {
		if strings.Contains(ending, "CHAIN") && !postgres {
			continue
		}
		if err := fenced(ending); err == nil {
			t.Errorf("%s: the func's writes are said to be fenced", ending)
		}
	}
	for _, harmless := range Harmless {
		if err := fenced(harmless); err != nil {
			t.Errorf("%s: %v", harmless, err)
		}
	}
	if err := lease.Renew(t.Context(), term); err != nil {
		t.Error(err)
	}
}

// Send sends the statements of an ending one after another.
func Send(ctx context.Context, ending string, exec func(ctx context.Context, query string) error) error {
	for query := range strings.SplitSeq(ending, "; ") {
		if err := exec(ctx, query); err != nil {
			return err
		}
	}
	return nil
}
