package testkit

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

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

// CreateLedger creates the table that [RunFenceRaces] writes to.
const CreateLedger = `CREATE TABLE ledger (token bigint NOT NULL)`

// RunFenceRaces races fenced transactions of db, at an isolation level, against takeovers of the
// lease. Every other transaction ends with a fence statement, and the rest use
// [tenure.FencedTx]. After a term has begun, no write of an earlier term may appear. insert is the
// statement that writes a token, with the driver's placeholders.
func RunFenceRaces(t *testing.T, store tenure.SQLStore, db *sql.DB, level sql.IsolationLevel, insert string, trials int) {
	t.Helper()
	var committed, refused, retried int
	for trial := range trials {
		key := tenure.Key{Type: "lease", ID: fmt.Sprint("race-", level, "-", trial)}
		first := NewLease(t, store, tenure.LeaseConfig{Key: key, Holder: "first"})
		next := NewLease(t, store, tenure.LeaseConfig{Key: key, Holder: "next"})
		term, err := first.TryAcquire(t.Context())
		require.NoError(t, err)
		var both sync.WaitGroup
		var late error
		both.Go(func() {
			// Without this pause the write wins every race if transactions lock the whole
			// database, as on SQLite.
			time.Sleep(rand.N(3 * time.Millisecond))
			if trial%2 == 0 {
				late = writeWithFence(t.Context(), store, db, level, insert, term)
			} else {
				late = writeInFencedTx(t.Context(), store, db, level, insert, term)
			}
		})
		time.Sleep(rand.N(3 * time.Millisecond))
		holding, err := first.Read(t.Context())
		require.NoError(t, err)
		require.NoError(t, store.DeleteIf(t.Context(), key, tenure.IfVersion(holding.Version))) // as a takeover would, at any time
		after, err := next.TryAcquire(t.Context())
		require.NoError(t, err)
		seen := countToken(t, db, term.Token())
		both.Wait()
		require.Equal(t, seen, countToken(t, db, term.Token()),
			"trial %d: the term with token %d has written after the one with %d had begun (%v)", trial, term.Token(), after.Token(), late)
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

func writeWithFence(ctx context.Context, store tenure.SQLStore, db *sql.DB, level sql.IsolationLevel, insert string, term *tenure.Term) error {
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

func writeInFencedTx(ctx context.Context, store tenure.SQLStore, db *sql.DB, level sql.IsolationLevel, insert string, term *tenure.Term) error {
	return tenure.FencedTx(ctx, store, term, db, &sql.TxOptions{Isolation: level}, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, insert, term.Token())
		time.Sleep(rand.N(2 * time.Millisecond))
		return err
	})
}

func countToken(t *testing.T, db *sql.DB, token int64) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRowContext(t.Context(), fmt.Sprint(`SELECT count(*) FROM ledger WHERE token = `, token)).Scan(&n))
	return n
}

// isSerialization reports whether the transaction has to be retried.
func isSerialization(err error) bool {
	text := strings.ToLower(err.Error())
	return strings.Contains(text, "could not serialize") || strings.Contains(text, "database is locked")
}

// TxEndings are the ways in which a func can end its transaction by SQL, after which another
// transaction follows, or none. Those with AND CHAIN are for Postgres.
var TxEndings = []string{
	"COMMIT AND CHAIN", "ROLLBACK AND CHAIN", "COMMIT; BEGIN", "ROLLBACK; BEGIN", "COMMIT", "ROLLBACK",
	"COMMIT; BEGIN; SAVEPOINT own", "ROLLBACK; BEGIN; SAVEPOINT own; RELEASE own",
}

// HarmlessSQL has statements on a func's own savepoints, which it may send.
var HarmlessSQL = []string{"SAVEPOINT own; ROLLBACK TO own", "SAVEPOINT own; RELEASE own"}

// RunFenceEndings checks that a func in a transaction of [tenure.FencedTx] gets an error if it ends
// the transaction by SQL and keeps writing.
func RunFenceEndings(t *testing.T, store tenure.SQLStore, db *sql.DB, insert string) {
	t.Helper()
	lease := NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "endings"}, Holder: "holder"})
	term := MustAcquire(t, lease)
	fenced := func(ending string) error {
		return tenure.FencedTx(t.Context(), store, term, db, nil, func(tx *sql.Tx) error {
			_, before := tx.ExecContext(t.Context(), insert, 1)
			ended := SendEnding(t.Context(), ending, func(ctx context.Context, query string) error {
				_, err := tx.ExecContext(ctx, query)
				return err
			})
			_, after := tx.ExecContext(t.Context(), insert, 2)
			return errors.Join(before, ended, after)
		})
	}
	_, postgres := store.(*tenure.PostgresStore)
	for _, ending := range TxEndings {
		if strings.Contains(ending, "CHAIN") && !postgres {
			continue
		}
		if err := fenced(ending); err == nil {
			t.Errorf("%s: the func's writes are said to be fenced", ending)
		}
	}
	for _, harmless := range HarmlessSQL {
		if err := fenced(harmless); err != nil {
			t.Errorf("%s: %v", harmless, err)
		}
	}
	require.NoError(t, lease.Renew(t.Context(), term))
}

// SendEnding sends the statements of an ending one after another.
func SendEnding(ctx context.Context, ending string, exec func(ctx context.Context, query string) error) error {
	for query := range strings.SplitSeq(ending, "; ") {
		if err := exec(ctx, query); err != nil {
			return err
		}
	}
	return nil
}
