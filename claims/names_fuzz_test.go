package claims_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// anyNames are names of tables and columns that a statement could take for something else.
var anyNames = []string{
	`it's`, `say "x"`, `'" \`, `back\slash`, "{id} {rows} {} {set}", "$1 ?1 :x @x", "-- x", "/* x", "a;b %s%d", "é", "a\nb", "[x]`", `x) WHERE "y`, "value", "r", "Select",
}

// columnNames are those that the statements themselves use, and each other's.
var columnNames = []string{"token", "session", "id", "key", "value", "number", "labels", "payload", "name", "attempts"}

// queueOf returns a queue with that name in all of its names, or the columns of columnNames.
func queueOf(name string) claims.QueueConfig {
	n := func(i int) string { return fmt.Sprint(name, i) }
	if name == "columns" {
		n = func(i int) string { return columnNames[i] }
	}
	quoted := objects.Quoted(n(9))
	return claims.QueueConfig{
		Table: name, ID: n(0), Session: n(1), Token: n(2), Attempts: n(3), NotBefore: n(4), Requested: n(5), Expires: n(6), Limit: n(7),
		PerKey: claims.PerKey{Column: n(8), Limit: 2},
		Ready:  quoted + " < 9", OrderBy: quoted + ", " + objects.Quoted(n(0)), Done: quoted + " = 9", Exhausted: quoted + " = 10", Taken: quoted + " = 1", Released: quoted + " = 0",
		MaxAttempts: 100, LostBackoff: time.Millisecond, Deadline: time.Hour, PollInterval: 10 * time.Millisecond, Logger: testkit.Quiet,
	}
}

// tryNames uses a queue with such names in every way; lose says whether also a session of it is lost. The database may
// refuse the names themselves.
func (db *rowsDB) tryNames(schema string, cfg claims.QueueConfig, lose bool) {
	ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
	defer cancel()
	table := objects.Quoted(cfg.Table)
	if schema != "" {
		if _, err := db.sql.Exec(`CREATE SCHEMA ` + objects.Quoted(schema)); err != nil {
			db.Skip(err)
		}
		cfg.Schema, table = schema, objects.Quoted(schema, cfg.Table)
	}
	if _, err := db.sql.Exec(`CREATE TABLE ` + table + ` (` + objects.Quoted(cfg.ID) + ` integer PRIMARY KEY, ` +
		strings.TrimSuffix(cfg.Ready, " < 9") + ` integer DEFAULT 0, ` + objects.Quoted(cfg.PerKey.Column) + ` text NOT NULL DEFAULT 'k')`); err != nil {
		db.Skip(err)
	}
	ddl := cfg.SQLiteDDL
	if db.pool != nil {
		ddl = cfg.PostgresDDL
	}
	text, err := ddl()
	if err != nil {
		require.ErrorIs(db, err, tenure.ErrInvalid)
		db.Skip(err)
	}
	if _, err := db.sql.Exec(text); err != nil {
		db.Skip(err)
	}
	add := func(ids ...string) {
		db.exec(`DELETE FROM ` + table)
		for _, id := range ids {
			db.exec(`INSERT INTO ` + table + ` (` + objects.Quoted(cfg.ID) + `) VALUES (` + id + `)`)
		}
	}
	a := db.worker(claims.SessionConfig{TTL: 8 * time.Second}, cfg)
	require.NoError(db, a.rows.Check(ctx))
	take := func(n int) []claims.Claim {
		got, err := a.rows.Take(ctx, n)
		require.NoError(db, err)
		require.Len(db, got, n)
		return got
	}

	add("1", "2", "3")
	got := take(2)
	none, err := a.rows.TryTakeFor(ctx, db.sessionOfRemote(a.store), claims.TakeOptions{N: 1})
	require.NoError(db, err)
	require.Empty(db, none, "two of the key are claimed")
	owned, err := a.rows.OwnedBy(ctx, a.session.ID())
	require.NoError(db, err)
	require.Equal(db, takenIDs(got), takenIDs(owned))
	listed, err := a.rows.List(ctx, "1", 9)
	require.NoError(db, err)
	require.Len(db, listed, 1)
	holding, err := a.rows.Owner(ctx, "1")
	require.NoError(db, err)
	require.Equal(db, a.session.ID(), got[0].Session)
	require.NotEmpty(db, holding.Holder)
	require.NoError(db, db.fencedBy(a.store, got[0]))
	query, args, err := a.store.(tenure.SQLStore).FenceStatement(got[0])
	require.NoError(db, err)
	_, err = db.sql.Exec(query, args...)
	require.NoError(db, err)
	require.NoError(db, a.rows.RequestRelease(ctx, "1"))
	require.NoError(db, a.rows.Queue.ReleaseAfter(ctx, time.Nanosecond, got[0]))
	require.NoError(db, a.rows.Queue.Release(ctx, got[1]))
	got = take(2)
	require.NoError(db, a.rows.Finish(ctx, got...))
	require.NoError(db, db.byStatement(a.rows, take(1)[0]))

	add("1", "2", "3", "4")
	require.NoError(db, a.rows.Finish(ctx, take(1)[0]))
	require.NoError(db, db.finish(a.rows, take(1), writing(`SELECT 1`, nil)))
	claimed, err := a.rows.TryClaim(ctx, "4")
	require.NoError(db, err)
	require.Len(db, claimed, 1)
	require.NoError(db, a.rows.Release(ctx, claimed...))

	// A claim expires, and a session is lost.
	add("1", "2")
	remote := db.sessionOfRemote(a.store)
	claimedFor(db, a, remote, claims.TakeOptions{N: 2, Lasts: time.Millisecond})
	require.NoError(db, a.rows.Extend(ctx, time.Hour, claimedFor(db, a, remote, claims.TakeOptions{N: 2})...))
	if !lose { // that takes a TTL
		a.stop()
		return
	}
	db.removeSession(remote)
	testkit.Await(db.T, "its rows are free", func() bool {
		listed, err := a.rows.List(ctx, "", 9)
		require.NoError(db, err)
		return len(listed) == 0
	})
}

// claimedFor takes n rows for the session of a remote worker.
func claimedFor(db *rowsDB, w *worker, session string, o claims.TakeOptions) (got []claims.Claim) {
	ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
	defer cancel()
	for n := o.N; len(got) < n; {
		o.N = n - len(got)
		more, err := w.rows.TakeFor(ctx, session, o)
		require.NoError(db, err)
		require.NotEmpty(db, more)
		got = append(got, more...)
	}
	return got
}

// sessionOfRemote begins a session of a remote worker.
func (db *rowsDB) sessionOfRemote(store tenure.Store) (id string) {
	id = fmt.Sprint("remote-", time.Now().UnixNano())
	testkit.MustAcquire(db.T, testkit.Must(tenure.NewLease(store, tenure.LeaseConfig{Key: claims.SessionKey(id), TTL: time.Hour, Logger: testkit.Quiet})))
	return id
}

func (db *rowsDB) fencedBy(store tenure.Database, c claims.Claim) error {
	fenced, err := tenure.Fence(store, c)
	require.NoError(db, err)
	_, err = fenced.PutIf(db.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: c.Session}}, tenure.IfAbsent())
	return err
}

// No name of a config means anything in a statement but itself.
func TestAQueueMayHaveNamesOfAnyText(t *testing.T) {
	testkit.Slow(t)
	for dialect, of := range map[string]func(*testing.T) *rowsDB{"postgres": rowsOnPostgres, "sqlite": rowsOnSQLite} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			db := of(t)
			store := db.open()
			db.open = func() tenure.Database { return store }
			for _, name := range append(anyNames, "columns") {
				t.Run(name, func(t *testing.T) {
					one := *db
					one.T = t
					schema := ""
					if db.pool != nil {
						schema = name + " of"
					}
					one.tryNames(schema, queueOf(name), slices.Contains([]string{`'" \`, "columns"}, name))
				})
			}
		})
	}
}

func FuzzAQueueMayHaveNamesOfAnyText(f *testing.F) {
	f.Add("plain")
	f.Fuzz(func(t *testing.T, name string) {
		if len(name) > 50 { // Postgres truncates longer ones
			t.Skip()
		}
		rowsOnSQLite(t).tryNames("", queueOf(name), true)
		rowsOnPostgres(t).tryNames(name, queueOf(name), true)
	})
}
