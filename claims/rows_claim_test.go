package claims_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/golden"
	"github.com/tenurelib/tenure/storetest"
)

// asked is a queue whose rows other processes can request.
var asked = func() claims.QueueConfig {
	cfg := tasks
	cfg.Requested = "requested"
	return cfg
}()

func TestGivenRowsAreClaimedIfTheyAreFreeAndReady(t *testing.T) {
	cfg := tasks
	cfg.MaxAttempts, cfg.Exhausted = 3, "status = 'dead'"
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 6)
		db.exec(`UPDATE tasks SET status = 'held' WHERE id = 2`)
		db.exec(`UPDATE tasks SET attempts = 3 WHERE id = 4`)
		a, b := db.worker(claims.SessionConfig{}, cfg), db.worker(claims.SessionConfig{}, cfg)
		later := b.take(1)
		require.NoError(db, b.rows.ReleaseAfter(db.Context(), time.Hour, later[0]))
		require.Equal(db, []string{"3"}, takenIDs(b.take(1)))

		got, err := a.rows.TryClaim(db.Context(), "1", "2", "3", "4", "5", "70")
		require.NoError(db, err)
		require.Equal(db, []string{"5"}, takenIDs(got), "1 is released for later, 2 not ready, 3 another's, 4 tried too often, and 70 does not exist")
		require.Equal(db, 1, got[0].Attempt)
		require.True(db, got[0].Row && a.rows.Holds(got[0]))
		testkit.Await(db.T, "the row that was tried too often is retired", func() bool { return db.count(`SELECT count(*) FROM tasks WHERE id = 4 AND status = 'dead'`) == 1 })
		again, err := a.rows.TryClaim(db.Context(), "5")
		require.NoError(db, err)
		require.Empty(db, again, "the session has it")
		require.NoError(db, a.rows.Finish(db.Context(), got...))
		for _, ids := range [][]string{nil, {""}, {"1", "1"}, {"\xff"}} {
			_, err := a.rows.TryClaim(db.Context(), ids...)
			require.ErrorIs(db, err, tenure.ErrInvalid, "%q", ids)
			_, err = a.rows.Claim(db.Context(), ids...)
			require.ErrorIs(db, err, tenure.ErrInvalid, "%q", ids)
		}
		if db.pool != nil {
			_, err := a.rows.Claim(db.Context(), "no number")
			require.ErrorIs(db, err, tenure.ErrInvalid)
		}
	})
}

func TestAClaimOfAGivenRowWaitsUntilItIsFreeOrReady(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 2)
		a, b := db.worker(claims.SessionConfig{}, tasks), db.worker(claims.SessionConfig{}, tasks)
		held := a.take(2)
		claimed := make(chan []claims.Claim, 1)
		claim := func(ids ...string) {
			go func() {
				got, err := b.rows.Claim(context.Background(), ids...)
				if err != nil {
					t.Error(err)
				}
				claimed <- got
			}()
		}
		claim("2")
		require.NoError(db, a.rows.Release(db.Context(), held...))
		require.Equal(db, []string{"2"}, takenIDs(<-claimed))
		claim("3") // it does not exist yet
		db.add(3, 3)
		require.Equal(db, []string{"3"}, takenIDs(<-claimed))
		db.exec(`UPDATE tasks SET status = 'held' WHERE id = 1`)
		claim("1")
		db.exec(`UPDATE tasks SET status = 'queued' WHERE id = 1`)
		require.Equal(db, []string{"1"}, takenIDs(<-claimed))
		ctx, cancel := context.WithTimeout(db.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := a.rows.Claim(ctx, "1")
		require.ErrorIs(db, err, context.DeadlineExceeded)
	})
}

func TestTheRowOfACrashedProcessCanBeClaimedByName(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 2)
		a, b := db.worker(claims.SessionConfig{}, tasks), db.worker(claims.SessionConfig{}, tasks)
		old := a.take(2)
		db.removeSession(a.session.ID())
		ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
		defer cancel()
		got, err := b.rows.Claim(ctx, "2")
		require.NoError(db, err)
		require.Greater(db, got[0].Token, old[1].Token)
	})
}

// The answer to the statement that took a row is lost. The next claim by name gets the row all the same.
func TestAGivenRowWhoseClaimWasNotAnsweredIsClaimedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, testkit.OpenSQLite(t, ":memory:"))
		sqlite := w.store.(*tenure.SQLiteStore)
		testkit.ExecSQL(t, sqlite.DB(), fmt.Sprintf(createTasks, "integer"))
		ddl, err := tasks.SQLiteDDL()
		require.NoError(t, err)
		testkit.ExecSQL(t, sqlite.DB(), ddl)
		testkit.ExecSQL(t, sqlite.DB(), `INSERT INTO tasks (id) VALUES (1)`)
		p := w.start("a")
		rows, err := newRows(p.session, tasks)
		require.NoError(t, err)
		p.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if err := do(ctx); err != nil || call.Op != "queue.take" {
				return err
			}
			return errors.New("connection reset")
		})
		_, err = rows.TryClaim(t.Context(), "1")
		require.Error(t, err)
		p.fault(nil)
		got, err := rows.TryClaim(t.Context(), "1") // at once
		require.NoError(t, err)
		require.Len(t, got, 1)
		require.Equal(t, 1, got[0].Attempt, "nobody has worked on it before")
		time.Sleep(2 * time.Hour)
		require.True(t, rows.Holds(got[0]), "the doubt about the row is over")
	})
}

func TestARequestedRowIsReleased(t *testing.T) {
	eachRowsServer(t, asked, func(db *rowsDB) {
		db.add(1, 4)
		requests := make(chan claims.Claim, 10)
		a := db.worker(claims.SessionConfig{ReleaseRequested: func(c claims.Claim) { requests <- c }}, asked)
		b := db.worker(claims.SessionConfig{}, asked)
		got := a.take(3)
		begun, stopped := make(chan struct{}), make(chan error, 1)
		go func() {
			stopped <- a.rows.Do(context.Background(), got[0], func(ctx context.Context) error {
				close(begun)
				<-ctx.Done()
				return context.Cause(ctx)
			})
		}()
		<-begun
		require.NoError(db, b.rows.RequestRelease(db.Context(), "1", "2", "4", "50"))
		require.ErrorIs(db, <-stopped, tenure.ErrResigned)
		require.Equal(db, got[1], <-requests)
		mine, err := b.rows.Claim(db.Context(), "1")
		require.NoError(db, err)
		require.True(db, a.rows.Holds(got[1]) && a.rows.Holds(got[2]))
		require.Empty(db, requests)

		// A request is for the present claim only.
		require.NoError(db, b.rows.Release(db.Context(), mine...))
		again, err := a.rows.Claim(db.Context(), "1")
		require.NoError(db, err)
		require.NoError(db, a.rows.Release(db.Context(), got[1]))
		kept, err := a.rows.Claim(db.Context(), "2")
		require.NoError(db, err)
		require.NoError(db, b.rows.RequestRelease(db.Context(), "3"))
		require.Equal(db, got[2], <-requests)
		require.Empty(db, requests)
		require.True(db, a.rows.Holds(again[0]) && a.rows.Holds(kept[0]))

		without := db.worker(claims.SessionConfig{}, tasks)
		err = without.rows.RequestRelease(db.Context(), "1")
		require.ErrorIs(db, err, tenure.ErrInvalid)
		require.ErrorContains(db, err, "set Requested")
		require.ErrorIs(db, b.rows.RequestRelease(db.Context()), tenure.ErrInvalid)
	})
}

func TestARequestForARowIsFoundEvenIfItsHintWasLost(t *testing.T) {
	eachRowsServer(t, asked, func(db *rowsDB) {
		db.add(1, 1)
		requests := make(chan claims.Claim, 1)
		a := db.worker(claims.SessionConfig{TTL: 2 * time.Second, ReleaseRequested: func(c claims.Claim) { requests <- c }}, asked)
		got := a.take(1)
		db.exec(`UPDATE tasks SET requested = token`)
		require.Equal(db, got[0], <-requests)
	})
}

func TestOperatorsSeeWhoOwnsTheRowsOfAQueue(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 30)
		a, b := db.worker(claims.SessionConfig{Holder: "a"}, tasks), db.worker(claims.SessionConfig{Holder: "b", Labels: map[string]string{"address": "10.0.0.2"}}, tasks)
		first, rest := a.take(10), b.take(10)
		q, err := claims.NewQueue(db.open(), tasks)
		require.NoError(db, err)
		owner, err := q.Owner(db.Context(), "12")
		require.NoError(db, err)
		require.Equal(db, "b", owner.Holder)
		require.Equal(db, "10.0.0.2", owner.Labels["address"])
		for _, id := range []string{"25", "31"} {
			_, err := q.Owner(db.Context(), id)
			require.ErrorIs(db, err, tenure.ErrNotFound)
		}
		var listed []claims.Claim
		for after := ""; ; after = listed[len(listed)-1].Key.ID {
			page, err := q.List(db.Context(), after, 7)
			require.NoError(db, err)
			listed = append(listed, page...)
			if len(page) < 7 {
				break
			}
		}
		require.Equal(db, append(first, rest...), listed)
		_, err = q.List(db.Context(), "", 0)
		require.ErrorIs(db, err, tenure.ErrInvalid)

		holder := `convert_from(o.payload, 'UTF8')::json ->> 'holder'` // as in the documents
		if db.pool == nil {
			holder = `json_extract(CAST(o.payload AS TEXT), '$.holder')`
		}
		db.exec(`CREATE VIEW tasks_owned AS SELECT m.id, ` + holder + ` AS holder, o.labels, m.session, m.token
			FROM tasks m LEFT JOIN objects o ON o.object_type = 'tenure.session' AND o.id = m.session WHERE m.session IS NOT NULL`)
		require.Equal(db, 10, db.count(`SELECT count(*) FROM tasks_owned WHERE holder = 'a'`))
		require.Equal(db, 10, db.count(`SELECT count(*) FROM tasks_owned WHERE holder = 'b'`))
	})
}

// The store does not know which tables are queues, so a session that has taken a row registers the queue, once.
func TestAQueueThatIsWorkedOnRegistersItself(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 3)
		a := db.worker(claims.SessionConfig{}, tasks)
		key := tenure.Key{Type: "tenure.queue", ID: "tasks"}
		_, err := a.store.Get(db.Context(), key)
		require.ErrorIs(db, err, tenure.ErrNotFound)
		a.take(1)
		var record tenure.Object
		testkit.Await(db.T, "the queue is registered", func() bool {
			record, err = a.store.Get(db.Context(), key)
			return err == nil
		})
		golden.Compare(db.T, "queue", string(record.Payload)+"\n")
		a.take(1)
		b := db.worker(claims.SessionConfig{}, tasks)
		b.take(1)
		a.stop()
		b.stop()
		now, err := a.store.Get(db.Context(), key)
		require.NoError(db, err)
		require.Equal(db, record.Version, now.Version, "it is written once")

		other := tasks
		other.Token = "fence"
		db.exec(`ALTER TABLE tasks RENAME COLUMN token TO fence`)
		db.worker(claims.SessionConfig{}, other).take(1)
		testkit.Await(db.T, "the other column is registered", func() bool {
			now, err = a.store.Get(db.Context(), key)
			return err == nil && strings.Contains(string(now.Payload), `"token":"fence"`)
		})

		// The server of remote workers does it, too.
		require.NoError(db, a.store.DeleteIf(db.Context(), key, tenure.IfVersion(now.Version)))
		q, err := claims.NewQueue(a.store, other)
		require.NoError(db, err)
		db.add(4, 4)
		got, err := takeFor(db.Context(), q, db.remote("remote", time.Hour), claims.TakeOptions{N: 1})
		require.NoError(db, err)
		require.Len(db, got, 1)
		_, err = a.store.Get(db.Context(), key)
		require.NoError(db, err)
	})
}
