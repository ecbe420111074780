package databases_test

import (
	"database/sql"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// fencedWays are the ways in which a func writes in a transaction that is fenced by a term.
var fencedWays = map[string]func(h *testkit.Hidden, term *tenure.Term, fn func(exec func(string) error) error) error{
	"Fenced": func(h *testkit.Hidden, term *tenure.Term, fn func(exec func(string) error) error) error {
		if s, ok := h.Store.(*tenure.PostgresStore); ok {
			return s.Fenced(h.Context(), term, func(tx pgx.Tx) error { return fn(testkit.ExecIn(tx)) })
		}
		return h.Store.(*tenure.SQLiteStore).Fenced(h.Context(), term, func(tx *sql.Tx) error { return fn(testkit.ExecInSQL(tx)) })
	},
	"FencedTx": func(h *testkit.Hidden, term *tenure.Term, fn func(exec func(string) error) error) error {
		return tenure.FencedTx(h.Context(), h.Store.(tenure.SQLStore), term, h.SQL, nil, func(tx *sql.Tx) error { return fn(testkit.ExecInSQL(tx)) })
	},
	"FenceStatement": func(h *testkit.Hidden, term *tenure.Term, fn func(exec func(string) error) error) error {
		query, args, err := h.Store.(tenure.SQLStore).FenceStatement(term)
		require.NoError(h, err)
		tx, err := h.SQL.Begin()
		require.NoError(h, err)
		defer tx.Rollback()
		require.NoError(h, fn(testkit.ExecInSQL(tx)))
		if _, err := tx.Exec(query, args...); err != nil {
			return tenure.FenceError(err)
		}
		return tx.Commit()
	},
	"Fence": func(h *testkit.Hidden, term *tenure.Term, fn func(exec func(string) error) error) error {
		store, err := tenure.Fence(h.Store, term)
		require.NoError(h, err)
		_, err = store.PutIf(h.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: term.Key().ID}}, tenure.Unconditional())
		return err
	},
}

// Whatever is left behind by the application in its session, or by fn in its transaction, the fence
// is checked against the table that the store has found, and the store writes to no other one.
func TestTheFenceAndTheObjectsAreThoseThatWereFoundWhateverHidesThem(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	for _, within := range []string{"the session", "a transaction"} {
		t.Run("within "+within, func(t *testing.T) {
			testkit.EachHiding(t, testkit.OwnTables, func(h *testkit.Hidden) {
				hiddenFence(h, within)
			})
		})
	}
}

func hiddenFence(h *testkit.Hidden, within string) {
	acquire := func(id string) *tenure.Term {
		return testkit.MustAcquire(h.T, testkit.NewLease(h.T, h.Store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: id}}))
	}
	over, stands := map[string]*tenure.Term{}, map[string]*tenure.Term{}
	testkit.ExecSQL(h.T, h.SQL, `CREATE TABLE `+h.Real("ledger")+` (way text)`)
	for way := range fencedWays {
		over[way] = acquire("over: " + way)
	}
	old := testkit.Put(h.T, h.Store, tenure.Object{Key: tenure.Key{Type: "t", ID: "old"}})
	gone := testkit.Put(h.T, h.Store, tenure.Object{Key: tenure.Key{Type: "t", ID: "gone"}})
	h.Copy()
	for way := range fencedWays {
		stands[way] = acquire("stands: " + way)
	}
	testkit.ExecSQL(h.T, h.SQL, `UPDATE `+h.Real("objects")+` SET payload = 'of the next term' WHERE id LIKE 'over: %'`)
	old, err := h.Store.PutIf(h.Context(), old, tenure.IfVersion(old.Version))
	require.NoError(h, err)
	require.NoError(h, h.Store.DeleteIf(h.Context(), gone.Key, tenure.IfVersion(gone.Version)))
	if within == "the session" {
		h.HideFromSession()
	}
	before := h.Copies()

	for way, fenced := range fencedWays {
		if way == "Fence" && within == "a transaction" {
			continue // it has no func
		}
		write := func(exec func(string) error) error {
			if within == "a transaction" {
				h.Hide(exec, within)
			}
			return exec(fmt.Sprintf(`INSERT INTO %s VALUES ('%s')`, h.Real("ledger"), way))
		}
		require.ErrorIs(h, fenced(h, over[way], write), tenure.ErrLost, way)
		require.NoError(h, fenced(h, stands[way], write), way)
		want := map[bool]int{true: 0, false: 1}[way == "Fence"]
		var wrote int
		require.NoError(h, h.SQL.QueryRow(`SELECT count(*) FROM `+h.Real("ledger")+` WHERE way = '`+way+`'`).Scan(&wrote))
		require.Equal(h, want, wrote, way)
	}
	if within == "a transaction" {
		return
	}
	is, err := h.Store.Get(h.Context(), old.Key)
	require.NoError(h, err)
	require.Equal(h, old.Version, is.Version)
	listed, err := h.Store.(tenure.Lister).List(h.Context(), "t", "", 10)
	require.NoError(h, err)
	require.Len(h, listed, 2) // and what Fence wrote
	_, err = h.Store.PutIf(h.Context(), tenure.Object{Key: old.Key}, tenure.IfAbsent())
	require.ErrorIs(h, err, tenure.ErrExists)
	again, err := h.Store.PutIf(h.Context(), tenure.Object{Key: gone.Key}, tenure.IfAbsent())
	require.NoError(h, err)
	require.Greater(h, again.Version, gone.Version)
	query, args, err := h.Store.(interface {
		PutStatement(obj tenure.Object, version int64) (string, []any, error)
	}).PutStatement(again, again.Version)
	require.NoError(h, err)
	testkit.ExecSQL(h.T, h.SQL, query, args...)
	again, err = h.Store.Get(h.Context(), gone.Key)
	require.NoError(h, err)
	require.NoError(h, h.Store.DeleteIf(h.Context(), again.Key, tenure.IfVersion(again.Version)))
	testkit.MigrateClaims(h.T, h.Store)
	require.Equal(h, before, h.Copies(), "the copies were written")
}
