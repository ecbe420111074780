//go:build unix

package databases_test

import (
	"context"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// stall makes a server hang, with all its connections, until the test ends: the
// system takes what is sent to it, and nobody answers.
func stall(t *testing.T, url string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	testkit.WantErr(t, err, nil)
	var postmaster string
	testkit.WantErr(t, conn.QueryRow(t.Context(), `SELECT pg_read_file('postmaster.pid')`).Scan(&postmaster), nil)
	var pids []int
	testkit.WantErr(t, conn.QueryRow(t.Context(), `SELECT array_agg(pid) FROM pg_stat_activity WHERE backend_type = 'client backend'`).Scan(&pids), nil)
	parent, err := strconv.Atoi(strings.Fields(postmaster)[0])
	testkit.WantErr(t, err, nil)
	pids = append(pids, parent)
	for _, pid := range pids {
		testkit.WantErr(t, syscall.Kill(pid, syscall.SIGSTOP), nil)
	}
	t.Cleanup(func() {
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
		conn.Close(context.Background())
	})
}

func TestCloseDoesNotWaitForAServerThatHangs(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T, url string) *tenure.PostgresStore{
		"with a pool of its own": func(t *testing.T, url string) *tenure.PostgresStore {
			return testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
		},
		"with a ListenURL": func(t *testing.T, url string) *tenure.PostgresStore {
			return testkit.OpenPostgres(t, url, tenure.PostgresConfig{ListenURL: url})
		},
		"with the caller's pool": func(t *testing.T, url string) *tenure.PostgresStore {
			pool, err := pgxpool.New(t.Context(), url)
			testkit.WantErr(t, err, nil)
			go func() { // not the store's to close, and slow to
				<-t.Context().Done()
				pool.Close()
			}()
			return testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := testkit.StartPostgres(t)
			before := stacksOf("tenurelib/tenure.", "internal/listen.")
			store := open(t, server.URL())
			testkit.Migrate(t, store)
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
			term := testkit.MustAcquire(t, lease)
			testkit.LiveWatch(t, store, testkit.LeaseKey)
			stall(t, server.URL())
			soon, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if err := lease.Renew(soon, term); err == nil { // the driver ends that connection in its own time
				t.Fatal("the server answers; the test tests nothing")
			}
			under := make(chan error, 1)
			go func() { under <- lease.Renew(context.Background(), term) }()

			began := time.Now()
			testkit.WantErr(t, store.Close(), nil)
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("Close took %v", took)
			}
			select {
			case err := <-under:
				if err == nil {
					t.Error("a call of a server that hangs succeeds")
				}
			case <-time.After(10 * time.Second):
				t.Error("a call that was under way goes on")
			}
			testkit.Await(t, "no goroutine is left", func() bool { return stacksOf("tenurelib/tenure.", "internal/listen.") <= before })
		})
	}
}

// A program, or its ORM, sets how many connections of the handle stay open. They are the pool's.
func TestCloseDoesNotWaitForConnectionsThatTheHandleKeeps(t *testing.T) {
	store, err := tenure.OpenPostgres(t.Context(), testkit.PostgresURL(t), tenure.PostgresConfig{Logger: testkit.Quiet})
	require.NoError(t, err)
	store.DB().SetMaxIdleConns(5)
	require.NoError(t, store.DB().PingContext(t.Context()))
	closed := make(chan error, 1)
	go func() { closed <- store.Close() }()
	select {
	case err := <-closed:
		require.NoError(t, err)
	case <-time.After(testkit.Patience):
		require.Fail(t, "Close waits")
	}
	require.Error(t, store.DB().PingContext(t.Context()))
}
