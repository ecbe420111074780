package claims_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// fourTables is a config for each of four tables of the user.
func fourTables() (cfgs []claims.QueueConfig) {
	for i := range 4 {
		cfg := tasks
		cfg.Table = fmt.Sprintf("tasks%d", i)
		cfgs = append(cfgs, cfg)
	}
	return cfgs
}

const createTable = `CREATE TABLE %s (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`

// S4: three of the user's tables answer nothing, and a process owned a key and a row of the fourth.
func TestTablesThatAnswerNothingDelayNoOther(t *testing.T) {
	t.Parallel()
	inBubble(t, func(w *world) {
		db := w.store.(*tenure.SQLiteStore).DB()
		a, b, c := w.start("a"), w.start("b"), w.start("c")
		var ofA, ofC *workedQueue
		for i, cfg := range fourTables() {
			testkit.ExecSQL(w.T, db, fmt.Sprintf(createTable, cfg.Table))
			testkit.ExecSQL(w.T, db, testkit.Must(cfg.SQLiteDDL()))
			if i < 3 {
				(&rowsWorld{world: w}).rowsOf(c, cfg)
				continue
			}
			testkit.ExecSQL(w.T, db, `INSERT INTO tasks3 (id) VALUES (1)`)
			ofA = testkit.Must(newRows(testkit.Must(claims.NewSession(w.store, claims.SessionConfig{Logger: testkit.Quiet})), cfg))
			ofC = (&rowsWorld{world: w}).rowsOf(c, cfg)
		}
		a.claimOne("k")
		got, err := ofA.TryTakeFor(w.Context(), a.session.ID(), claims.TakeOptions{N: 1})
		require.NoError(w, err)
		require.Len(w, got, 1)
		c.fault(testkit.Only("queue.sessions", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Key.Type == "tasks3" {
				return do(ctx)
			}
			return testkit.Hang(ctx, call, do)
		}))
		time.Sleep(67 * time.Second)
		b.stop() // otherwise it would remove the session
		record, err := w.store.Get(w.Context(), claims.SessionKey(a.session.ID()))
		require.NoError(w, err)
		due := record.UpdatedAt.Add(ttl + 60*time.Millisecond)
		a.crash()
		row := make(chan time.Time)
		go func() {
			_, _ = ofC.Take(context.Background(), 1)
			row <- time.Now()
		}()
		_, err = c.keys.Claim(context.Background(), "k")
		require.NoError(w, err)
		require.False(w, time.Now().After(due), "the key comes late")
		require.False(w, (<-row).After(due), "the row comes late")
		c.fault(nil)
	})
}

func TestAKeyOfTheDeadIsFreeInTimeThoughTheUsersTablesAreLocked(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	const ttl = 6 * time.Second
	url := testkit.PostgresURL(t)
	w := newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	db := testkit.OpenSQL(t, "pgx", url)
	a, b := w.startWith("a", claims.SessionConfig{TTL: ttl}), w.startWith("b", claims.SessionConfig{TTL: ttl})
	var serving sync.WaitGroup
	defer serving.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	lock := ""
	for _, cfg := range fourTables() {
		testkit.ExecSQL(t, db, fmt.Sprintf(createTable, cfg.Table))
		testkit.ExecSQL(t, db, testkit.Must(cfg.PostgresDDL()))
		rows := testkit.Must(newRows(b.session, cfg))
		require.NoError(t, rows.Check(ctx))
		serving.Go(func() { _ = rows.Serve(ctx, 1, func(context.Context, claims.Claim) error { return nil }) })
		lock += "LOCK TABLE " + cfg.Table + " IN ACCESS EXCLUSIVE MODE;"
	}
	a.claimOne("k")
	tx, err := db.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(lock)
	require.NoError(t, err)
	time.Sleep(ttl / 2)
	crashed := time.Now()
	a.crash()
	_, err = b.keys.Claim(ctx, "k")
	require.NoError(t, err)
	require.Less(t, time.Since(crashed), ttl+3*time.Second)
}

// However many statements wait for a table of the user, claims by key have a connection.
func TestAKeyIsClaimedWhileStatementsWaitForALockedTable(t *testing.T) {
	db := rowsOnPostgres(t)
	db.exec(fmt.Sprintf(createTable, "tasks"))
	db.exec(testkit.Must(tasks.PostgresDDL()))
	a := db.worker(claims.SessionConfig{TTL: time.Minute}, tasks) // so a statement has ten seconds
	keys := testkit.Must(claims.NewKeys(a.session, "tenant"))
	require.NoError(t, a.rows.Check(t.Context()))
	_, err := keys.TryClaim(t.Context(), "before")
	require.NoError(t, err)
	tx, err := db.sql.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(`LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	takes, worker := make(chan error, 8), db.remote("worker", time.Hour)
	for range cap(takes) {
		go func() {
			_, err := a.rows.TryTakeFor(context.Background(), worker, claims.TakeOptions{N: 1})
			takes <- err
		}()
	}
	testkit.Await(t, "the statements wait", func() bool {
		return db.count(`SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND state = 'active'`) >= 3
	})
	_, err = keys.TryClaim(t.Context(), "k")
	require.NoError(t, err)
	require.Empty(t, takes, "it has waited for them")
	require.NoError(t, tx.Rollback())
	for range cap(takes) {
		require.NoError(t, <-takes)
	}
}
