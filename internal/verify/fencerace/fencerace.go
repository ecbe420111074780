// Package fencerace is for tests: it makes late fenced writes race against the next term,
// in transactions of any driver.
package fencerace

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

// Store is a store with a fence for the transactions of any driver.
type Store interface{ tenure.StatementFencer }

// Setup creates the table that Run writes to.
const Setup = `CREATE TABLE ledger (token bigint NOT NULL)`

// Run makes transactions of db at an isolation level, each of which ends with a fence
// statement (every other one by [tenure.FencedTx]), race against takeovers of the lease. After a term has begun, no write of an
// earlier term may appear. insert is the statement that writes a token, with the driver's
// placeholders.
func Run(t *testing.T, store Store, db *sql.DB, level sql.IsolationLevel, insert string, trials int) {
	t.Helper()
	var committed, refused, retried int
	for trial := range trials {
		key := tenure.Key{Type: "lease", ID: fmt.Sprint("race-", level, "-", trial)}
		first, next := newLease(t, store, key, "first"), newLease(t, store, key, "next")
		term, err := first.TryAcquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var both sync.WaitGroup
		var late error
		both.Go(func() {
			// Without this pause the write wins every race if transactions lock the whole
			// database, as on SQLite.
			time.Sleep(rand.N(3 * time.Millisecond))
			if trial%2 == 0 {
				late = write(t.Context(), store, db, level, insert, term)
			} else {
				late = fencedTx(t.Context(), store, db, level, insert, term)
			}
		})
		time.Sleep(rand.N(3 * time.Millisecond))
		holding, err := first.Read(t.Context())
		if err == nil {
			err = store.DeleteIf(t.Context(), key, holding.Version) // as a takeover would, at any time
		}
		if err != nil {
			t.Fatal(err)
		}
		after, err := next.TryAcquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		seen := count(t, db, term.Token())
		both.Wait()
		if now := count(t, db, term.Token()); now != seen {
			t.Fatalf("trial %d: the term with token %d has written after the one with %d had begun: %d rows, then %d (%v)",
				trial, term.Token(), after.Token(), seen, now, late)
		}
		switch {
		case late == nil && seen == 1:
			committed++
		case errors.Is(late, tenure.ErrLost) && seen == 0:
			refused++
		case late != nil && seen == 0 && isSerialization(late):
			retried++
		default:
			t.Fatalf("trial %d: %d rows, and the write says %v", trial, seen, late)
		}
	}
	t.Logf("%v: %d committed, %d rejected, %d need a retry", level, committed, refused, retried)
	if committed == 0 || refused+retried == 0 {
		t.Error("writes and takeovers never raced")
	}
}

// write is a fenced write of one term.
func write(ctx context.Context, store Store, db *sql.DB, level sql.IsolationLevel, insert string, term *tenure.Term) error {
	fence, args, err := store.FenceStatement(term)
	if err != nil {
		return err
	}
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, insert, term.Token()); err != nil {
		return tenure.FenceError(err)
	}
	time.Sleep(rand.N(2 * time.Millisecond))
	if _, err := tx.ExecContext(ctx, fence, args...); err != nil {
		return tenure.FenceError(err)
	}
	time.Sleep(rand.N(time.Millisecond))
	return tenure.FenceError(tx.Commit())
}

// fencedTx is the same write by [tenure.FencedTx].
func fencedTx(ctx context.Context, store Store, db *sql.DB, level sql.IsolationLevel, insert string, term *tenure.Term) error {
	return tenure.FencedTx(ctx, store, term, db, &sql.TxOptions{Isolation: level}, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, insert, term.Token())
		time.Sleep(rand.N(2 * time.Millisecond))
		return err
	})
}

func newLease(t *testing.T, store tenure.Store, key tenure.Key, holder string) *tenure.Lease {
	t.Helper()
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Holder: holder})
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

func count(t *testing.T, db *sql.DB, token int64) (n int) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), fmt.Sprint(`SELECT count(*) FROM ledger WHERE token = `, token)).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// isSerialization reports whether the transaction has to be retried.
func isSerialization(err error) bool {
	text := strings.ToLower(err.Error())
	return strings.Contains(text, "could not serialize") || strings.Contains(text, "database is locked")
}
