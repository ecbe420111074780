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
	"slices"
	"strconv"
	"sync/atomic"
	"time"
)

var (
	errRefused  = errors.New("the owner has refused the request")
	errUnknown  = errors.New("the owner does not know whether the request has run")
	errNoReplay = errors.New("the request was not run: its owner has moved, and its body is too long to be sent again")
)

// outgoing is a request that may have to be sent to other processes, more than once.
type outgoing struct {
	rt   *Route
	id   string
	r    *http.Request
	kept []byte // its body, if that is short; other bodies can't be sent again once an owner may have read from them

	mayHaveRun bool // an attempt has no known outcome, so the request is never refused any more
}

// request returns the request with its body from the beginning.
func (o *outgoing) request() *http.Request {
	r := *o.r
	if o.kept != nil {
		r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(o.kept)), nil }
		r.Body, _ = r.GetBody()
	}
	return &r
}

const headerFormat = "to=%s least=%d; wait=%d" // the owner's ID ends with a semicolon; wait is in milliseconds

// attempt is one sending of a request.
type attempt struct {
	of       *outgoing
	owner    *owner
	sent     time.Time
	header   string
	cancel   context.CancelFunc
	progress atomic.Int32
	begun    bool  // the owner has answered
	err      error // why the owner has not answered
}

// The progress of an attempt, if its transport tells it.
const (
	connecting   = iota + 1 // no process has processed it
	wroteHeaders            // its receiver may process it
)

type attemptKey struct{}

func attemptOf(r *http.Request) *attempt { return r.Context().Value(attemptKey{}).(*attempt) }

// send sends the request to its owner. It reports whether the client was answered; otherwise the request may be sent
// again, until ctx is done.
func (o *outgoing) send(ctx context.Context, w http.ResponseWriter, to *owner) (done bool) {
	deadline, _ := ctx.Deadline()
	if length := o.r.ContentLength; o.kept == nil && length > 0 && length <= o.rt.cfg.MaxReplay {
		slow := time.AfterFunc(time.Until(deadline), func() { _ = http.NewResponseController(w).SetReadDeadline(time.Now()) })
		var err error
		o.kept, err = io.ReadAll(o.r.Body)
		if slow.Stop(); err != nil {
			fail(w, o.r, http.StatusBadRequest, refused, "the request was not run: its body can't be read, or comes too slowly")
			return true
		}
	}
	sending, cancel := context.WithCancel(o.r.Context())
	defer cancel()
	a := &attempt{of: o, owner: to, sent: time.Now(), cancel: cancel}
	if !o.rt.begin(a, deadline) {
		o.fail(w, false, errBusy.Error())
		return true
	}
	defer o.rt.end(a)
	idempotent := o.idempotent()
	o.rt.proxy.ServeHTTP(w, o.request().WithContext(httptrace.WithClientTrace(context.WithValue(sending, attemptKey{}, a), &httptrace.ClientTrace{
		// A transport repeats by itself what its receiver says was not processed, and gets another connection first. It
		// also repeats what is idempotent, which may have run by then.
		GetConn: func(string) {
			if !idempotent || a.progress.Load() == 0 {
				a.progress.Store(connecting)
			}
		},
		WroteHeaders: func() { a.progress.Store(wroteHeaders) },
	})))
	switch {
	case a.err == nil:
		return true
	case a.begun: // the client is not there any more, or its connection can't be upgraded
		o.fail(w, true, "the owner of the key has answered, and the answer could not be passed on")
		return true
	}
	o.rt.mu.Lock()
	e := o.rt.entry(o.id)
	if e.owner == to {
		e.owner = nil // look again
	}
	if errors.Is(a.err, errRefused) { // perhaps because of a token that a stranger has made up
		e.token = 0
	}
	o.rt.mu.Unlock()
	replays := o.kept != nil || o.r.ContentLength == 0
	switch {
	case a.progress.Load() == connecting && sending.Err() == nil: // one that is given up may be written at that moment
		return false
	case errors.Is(a.err, errRefused) && replays:
		return false
	case errors.Is(a.err, errRefused):
		o.fail(w, false, errNoReplay.Error())
	case idempotent && replays && ctx.Err() == nil && !o.mayHaveRun: // once: it may be what has ended its owner
		o.mayHaveRun = true
		return false
	default:
		o.fail(w, true, "the request was sent to the owner of its key, may have run, and has no answer")
	}
	return true
}

// fail answers a request that has no answer.
func (o *outgoing) fail(w http.ResponseWriter, mayHaveRun bool, text string) {
	switch {
	case mayHaveRun:
		fail(w, o.r, http.StatusBadGateway, unknown, text)
	case o.mayHaveRun:
		fail(w, o.r, http.StatusBadGateway, unknown, "the request may have run before its owner changed, and no other has answered")
	default:
		fail(w, o.r, http.StatusServiceUnavailable, refused, text)
	}
}

// idempotent reports whether the request may run twice. The transport of net/http repeats the same ones.
func (o *outgoing) idempotent() bool {
	switch o.r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return o.r.Header["Idempotency-Key"] != nil || o.r.Header["X-Idempotency-Key"] != nil || o.rt.cfg.Idempotent != nil && o.rt.cfg.Idempotent(o.r)
}

// begin notes an attempt, unless too many requests wait.
func (rt *Route) begin(a *attempt, deadline time.Time) bool {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if len(rt.pending) >= rt.cfg.MaxWaiting {
		return false
	}
	a.header = fmt.Sprintf(headerFormat, a.owner.to+";", rt.entry(a.of.id).token, max(0, time.Until(deadline).Milliseconds()))
	rt.pending[a] = true
	if !rt.rechecks {
		rt.rechecks = true
		time.AfterFunc(a.owner.ttl, rt.recheck)
	}
	return true
}

// end notes that an attempt waits no longer.
func (rt *Route) end(a *attempt) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	delete(rt.pending, a)
}

// recheck gives up the attempts whose owners have lost the right: those may hang, and stop, wait, release says that no
// process answers under a former right. It looks once per TTL, for all that have waited so long.
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

// newProxy returns the proxy that carries attempts. It answers the client only if the owner has answered.
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
			}
			a := attemptOf(response.Request)
			a.begun, a.of.kept = true, nil
			token, _ := strconv.ParseInt(response.Header.Get(tokenHeader), 10, 64)
			rt.mu.Lock()
			defer rt.mu.Unlock()
			delete(rt.pending, a)
			a.owner.heard = time.Now()
			if response.StatusCode != http.StatusSwitchingProtocols { // whose headers the handler wrote by itself
				rt.entry(a.of.id).learn(a.owner.to, token)
			}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, r *http.Request, err error) { attemptOf(r).err = err },
	}
}

// rewrite makes a client's request the one that goes to the owner. Its Host stays.
func rewrite(p *httputil.ProxyRequest) {
	a := attemptOf(p.In)
	p.Out.Header["X-Forwarded-For"] = p.In.Header["X-Forwarded-For"]
	p.SetXForwarded()
	for _, name := range []string{"Forwarded", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if before, ok := p.In.Header[name]; ok {
			p.Out.Header[name] = before
		}
	}
	p.Out.URL.Scheme, p.Out.URL.Host, p.Out.URL.RawQuery = a.owner.url.Scheme, a.owner.url.Host, p.In.URL.RawQuery
	p.Out.Header.Set(routeHeader, a.header)
}

// judge returns the call of Serve for which another process has sent a request, or nil. Each field of the header can
// only make this process refuse the one request.
func (rt *Route) judge(ctx context.Context, id string, header []string) *call {
	var to string
	var least, wait int64
	if n, _ := fmt.Sscanf(header[0], headerFormat, &to, &least, &wait); n != 3 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(min(wait, 1e6))*time.Millisecond)
	defer cancel()
	c, _, _ := rt.locate(ctx, id, true)
	if c == nil || c.to+";" != to || c.token < least {
		return nil
	}
	return c
}

// carrier carries requests to addresses with the scheme h2c by another transport.
type carrier struct{ plain, h2c http.RoundTripper }

func (c carrier) RoundTrip(r *http.Request) (*http.Response, error) {
	by := c.plain
	if r.URL.Scheme == "h2c" {
		if r.URL.Scheme = "http"; r.Header.Get("Upgrade") == "" { // which only HTTP/1 has
			by = c.h2c
		}
	}
	return by.RoundTrip(r)
}

func (c carrier) close() {
	c.plain.(*http.Transport).CloseIdleConnections()
	c.h2c.(*http.Transport).CloseIdleConnections()
}

func newTransport(given http.RoundTripper) http.RoundTripper {
	if given != nil {
		return carrier{given, given}
	}
	dialer := &net.Dialer{Timeout: time.Second, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3}}
	transport := func() *http.Transport {
		return &http.Transport{
			DialContext: dialer.DialContext, TLSHandshakeTimeout: 2 * time.Second, Protocols: new(http.Protocols),
			HTTP2:               &http.HTTP2Config{SendPingTimeout: 10 * time.Second, PingTimeout: 10 * time.Second},
			MaxIdleConnsPerHost: 256, IdleConnTimeout: 90 * time.Second, ExpectContinueTimeout: time.Second,
			DisableCompression: true, // what a client accepts passes unchanged
		}
	}
	plain, h2c := transport(), transport() // no clone: that would be without the protocols that are set later
	plain.Protocols.SetHTTP1(true)
	plain.Protocols.SetHTTP2(true)
	h2c.Protocols.SetUnencryptedHTTP2(true)
	return carrier{plain, h2c}
}
