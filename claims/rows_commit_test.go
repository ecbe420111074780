package claims_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// commitCutter is a proxy that breaks a connection when the client sends COMMIT.
type commitCutter struct {
	net.Listener
	server atomic.Pointer[string] // to which new connections go

	// next is called once, before that, with a func that sends COMMIT on and waits for the answer.
	next atomic.Pointer[func(deliver func())]
}

func cutCommits(t *testing.T, server string) *commitCutter {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	p := &commitCutter{Listener: listener}
	p.server.Store(&server)
	go func() {
		for {
			client, err := p.Accept()
			if err != nil {
				return
			}
			go p.serve(client)
		}
	}()
	return p
}

func (p *commitCutter) serve(client net.Conn) {
	defer client.Close()
	backend, err := net.Dial("tcp", *p.server.Load())
	if err != nil {
		return
	}
	defer backend.Close()
	muted := make(chan struct{})
	go func() {
		defer client.Close()
		defer backend.Close()
		buf := make([]byte, 1<<16)
		for {
			n, err := client.Read(buf)
			if bytes.Contains(buf[:n], []byte("COMMIT")) {
				if cut := p.next.Swap(nil); cut != nil {
					close(muted)
					(*cut)(func() {
						_, _ = backend.Write(buf[:n])
						_, _ = backend.Read(buf) // the answer, which the client does not get
					})
					return
				}
			}
			if err != nil {
				return
			}
			_, _ = backend.Write(buf[:n])
		}
	}()
	buf := make([]byte, 1<<16)
	for {
		n, err := backend.Read(buf)
		select {
		case <-muted:
			return
		default:
		}
		if _, writeErr := client.Write(buf[:n]); err != nil || writeErr != nil {
			return
		}
	}
}

// rowsBehind returns tasks on a server, and what the workers send goes through the proxy.
func rowsBehind(t *testing.T, server string) (*rowsDB, *commitCutter) {
	u, err := url.Parse(server)
	require.NoError(t, err)
	proxy := cutCommits(t, u.Host)
	db := rowsOnPostgresAt(t, server)
	ddl, err := tasks.PostgresDDL()
	require.NoError(t, err)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0, result text)`)
	db.exec(ddl)
	u.Host = proxy.Addr().String()
	query := u.Query()
	query.Set("default_query_exec_mode", "exec") // the proxy has to see the text of each statement
	u.RawQuery = query.Encode()
	db.open = func() tenure.Database { return testkit.OpenPostgres(t, u.String(), tenure.PostgresConfig{}) }
	return db, proxy
}

// The connection breaks when COMMIT was sent, or before it arrives.
func TestTheOutcomeOfAnUnansweredCommitIsLookedUp(t *testing.T) {
	db, proxy := rowsBehind(t, testkit.PostgresURL(t))
	db.add(1, 2)
	w := db.worker(claims.SessionConfig{}, tasks)
	for _, c := range w.take(2) {
		lands := c.Key.ID == "1"
		cut := func(deliver func()) {
			if lands {
				deliver()
			}
		}
		err := w.rows.FinishPostgres(context.Background(), []claims.Claim{c}, func(tx pgx.Tx) error {
			_, err := tx.Exec(context.Background(), `UPDATE tasks SET result = 'x' WHERE id = `+c.Key.ID)
			proxy.next.Store(&cut)
			return err
		})
		if lands {
			require.NoError(t, err)
			require.Equal(t, 1, db.count(`SELECT count(*) FROM tasks WHERE result = 'x' AND status = 'done'`))
			continue
		}
		require.ErrorContains(t, err, "nothing is written")
		require.True(t, w.rows.Holds(c))
		require.Equal(t, 1, db.count(`SELECT count(*) FROM tasks WHERE result = 'x'`))
	}
}

// The row would be finished without what was written, or the other way round.
func TestAFuncThatEndsItsTransactionBySQLIsNeverToldThatItsRowIsFinished(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		w := db.worker(claims.SessionConfig{}, tasks)
		id := 0
		try := func(ending string) error {
			id++
			db.add(id, id)
			return db.finish(w.rows, w.take(1), func(exec exec) error {
				return errors.Join(testkit.SendEnding(db.Context(), ending, func(ctx context.Context, query string) error { return exec(ctx, query) }),
					exec(db.Context(), fmt.Sprintf(`UPDATE tasks SET result = 'x' WHERE id = %d`, id)))
			})
		}
		for _, ending := range testkit.TxEndings {
			if db.pool == nil && strings.Contains(ending, "CHAIN") {
				continue
			}
			require.Error(db, try(ending), ending)
		}
		for _, harmless := range testkit.HarmlessSQL {
			require.NoError(db, try(harmless), harmless)
		}
	})
}

// The server crashes before COMMIT arrives, and gives the transaction's xid to another, which
// commits.
func TestACommitOfAnotherTransactionWithTheSameXidProvesNothing(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	for how, crash := range map[string]func(s *testkit.PostgresServer, backend int) error{
		"a backend crashes": func(s *testkit.PostgresServer, backend int) error {
			witness, err := pgx.Connect(context.Background(), s.URL())
			if err != nil {
				return err
			}
			defer witness.Close(context.Background())
			process, err := os.FindProcess(backend)
			if err == nil {
				err = process.Kill()
			}
			for err == nil && witness.Ping(context.Background()) == nil { // until the server has ended all sessions
				time.Sleep(time.Millisecond)
			}
			return err
		},
		"the server restarts": func(s *testkit.PostgresServer, _ int) error { return s.Restart("immediate") },
	} {
		t.Run(how, func(t *testing.T) {
			for range 10 {
				if xidReused(t, crash) {
					return
				}
			}
			t.Fatal("not once in 10 times was the xid given again")
		})
	}
}

// xidReused reports whether another transaction got the xid. It does not if something that
// committed before the crash has made the server keep it.
func xidReused(t *testing.T, crash func(s *testkit.PostgresServer, backend int) error) bool {
	s := testkit.StartPostgres(t, "wal_writer_delay=10000ms") // it would keep the xid, too
	db, proxy := rowsBehind(t, s.URL())
	db.add(1, 1)
	w := db.worker(claims.SessionConfig{}, tasks)
	c := w.take(1)[0]
	ctx := context.Background()
	var xid int64
	var backend int
	reused := make(chan bool, 1)
	cut := func(func()) {
		if err := crash(s, backend); err != nil {
			t.Error(err)
		}
		reused <- useXid(t, s.URL(), xid)
	}
	err := w.rows.FinishPostgres(ctx, []claims.Claim{c}, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, `UPDATE tasks SET result = 'x' WHERE id = 1 RETURNING pg_current_xact_id()::text::bigint, pg_backend_pid()`).Scan(&xid, &backend)
		proxy.next.Store(&cut)
		return err
	})
	require.Zero(t, rowsOnPostgresAt(t, s.URL()).count(`SELECT count(*) FROM tasks WHERE result = 'x'`))
	if !<-reused { // by useXid; a renewal of the session may have had it
		require.Error(t, err)
		require.Regexp(t, "nothing is written|unknown whether it is written", err.Error())
		return false
	}
	require.ErrorContains(t, err, "unknown whether it is written")
	return true
}

// Before COMMIT arrives, another server takes over, which has given the xid to another transaction and has
// older sessions.
func TestACommitOnAnotherServerProvesNothing(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	first, next := testkit.StartPostgres(t), testkit.StartPostgres(t)
	db, proxy := rowsBehind(t, first.URL())
	db.add(1, 1)
	w := db.worker(claims.SessionConfig{}, tasks)
	c := w.take(1)[0]
	old, err := pgx.Connect(t.Context(), next.URL())
	require.NoError(t, err)
	defer old.Close(context.Background())
	ctx := context.Background()
	var xid int64
	stopped := make(chan struct{})
	cut := func(func()) {
		defer close(stopped)
		u, err := url.Parse(next.URL())
		if err != nil || !useXid(t, next.URL(), xid) {
			t.Error("the xid was not given again", err)
		}
		proxy.server.Store(&u.Host)
		if err := first.Stop("immediate"); err != nil {
			t.Error(err)
		}
	}
	err = w.rows.FinishPostgres(ctx, []claims.Claim{c}, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, `UPDATE tasks SET result = 'x' WHERE id = 1 RETURNING pg_current_xact_id()::text::bigint`).Scan(&xid)
		proxy.next.Store(&cut)
		return err
	})
	<-stopped
	require.ErrorContains(t, err, "unknown whether it is written")
}

// useXid commits transactions until one has had that xid, and reports whether one had.
func useXid(t *testing.T, url string, xid int64) bool {
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		conn, err := pgx.Connect(context.Background(), url)
		if err != nil {
			continue // it still recovers
		}
		defer conn.Close(context.Background())
		for {
			var is int64
			if err := conn.QueryRow(context.Background(), `SELECT pg_current_xact_id()::text::bigint`).Scan(&is); err != nil {
				break
			}
			if is >= xid {
				return is == xid
			}
		}
	}
	t.Error("the server does not come back")
	return false
}
