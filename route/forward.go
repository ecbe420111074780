package route

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/pace"
)

var (
	errRefused  = errors.New("the owner has refused the request")
	errUnknown  = errors.New("the owner does not know whether the request has run")
	errNoReplay = errors.New("the request was not run: its owner has moved, and its body is too long to be sent again")
	errBody     = errors.New("the request was not run: its body can't be read, or comes too slowly")
	errNoAnswer = errors.New("the request was sent to the owner of its key, may have run, and has no answer")
	errKey      = errors.New("the func that returns the key of a request has returned another one to the sender")
	errNoToken  = errors.New("the request may have run, and was answered by something else than the route of its owner")
	errGone     = errors.New("the owner of the key has answered, and the answer could not be passed on")
	errMoved    = errors.New("the request may have run before its owner changed, and no other has answered")
)

// outgoing is a client's request, which may be sent to other processes several times.
type outgoing struct {
	rt   *Route
	id   string
	at   *client
	r    *http.Request
	kept []byte // the body, if it is short; any other body can't be sent again once an attempt has read from it

	mayHaveRun bool // an attempt has an unknown outcome, so the request must not be refused any more

	began time.Time
	told  Request // to the trace
}

// request returns the request, with a body that begins at the beginning.
func (o *outgoing) request() *http.Request {
	r := *o.r
	if o.kept != nil {
		r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(o.kept)), nil }
		r.Body, _ = r.GetBody()
	}
	return &r
}

// headerFormat is that of a forwarded request's header. To ends with a semicolon, wait is in milliseconds, and the key is
// escaped.
const headerFormat = "to=%s least=%d; wait=%d; key=%s"

// attempt is one attempt to forward a request.
type attempt struct {
	of       *outgoing
	owner    *owner
	sent     time.Time
	header   string
	body     *stream // nil: it can be sent again
	cancel   context.CancelFunc
	leave    func() // gives back its room
	progress atomic.Int32
	begun    bool  // the owner has begun to answer
	token    int64 // under which it does
	err      error // why there is no answer
}

// The progress of an attempt, as reported by its transport; 0: the transport has reported nothing.
const (
	connecting   = iota + 1 // no process can have run the request
	wroteHeaders            // the receiver may run it
)

// stream is the body of an attempt that is too long to be kept, or of unknown length. The next attempt may have the body
// unless this one has begun to read it.
type stream struct {
	io.ReadCloser
	state atomic.Int32
}

const (
	streamOver  = iota + 1
	streamBegun // being read
	streamEnded // read to its end
)

func (s *stream) Read(b []byte) (int, error) {
	if !s.state.CompareAndSwap(0, streamBegun) && s.state.Load() == streamOver {
		return 0, errRefused
	}
	n, err := s.ReadCloser.Read(b)
	if err != nil {
		s.state.Store(streamEnded)
	}
	return n, err
}

// Close keeps a body open that has not been read.
func (s *stream) Close() error {
	if s.state.Load() >= streamBegun {
		return s.ReadCloser.Close()
	}
	return nil
}

// continues is a ResponseWriter for the owner's answer. It leaves out the 100 that the owner sends when it reads a stream;
// this process sends its own to a client that asks for one.
// ReverseProxy clears the headers after each 1xx, so until the answer begins, it gets others than those that were set before.
type continues struct {
	http.ResponseWriter
	of    *attempt
	hints http.Header
}

func (w continues) Header() http.Header {
	if w.of.begun {
		return w.ResponseWriter.Header()
	}
	return w.hints
}

func (w continues) WriteHeader(status int) {
	switch {
	case w.of.begun:
		if b := w.of.body; b != nil && b.state.Load() != streamEnded && w.of.of.r.ProtoMajor == 1 {
			w.Header().Set("Connection", "close") // otherwise net/http discards the rest of the body, which the handler may want to read
		}
		w.ResponseWriter.WriteHeader(status)
	case status != http.StatusContinue:
		header := w.ResponseWriter.Header()
		before := maps.Clone(header)
		maps.Copy(header, w.hints)
		w.ResponseWriter.WriteHeader(status)
		clear(header)
		maps.Copy(header, before)
	}
}

func (w continues) Unwrap() http.ResponseWriter { return w.ResponseWriter }

type attemptKey struct{}

func attemptOf(r *http.Request) *attempt { return r.Context().Value(attemptKey{}).(*attempt) }

// send forwards the request to an owner. It reports whether the client has been answered. Otherwise the request may be sent
// again, until ctx is done.
func (o *outgoing) send(ctx context.Context, to *owner) (done bool) {
	deadline, _ := ctx.Deadline()
	if length := o.r.ContentLength; o.kept == nil && length > 0 && length <= o.rt.cfg.MaxReplay {
		read, ok := o.rt.takeBody(o.id)
		if !ok {
			o.fail(http.StatusServiceUnavailable, errBusy)
			return true
		}
		slow := time.AfterFunc(time.Until(deadline), func() { o.at.stop(errSlow) })
		var err error
		o.kept, err = io.ReadAll(o.r.Body)
		slow.Stop()
		if read(); err != nil {
			o.fail(http.StatusBadRequest, errBody)
			return true
		}
	}
	sending, cancel := context.WithCancel(o.r.Context())
	defer cancel()
	a := &attempt{of: o, owner: to, sent: time.Now(), cancel: cancel}
	idempotent, r := o.idempotent(), o.request()
	if o.kept == nil && r.ContentLength != 0 {
		a.body = &stream{ReadCloser: r.Body}
		r.Body = a.body
	}
	if !o.rt.begin(a, deadline) {
		o.fail(http.StatusServiceUnavailable, errBusy)
		return true
	}
	defer o.rt.end(a)
	o.told.Sends++
	o.rt.proxy.ServeHTTP(continues{o.at, a, http.Header{}}, r.WithContext(httptrace.WithClientTrace(context.WithValue(sending, attemptKey{}, a), &httptrace.ClientTrace{
		// The transport itself retries a request that the receiver has not processed, and gets another connection first.
		// It also retries an idempotent request that may have run.
		GetConn: func(string) {
			if !idempotent || a.progress.Load() == 0 {
				a.progress.Store(connecting)
			}
		},
		WroteHeaders: func() { a.progress.Store(wroteHeaders) },
	})))
	switch {
	case a.err == nil:
		o.told.Outcome = answered
		return true
	case a.begun: // the client has gone, or its connection can't be upgraded
		o.fail(http.StatusBadGateway, errGone)
		return true
	}
	o.rt.mu.Lock()
	e := o.rt.entry(o.id)
	if e.owner == to {
		if e.failed != to.to {
			e.askPause = pace.Doubling{}
		}
		e.owner, e.failed = nil, to.to                             // look again
		pause := e.askPause.Next(0, shortestPause, longestPause/2) // over before the search looks again
		e.askAfter = time.Now().Add(pace.Jitter(pause))
	}
	if errors.Is(a.err, errRefused) { // perhaps because a stranger has sent us a token that is too great
		e.token = 0
	}
	o.rt.mu.Unlock()
	replays := a.body == nil || a.body.state.CompareAndSwap(0, streamOver)
	// If an attempt was cancelled, it may be written at this moment.
	switch unsent := errors.Is(a.err, errRefused) || a.progress.Load() == connecting && sending.Err() == nil; {
	case unsent && replays:
		return false
	case unsent:
		o.fail(http.StatusServiceUnavailable, errNoReplay)
	case idempotent && replays && ctx.Err() == nil && !o.mayHaveRun: // only once, in case the request crashes its owners
		o.mayHaveRun = true
		return false
	case errors.Is(a.err, errNoToken):
		o.fail(http.StatusBadGateway, errNoToken)
	default:
		o.fail(http.StatusBadGateway, errNoAnswer)
	}
	return true
}

// fail tells the client that the request is refused, or that its outcome is unknown.
func (o *outgoing) fail(status int, err error) {
	if o.mayHaveRun && status != http.StatusBadGateway {
		status, err = http.StatusBadGateway, errMoved
	}
	if o.told.Err = err; status != http.StatusBadGateway {
		o.told.Outcome = refused
	}
	fail(o.at, o.r, status, err.Error())
}

// idempotent reports whether the request may run twice. By default, these are the requests that net/http itself retries.
func (o *outgoing) idempotent() bool {
	switch o.r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return o.r.Header["Idempotency-Key"] != nil || o.r.Header["X-Idempotency-Key"] != nil || o.rt.cfg.Idempotent != nil && o.rt.cfg.Idempotent(o.r)
}

// begin records an attempt, unless too many requests wait for an answer. While a long body is sent, its client may be what
// the answer waits for, so such requests take no room from others.
func (rt *Route) begin(a *attempt, deadline time.Time) bool {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	e := rt.entry(a.of.id)
	of, all := &e.sent, &rt.sent
	if a.body != nil {
		of, all = &e.bodies, &rt.bodies
	}
	if !rt.take(of, all) {
		return false
	}
	a.leave = func() { *of--; *all-- }
	a.header = fmt.Sprintf(headerFormat, a.owner.to+";", e.token, max(0, time.Until(deadline).Milliseconds()), url.QueryEscape(a.of.id))
	rt.pending[a] = true
	if !rt.rechecks {
		rt.rechecks = true
		time.AfterFunc(a.owner.ttl, rt.recheck)
	}
	return true
}

// end removes an attempt that waits no longer.
func (rt *Route) end(a *attempt) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.answered(a)
}

// answered is end for a caller that holds mu.
func (rt *Route) answered(a *attempt) {
	if rt.pending[a] {
		delete(rt.pending, a)
		a.leave()
	}
}

// takeBody makes room for a body that is being read to be kept, until read is called.
func (rt *Route) takeBody(id string) (read func(), ok bool) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	e := rt.entry(id)
	return func() {
		rt.mu.Lock()
		defer rt.mu.Unlock()
		e.bodies--
		rt.bodies--
	}, rt.take(&e.bodies, &rt.bodies)
}

// recheck cancels the attempts whose owners no longer own the key. Such an owner may hang, and cannot answer any more,
// because it would have answered all requests before it gave the key up. Attempts that have waited for a TTL share one look
// per TTL.
func (rt *Route) recheck() {
	rt.mu.Lock()
	old := make(map[string][]*attempt)
	next := time.Hour
	for a := range rt.pending {
		if next = min(next, a.owner.ttl); time.Since(a.sent) >= a.owner.ttl {
			old[a.of.id] = append(old[a.of.id], a)
		}
	}
	if rt.rechecks = len(rt.pending) > 0; rt.rechecks {
		time.AfterFunc(next, rt.recheck)
	}
	if len(old) == 0 {
		rt.mu.Unlock()
		return
	}
	rt.busy.Add(1)
	defer rt.busy.Done()
	rt.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), next)
	defer cancel()
	owners, err := rt.find(ctx, slices.Collect(maps.Keys(old))...)
	rt.mu.Lock()
	defer rt.mu.Unlock()
	for id, attempts := range old {
		holding, owned := owners[id]
		for _, a := range attempts {
			if lost := owned && rt.owner(holding) != a.owner.to || !owned && err == nil; lost && rt.pending[a] {
				a.cancel()
			}
		}
	}
}

// newProxy returns the proxy that makes attempts. It writes to the client only if the owner answers.
func (rt *Route) newProxy() *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:   rewrite,
		Transport: newTransport(rt.cfg.Transport),
		ErrorLog:  slog.NewLogLogger(rt.cfg.Logger.Handler(), slog.LevelDebug),
		ModifyResponse: func(response *http.Response) error {
			switch fate := response.Header.Get(fateHeader); {
			case fate == refused && response.StatusCode == http.StatusMisdirectedRequest:
				return errRefused
			case fate == unknown:
				return errUnknown
			case response.Header.Get(tokenHeader) == "" && response.StatusCode != http.StatusSwitchingProtocols: // whose headers a handler may write itself
				rt.log.Log(rt.cfg.Logger, slog.LevelWarn, "route: an answer without Tenure-Token: mount the route so that a forwarded request reaches it under the path that the client has sent", errNoToken, "status", response.StatusCode)
				return errNoToken
			}
			a := attemptOf(response.Request)
			a.begun, a.of.kept = true, nil
			a.token, _ = strconv.ParseInt(response.Header.Get(tokenHeader), 10, 64)
			rt.mu.Lock()
			defer rt.mu.Unlock()
			rt.answered(a)
			a.owner.heard = time.Now()
			if response.StatusCode != http.StatusSwitchingProtocols { // then the handler has written the headers itself
				e := rt.entry(a.of.id)
				e.failed = ""
				e.learn(a.owner.to, a.token)
			}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, r *http.Request, err error) { attemptOf(r).err = err },
	}
}

// ofConnections are the headers that belong to a single connection.
var ofConnections = []string{
	"Connection", "Http2-Settings", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// rewrite turns a client's request into the one that is sent to the owner. The Host stays the same.
func rewrite(p *httputil.ProxyRequest) {
	a := attemptOf(p.In)
	p.Out.Header["X-Forwarded-For"] = p.In.Header["X-Forwarded-For"]
	p.SetXForwarded()
	for _, name := range []string{"X-Forwarded-Host", "X-Forwarded-Proto"} {
		if before, ok := p.In.Header[name]; ok {
			p.Out.Header[name] = before
		}
	}
	for name, values := range p.In.Header { // also those that the client's Connection names: the key may depend on them
		if p.Out.Header[name] == nil && !slices.Contains(ofConnections, name) {
			p.Out.Header[name] = values
		}
	}
	if sent, err := url.ParseRequestURI(p.In.RequestURI); err == nil && strings.HasSuffix(sent.Path, p.In.URL.Path) {
		p.Out.URL.Path, p.Out.URL.RawPath = sent.Path, sent.RawPath // with the prefix that the owner strips too
	}
	p.Out.Trailer = p.In.Trailer // the values come with the body's end
	if len(p.In.Trailer) > 0 {
		p.Out.ContentLength = -1 // HTTP/1 has trailers only after chunks
	}
	p.Out.URL.Scheme, p.Out.URL.Host, p.Out.URL.RawQuery = a.owner.url.Scheme, a.owner.url.Host, p.In.URL.RawQuery
	p.Out.Header.Set(routeHeader, a.header)
	if a.body != nil {
		if p.Out.ContentLength < 0 {
			p.Out.TransferEncoding = []string{"chunked"} // otherwise net/http reads a byte of some bodies before the headers are sent
		}
		p.Out.Header.Set("Expect", "100-continue") // so that the owner can refuse the request before the body is read
	}
}

// judge returns the call of Serve to which another process has sent a request; nil: the request is refused. The header can
// do nothing else than have this one request refused.
func (rt *Route) judge(ctx context.Context, id string, header []string) *call {
	var to, key string
	var least, wait int64
	switch n, _ := fmt.Sscanf(header[0], headerFormat, &to, &least, &wait, &key); {
	case n == 4 && key != url.QueryEscape(id):
		rt.log.Log(rt.cfg.Logger, slog.LevelWarn, "route: refused a forwarded request, whose key is another one here: the key must not depend on its connection", errKey)
		return nil
	case n < 3: // a sender of an older version names no key
		return nil
	}
	if rt.keys != nil && to != rt.keys.Session().ID()+";" {
		return nil // at once: this process may be about to serve the key under another session
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(min(wait, 1e6))*time.Millisecond)
	defer cancel()
	c, _, _ := rt.locate(ctx, id, true)
	if c == nil || c.to+";" != to || c.token < least {
		return nil
	}
	return c
}

// carrier is a transport that uses HTTP/2 without TLS for the scheme h2c. On HTTP/2, a body that a handler does not read
// uses up the window of its connection, and then no other body gets through. So each body has a connection of its own.
type carrier struct {
	plain, h2c http.RoundTripper

	mu   sync.Mutex
	idle []*lane // those that were used last come last
}

// lane is a transport for one body at a time, to one process.
type lane struct {
	*http.Transport
	to   url.URL
	used time.Time
}

func (c *carrier) RoundTrip(r *http.Request) (*http.Response, error) {
	by, to := c.plain, url.URL{Scheme: r.URL.Scheme, Host: r.URL.Host}
	upgrade := r.Header.Get("Upgrade") != "" // only HTTP/1 has it
	if r.URL.Scheme == "h2c" {
		if r.URL.Scheme = "http"; !upgrade {
			by = c.h2c
		}
	}
	shared, known := by.(*http.Transport)
	if !known || upgrade || to.Scheme == "http" || r.Body == nil || r.Body == http.NoBody {
		return by.RoundTrip(r)
	}
	l := c.lane(shared, to)
	answer, err := l.RoundTrip(r)
	if err != nil {
		c.free(l)
		return nil, err
	}
	answer.Body = &laneBody{answer.Body, sync.OnceFunc(func() { c.free(l) })}
	return answer, nil
}

// lane returns a lane that no request uses.
func (c *carrier) lane(shared *http.Transport, to url.URL) *lane {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, l := range slices.Backward(c.idle) {
		if l.to == to {
			c.idle = slices.Delete(c.idle, i, i+1)
			return l
		}
	}
	return &lane{Transport: shared.Clone(), to: to}
}

// free lets another request use the lane, and forgets lanes that were not used for long.
func (c *carrier) free(l *lane) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.used = time.Now()
	c.idle = append(c.idle, l)
	for len(c.idle) > 0 && time.Since(c.idle[0].used) > idleFor {
		c.idle[0].CloseIdleConnections()
		c.idle = slices.Delete(c.idle, 0, 1)
	}
}

// laneBody is the body of an answer. The lane is free when it is closed.
type laneBody struct {
	io.ReadCloser
	free func()
}

func (b *laneBody) Close() error {
	defer b.free()
	return b.ReadCloser.Close()
}

func (c *carrier) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.plain.(*http.Transport).CloseIdleConnections()
	c.h2c.(*http.Transport).CloseIdleConnections()
	for _, l := range c.idle {
		l.CloseIdleConnections()
	}
	c.idle = nil
}

// idleFor is how long connections to other processes are kept that no request uses.
const idleFor = 90 * time.Second

func newTransport(given http.RoundTripper) http.RoundTripper {
	if given != nil {
		return &carrier{plain: given, h2c: given}
	}
	dialer := &net.Dialer{Timeout: time.Second, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3}}
	transport := func() *http.Transport {
		return &http.Transport{
			DialContext: dialer.DialContext, TLSHandshakeTimeout: 2 * time.Second, Protocols: new(http.Protocols),
			HTTP2:               &http.HTTP2Config{SendPingTimeout: 10 * time.Second, PingTimeout: 10 * time.Second},
			MaxIdleConnsPerHost: 256, IdleConnTimeout: idleFor, ExpectContinueTimeout: time.Second,
			DisableCompression: true, // the client's Accept-Encoding decides
		}
	}
	plain, h2c := transport(), transport() // not a Clone, which would fix the protocols before they are set
	plain.Protocols.SetHTTP1(true)
	plain.Protocols.SetHTTP2(true)
	h2c.Protocols.SetUnencryptedHTTP2(true)
	return &carrier{plain: plain, h2c: h2c}
}
