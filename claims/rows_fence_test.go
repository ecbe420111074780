package claims_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// fencedIn runs a func in a transaction of a store that is fenced by a claim.
func fencedIn(ctx context.Context, store tenure.Store, c claims.Claim, fn func(exec) error) error {
	if s, ok := store.(*tenure.PostgresStore); ok {
		return s.Fenced(ctx, c, func(tx pgx.Tx) error {
			return fn(func(ctx context.Context, query string, args ...any) error {
				_, err := tx.Exec(ctx, query, args...)
				return err
			})
		})
	}
	return store.(*tenure.SQLiteStore).Fenced(ctx, c, func(tx *sql.Tx) error { return fn(execIn(tx)) })
}

// fences are all ways to make one write, whose result is 'x', depend on a claim.
func (db *rowsDB) fences(store tenure.Database, c claims.Claim) map[string]func() error {
	const write = `INSERT INTO ledger VALUES ('x')`
	return map[string]func() error{
		"Fenced": func() error { return fencedIn(db.Context(), store, c, writing(write, nil)) },
		"FencedTx": func() error {
			return tenure.FencedTx(db.Context(), store.(tenure.SQLStore), c, db.sql, nil, func(tx *sql.Tx) error { return writing(write, nil)(execIn(tx)) })
		},
		"FenceStatement": func() error {
			query, args, err := store.(tenure.SQLStore).FenceStatement(c)
			if err != nil {
				return err
			}
			tx, err := db.sql.Begin()
			require.NoError(db, err)
			defer tx.Rollback()
			_, err = tx.Exec(write)
			require.NoError(db, err)
			if _, err := tx.Exec(query, args...); err != nil {
				return tenure.FenceError(err)
			}
			return tx.Commit()
		},
		"Fence": func() error {
			fenced, err := tenure.Fence(store, c)
			if err != nil {
				return err
			}
			obj, err := fenced.PutIf(db.Context(), tenure.Object{Key: tenure.Key{Type: "note", ID: "x"}}, tenure.IfAbsent())
			if err != nil {
				return err
			}
			db.exec(`INSERT INTO ledger VALUES ('x')`)
			return fenced.DeleteIf(db.Context(), obj.Key, tenure.IfVersion(obj.Version))
		},
	}
}

func TestTheClaimOfARowFencesWritesWhileItStands(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.exec(`CREATE TABLE ledger (note text)`)
		db.add(1, 5)
		a, b := db.worker(claims.SessionConfig{}, tasks), db.worker(claims.SessionConfig{}, tasks)
		got := a.take(5)
		text, err := json.Marshal(got[0])
		require.NoError(db, err)
		var sent claims.Claim
		require.NoError(db, json.Unmarshal(text, &sent))
		for _, store := range []tenure.Database{a.store, b.store} { // any process that was given the claim may write
			for name, write := range db.fences(store, sent) {
				before := db.count(`SELECT count(*) FROM ledger`)
				require.NoError(db, write(), name)
				require.Equal(db, before+1, db.count(`SELECT count(*) FROM ledger`), name)
			}
		}
		written := db.count(`SELECT count(*) FROM ledger`)

		// The transaction may change the row as well.
		require.NoError(db, fencedIn(db.Context(), a.store, got[0], writing(`UPDATE tasks SET result = 'half' WHERE id = 1`, nil)))
		require.True(db, a.rows.Holds(got[0]))

		require.NoError(db, a.rows.Release(db.Context(), got[1]))
		require.NoError(db, a.rows.Finish(db.Context(), got[2]))
		db.exec(`DELETE FROM tasks WHERE id = 4`)
		db.exec(`UPDATE tasks SET session = NULL WHERE id = 5`) // as the session that removed this one does
		taken := b.take(2)
		require.Equal(db, []string{"2", "5"}, takenIDs(taken))
		other := got[0]
		other.Session = b.session.ID()
		older := got[0]
		older.Token--
		for what, c := range map[string]claims.Claim{
			"released": got[1], "finished": got[2], "deleted": got[3], "taken by another": got[4], "another session's": other, "of another token": older,
		} {
			for name, write := range db.fences(a.store, c) {
				require.ErrorIs(db, write(), tenure.ErrLost, "%s: %s", what, name)
			}
		}
		require.Equal(db, written, db.count(`SELECT count(*) FROM ledger`))
		for name, write := range db.fences(a.store, taken[1]) {
			require.NoError(db, write(), name)
		}
	})
}

func TestAClaimOfARowThatIsNoQueuesOfTheStoreFencesNothing(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.exec(`CREATE TABLE ledger (note text)`)
		db.add(1, 1)
		a := db.worker(claims.SessionConfig{}, tasks)
		got := a.take(1)[0]
		refused := func(store tenure.Database, c claims.Claim, remedy string) {
			db.Helper()
			for name, write := range db.fences(store, c) {
				err := write()
				require.ErrorIs(db, err, tenure.ErrInvalid, name)
				require.ErrorContains(db, err, remedy, name)
			}
		}
		refused(db.open(), got, "call claims.NewQueue")
		old := got
		old.Row = false // as in the JSON of an earlier version
		for name, write := range db.fences(a.store, old) {
			require.ErrorIs(db, write(), tenure.ErrLost, name)
		}
		again := tasks
		again.Ready = "status = 'held'"
		_, err := claims.NewQueue(a.store, again)
		require.NoError(db, err)
		for name, write := range db.fences(a.store, got) {
			require.NoError(db, write(), name)
		}
		again.Token = "attempts"
		again.Attempts = ""
		_, err = claims.NewQueue(a.store, again)
		require.NoError(db, err)
		refused(a.store, got, "two queues")
		require.NoError(db, a.rows.Finish(db.Context(), old), "a claim in the JSON of an earlier version")
	})
}

func TestATableThatFitsNoQueueFencesNothing(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.exec(`CREATE TABLE ledger (note text)`)
		db.exec(`CREATE TABLE bare (id text PRIMARY KEY, session text)`)
		store := db.open()
		_, err := claims.NewQueue(store, claims.QueueConfig{Table: "bare", Logger: testkit.Quiet})
		require.NoError(db, err)
		c := claims.Claim{Key: tenure.Key{Type: "bare", ID: "1"}, Session: "s", Token: 1, Row: true}
		require.ErrorIs(db, fencedIn(db.Context(), store, c, writing(`INSERT INTO ledger VALUES ('x')`, nil)), tenure.ErrSetup)
		require.Zero(db, db.count(`SELECT count(*) FROM ledger`))
	})
}

// A take, a release and a finish of a row wait for a fenced transaction that has been checked, or skip the
// row: the transaction commits first, or not at all.
func TestNoWriteUnderARowsClaimFollowsItsEnd(t *testing.T) {
	db := rowsTableOnPostgres(t, tasks)
	db.exec(`CREATE TABLE ledger (note text)`)
	db.exec(`CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$`)
	db.exec(`CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_at_gate()`)
	a, b := db.worker(claims.SessionConfig{}, tasks), db.worker(claims.SessionConfig{}, tasks)
	for name, end := range map[string]func(claims.Claim) error{
		"released": func(claims.Claim) error { _, err := db.sql.Exec(`UPDATE tasks SET session = NULL`); return err },
		"finished": func(c claims.Claim) error { return db.byStatement(b.rows, c) },
		"deleted":  func(claims.Claim) error { _, err := db.sql.Exec(`DELETE FROM tasks`); return err },
		"taken over": func(claims.Claim) error {
			_, err := db.sql.Exec(`UPDATE tasks SET session = 'another', token = token + 1`)
			return err
		},
	} {
		db.exec(`DELETE FROM ledger`)
		db.exec(`DELETE FROM tasks`)
		db.add(1, 1)
		c := a.take(1)[0]
		gate, err := db.pool.Begin(db.Context())
		require.NoError(t, err)
		_, err = gate.Exec(db.Context(), `SELECT pg_advisory_xact_lock(7)`)
		require.NoError(t, err)
		result := make(chan error, 1)
		go func() {
			result <- fencedIn(context.Background(), a.store, c, writing(`INSERT INTO ledger VALUES ('x')`, nil))
		}()
		testkit.AwaitLockWait(t, db.pool) // at the gate, after the check
		ended := make(chan int, 1)
		go func() {
			if err := end(c); err != nil {
				t.Error(name, err)
			}
			ended <- db.count(`SELECT count(*) FROM ledger`)
		}()
		testkit.Await(t, "the claim has ended, or that waits as well", func() bool { return len(ended) > 0 || testkit.LockWaits(t, db.pool) == 2 })
		require.NoError(t, gate.Commit(db.Context()))
		require.NoError(t, <-result, name)
		require.Equal(t, 1, <-ended, "%s: the write was committed after the claim's end", name)
	}
}

// Two transactions under one claim that both change the row wait for each other, but not forever.
func TestFencedWritesToTheRowItselfDoNotDeadlock(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 1)
		a := db.worker(claims.SessionConfig{}, tasks)
		c := a.take(1)[0]
		var writers sync.WaitGroup
		for range 8 {
			writers.Go(func() {
				for range 10 {
					if err := fencedIn(context.Background(), a.store, c, writing(`UPDATE tasks SET priority = priority + 1 WHERE id = 1`, nil)); err != nil {
						t.Error(err)
					}
				}
			})
		}
		writers.Wait()
		require.Equal(db, 80, db.count(`SELECT priority FROM tasks`))
	})
}

// The table is moved to another schema, and its ID gets another type, while a store uses it.
func TestARowsFenceFollowsItsTable(t *testing.T) {
	db := rowsTableOnPostgres(t, tasks)
	db.exec(`CREATE TABLE public.ledger (note text)`)
	db.add(1, 1)
	a := db.worker(claims.SessionConfig{}, tasks)
	c := a.take(1)[0]
	fences := db.fences(a.store, c)
	for _, change := range []string{
		`ALTER TABLE tasks ALTER COLUMN id TYPE text`,
		`DO $$ BEGIN EXECUTE format('CREATE SCHEMA %I', current_user); EXECUTE format('ALTER TABLE tasks SET SCHEMA %I', current_user); END $$`,
	} {
		require.NoError(t, fences["Fence"](), "before: %s", change)
		db.exec(change)
		require.NoError(t, fences["Fence"](), change)
		for name, write := range fences {
			require.NoError(t, write(), "%s: %s", name, change)
		}
	}
	require.NoError(t, a.rows.Finish(db.Context(), c))
	require.ErrorIs(t, fences["Fence"](), tenure.ErrLost)
}
