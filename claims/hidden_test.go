package claims_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// claimedWay writes in a transaction that depends on a claim of a key, or of a row.
type claimedWay func(h *testkit.Hidden, rows *workedQueue, c claims.Claim, fn func(exec func(string) error) error) error

var keyWays = map[string]claimedWay{
	"Fenced": func(h *testkit.Hidden, _ *workedQueue, c claims.Claim, fn func(exec func(string) error) error) error {
		if s, ok := h.Store.(*tenure.PostgresStore); ok {
			return s.Fenced(h.Context(), c, func(tx pgx.Tx) error { return fn(testkit.ExecIn(tx)) })
		}
		return h.Store.(*tenure.SQLiteStore).Fenced(h.Context(), c, func(tx *sql.Tx) error { return fn(testkit.ExecInSQL(tx)) })
	},
	"FencedTx": func(h *testkit.Hidden, _ *workedQueue, c claims.Claim, fn func(exec func(string) error) error) error {
		return tenure.FencedTx(h.Context(), h.Store.(tenure.SQLStore), c, h.SQL, nil, func(tx *sql.Tx) error { return fn(testkit.ExecInSQL(tx)) })
	},
	"FenceStatement": func(h *testkit.Hidden, _ *workedQueue, c claims.Claim, fn func(exec func(string) error) error) error {
		query, args, err := h.Store.(tenure.SQLStore).FenceStatement(c)
		require.NoError(h, err)
		return lastly(h, fn, query, args)
	},
	"Fence": func(h *testkit.Hidden, _ *workedQueue, c claims.Claim, _ func(exec func(string) error) error) error {
		store, err := tenure.Fence(h.Store, c)
		require.NoError(h, err)
		_, err = store.PutIf(h.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: c.Key.ID}}, tenure.Unconditional())
		return err
	},
}

var rowWays = map[string]claimedWay{
	"FinishPostgres": func(h *testkit.Hidden, rows *workedQueue, c claims.Claim, fn func(exec func(string) error) error) error {
		if h.IsPostgres() {
			return rows.FinishPostgres(h.Context(), []claims.Claim{c}, func(tx pgx.Tx) error { return fn(testkit.ExecIn(tx)) })
		}
		return rows.FinishSQLite(h.Context(), []claims.Claim{c}, func(tx *sql.Tx) error { return fn(testkit.ExecInSQL(tx)) })
	},
	"FinishStatement": func(h *testkit.Hidden, rows *workedQueue, c claims.Claim, fn func(exec func(string) error) error) error {
		query, args, err := rows.FinishStatement(c)
		require.NoError(h, err)
		return lastly(h, fn, query, args)
	},
	"Finish": func(h *testkit.Hidden, rows *workedQueue, c claims.Claim, _ func(exec func(string) error) error) error {
		return rows.Finish(h.Context(), c)
	},
}

// lastly runs fn in a transaction of the application's that ends with a statement.
func lastly(h *testkit.Hidden, fn func(exec func(string) error) error, query string, args []any) error {
	tx, err := h.SQL.Begin()
	require.NoError(h, err)
	defer tx.Rollback()
	require.NoError(h, fn(testkit.ExecInSQL(tx)))
	if _, err := tx.Exec(query, args...); err != nil {
		return tenure.FenceError(err)
	}
	return tx.Commit()
}

func TestClaimsAndRowsAreThoseThatWereFoundWhateverHidesThem(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	for _, within := range []string{"the session", "a transaction"} {
		t.Run("within "+within, func(t *testing.T) {
			testkit.EachHiding(t, append(slices.Clone(testkit.OwnTables), "tasks"), func(h *testkit.Hidden) {
				hiddenClaims(h, within)
			})
		})
	}
}

func hiddenClaims(h *testkit.Hidden, within string) {
	ddl, err := tasks.SQLiteDDL()
	if h.IsPostgres() {
		ddl, err = tasks.PostgresDDL()
	}
	require.NoError(h, err)
	testkit.ExecSQL(h.T, h.SQL, `CREATE TABLE tasks (id integer NOT NULL PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	testkit.ExecSQL(h.T, h.SQL, ddl)
	testkit.ExecSQL(h.T, h.SQL, `CREATE TABLE `+h.Real("ledger")+` (way text)`)
	for id := range 40 {
		testkit.ExecSQL(h.T, h.SQL, fmt.Sprintf(`INSERT INTO tasks (id) VALUES (%d)`, id+1))
	}
	session, err := claims.NewSession(h.Store, claims.SessionConfig{Logger: testkit.Quiet})
	require.NoError(h, err)
	keys, err := claims.NewKeys(session, "tenant")
	require.NoError(h, err)
	rows, err := newRows(session, tasks)
	require.NoError(h, err)
	ctx, cancel := context.WithCancel(context.Background())
	returned := make(chan struct{})
	go func() { defer close(returned); _ = session.Run(ctx) }()
	defer func() { cancel(); <-returned }()

	claim := func(what string) map[string]claims.Claim {
		of := map[string]claims.Claim{}
		for way := range keyWays {
			got, err := keys.TryClaim(h.Context(), what+": "+way)
			require.NoError(h, err)
			require.Len(h, got, 1)
			of[way] = got[0]
		}
		got, err := rows.Take(h.Context(), len(rowWays))
		require.NoError(h, err)
		require.Len(h, got, len(rowWays))
		for way := range rowWays {
			of[way], got = got[0], got[1:]
		}
		return of
	}
	over := claim("over")
	h.Copy()
	stands := claim("stands")
	testkit.ExecSQL(h.T, h.SQL, `UPDATE `+h.Real("objects_claims")+` SET session = NULL WHERE id LIKE 'over: %'`)
	for way := range rowWays {
		testkit.ExecSQL(h.T, h.SQL, `UPDATE `+h.Real("tasks")+` SET session = NULL, status = 'held' WHERE id = `+over[way].Key.ID)
	}
	if within == "the session" {
		h.HideFromSession()
	}
	before := h.Copies()

	for _, ways := range []map[string]claimedWay{keyWays, rowWays} {
		for way, write := range ways {
			wrote := 0
			fn := func(exec func(string) error) error {
				if within == "a transaction" {
					h.Hide(exec, within)
				}
				wrote = 1
				return exec(fmt.Sprintf(`INSERT INTO %s VALUES ('%s')`, h.Real("ledger"), way))
			}
			require.ErrorIs(h, write(h, rows, over[way], fn), tenure.ErrLost, way)
			wrote = 0
			require.NoError(h, write(h, rows, stands[way], fn), way)
			var lines int
			require.NoError(h, h.SQL.QueryRow(`SELECT count(*) FROM `+h.Real("ledger")+` WHERE way = '`+way+`'`).Scan(&lines))
			require.Equal(h, wrote, lines, way)
		}
	}
	if within == "a transaction" {
		return
	}
	got, err := keys.TryClaim(h.Context(), "one more", "another")
	require.NoError(h, err)
	require.Len(h, got, 2)
	require.NoError(h, keys.Release(h.Context(), got...))
	got, err = rows.Take(h.Context(), 4)
	require.NoError(h, err)
	require.Len(h, got, 4)
	require.NoError(h, rows.Release(h.Context(), got[:2]...))
	require.NoError(h, rows.Finish(h.Context(), got[2:]...))
	require.NoError(h, rows.Check(h.Context()))
	require.Equal(h, before, h.Copies(), "the copies were written")
	var done []string
	found, err := h.SQL.Query(`SELECT id FROM ` + h.Real("tasks") + ` WHERE status = 'done' AND session IS NULL ORDER BY id`)
	require.NoError(h, err)
	for found.Next() {
		var id string
		require.NoError(h, found.Scan(&id))
		done = append(done, id)
	}
	require.NoError(h, found.Close())
	require.Len(h, done, len(rowWays)+2, strings.Join(done, ", "))
}
