package route_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/route"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// tenantOf returns the last element of a request's path.
func tenantOf(r *http.Request) string { return r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:] }

// ran counts how often the handlers have run each request, by the header Id, and under which token.
type ran struct {
	mu     sync.Mutex
	times  map[string]int
	tokens map[string]int64
}

func (r *ran) note(id string, token int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.times[id]++
	r.tokens[id] = token
}

func (r *ran) of(id string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.times[id]
}

func (r *ran) token(id string) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tokens[id]
}

func newRan() *ran { return &ran{times: map[string]int{}, tokens: map[string]int64{}} }

// newFile returns the path of a SQLite file with the tables of claims.
func newFile(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "route.db")
	testkit.MigrateClaims(t, testkit.OpenSQLite(t, path))
	return path
}

// ownerFunc answers as the route of an owner does.
type ownerFunc http.HandlerFunc

func (f ownerFunc) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Tenure-Token", "9")
	f(w, r)
}

// process is one that answers for tenants, or forwards to another that does.
type process struct {
	*testing.T
	addr    string
	session *claims.Session
	keys    *claims.Keys
	route   *route.Route
	server  *http.Server
	handler atomic.Pointer[http.Handler] // of the server
	end     func()                       // closes the session, and waits for it
}

// startProcess runs a process on a store until the test ends. Its handler answers with its name and the tenant.
func startProcess(t *testing.T, store tenure.Store, name string, cfg route.Config, session claims.SessionConfig, protocols *http.Protocols) *process {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &process{T: t, addr: listener.Addr().String()}
	address := p.addr
	if protocols != nil {
		address = "h2c://" + address
	}
	session.Holder, session.Labels, session.Logger = name, map[string]string{"address": address}, testkit.Quiet
	if session.PollInterval == 0 {
		session.PollInterval = 20 * time.Millisecond
	}
	p.session = testkit.Must(claims.NewSession(store, session))
	p.keys = testkit.Must(claims.NewKeys(p.session, "tenant"))
	p.route, err = route.Keys(p.keys, tenantOf, cfg)
	require.NoError(t, err)
	p.use(p.route)
	p.server = &http.Server{Protocols: protocols, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		(*p.handler.Load()).ServeHTTP(w, r)
	})}
	go p.server.Serve(listener)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.session.Run(ctx) }()
	p.end = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { p.server.Close(); p.end() })
	testkit.Await(t, "the session begins", p.session.Valid)
	return p
}

// use has the server use another handler than the route.
func (p *process) use(h http.Handler) { p.handler.Store(&h) }

// serve claims a tenant and serves it until the returned func is called, which waits for that.
func (p *process) serve(tenant string, h http.Handler) (release func()) {
	p.Helper()
	got, err := p.keys.Claim(context.Background(), tenant)
	require.NoError(p, err)
	return p.serveClaim(got[0], h)
}

func (p *process) serveClaim(c claims.Claim, h http.Handler) (release func()) {
	returned := make(chan error, 1)
	go func() {
		returned <- p.keys.Do(context.Background(), c, func(ctx context.Context) error { return p.route.Serve(ctx, h) })
	}()
	testkit.Await(p, "it is served", func() bool {
		owner, _ := p.route.Owner(context.Background(), c.Key.ID)
		return owner.Local
	})
	return sync.OnceFunc(func() {
		if err := p.keys.Release(context.Background(), c); err != nil && !errors.Is(err, tenure.ErrLost) {
			p.Error(err)
		}
		if err := <-returned; err != nil && !errors.Is(err, tenure.ErrLost) && !errors.Is(err, tenure.ErrDeadline) {
			p.Error(err)
		}
	})
}

// outcome is what a client sees.
type outcome struct {
	status int
	fate   string
	token  string
	body   string
	header http.Header
	err    error
}

func (o outcome) String() string {
	return fmt.Sprintf("%d %s %q %v", o.status, o.fate, strings.TrimSpace(o.body), o.err)
}

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

// ask sends a request to an address.
func ask(addr, method, path, id string, body io.Reader, set ...string) outcome {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, body)
	if err != nil {
		return outcome{err: err}
	}
	r.Header.Set("Id", id)
	for i := 0; i < len(set); i += 2 {
		r.Header.Set(set[i], set[i+1])
	}
	response, err := client.Do(r)
	if err != nil {
		return outcome{err: err}
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return outcome{response.StatusCode, response.Header.Get("Tenure-Request"), response.Header.Get("Tenure-Token"), string(text), response.Header, err}
}
