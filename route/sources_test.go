package route_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
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
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/storetest"
)

// wires connects processes in virtual time: a transport whose connections are pipes to handlers.
type wires struct {
	mu    sync.Mutex
	procs map[string]http.Handler
}

func (n *wires) RoundTrip(r *http.Request) (*http.Response, error) { // each request has its own connection
	n.mu.Lock()
	h := n.procs[r.URL.Host]
	n.mu.Unlock()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		if h == nil {
			return nil, errors.New("nothing listens")
		}
		here, there := net.Pipe()
		go (&http.Server{Handler: h}).Serve(&oneConn{conn: there})
		return here, nil
	}}
	return transport.RoundTrip(r)
}

// oneConn is a listener with one connection.
type oneConn struct {
	conn net.Conn
	once atomic.Bool
}

func (l *oneConn) Accept() (net.Conn, error) {
	if l.once.Swap(true) {
		return nil, net.ErrClosed
	}
	return l.conn, nil
}
func (l *oneConn) Close() error   { return nil }
func (l *oneConn) Addr() net.Addr { return l.conn.LocalAddr() }

func (n *wires) add(addr string, h http.Handler) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.procs[addr] = h
}

// post sends a request for a tenant within the process.
func post(h http.Handler, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("POST", "http://any"+path, nil))
	return w
}

// virtual is a process in virtual time.
type virtual struct {
	session *claims.Session
	keys    *claims.Keys
	route   *route.Route
	stop    func()
}

func (n *wires) start(t *testing.T, store tenure.Store, name string, cfg route.Config) *virtual {
	session := testkit.Must(claims.NewSession(store, claims.SessionConfig{Holder: name, Labels: map[string]string{"address": name + ":1"}, Logger: testkit.Quiet}))
	p := &virtual{session: session, keys: testkit.Must(claims.NewKeys(session, "tenant"))}
	cfg.Transport = n
	p.route = testkit.Must(route.Keys(p.keys, tenantOf, cfg))
	n.add(name+":1", p.route)
	p.stop = runSession(t, session)
	synctest.Wait()
	return p
}

func runSession(t *testing.T, session *claims.Session) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- session.Run(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-ended })
	t.Cleanup(stop)
	return stop
}

func inBubble(t *testing.T, test func(t *testing.T, store *tenure.SQLiteStore, n *wires)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		store := testkit.OpenSQLite(t, ":memory:")
		testkit.MigrateClaims(t, store)
		test(t, store, &wires{procs: map[string]http.Handler{}})
		time.Sleep(time.Second) // the search ends
	})
}

func TestAFirstRequestStartsItsTenantOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		var runs atomic.Int32
		start := func(name string) *virtual {
			return n.start(t, store, name, route.Config{Idle: time.Minute, Run: func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
				runs.Add(1)
				time.Sleep(time.Second) // to load it
				if claims.ClaimFromContext(ctx) != c {
					t.Error("the context has another claim")
				}
				return serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, name) }))
			}})
		}
		a, b := start("a"), start("b")
		began := time.Now()
		var answers sync.Map
		var clients sync.WaitGroup
		for i := range 20 {
			clients.Go(func() {
				w := post([]*virtual{a, b}[i%2].route, "/x")
				answers.Store(w.Code, w.Body.String())
			})
		}
		clients.Wait()
		only := 0
		answers.Range(func(code, by any) bool { only++; return code == 200 })
		require.Equal(t, 1, only, "all are answered, by one")
		require.EqualValues(t, 1, runs.Load())
		require.Less(t, time.Since(began), 2*time.Second)
		time.Sleep(59 * time.Second)
		require.Equal(t, 200, post(a.route, "/x").Code)
		time.Sleep(59 * time.Second)
		_, err := b.route.Owner(t.Context(), "x")
		require.NoError(t, err, "a request came in time")
		time.Sleep(3 * time.Second)
		_, err = b.route.Owner(t.Context(), "x")
		require.ErrorIs(t, err, tenure.ErrNotFound, "it was idle")
		require.Equal(t, 200, post(b.route, "/x").Code)
		require.EqualValues(t, 2, runs.Load())

		a.stop()
		require.Equal(t, 200, post(b.route, "/y").Code)
		require.Equal(t, "b", post(a.route, "/y").Body.String(), "a process without a session forwards still")
		require.Equal(t, 200, post(a.route, "/x").Code)
		w := post(a.route, "/z")
		require.Equal(t, 503, w.Code, "it claims nothing")
		require.Equal(t, "refused", w.Header().Get("Tenure-Request"))
		b.stop()
		require.NoError(t, a.route.Shutdown(t.Context(), &http.Server{}))
	})
}

func TestAKeyThatCannotBeLoadedIsRefusedAndLeftForAWhile(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		var runs []time.Time
		p := n.start(t, store, "a", route.Config{Run: func(context.Context, claims.Claim, func(http.Handler) error) error {
			runs = append(runs, time.Now())
			return errors.New("a secret")
		}})
		for i := range 12 {
			w := post(p.route, "/x")
			require.Equal(t, 503, w.Code)
			require.NotContains(t, w.Body.String(), "secret")
			if i == 0 {
				require.Contains(t, w.Body.String(), "could not be loaded", "it does not wait any longer")
			}
		}
		synctest.Wait()
		for i := 1; i < len(runs); i++ {
			pause, least := runs[i].Sub(runs[i-1]), min(100*time.Millisecond<<(i-1), 30*time.Second)
			require.GreaterOrEqual(t, pause, least)
			require.Less(t, pause, least+300*time.Millisecond+least/100)
		}
		require.Greater(t, len(runs), 6)
	})
}

func TestRequestsWaitForTheTenantsOfADeadProcess(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		run := func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
			return serve(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		}
		link := storetest.Faulty(store, nil)
		dead := n.start(t, link, "dead", route.Config{Run: run})
		p := n.start(t, store, "a", route.Config{Run: run, MaxWait: 3 * tenure.DefaultTTL})
		require.Equal(t, 200, post(p.route, "/first").Code)
		require.Equal(t, 200, post(dead.route, "/x").Code)
		require.Equal(t, 200, post(p.route, "/x").Code)
		link.SetHook(testkit.Hang)
		n.add("dead:1", nil)
		t.Cleanup(func() { link.SetHook(nil) })
		began := time.Now()
		require.Equal(t, 200, post(p.route, "/x").Code)
		require.Less(t, time.Since(began), tenure.DefaultTTL+5*time.Second)
	})
}

// A process that was stopped keeps its connections, and its requests hang.
func TestARequestToAnOwnerThatHangsEndsOnceAnotherMayOwnTheKey(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		link := storetest.Faulty(store, nil)
		hangs := n.start(t, link, "hangs", route.Config{})
		_, err := hangs.keys.TryClaim(t.Context(), "x", "y")
		require.NoError(t, err)
		var asked atomic.Int32
		over := make(chan struct{})
		n.add("hangs:1", ownerFunc(func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1); r.URL.Path == "/y" {
				w.WriteHeader(200)
				w.(http.Flusher).Flush()
			}
			<-over
		}))
		p := n.start(t, store, "a", route.Config{Run: func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
			return serve(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		}})
		streams := make(chan int, 1)
		go func() { streams <- post(p.route, "/y").Code }()
		synctest.Wait()
		answers := make(chan int, 1)
		go func() { answers <- post(p.route, "/x").Code }()
		time.Sleep(5 * tenure.DefaultTTL)
		require.Empty(t, answers, "its owner lives")
		link.SetHook(testkit.Hang)
		t.Cleanup(func() { link.SetHook(nil) })
		time.Sleep(4 * tenure.DefaultTTL)
		require.Equal(t, 502, <-answers)
		require.EqualValues(t, 2, asked.Load())
		require.Empty(t, streams, "an answer that has begun is the owner's to end")
		close(over)
		require.Equal(t, 200, <-streams)
		require.Equal(t, 200, post(p.route, "/x").Code)
	})
}

func TestALeaseIsServedByItsHolder(t *testing.T) {
	path := newFile(t)
	start := func(name string) (addr string, rt *route.Route, c *tenure.Coordinator, stop func()) {
		var h http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			term := tenure.TermFromContext(r.Context())
			fmt.Fprint(w, name, term.Token())
		})
		mux := http.NewServeMux()
		addr = listen(t, mux)
		lease := testkit.NewLease(t, testkit.OpenSQLite(t, path), tenure.LeaseConfig{Holder: name, Labels: map[string]string{"address": addr}})
		rt = testkit.Must(route.Lease(lease, route.Config{}))
		mux.Handle("/", rt)
		c = testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{AcquireInterval: 50 * time.Millisecond, Logger: testkit.Quiet,
			Watch: func(ctx context.Context) error { return rt.Serve(ctx, h) }}))
		return addr, rt, c, testkit.RunCoordinator(t, context.Background(), c)
	}
	a, rtA, holder, stop := start("a")
	testkit.Await(t, "a serves", func() bool { o, _ := rtA.Owner(t.Context(), ""); return o.Local })
	b, rtB, standby, _ := start("b")
	for _, addr := range []string{a, b} {
		got := ask(addr, "POST", "/any", "1", nil)
		require.Equal(t, fmt.Sprint("a", got.token), got.body, got)
		require.Equal(t, fmt.Sprint(holder.Status().Token), got.token)
	}
	owner, err := rtB.Owner(t.Context(), "")
	require.NoError(t, err)
	require.Equal(t, "http://"+a, owner.URL)
	for term, want := range map[string]string{owner.ID: "200", "another": "421 refused"} {
		got := ask(a, "POST", "/any", "1", nil, "Tenure-Route", fmt.Sprintf("to=%s; least=0; wait=1000", term))
		require.Contains(t, got.String(), want)
	}
	stop()
	testkit.Await(t, "b holds", standby.IsHolder)
	for _, addr := range []string{a, b} {
		got := ask(addr, "POST", "/any", "1", nil)
		require.Equal(t, fmt.Sprint("b", got.token), got.body, got)
	}
}

// The term stands until Serve has returned.
func TestARequestMayContinueWhenTheJobHasEndedByALossElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lease := testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{Labels: map[string]string{"address": "a:1"}})
		rt := testkit.Must(route.Lease(lease, route.Config{}))
		fails := make(chan error, 1)
		c := testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Logger: testkit.Quiet,
			Watch: func(ctx context.Context) error {
				return rt.Serve(ctx, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					time.Sleep(time.Second)
					fmt.Fprint(w, r.Context().Err())
				}))
			},
			Reconcile: func(ctx context.Context) error {
				select {
				case err := <-fails:
					return err
				case <-ctx.Done():
					return nil
				}
			},
		}))
		defer testkit.RunCoordinator(t, context.Background(), c)()
		synctest.Wait()
		answers := make(chan string, 1)
		go func() { answers <- post(rt, "/x").Body.String() }()
		synctest.Wait()
		fails <- fmt.Errorf("another lease: %w", tenure.ErrLost)
		require.Equal(t, "<nil>", <-answers)
	})
}

func TestShardsAreServedByTheirMembers(t *testing.T) {
	path := newFile(t)
	start := func(name string) (addr string, member *shards.Member) {
		mux := http.NewServeMux()
		addr = listen(t, mux)
		session := testkit.Must(claims.NewSession(testkit.OpenSQLite(t, path), claims.SessionConfig{Labels: map[string]string{"address": addr}, PollInterval: 20 * time.Millisecond, Logger: testkit.Quiet}))
		var rt *route.Route
		member = testkit.Must(shards.New(session, shards.Config{Kind: "users", Count: 8, Settle: 50 * time.Millisecond,
			Work: func(ctx context.Context, id string) error {
				return rt.Serve(ctx, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if claims.ClaimFromContext(r.Context()).Key.ID != id {
						t.Error("the context has another claim")
					}
					io.WriteString(w, id)
				}))
			}}))
		rt = testkit.Must(route.Shards(member, tenantOf, route.Config{MaxWait: testkit.Patience}))
		mux.Handle("/", rt)
		runSession(t, session)
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- member.Run(ctx) }()
		t.Cleanup(func() { cancel(); <-ended })
		return addr, member
	}
	a, _ := start("a")
	b, member := start("b")
	testkit.Await(t, "each has some", func() bool { s := member.Status(); return len(s.Shards) > 0 })
	for i := range 32 {
		id := fmt.Sprint(i % 8)
		got := ask([]string{a, b}[i/8%2], "POST", "/"+id, "1", nil)
		require.Equal(t, id, got.body, got)
	}
	_, err := route.Shards(member, tenantOf, route.Config{Idle: time.Second})
	require.ErrorContains(t, err, "leave them unset")
}
