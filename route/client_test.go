package route_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/route"
)

// stuck is a connection of a client that at some time reads no more, whatever the protocol above it wants.
type stuck struct {
	net.Conn
	from *atomic.Bool
	over chan struct{}
}

func (c stuck) Read(b []byte) (int, error) {
	if c.from.Load() {
		<-c.over
		return 0, io.EOF
	}
	return c.Conn.Read(b)
}

// bare is a ResponseWriter of a middleware that hides what it wraps.
type bare struct{ w http.ResponseWriter }

func (b bare) Header() http.Header         { return b.w.Header() }
func (b bare) WriteHeader(status int)      { b.w.WriteHeader(status) }
func (b bare) Write(p []byte) (int, error) { return b.w.Write(p) }
func (b bare) Flush()                      { b.w.(http.Flusher).Flush() }

// A client without any right to it must not be able to keep a key, whatever it does to its connection.
func TestNoClientKeepsAKeyByNeitherReadingNorSending(t *testing.T) {
	testkit.Slow(t)
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	for name, test := range map[string]struct {
		protocols *http.Protocols
		bare, hop bool
	}{
		"HTTP/1": {}, "h2c": {protocols: h2c}, "HTTP/1, through another process": {hop: true}, "h2c, through another process": {protocols: h2c, hop: true},
		"HTTP/1, behind a middleware without Unwrap": {bare: true}, "h2c, behind a middleware without Unwrap": {protocols: h2c, bare: true},
	} {
		for _, does := range []string{"sends no more", "reads no more", "closes its window"} {
			passed := t.Run(name+"/"+does, func(t *testing.T) {
				store := testkit.OpenSQLite(t, newFile(t))
				cfg := route.Config{DrainFor: 100 * time.Millisecond}
				owner := startProcess(t, store, "owner", cfg, claims.SessionConfig{}, test.protocols)
				at := owner
				if test.hop {
					at = startProcess(t, store, "other", cfg, claims.SessionConfig{}, test.protocols)
				}
				if test.bare {
					owner.use(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { owner.route.ServeHTTP(bare{w}, r) }))
				}
				returned := make(chan error, 1)
				release := owner.serve("x", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if does == "sends no more" {
						_, err := io.Copy(io.Discard, r.Body)
						returned <- err
						return
					}
					var err error
					for err == nil {
						_, err = w.Write(make([]byte, 100_000))
					}
					returned <- err
				}))
				over, reading := make(chan struct{}), new(atomic.Bool)
				transport := &http.Transport{Protocols: test.protocols, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := new(net.Dialer).DialContext(ctx, network, addr)
					if err == nil && does == "reads no more" {
						_ = conn.(*net.TCPConn).SetReadBuffer(4096)
					}
					return stuck{conn, reading, over}, err
				}}
				t.Cleanup(func() { close(over); transport.CloseIdleConnections() })
				never, write := io.Pipe()
				t.Cleanup(func() { write.Close() })
				ctx, cancel := context.WithCancel(t.Context())
				t.Cleanup(cancel)
				r, err := http.NewRequestWithContext(ctx, "POST", "http://"+at.addr+"/x", never)
				require.NoError(t, err)
				if does != "sends no more" {
					r.Body, r.ContentLength = nil, 0
				}
				heard := make(chan *http.Response, 1)
				go func() {
					answer, err := transport.RoundTrip(r)
					if err != nil {
						t.Error(err)
					}
					if does == "reads no more" { // not even what its window allows
						reading.Store(true)
					}
					heard <- answer
				}()
				if does == "sends no more" {
					_, err = io.WriteString(write, "the rest does not come")
					require.NoError(t, err)
				}
				testkit.Await(t, "it runs", func() bool { return owner.route.Status().Running == 1 })
				time.Sleep(200 * time.Millisecond) // until it waits for its client; if it does not, the test shows less
				released := make(chan struct{})
				go func() { release(); close(released) }()
				select {
				case <-released:
				case <-time.After(testkit.Patience / 6):
					t.Fatal("the client keeps the key")
				}
				require.Error(t, <-returned)
				_, err = at.keys.TryClaim(t.Context(), "x")
				require.NoError(t, err)
				write.Close() // now the connection can end in order
				answer := <-heard
				defer answer.Body.Close()
				if does == "closes its window" {
					_, err = io.Copy(io.Discard, answer.Body)
					require.Error(t, err, "an answer that was cut off does not look complete")
				}
				owner.server.Close()
			})
			if !passed {
				return // each would wait
			}
		}
	}
}

// dial returns a client's connection to a handler, in virtual time.
func dial(t *testing.T, h http.Handler) net.Conn {
	here, there := net.Pipe()
	require.NoError(t, here.SetReadDeadline(time.Now().Add(time.Hour)))
	server := &http.Server{Handler: h}
	go server.Serve(&oneConn{conn: there})
	t.Cleanup(func() { here.Close(); there.Close(); server.Close() })
	return here
}

func TestARequestWithoutProgressEndsAfterMaxStall(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		ends := make(chan string, 1)
		run := func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
			return serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				began := time.Now()
				var err error
				switch c.Key.ID {
				case "chat":
					w.WriteHeader(http.StatusAccepted)
					w.(http.Flusher).Flush()
					fallthrough
				case "body":
					_, err = io.Copy(io.Discard, r.Body)
				case "answer":
					_, err = w.Write(make([]byte, 1<<20))
				}
				ends <- fmt.Sprint(time.Since(began), errors.Is(err, os.ErrDeadlineExceeded))
			}))
		}
		var log bytes.Buffer // read when nothing writes
		owner := n.start(t, store, "owner", route.Config{Run: run, MaxStall: 20 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		other := n.start(t, store, "other", route.Config{MaxStall: 20 * time.Second})
		for _, tenant := range []string{"body", "answer", "chat"} {
			post(owner.route, "/"+tenant)
			<-ends
		}
		const head = "POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\nslow"
		for name, h := range map[string]http.Handler{
			"direct": owner.route, "forwarded": other.route,
			"behind a middleware without Unwrap": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { owner.route.ServeHTTP(bare{w}, r) }),
		} {
			t.Log(name)
			conn := dial(t, h)
			fmt.Fprintf(conn, head, "body")
			answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			if name == "forwarded" { // one of the two processes notices it first
				require.Contains(t, <-ends, "20s")
			} else {
				require.Equal(t, "20s true", <-ends)
				require.Equal(t, http.StatusOK, answer.StatusCode, "the handler may still answer")
			}
			require.True(t, answer.Close)
			if strings.Contains(name, "Unwrap") {
				synctest.Wait()
				require.Contains(t, log.String(), "a method Unwrap")
			} else {
				_, err = io.Copy(io.Discard, conn)
				require.NoError(t, err, "it is closed")
			}
			conn.Close()

			conn = dial(t, h)
			fmt.Fprintf(conn, head, "body")
			for range 10 {
				time.Sleep(15 * time.Second)
				fmt.Fprint(conn, "slow")
			}
			require.Empty(t, ends, "it makes progress")
			conn.Close()
			<-ends

			// A flush of httputil's proxy may wait for a mutex, and then virtual time stands still.
			if name != "forwarded" {
				conn = dial(t, h)
				io.WriteString(conn, "GET /answer HTTP/1.1\r\nHost: a\r\n\r\n")
				reader := bufio.NewReaderSize(conn, 1000)
				answer, err = http.ReadResponse(reader, nil)
				require.NoError(t, err)
				for range 10 {
					time.Sleep(15 * time.Second)
					_, err = io.ReadFull(answer.Body, make([]byte, 64<<10))
					require.NoError(t, err)
				}
				require.Empty(t, ends, "it makes progress")
				require.Contains(t, <-ends, "2m50s")
				conn.Close()
			}

			conn = dial(t, h)
			fmt.Fprintf(conn, head, "chat")
			answer, err = http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusAccepted, answer.StatusCode)
			time.Sleep(10 * time.Minute)
			require.Empty(t, ends, "a stream that has begun may be silent")
			conn.Close()
			<-ends
		}
		synctest.Wait()
	})
}
