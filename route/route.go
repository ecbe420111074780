// Package route forwards each HTTP request to the process that owns the request's key: the holder of a lease, the session
// that has claimed a key, or the member that works for a shard. A request may arrive at any process. A request that is not
// idempotent runs at most once, and the client always learns which of three outcomes it had:
//
//   - answered: the handler's answer. The header Tenure-Token has the fencing token under which the request ran.
//   - refused: status 503 with "Tenure-Request: refused" and Retry-After. The request did not run and will not run; the
//     client may send it again.
//   - unknown: status 502 with "Tenure-Request: unknown", or a broken connection if the answer had begun. The request may
//     have run, but at most once unless it is idempotent: an idempotent request is sent a second time before its outcome
//     becomes unknown.
//
// gRPC clients get the statuses UNAVAILABLE and UNKNOWN instead. A process answers requests for a key while [Route.Serve]
// runs in the func that holds the right to the key: the term of the lease, or the claim. It checks that right before each
// request, without I/O. No answer begins after its process can tell that the right has ended.
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
	routeHeader = "Tenure-Route"   // in a forwarded request: to=…; least=…; wait=…
	tokenHeader = "Tenure-Token"   // in a handler's answer
	fateHeader  = "Tenure-Request" // in any other answer: refused or unknown

	// addressLabel is the label of the lease or session that has this process's address.
	addressLabel = "address"

	answered, refused, unknown = "answered", "refused", "unknown" // outcomes
)

// Config configures a [Route]. The zero value is ready to use. The lease or session must have this process's address in
// its label "address": host:port, or a URL with the scheme http, https or h2c (HTTP/2 without TLS).
type Config struct {
	// Run, for [Keys], starts the owner of a key. If a request arrives for a key that no process owns, this process claims
	// the key and calls Run in a func of [claims.Keys.Do]. Run calls serve, which is [Route.Serve], as soon as it can answer
	// requests. If Run returns without having called serve, this process refuses the waiting requests, frees the key, and
	// does not claim it again for a while: at first for 100 ms, then for twice as long each time, up to 30 s. If Run is nil,
	// this process claims no keys.
	Run func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error

	// Idle, for [Keys], is how long Serve waits for another request before it returns. 0 means forever.
	Idle time.Duration

	// MaxWait limits how long a request waits until it is answered here or sent to its owner, and how long a client may
	// take to send a body of at most MaxReplay bytes. Default 10s.
	MaxWait time.Duration

	// MaxStall limits how long a request waits for its client to send more of the body or to read more of the answer. Then
	// the handler's call returns an error that is [os.ErrDeadlineExceeded], and the connection is closed. A body may pause for
	// longer once the answer has begun. Default 1m.
	MaxStall time.Duration

	// DrainFor is how long running requests may continue after the context of Serve has ended while the right still
	// stands. Default half of the time that a job has to stop, at most 5s.
	DrainFor time.Duration

	// MaxReplay is the longest body, in bytes, that is kept in memory so that it can be sent again. A longer body, or one of
	// unknown length, can be sent to another owner until one has begun to read it; a request that is refused later than that
	// is refused to the client too. Default 64 KiB.
	MaxReplay int64

	// MaxWaiting limits how many requests wait in this process for an owner, how many wait for an owner's answer, and how
	// many bodies it is reading that it forwards. No key takes more than what is left to others: one busy key gets half of a
	// limit, two get a third each. A request beyond a limit is refused at once. The bodies that are kept take up to
	// 3 × MaxWaiting × MaxReplay bytes, 2 GB by default. Default 10,000.
	MaxWaiting int

	// Idempotent reports whether a request may run more than once. A GET, HEAD, OPTIONS or TRACE, and a request with an
	// Idempotency-Key or X-Idempotency-Key, always may.
	Idempotent func(*http.Request) bool

	// Transport carries requests to other processes. It must not retry any request, and must call the hooks of
	// net/http/httptrace; otherwise every failed request counts as sent. It sees the scheme h2c as http. On HTTP/2 a request
	// with a body gets a connection of its own if this is an [*http.Transport], of which the route then makes clones. With
	// any other, a body that a handler does not read may hold up those of other keys. The default notices a lost host within
	// 20s.
	Transport http.RoundTripper

	Trace  *Trace       // nil: none
	Logger *slog.Logger // default: that of the lease or session
}

// Route is an [http.Handler] for the requests of one lease, one kind of keys, or one set of shards. All methods are safe
// for concurrent use.
type Route struct {
	cfg    Config
	own    *url.URL                    // where other processes reach this one
	keys   *claims.Keys                // nil: this is the route of a lease
	id     func(*http.Request) string  // returns the key of a request; empty: it has none
	owner  func(tenure.Holding) string // returns the session or term of an owner
	isMine func(tenure.Holding) bool   // reports whether an owner is this process
	find   func(ctx context.Context, ids ...string) (map[string]tenure.Holding, error)
	right  func(ctx context.Context) (right, error)

	proxy *httputil.ReverseProxy
	log   logtext.Retries
	busy  sync.WaitGroup // the search, and funcs of Run
	kick  chan struct{}  // receives when the search must look at once

	mu       sync.Mutex // guards the fields below, and those of entries, calls and answers; never held across I/O
	entries  map[string]*entry
	wanted   map[string]*entry // the keys for which requests wait; the search runs while there are any
	usage                      // of all keys
	running  int               // number of requests that are answered here
	pending  map[*attempt]bool // the attempts that wait for an owner's answer
	rechecks bool              // a timer is set that calls recheck
}

// right is the right under which a call of Serve answers requests.
type right struct {
	id    string // of the key
	to    string // the session or term, as in the header of a forwarded request
	token int64
	holds func() bool
}

// Lease returns a route to the holder of a lease. The holder's job calls [Route.Serve]. Lease does no I/O. The error is a
// [tenure.ErrInvalid] that names everything that is wrong with the config.
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
	rt.isMine = func(h tenure.Holding) bool { return h.Holder == of.Holder }
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
	cfg.Trace.created(rt)
	return rt, nil
}

// Keys returns a route to the owners of keys. The func id returns the key of a request. If it returns "", or a key that
// [claims.Keys.TryClaim] would reject, the client gets status 404. An owner calls [Route.Serve] in a func of
// [claims.Keys.Do]. If [Config.Run] is set, every key that is requested gets a row in the database, so check that a key
// exists before a request reaches the route. Keys does no I/O. The error is a [tenure.ErrInvalid] that names everything
// that is wrong with the config.
func Keys(k *claims.Keys, id func(*http.Request) string, cfg Config) (*Route, error) {
	return keysRoute(k, id, cfg, true)
}

// Shards is like [Keys] for the members that work for shards. The Work func of a shard calls [Route.Serve].
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
	rt.isMine = func(h tenure.Holding) bool { return h.Key.ID == session.ID() }
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
	cfg.Trace.created(rt)
	return rt, nil
}

func newRoute(cfg Config, claiming bool, labels map[string]string, logger *slog.Logger, stop time.Duration) (*Route, error) {
	var problems objects.Problems
	problems.Duration("Idle", cfg.Idle)
	problems.Duration("MaxWait", cfg.MaxWait)
	problems.Duration("MaxStall", cfg.MaxStall)
	problems.Duration("DrainFor", cfg.DrainFor)
	problems.If(min(cfg.MaxReplay, int64(cfg.MaxWaiting)) < 0, "MaxReplay or MaxWaiting is negative: leave it unset for the default")
	problems.If(!claiming && (cfg.Run != nil || cfg.Idle != 0), "Run and Idle are for keys: leave them unset")
	cfg.MaxWait, cfg.MaxReplay = cmp.Or(cfg.MaxWait, 10*time.Second), cmp.Or(cfg.MaxReplay, 64<<10)
	cfg.MaxWaiting, cfg.MaxStall = cmp.Or(cfg.MaxWaiting, 10_000), cmp.Or(cfg.MaxStall, time.Minute)
	cfg.DrainFor = cmp.Or(cfg.DrainFor, max(time.Millisecond, min(stop/2, 5*time.Second)))
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, logger))
	own, err := address(labels[addressLabel])
	problems.If(err != nil, "the label %q of this process is %q: set it to the host:port at which other processes reach it, or to a URL with the scheme http, https or h2c", addressLabel, labels[addressLabel])
	rt := &Route{
		cfg: cfg, own: own, log: logtext.Retries{Repeat: true}, kick: make(chan struct{}, 1),
		entries: make(map[string]*entry), wanted: make(map[string]*entry), pending: make(map[*attempt]bool),
	}
	rt.proxy = rt.newProxy()
	return rt, problems.Err()
}

// address parses an address label.
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

// ServeHTTP answers a request in this process if it owns the request's key, and otherwise forwards it to the owner. While
// no process answers for the key, the request waits, for at most [Config.MaxWait].
func (rt *Route) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := rt.id(r)
	hop := r.Header[routeHeader]
	if id == "" && hop == nil {
		http.NotFound(w, r)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), rt.cfg.MaxWait)
	defer cancel()
	at := newClient(rt, w, r)
	defer at.close()
	r = at.r
	if hop != nil { // a forwarded request is never forwarded again
		if c := rt.judge(ctx, id, hop); c == nil || c.answer(at, r) == refused {
			fail(at, r, http.StatusMisdirectedRequest, "")
		}
		return
	}
	out := outgoing{rt: rt, id: id, at: at, r: r, began: time.Now(), told: Request{Key: id, Outcome: unknown}}
	if trace := rt.cfg.Trace; trace != nil && trace.Request != nil {
		defer func() { // also if the answer breaks off
			out.told.Took = time.Since(out.began)
			trace.Request(out.told)
		}()
	}
	for {
		c, owner, err := rt.locate(ctx, id, false)
		out.told.Waited = time.Since(out.began)
		switch {
		case err != nil:
			out.fail(http.StatusServiceUnavailable, err)
			return
		case c != nil:
			if outcome := c.answer(at, out.request()); outcome != refused {
				out.told.Outcome = outcome
				return
			}
		case out.send(ctx, owner):
			return
		}
	}
}

// fail answers a request that a handler has not answered. A gRPC client gets a gRPC status.
func fail(w http.ResponseWriter, r *http.Request, status int, text string) {
	fate := refused
	if status == http.StatusBadGateway {
		fate = unknown
	}
	w.Header().Set(fateHeader, fate)
	if r.ProtoMajor == 1 && (r.ContentLength < 0 || r.ContentLength > 64<<10) { // otherwise net/http reads the body before it answers
		w.Header().Set("Connection", "close")
	}
	if fate == refused {
		w.Header().Set("Retry-After", "1")
	}
	if r.Header[routeHeader] != nil { // without a body, because the sender would close the connection instead of reading it
		w.WriteHeader(status)
		return
	}
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		http.Error(w, text, status)
		return
	}
	w.Header().Set("Content-Type", "application/grpc") // trailers only
	w.Header().Set("Grpc-Status", map[string]string{refused: "14", unknown: "2"}[fate])
	w.Header().Set("Grpc-Message", text)
	w.WriteHeader(http.StatusOK) // at once, so that a handler whose answer comes too late can't change the headers
}

// Owner is the process that owns a key.
type Owner struct {
	URL   string // from its label; the scheme may be h2c
	ID    string // of its session, or of its term of the lease
	Local bool   // it is this process, and Serve runs for the key
}

// Owner returns the owner of a key, for protocols other than HTTP. For a lease, id is ignored. Owner reads the store unless
// this process is the owner. If no process owns the key, the error is [tenure.ErrNotFound]. The key may move at any time, so
// the owner must check its right before it acts.
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
	at, addressErr := address(holding.Labels[addressLabel])
	if err = cmp.Or(err, addressErr); err != nil {
		return Owner{}, fmt.Errorf("route: owner of %s: %w", id, err)
	}
	return Owner{at.String(), rt.owner(holding), false}, nil
}

// Shutdown shuts down a server that serves the route, and closes the route's connections to other processes. Call it when
// the Run of the session or coordinator has returned, so that the keys are free. For 250 ms the server still refuses
// forwarded requests, because a request on a connection that is closed has an unknown outcome. If ctx is done before every
// request is answered, Shutdown returns an error; then close the server, and call Shutdown again.
func (rt *Route) Shutdown(ctx context.Context, s *http.Server) error {
	pace.Sleep(ctx, 250*time.Millisecond)
	err := s.Shutdown(ctx)
	if err != nil {
		return err
	}
	if rt.cfg.Transport == nil {
		rt.proxy.Transport.(*carrier).close()
	}
	ended := make(chan struct{})
	go func() { rt.busy.Wait(); close(ended) }() // soon, because no request waits any more
	select {
	case <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return err
}
