package claims_test

import (
	"bytes"
	"context"
	"net"
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/verify/kit"
	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

// The connection breaks when COMMIT was sent, or before it arrives.
func TestTheOutcomeOfAnUnansweredCommitIsLookedUp(t *testing.T) {
	server, err := url.Parse(pgtest.URL(t))
	require.NoError(t, err)
	var arrives, cuts atomic.Bool
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { proxy.Close() })
	go func() {
		for {
			client, err := proxy.Accept()
			if err != nil {
				return
			}
			go func() {
				defer client.Close()
				backend, err := net.Dial("tcp", server.Host)
				if err != nil {
					return
				}
				defer backend.Close()
				muted := make(chan struct{})
				go func() {
					buf := make([]byte, 1<<16)
					for {
						n, err := client.Read(buf)
						if bytes.Contains(buf[:n], []byte("commit")) && cuts.CompareAndSwap(true, false) {
							close(muted)
							if arrives.Load() {
								_, _ = backend.Write(buf[:n])
								_, _ = backend.Read(buf) // the answer, which the client does not get
							}
							client.Close()
							backend.Close()
							return
						}
						if err != nil {
							backend.Close()
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
			}()
		}
	}()
	db := rowsOnPostgresAt(t, server.String())
	ddl, err := tasks.PostgresDDL()
	require.NoError(t, err)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0, result text)`)
	db.exec(ddl)
	db.add(1, 2)
	through := *server
	through.Host = proxy.Addr().String()
	db.open = func() tenure.Database { return kit.OpenPostgres(t, through.String(), tenure.PostgresConfig{}) }
	w := db.worker(claims.SessionConfig{}, tasks)
	for _, c := range w.take(2) {
		lands := c.Key.ID == "1"
		arrives.Store(lands)
		err := w.rows.FinishPostgres(context.Background(), []claims.Claim{c}, func(tx pgx.Tx) error {
			_, err := tx.Exec(context.Background(), `UPDATE tasks SET result = 'x' WHERE id = `+c.Key.ID)
			cuts.Store(true)
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
