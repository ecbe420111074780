// Package route sends each HTTP request to the process that owns its key: the holder of a lease, the session that has
// claimed a key, or the member that works for a shard. A request may arrive at any process. One that is not idempotent
// runs at most once, and its sender is told which of three outcomes it had:
//
//   - answered: the handler's answer, with the fencing token under which it ran in the header Tenure-Token.
//   - refused: 503 with "Tenure-Request: refused" and Retry-After. It did not run and will not; send it again.
//   - unknown: 502 with "Tenure-Request: unknown", or a broken connection if the answer had begun. It ran once or not
//     at all. An idempotent request is sent again once before that.
//
// For gRPC these are the statuses UNAVAILABLE and UNKNOWN. A process answers for a key while [Route.Serve] runs in the
// func that has the right. The owner judges each request by its own trust in that right, without I/O. No answer begins
// once its process can tell that the right has ended.
package route

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/shards"
)

const (
	routeHeader = "Tenure-Route"   // of a forwarded request: to=…; least=…; wait=…
	tokenHeader = "Tenure-Token"   // of a handler's answer
	fateHeader  = "Tenure-Request" // of any other answer: refused or unknown
	refused     = "refused"
	unknown     = "unknown"
)

// Config configures a [Route]. The zero value is ready to use.
type Config struct {
	// Run, for Keys, is called in a func of [claims.Keys.Do] when this process has claimed a key because a request came
	// and no process owned it. It calls serve, which is [Route.Serve], once it can answer. If it returns without, the
	// requests that wait here are refused, and the key is left for 100 ms, doubling to 30 s. nil: no keys are claimed.
	Run func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error

	Idle     time.Duration // for Keys: Serve returns when no request came for so long; 0: never
	Label    string        // of the lease or session: host:port, or a URL with http, https or h2c (HTTP/2 without TLS); default "address"
	MaxWait  time.Duration // until a request is answered here or sent to its owner; default 10s; also for a body that is kept
	DrainFor time.Duration // for requests that run when the right is given up in order; default half of a job's time to stop, at most 5s

	// MaxReplay is how long a body may be to be kept and sent again. If an owner refuses a request with a longer body,
	// or one of unknown length, the client is refused too. Default 64 KiB.
	MaxReplay int64

	// MaxWaiting is how many requests may wait at once in this process for an owner, and how many more for its answer. Any
	// others are refused at once. So it also bounds the bodies that are kept, each of at most MaxReplay: lower one of the
	// two if twice their product, 1.3 GB by default, is too much for this process. Default 10,000.
	MaxWaiting int

	// Idempotent reports whether a request may run more than once. A GET, HEAD, OPTIONS or TRACE, or a request with an
	// Idempotency-Key or X-Idempotency-Key, may in any case.
	Idempotent func(*http.Request) bool

	// Transport carries requests to other processes. It must not repeat any by itself, and must call the hooks of net/http/httptrace, without which no
	// failed request counts as unsent, and sees h2c as http. Default: one that notices a lost host within 20s.
	Transport http.RoundTripper

	Logger *slog.Logger // default: that of the lease or session
}

// Route sends the requests of one lease, one kind of keys, or one set of shards to their owners. All methods are safe for
// concurrent use.
type Route struct {
	cfg   Config
	own   *url.URL                    // at which other processes reach this one
	keys  *claims.Keys                // nil: the route of a lease
	id    func(*http.Request) string  // the key of a request; empty: it has none
	owner func(tenure.Holding) string // the session or term of an owner
	find  func(ctx context.Context, ids ...string) (map[string]tenure.Holding, error)
	right func(ctx context.Context) (right, error)

	proxy *httputil.ReverseProxy
	log   logtext.Retries
	busy  sync.WaitGroup // the search, and funcs of Run
	kick  chan struct{}  // receives when the search has to look at once

	mu       sync.Mutex // guards the fields below, and those of entries, calls and answers; never held across I/O
	entries  map[string]*entry
	wanted   map[string]*entry // for which requests wait; the search runs while there are any
	waiting  int               // requests that wait for an owner
	pending  map[*attempt]bool // requests that wait for an owner's answer
	rechecks bool              // a timer runs that will call recheck
}

// right is what a call of Serve answers under.
type right struct {
	id    string // the key
	to    string // the session or term
	token int64
	holds func() bool
}

// Lease returns a route to the holder of a lease, whose job calls [Route.Serve]. Lease does no I/O. A [tenure.ErrInvalid]
// names everything that is wrong with the config.
func Lease(l *tenure.Lease, cfg Config) (*Route, error) {
	if l == nil {
		return nil, fmt.Errorf("route: lease: %w: lease is nil: pass that of the coordinator whose job calls Serve", tenure.ErrInvalid)
	}
	of, id := l.Config(), l.Key().String()
	rt, err := newRoute(cfg, false, of.Labels, of.Logger, of.TTL/3-of.Margin)
	if err != nil {
		return nil, fmt.Errorf("route: lease %s: %w", id, err)
	}
	rt.id = func(*http.Request) string { return id }
	rt.owner = func(h tenure.Holding) string { return h.Term }
	rt.right = func(ctx context.Context) (right, error) {
		term := tenure.TermFromContext(ctx)
		if term == nil || term.Key() != l.Key() {
			return right{}, fmt.Errorf("%w: ctx has no term of this lease: call Serve in the coordinator's job, with the job's context", tenure.ErrInvalid)
		}
		return right{id, term.ID(), term.Token(), term.Valid}, nil
	}
	rt.find = func(ctx context.Context, _ ...string) (map[string]tenure.Holding, error) {
		holding, err := l.Read(ctx)
		switch {
		case errors.Is(err, tenure.ErrNotFound) || err == nil && holding.Holder == "":
			return nil, nil
		case err != nil:
			return nil, err
		}
		return map[string]tenure.Holding{id: holding}, nil
	}
	return rt, nil
}

// Keys returns a route to the owners of keys. id returns the key of a request. A request without one, or with one that
// [claims.Keys.TryClaim] would refuse, is answered with 404. A func of [claims.Keys.Do] calls [Route.Serve]. With
// [Config.Run] each key that is asked for makes a row, so check before that it is one of yours. Keys does no I/O. A
// [tenure.ErrInvalid] names everything that is wrong with the config.
func Keys(k *claims.Keys, id func(*http.Request) string, cfg Config) (*Route, error) {
	return keysRoute(k, id, cfg, true)
}

// Shards is [Keys] for the members that work for shards. The Work of a shard calls [Route.Serve].
func Shards(m *shards.Member, id func(*http.Request) string, cfg Config) (*Route, error) {
	if m == nil {
		return nil, fmt.Errorf("route: shards: %w: the member is nil: pass the one whose Work calls Serve", tenure.ErrInvalid)
	}
	return keysRoute(m.Keys(), id, cfg, false)
}

func keysRoute(k *claims.Keys, id func(*http.Request) string, cfg Config, claiming bool) (*Route, error) {
	if k == nil || id == nil {
		return nil, fmt.Errorf("route: keys: %w: keys or id is nil: pass the keys of this process's session, and a func that returns the key of a request", tenure.ErrInvalid)
	}
	session, kind := k.Session(), k.Kind()
	of := session.Config()
	rt, err := newRoute(cfg, claiming, of.Labels, of.Logger, of.TTL-of.Margin-of.RenewDeadline)
	if err != nil {
		return nil, fmt.Errorf("route: keys %s: %w", kind, err)
	}
	rt.keys, rt.find = k, k.Owners
	rt.owner = func(h tenure.Holding) string { return h.Key.ID }
	rt.id = func(r *http.Request) string {
		if id := id(r); id != "" && session.CheckKeys(kind, id) == nil {
			return id
		}
		return ""
	}
	rt.right = func(ctx context.Context) (right, error) {
		c := claims.ClaimFromContext(ctx)
		if c.Session == "" || c.Key.Type != kind {
			return right{}, fmt.Errorf("%w: ctx has no claim of kind %q: call Serve in a func of Keys.Do, with the func's context", tenure.ErrInvalid, kind)
		}
		return right{c.Key.ID, c.Session, c.Token, func() bool { return k.Keeps(c) }}, nil
	}
	return rt, nil
}

func newRoute(cfg Config, claiming bool, labels map[string]string, logger *slog.Logger, stop time.Duration) (*Route, error) {
	var problems objects.Problems
	problems.If(min(cfg.Idle, cfg.MaxWait, cfg.DrainFor) < 0 || min(cfg.MaxReplay, int64(cfg.MaxWaiting)) < 0, "Idle, MaxWait, DrainFor, MaxReplay or MaxWaiting is negative: leave it unset for the default")
	problems.If(!claiming && (cfg.Run != nil || cfg.Idle != 0), "Run and Idle are for keys: leave them unset")
	cfg.Label, cfg.MaxWait, cfg.MaxReplay = cmp.Or(cfg.Label, "address"), cmp.Or(cfg.MaxWait, 10*time.Second), cmp.Or(cfg.MaxReplay, 64<<10)
	cfg.MaxWaiting = cmp.Or(cfg.MaxWaiting, 10_000)
	cfg.DrainFor = cmp.Or(cfg.DrainFor, max(time.Millisecond, min(stop/2, 5*time.Second)))
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, logger))
	own, err := address(labels[cfg.Label])
	problems.If(err != nil, "the label %q of this process is %q: set it to the host:port at which other processes reach it, or to a URL with the scheme http, https or h2c", cfg.Label, labels[cfg.Label])
	rt := &Route{
		cfg: cfg, own: own, log: logtext.Retries{Repeat: true}, kick: make(chan struct{}, 1),
		entries: make(map[string]*entry), wanted: make(map[string]*entry), pending: make(map[*attempt]bool),
	}
	rt.proxy = rt.newProxy()
	return rt, problems.Err()
}

// address returns the URL in an address label.
func address(label string) (*url.URL, error) {
	if !strings.Contains(label, "://") {
		label = "http://" + label
	}
	u, err := url.Parse(label)
	if err == nil && (u.Host == "" || u.Scheme != "http" && u.Scheme != "https" && u.Scheme != "h2c") {
		err = fmt.Errorf("%w: %q is no address", tenure.ErrInvalid, label)
	}
	return u, err
}

// ServeHTTP answers a request here if this process owns its key, and otherwise sends it to the owner. While no
// process owns the key, the request waits, for [Config.MaxWait] at most.
func (rt *Route) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := rt.id(r)
	if id == "" {
		http.NotFound(w, r)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), rt.cfg.MaxWait)
	defer cancel()
	if hop := r.Header[routeHeader]; hop != nil { // only here, never forwarded again
		if c := rt.judge(ctx, id, hop); c == nil || !c.answer(w, r) {
			fail(w, r, http.StatusMisdirectedRequest, refused, "this process does not answer for the key")
		}
		return
	}
	out := outgoing{rt: rt, id: id, r: r}
	for tries := 0; ; tries++ {
		c, owner, err := rt.locate(ctx, id, false)
		if err != nil {
			out.fail(w, false, err.Error())
			return
		}
		if c != nil && c.answer(w, out.request()) || owner != nil && out.send(ctx, w, owner) {
			return
		}
		if !pace.Sleep(ctx, pace.Jitter(min(5*time.Millisecond<<min(tries, 10), longestPause))) {
			out.fail(w, false, errNoOwner.Error())
			return
		}
	}
}

// fail answers a request that has no answer of its own. A gRPC client gets a status that it understands.
func fail(w http.ResponseWriter, r *http.Request, status int, fate, text string) {
	w.Header().Set(fateHeader, fate)
	if r.ProtoMajor == 1 && (r.ContentLength < 0 || r.ContentLength > 64<<10) { // else net/http reads on before it answers
		w.Header().Set("Connection", "close")
	}
	if fate == refused {
		w.Header().Set("Retry-After", "1")
	}
	if r.Header[routeHeader] != nil || !strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		http.Error(w, text, status)
		return
	}
	w.Header().Set("Content-Type", "application/grpc") // trailers only
	w.Header().Set("Grpc-Status", map[string]string{refused: "14", unknown: "2"}[fate])
	w.Header().Set("Grpc-Message", text)
	w.WriteHeader(http.StatusOK) // so that a handler whose answer came too late can't change them
}

// Owner is the process that answers for a key: its URL, whose scheme may be h2c, the ID of its session or of its term of
// a lease, and whether it is this process and Serve runs.
type Owner struct {
	URL, ID string
	Local   bool
}

// Owner returns the owner of a key, for anything but HTTP; for a lease, id is ignored. It asks the store unless this
// process is the owner. If there is none, the error is [tenure.ErrNotFound]. The owner must check its right by itself.
func (rt *Route) Owner(ctx context.Context, id string) (Owner, error) {
	if rt.keys == nil {
		id = rt.id(nil)
	}
	rt.mu.Lock()
	var c *call
	if e := rt.entries[id]; e != nil {
		c = e.call
	}
	rt.mu.Unlock()
	if c != nil && c.holds() {
		return Owner{rt.own.String(), c.to, true}, nil
	}
	all, err := rt.find(ctx, id)
	holding, owned := all[id]
	if err == nil && !owned {
		err = tenure.ErrNotFound
	}
	at, addressErr := address(holding.Labels[rt.cfg.Label])
	if err = cmp.Or(err, addressErr); err != nil {
		return Owner{}, fmt.Errorf("route: owner of %s: %w", id, err)
	}
	return Owner{at.String(), rt.owner(holding), false}, nil
}

// Shutdown stops a server, and closes the route's connections to other processes. Call it when the Run of the session or coordinator has returned, so that the keys are free.
// The server goes on refusing for 250 ms, because a connection that is closed under a request makes that unknown. If ctx is
// done before every request is answered, Shutdown returns its cause; then close the server, and call Shutdown again.
func (rt *Route) Shutdown(ctx context.Context, s *http.Server) error {
	pace.Sleep(ctx, 250*time.Millisecond)
	err := s.Shutdown(ctx)
	if err != nil {
		return err
	}
	if rt.cfg.Transport == nil {
		rt.proxy.Transport.(carrier).close()
	}
	ended := make(chan struct{})
	go func() { rt.busy.Wait(); close(ended) }() // no request waits any more
	select {
	case <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return err
}
