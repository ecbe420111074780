package route_test

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
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
	"github.com/tenurelib/tenure/storetest"
)

// A client may name any header in Connection, and a proxy drops what it names.
func TestTheOwnerServesTheKeyThatTheSenderHasLookedUp(t *testing.T) {
	tenant := func(r *http.Request) string { return cmp.Or(r.Header.Get("X-Tenant"), "default") }
	byAddr := func(r *http.Request) string { return cmp.Or(r.Header.Get("X-Forwarded-For"), "none") }
	for name, id := range map[string]func(r *http.Request) string{"by header": tenant, "by what a hop adds": byAddr} {
		t.Run(name, func(t *testing.T) {
			store, ran := testkit.OpenSQLite(t, newFile(t)), newRan()
			h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				ran.note(claims.ClaimFromContext(r.Context()).Key.ID, 0)
				fmt.Fprint(w, claims.ClaimFromContext(r.Context()).Key.ID, r.Header["Keep-Alive"], r.Header["Tenure-Route"])
			})
			owner, front := startKeyed(t, store, "owner", id), startKeyed(t, store, "front", id)
			for _, key := range []string{"default", "acme", "none", "127.0.0.1"} {
				owner.serve(key, h)
			}
			got := ask(front.addr, "POST", "/", "1", strings.NewReader("body"), "X-Tenant", "acme", "Connection", "X-Tenant, keep-alive, tenure-route,id", "Keep-Alive", "1")
			if name == "by header" {
				require.Equal(t, `200  "acme[] []" <nil>`, got.String())
			} else {
				require.Contains(t, got.String(), "503 refused", "the sender has computed the key none, and the owner 127.0.0.1")
				require.Empty(t, ran.times)
			}
		})
	}
}

// startKeyed is startProcess with another func that returns the key of a request.
func startKeyed(t *testing.T, store tenure.Store, name string, id func(*http.Request) string) *process {
	p := startProcess(t, store, name, route.Config{}, claims.SessionConfig{}, nil)
	p.route = testkit.Must(route.Keys(p.keys, id, route.Config{MaxWait: 500 * time.Millisecond}))
	p.use(p.route)
	return p
}

func TestAHeaderThatNamesAnotherKeyIsRefused(t *testing.T) {
	p := newPair(t, func(http.ResponseWriter, *http.Request) {}, route.Config{}, 0)
	hop := p.hop(p.claim.Session, 0, 100)
	require.Equal(t, 200, ask(p.owner.addr, "POST", "/x", "1", nil, "Tenure-Route", hop).status, "from an older version")
	require.Equal(t, 200, ask(p.owner.addr, "POST", "/x", "1", nil, "Tenure-Route", hop+"; key=x").status)
	require.Equal(t, 421, ask(p.owner.addr, "POST", "/x", "1", nil, "Tenure-Route", hop+"; key=y").status)
	require.Equal(t, 421, ask(p.owner.addr, "POST", "/y", "1", nil, "Tenure-Route", hop+"; key=x").status, "the header chooses no key")
}

func TestARouteMayBeMountedUnderAPrefix(t *testing.T) {
	p := newPair(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.URL.EscapedPath(), "?", r.URL.RawQuery) }, route.Config{}, 0)
	for _, at := range []*process{p.owner, p.other} {
		mux := http.NewServeMux()
		mux.Handle("/api/", http.StripPrefix("/api", at.route))
		mux.HandleFunc("/", http.NotFound)
		at.use(mux)
	}
	for _, at := range []*process{p.owner, p.other} {
		require.Equal(t, `200  "/a%2Fb/x?q=1" <nil>`, ask(at.addr, "POST", "/api/a%2Fb/x?q=1", "1", nil).String())
	}
}

func TestAnAnswerOfSomethingElseThanTheRouteIsUnknown(t *testing.T) {
	var log bytes.Buffer // read when nothing writes
	path, asked := newFile(t), atomic.Int32{}
	ownedBy(t, path, listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { asked.Add(1); http.NotFound(w, r) })), "x")
	front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}, claims.SessionConfig{}, nil)
	require.Contains(t, ask(front.addr, "POST", "/x", "1", nil).String(), "502 unknown")
	require.EqualValues(t, 1, asked.Load(), "it may have run")
	require.Contains(t, ask(front.addr, "GET", "/x", "1", nil).String(), "502 unknown")
	front.server.Close()
	testkit.Await(t, "it is logged", func() bool { return strings.Contains(log.String(), "without Tenure-Token") })

	p := newPair(t, func(http.ResponseWriter, *http.Request) { panic("a handler's mistake") }, route.Config{}, 0)
	p.owner.use(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			recover()
			w.WriteHeader(http.StatusInternalServerError)
		}()
		p.owner.route.ServeHTTP(w, r)
	}))
	require.Equal(t, `500  "" <nil>`, ask(p.other.addr, "POST", "/x", "1", nil).String(), "a middleware answers for the handler")
}

// Some WebSocket libraries take the connection over before the status, others after it.
func TestAHandlerMayTakeTheConnectionOverAfter101(t *testing.T) {
	p := newPair(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", "chat")
		w.WriteHeader(http.StatusSwitchingProtocols)
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		line, _ := buffered.ReadString('\n')
		io.WriteString(conn, "heard "+line)
		_, err = buffered.ReadByte()
		require.Error(t, err)
	}, route.Config{DrainFor: 100 * time.Millisecond}, 0)
	for _, at := range []*process{p.owner, p.other} {
		conn, err := net.Dial("tcp", at.addr)
		require.NoError(t, err)
		defer conn.Close()
		require.NoError(t, conn.SetDeadline(time.Now().Add(testkit.Patience)))
		io.WriteString(conn, "GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: chat\r\n\r\n")
		reader := bufio.NewReader(conn)
		answer, err := http.ReadResponse(reader, nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusSwitchingProtocols, answer.StatusCode)
		io.WriteString(conn, "hello\n")
		line, err := reader.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "heard hello\n", line)
		defer func() {
			_, err = reader.ReadByte()
			require.ErrorIs(t, err, io.EOF, "it is closed when the key moves")
		}()
	}
	p.release()
}

func TestTrailersReachTheOwner(t *testing.T) {
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	for name, protocols := range map[string]*http.Protocols{"HTTP/1": nil, "h2c": h2c} {
		t.Run(name, func(t *testing.T) {
			store := testkit.OpenSQLite(t, newFile(t))
			owner := startProcess(t, store, "owner", route.Config{}, claims.SessionConfig{}, protocols)
			front := startProcess(t, store, "front", route.Config{}, claims.SessionConfig{}, protocols)
			owner.serve("x", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Trailer", "Sum")
				n, err := io.Copy(io.Discard, r.Body)
				fmt.Fprint(w, n, err, r.Trailer.Get("Sum"))
				w.Header().Set("Sum", "42")
				w.Header().Set(http.TrailerPrefix+"Late", "43")
			}))
			client := &http.Client{Transport: &http.Transport{Protocols: protocols}}
			defer client.CloseIdleConnections()
			for _, at := range []*process{owner, front} {
				for _, length := range []int64{-1, 9} { // HTTP/2 has trailers after a body of known length, too
					r, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+at.addr+"/x", io.MultiReader(strings.NewReader("some body")))
					require.NoError(t, err)
					if r.ContentLength = length; protocols == nil {
						r.ContentLength = -1
					}
					r.Trailer = http.Header{"Sum": {"41"}}
					answer, err := client.Do(r)
					require.NoError(t, err)
					text, err := io.ReadAll(answer.Body)
					require.NoError(t, err)
					require.Equal(t, "9 <nil>41", string(text))
					require.Equal(t, http.Header{"Sum": {"42"}, "Late": {"43"}}, answer.Trailer)
				}
			}
		})
	}
}

func TestProcessesWithOneAddressAreWarnedOf(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		var log bytes.Buffer // read when nothing writes
		start := func(store tenure.Store, holder string) (*claims.Keys, *route.Route) {
			session := testkit.Must(claims.NewSession(store, claims.SessionConfig{Holder: holder, Labels: map[string]string{"address": "localhost:80"}, Logger: testkit.Quiet}))
			keys := testkit.Must(claims.NewKeys(session, "tenant"))
			runSession(t, session)
			synctest.Wait()
			return keys, testkit.Must(route.Keys(keys, tenantOf, route.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
		}
		keys, rt := start(store, "a")
		require.Len(t, testkit.Must(keys.TryClaim(t.Context(), "x")), 1)
		for range 10 {
			require.Equal(t, http.StatusServiceUnavailable, post(rt, "/x").Code, "it does not serve the key")
		}
		synctest.Wait()
		require.NotContains(t, log.String(), "address", "its own key")

		link := storetest.Faulty(store, nil)
		t.Cleanup(func() { link.SetHook(nil) })
		keys, _ = start(link, "crashed")
		require.Len(t, testkit.Must(keys.TryClaim(t.Context(), "y")), 1)
		link.SetHook(testkit.Hang)
		_, rt = start(store, "b")
		require.Equal(t, http.StatusServiceUnavailable, post(rt, "/y").Code)
		require.Equal(t, http.StatusServiceUnavailable, post(rt, "/y").Code)
		synctest.Wait()
		require.NotContains(t, log.String(), "address", "a process that has crashed and was started again")

		for range 10 {
			require.Equal(t, http.StatusServiceUnavailable, post(rt, "/x").Code)
		}
		synctest.Wait()
		require.Contains(t, log.String(), "the same address")
		require.Contains(t, log.String(), "holder=a")
	})
}
