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
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
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

// answering is a Run whose handler answers at once.
func answering(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
	return serve(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
}

// owner starts a process without a route of its own that owns tenants. Its address answers with h.
func (n *wires) owner(t *testing.T, store tenure.Store, name string, h http.Handler, tenants ...string) *virtual {
	p := n.start(t, store, name, route.Config{})
	_, err := p.keys.TryClaim(t.Context(), tenants...)
	require.NoError(t, err)
	n.add(name+":1", ownerFunc(h.ServeHTTP))
	return p
}

func TestOnlySoManyRequestsWait(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		over := make(chan struct{})
		n.owner(t, store, "slow", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/events" {
				w.(http.Flusher).Flush()
			}
			<-over
		}), "x", "events", "other", "third")
		p := n.start(t, store, "a", route.Config{MaxWaiting: 3, MaxWait: time.Minute})
		var ends sync.WaitGroup
		defer ends.Wait()
		send := func(path string) { ends.Go(func() { post(p.route, path) }); synctest.Wait() }
		refused := func(path string) {
			began := time.Now()
			w := post(p.route, path)
			require.Equal(t, "refused", w.Header().Get("Tenure-Request"), path)
			require.Equal(t, http.StatusServiceUnavailable, w.Code)
			require.Zero(t, time.Since(began), "at once")
		}
		for range 9 {
			send("/events") // whose answers have begun
		}
		for _, paths := range [][]string{{"/x", "/other"}, {"/free", "/endless"}} { // the latter wait for an owner, and keep none from a known one
			send(paths[0])
			send(paths[0])
			refused(paths[0]) // one key leaves room for others
			send(paths[1])
			refused("/third")
		}
		time.Sleep(2 * time.Minute) // those for free keys are refused
		began := time.Now()
		require.Equal(t, http.StatusServiceUnavailable, post(p.route, "/free").Code)
		require.NotZero(t, time.Since(began), "others may wait")
		close(over)
		ends.Wait()
		require.Equal(t, http.StatusOK, post(p.route, "/x").Code, "they wait no longer")
	})
}

// Clients that send their bodies slowly take no room from requests without a body.
func TestBodiesThatDoNotComeTakeNoRoomFromOthers(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		n.owner(t, store, "owner", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }), "x", "y", "z")
		p := n.start(t, store, "a", route.Config{MaxWaiting: 3, MaxWait: time.Minute, MaxStall: time.Minute, MaxReplay: 1000})
		upload := func(path string, length int) net.Conn {
			conn := dial(t, p.route)
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\nslow", path, length)
			synctest.Wait()
			return conn
		}
		refused := func(path string, length int) {
			conn := upload(path, length)
			if length == 1000 { // net/http reads a short body before it answers
				conn.Write(make([]byte, length-4))
			}
			got, err := http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusServiceUnavailable, got.StatusCode)
		}
		answer := func(conn net.Conn) int {
			got, err := http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			return got.StatusCode
		}
		for _, length := range []int{1000, 1_000_000} {
			first, second := upload("/x", length), upload("/x", length)
			refused("/x", length) // one key leaves room for others
			third := upload("/y", length)
			refused("/z", length)
			for _, path := range []string{"/x", "/y", "/z"} {
				require.Equal(t, http.StatusOK, post(p.route, path).Code)
			}
			for _, conn := range []net.Conn{first, second, third} {
				require.NotEqual(t, http.StatusServiceUnavailable, answer(conn), "it has waited")
				conn.Close()
			}
		}
	})
}

// On HTTP/2, a body that is not read uses up the window of its connection.
func TestABodyThatIsNotReadHoldsUpNoOther(t *testing.T) {
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	for name, transport := range map[string]http.RoundTripper{"default": nil, "the user's": &http.Transport{Protocols: h2c}} {
		t.Run(name, func(t *testing.T) {
			store := testkit.OpenSQLite(t, newFile(t))
			owner := startProcess(t, store, "owner", route.Config{}, claims.SessionConfig{}, h2c)
			front := startProcess(t, store, "front", route.Config{Transport: transport}, claims.SessionConfig{}, nil)
			reading, over := make(chan bool), make(chan bool)
			owner.serve("slow", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = r.Body.Read(make([]byte, 1))
				reading <- true
				<-over
			}))
			owner.serve("x", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				n, err := io.Copy(io.Discard, r.Body)
				fmt.Fprint(w, n, err)
			}))
			var clients sync.WaitGroup
			defer clients.Wait()
			defer close(over)
			for range 2 {
				clients.Go(func() { ask(front.addr, "POST", "/slow", "1", bytes.NewReader(make([]byte, 8<<20))) })
				<-reading
			}
			for _, size := range []int{10, 50_000, 100_000, 3 << 20} {
				for range 3 {
					got := ask(front.addr, "POST", "/x", "1", bytes.NewReader(make([]byte, size)))
					require.Equal(t, fmt.Sprintf(`200  "%d <nil>" <nil>`, size), got.String())
				}
			}
		})
	}
}

func TestASessionThatCannotBeReadHidesNoOther(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		h := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
		bad := n.owner(t, store, "bad", h, "x")
		n.owner(t, store, "good", h, "y")
		link := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "get" && call.Key == claims.SessionKey(bad.session.ID()) {
				return errors.New("it can't be read")
			}
			return do(ctx)
		})
		p := n.start(t, link, "a", route.Config{Run: answering})
		owners, err := p.keys.Owners(t.Context(), "x", "y", "z")
		require.ErrorContains(t, err, "it can't be read")
		require.Len(t, owners, 1)
		require.Equal(t, "good", owners["y"].Holder)
		codes := make(chan string, 3)
		for _, tenant := range []string{"x", "y", "z"} {
			go func() { codes <- fmt.Sprint(tenant, post(p.route, "/"+tenant).Code) }()
		}
		require.ElementsMatch(t, []string{"y200", "z200"}, []string{<-codes, <-codes})
		require.Equal(t, "x503", <-codes)
	})
}

func TestRequestsThatHangShareOneLookPerTTL(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		over := make(chan struct{})
		n.owner(t, store, "hangs", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-over }), "0", "1", "2")
		var looks atomic.Int32
		link := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "claims.look" {
				looks.Add(1)
			}
			return do(ctx)
		})
		p := n.start(t, link, "a", route.Config{})
		var clients sync.WaitGroup
		for i := range 60 {
			clients.Go(func() { post(p.route, fmt.Sprint("/", i%3)) })
			time.Sleep(10 * time.Millisecond)
		}
		first := looks.Load()
		time.Sleep(10 * tenure.DefaultTTL)
		require.InDelta(t, 10, looks.Load()-first, 2)
		close(over)
		clients.Wait()
		looks.Store(0)
		for range 100 {
			post(p.route, "/0")
			time.Sleep(tenure.DefaultTTL / 20)
		}
		require.Zero(t, looks.Load(), "no request costs a statement")
	})
}

func TestALogThatBlocksKeepsNoRequestWaiting(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		release := make(chan struct{})
		defer close(release)
		session := testkit.Must(claims.NewSession(store, claims.SessionConfig{Holder: "no address", Logger: testkit.Quiet}))
		runSession(t, session)
		_, err := testkit.Must(claims.NewKeys(session, "tenant")).Claim(t.Context(), "x")
		require.NoError(t, err)
		p := n.start(t, store, "a", route.Config{Run: answering, Logger: slog.New(testkit.BlockedLog(release))})
		require.Equal(t, http.StatusServiceUnavailable, post(p.route, "/x").Code, "and a warning")
		require.Equal(t, http.StatusOK, post(p.route, "/y").Code)
	})
}

func TestARunThatIsToldToReturnHasNotFailed(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		loading, runs := make(chan bool, 9), 0
		p := n.start(t, store, "a", route.Config{MaxWait: time.Minute, Run: func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
			if runs++; runs < 9 {
				loading <- true
				<-ctx.Done()
				return context.Cause(ctx)
			}
			return answering(ctx, c, serve)
		}})
		other := n.start(t, store, "b", route.Config{})
		answers := make(chan int, 9)
		began := time.Now()
		go func() { answers <- post(p.route, "/x").Code }()
		for range 8 {
			<-loading
			require.NoError(t, other.keys.RequestRelease(t.Context(), "x"))
		}
		require.Equal(t, http.StatusOK, <-answers)
		require.Less(t, time.Since(began), 10*time.Second, "no back-off")
	})
}

func TestARunThatEndsByGoexitHasFailed(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		runs := 0
		p := n.start(t, store, "a", route.Config{Run: func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
			if runs++; runs == 1 {
				runtime.Goexit()
			}
			return answering(ctx, c, serve)
		}})
		require.Equal(t, http.StatusServiceUnavailable, post(p.route, "/x").Code)
		require.Equal(t, http.StatusOK, post(p.route, "/x").Code, "the next request has it called again")
		require.Equal(t, 2, runs)
	})
}

func TestAClaimThatWaitsForTheDatabaseKeepsNoOtherKeyWaiting(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		n.owner(t, store, "owner", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), "y")
		taking := make(chan bool, 9)
		link := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "claims.take" && call.IDs[0] == "x" {
				taking <- true
				time.Sleep(2 * time.Second)
			}
			return do(ctx)
		})
		p := n.start(t, link, "a", route.Config{Run: answering})
		answers := make(chan int, 1)
		go func() { answers <- post(p.route, "/x").Code }()
		<-taking
		began := time.Now()
		require.Equal(t, http.StatusOK, post(p.route, "/y").Code)
		require.Less(t, time.Since(began), time.Second)
		require.Equal(t, http.StatusOK, <-answers)
		require.Empty(t, taking, "it is claimed once")
	})
}

func TestABodyThatComesSlowlyIsRefusedAtMaxWait(t *testing.T) {
	path := newFile(t)
	asked := make(chan bool, 9)
	ownedBy(t, path, listen(t, ownerFunc(func(http.ResponseWriter, *http.Request) { asked <- true })), "x")
	front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{MaxWait: 300 * time.Millisecond}, claims.SessionConfig{}, nil)
	for name, h := range map[string]http.Handler{
		"a server": front.route, "a middleware without Unwrap": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { front.route.ServeHTTP(bare{w}, r) }),
	} {
		front.use(h)
		conn, err := net.Dial("tcp", front.addr)
		require.NoError(t, err)
		defer conn.Close()
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(testkit.Patience/2)))
		_, err = io.WriteString(conn, "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nslow")
		require.NoError(t, err)
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err, name)
		require.Equal(t, http.StatusBadRequest, answer.StatusCode)
		require.Equal(t, "refused", answer.Header.Get("Tenure-Request"))
		require.True(t, answer.Close)
		require.Empty(t, asked)
	}
}

// A process that is not the owner refuses before it has read a body, and closes the connection under a long one.
func TestARefusalIsHeardWhileABodyIsSent(t *testing.T) {
	testkit.Slow(t)
	p := newPair(t, func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }, route.Config{MaxWait: 500 * time.Millisecond}, 0)
	require.Equal(t, http.StatusOK, ask(p.other.addr, "POST", "/x", "0", nil).status) // it knows the owner
	p.release()
	_, err := p.owner.keys.Claim(t.Context(), "x") // not served
	require.NoError(t, err)
	for range 5 {
		for _, size := range []int{100_000, 1 << 20, 10 << 20} {
			got := ask(p.other.addr, "POST", "/x", "1", bytes.NewReader(make([]byte, size)))
			require.Contains(t, got.String(), "503 refused", "%d bytes", size)
		}
	}
	slow, write := io.Pipe()
	defer write.Close()
	go io.WriteString(write, "the rest does not come")
	require.Contains(t, ask(p.other.addr, "POST", "/x", "1", slow).String(), "503 refused")
}

// A handler may ask for another key or lease in its own process, with its own context.
func TestARequestHasTheRightOfItsOwnHandler(t *testing.T) {
	path := newFile(t)
	store := testkit.OpenSQLite(t, path)
	label := map[string]string{"address": "127.0.0.1:1"}
	start := func(id string, h func(w http.ResponseWriter, r *http.Request)) *route.Route {
		key := tenure.Key{Type: "route", ID: id}
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: key, Labels: label})
		rt := testkit.Must(route.Lease(lease, route.Config{}))
		c := testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Logger: testkit.Quiet, Watch: func(ctx context.Context) error {
			return rt.Serve(ctx, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprint(w, tenure.TermFromContext(r.Context()).Key().ID, claims.ClaimFromContext(r.Context()).Key.ID, " ")
				h(w, r)
			}))
		}}))
		testkit.RunCoordinator(t, context.Background(), c)
		testkit.Await(t, "it is served", func() bool { o, _ := rt.Owner(t.Context(), ""); return o.Local })
		return rt
	}
	inner := start("inner", func(http.ResponseWriter, *http.Request) {})
	ask := func(rt *route.Route) func(w http.ResponseWriter, r *http.Request) {
		return func(w http.ResponseWriter, r *http.Request) {
			answer := httptest.NewRecorder()
			rt.ServeHTTP(answer, httptest.NewRequestWithContext(r.Context(), "POST", "/", nil))
			io.Copy(w, answer.Body)
		}
	}
	outer := start("outer", ask(inner))
	p := startProcess(t, store, "p", route.Config{}, claims.SessionConfig{}, nil)
	defer p.serve("x", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if tenure.TermFromContext(r.Context()) != nil {
			t.Error("it has a term")
		}
		io.WriteString(w, claims.ClaimFromContext(r.Context()).Key.ID+" ")
		ask(outer)(w, r)
	}))()
	require.Equal(t, "x outer inner ", post(p.route, "/x").Body.String())
	require.Equal(t, "outer inner ", strings.TrimLeft(post(outer, "/").Body.String(), " "))
}

func TestShutdownLeavesNoConnectionBehind(t *testing.T) {
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	for scheme, protocols := range map[string]*http.Protocols{"http://": nil, "h2c://": h2c} {
		path := newFile(t)
		var open atomic.Int32
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		server := &http.Server{
			Protocols: protocols,
			Handler:   ownerFunc(func(http.ResponseWriter, *http.Request) {}),
			ConnState: func(_ net.Conn, s http.ConnState) {
				open.Add(map[http.ConnState]int32{http.StateNew: 1, http.StateClosed: -1}[s])
			},
		}
		go server.Serve(listener)
		t.Cleanup(func() { server.Close() })
		ownedBy(t, path, scheme+listener.Addr().String(), "x")
		front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{}, claims.SessionConfig{}, nil)
		for range 3 {
			require.Equal(t, http.StatusOK, ask(front.addr, "POST", "/x", "1", nil).status)
			require.Equal(t, http.StatusOK, ask(front.addr, "POST", "/x", "1", strings.NewReader("body")).status)
		}
		require.EqualValues(t, map[string]int{"http://": 1, "h2c://": 2}[scheme], open.Load(), "one for requests without a body, and one for a body at a time")
		front.end()
		require.NoError(t, front.route.Shutdown(t.Context(), front.server))
		testkit.Await(t, "its connections are closed", func() bool { return open.Load() == 0 })
	}
}

// Whoever reaches the port of any process may send anything to it.
func TestAStrangerHarmsNobodyElse(t *testing.T) {
	testkit.Slow(t)
	ran := newRan()
	p := newPair(t, func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err == nil {
			ran.note(r.Header.Get("Id"), 0)
		}
	}, route.Config{MaxWait: time.Second}, 0)
	send := func(addr, request string) string {
		conn, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer conn.Close()
		require.NoError(t, conn.SetDeadline(time.Now().Add(testkit.Patience)))
		_, err = io.WriteString(conn, strings.ReplaceAll(request, "\n", "\r\n"))
		require.NoError(t, err)
		answer, err := io.ReadAll(conn)
		require.NoError(t, err)
		return string(answer)
	}
	const endless = "Content-Length: 9000000000000\nExpect: 100-continue\nConnection: close\n\n"
	hop := "Tenure-Route: " + p.hop(p.claim.Session, 0, 1<<60) + "\n"
	for request, want := range map[string]string{
		"POST /nobody HTTP/1.1\nHost: a\n" + endless:                                      "503 Service Unavailable",
		"POST /nobody HTTP/1.1\nHost: a\n" + hop + endless:                                "421 Misdirected Request",
		"POST /x HTTP/1.1\nHost: a\nTENURE-ROUTE: to=x; least=0; wait=0\n" + endless:      "421 Misdirected Request",
		"POST /x HTTP/1.1\nHost: a\nContent-Length: x\n\n":                                "400 Bad Request",
		"POST /x HTTP/1.1\nHost: a\n" + hop + hop + "Connection: tenure-route, close\n\n": "HTTP/1.1 ",
	} {
		require.Contains(t, send(p.owner.addr, request), want, request)
		require.Contains(t, send(p.other.addr, request), want, request)
	}
	var strangers sync.WaitGroup
	for i := range 200 {
		strangers.Go(func() {
			for j := range 5 {
				for _, addr := range []string{p.owner.addr, p.other.addr} {
					ask(addr, "POST", fmt.Sprint("/endless", i, "-", j), "", nil, "Tenure-Route", p.hop(p.claim.Session, int64(i)<<50, 1<<40))
				}
			}
		})
	}
	for i := range 100 {
		require.Equal(t, 200, ask(p.other.addr, "POST", "/x", fmt.Sprint(i), nil).status)
		require.Equal(t, 1, ran.of(fmt.Sprint(i)))
	}
	strangers.Wait()
	require.True(t, p.owner.session.Valid())
}
