package route

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// call is a running call of Serve.
type call struct {
	right
	rt  *Route
	h   http.Handler
	ctx context.Context // of Serve

	closed  error // why no more requests are admitted; nil: they are
	running map[*answer]bool
	busy    sync.WaitGroup // counts running
	quiet   time.Time      // when the last request ended
}

// Serve has h answer the requests for a key in this process. Call it in the func that holds the right to the key, with the
// context of that func: in the job of the lease's coordinator, in a func of [claims.Keys.Do], or in the Work of a shard.
// Serve returns nil once ctx is done, or no request has come for [Config.Idle], and all requests have been answered. The
// right is therefore not given up before that. The error is [tenure.ErrInvalid] if h is nil, ctx has no right of this route,
// or Serve already runs for the key.
//
// [tenure.TermFromContext] and [claims.ClaimFromContext] return the same from a request's context as from ctx. The context
// ends, with the cause of ctx, when the request may not continue:
//
//   - If ctx ends while the right still stands, new requests are refused at once, and running requests may continue
//     for [Config.DrainFor]. Upgraded connections and event streams end at once; a connection that is still open
//     DrainFor later is closed.
//   - If the right is lost, or ctx ends with [tenure.ErrUnhealthy], all requests end at once, and
//     those whose answers have not begun have the outcome unknown.
//
// No client can keep the key by neither reading nor sending. Once the context of a request has ended and DrainFor is over, or
// the right is lost, each call of the handler that waits for the client returns an error, and the connection is closed. A
// handler that does not wait may still answer, for which it gets a second, or half of DrainFor if that is shorter. A handler
// that ignores its context and these errors keeps the key.
func (rt *Route) Serve(ctx context.Context, h http.Handler) error {
	right, err := rt.right(ctx)
	if err == nil && h == nil {
		err = fmt.Errorf("%w: the handler is nil", tenure.ErrInvalid)
	}
	if err != nil {
		return fmt.Errorf("route: serve: %w", err)
	}
	c := &call{right: right, rt: rt, h: h, ctx: ctx, running: make(map[*answer]bool), quiet: time.Now()}
	rt.mu.Lock()
	e := rt.entry(right.id)
	if e.call != nil {
		rt.mu.Unlock()
		return fmt.Errorf("route: serve %s: %w: Serve runs for it in this process: wait until that call has returned", right.id, tenure.ErrInvalid)
	}
	e.call, e.loading = c, false
	e.learn(right.to, right.token)
	e.news()
	rt.mu.Unlock()
	for left := c.close(e); left > 0; left = c.close(e) {
		pace.Sleep(ctx, left)
	}
	c.drain()
	return nil
}

// close stops admitting requests if ctx is done, or the call has been idle for too long. Otherwise it returns how long to
// wait before it is called again.
func (c *call) close(e *entry) (left time.Duration) {
	c.rt.mu.Lock()
	defer c.rt.mu.Unlock()
	left = cmp.Or(c.rt.cfg.Idle, time.Hour)
	if c.rt.cfg.Idle > 0 && len(c.running) == 0 {
		left -= time.Since(c.quiet)
	}
	if left > 0 && c.ctx.Err() == nil {
		return left
	}
	e.call, c.closed = nil, cmp.Or(context.Cause(c.ctx), errors.New("no request came"))
	return 0
}

// admits reports whether a request may be answered here now. The caller holds mu.
func (c *call) admits() bool { return c.closed == nil && c.ctx.Err() == nil && c.holds() }

// drain returns when all requests are answered. The context of Serve is done, so drain itself checks that the right stands.
func (c *call) drain() {
	lost := (errors.Is(c.closed, tenure.ErrLost) || errors.Is(c.closed, tenure.ErrDeadline) || errors.Is(c.closed, tenure.ErrUnhealthy)) &&
		!errors.Is(c.closed, tenure.ErrJobEnded) // which wraps an error of the job, perhaps about another right
	answered := make(chan struct{})
	go func() { c.busy.Wait(); close(answered) }()
	for end := time.Now().Add(c.rt.cfg.DrainFor); ; {
		all := lost || !time.Now().Before(end) || !c.holds()
		c.rt.mu.Lock()
		for a := range c.running {
			if all || a.long.Load() {
				a.cancel(c.closed)
			}
			if all && !a.hijacked.Load() {
				a.at.hurry(min(c.rt.cfg.DrainFor/2, time.Second))
			}
		}
		c.rt.mu.Unlock()
		select {
		case <-answered:
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// answer is an admitted request. It is the ResponseWriter that the handler gets, which lets an answer through only while the
// right stands.
type answer struct {
	of     *call
	at     *client
	r      *http.Request
	cancel context.CancelCauseFunc
	long   atomic.Bool // it is an upgraded connection or an event stream
	asked  bool        // the sender was asked for the body, because net/http does not do so any more

	hijacked atomic.Bool
	begun    bool
	upgraded bool // the answer is 101
	lost     bool // the right had ended before the answer began
	cutOff   bool // the right ended after that
}

// answer has the handler answer a request, and returns the outcome. If that is refused, the client has not been told.
func (c *call) answer(at *client, r *http.Request) (outcome string) {
	ctx, cancel := context.WithCancelCause(r.Context())
	a := &answer{of: c, at: at, r: r.WithContext(rightContext{ctx, c.ctx}), cancel: cancel}
	inner := a.r
	if r.Header[routeHeader] != nil { // a handler may pass its headers on to another route
		inner = r.WithContext(a.r.Context())
		inner.Header = r.Header.Clone()
		inner.Header.Del(routeHeader)
	}
	defer cancel(nil)
	c.rt.mu.Lock()
	if !c.admits() {
		c.rt.mu.Unlock()
		return refused
	}
	c.running[a] = true
	c.rt.running++
	c.busy.Add(1)
	c.rt.mu.Unlock()
	defer c.busy.Done()
	defer func() {
		c.rt.mu.Lock()
		defer c.rt.mu.Unlock()
		delete(c.running, a)
		c.rt.running--
		c.quiet = time.Now()
	}()
	a.Header().Set(tokenHeader, strconv.FormatInt(c.token, 10)) // also of what a middleware answers if the handler panics
	c.h.ServeHTTP(a, inner)
	switch {
	case a.hijacked.Load():
		return answered
	case !a.begin(http.StatusOK):
		return unknown
	case a.cutOff || !c.holds():
		panic(http.ErrAbortHandler) // a clean end would look complete
	}
	if a.asked && r.ProtoMajor == 1 {
		a.at.discard(500 * time.Millisecond) // what net/http allows for where it has asked for a body itself
	}
	return answered
}

// rightContext is the context of a request, with the values of the context of Serve. The right comes from Serve even if the
// request's own context has one, because a handler with another right may have sent the request.
type rightContext struct {
	context.Context
	of context.Context
}

func (c rightContext) Value(key any) any {
	if _, isRight := key.(objects.RightKey); !isRight {
		if value := c.Context.Value(key); value != nil {
			return value
		}
	}
	return c.of.Value(key)
}

func (a *answer) Header() http.Header { return a.at.Header() }

// Unwrap lets [http.ResponseController] set deadlines.
func (a *answer) Unwrap() http.ResponseWriter { return a.at }

func (a *answer) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		a.begin(status)
	} else if !a.begun {
		a.at.WriteHeader(status)
	}
}

// begin writes the header if it has not been written. It reports whether the answer is the handler's.
func (a *answer) begin(status int) bool {
	if a.begun {
		return !a.lost
	}
	a.begun = true
	header := a.Header()
	if a.lost = !a.of.holds(); a.lost {
		clear(header)
		fail(a.at, a.r, http.StatusBadGateway, "the right to answer has ended, and the request may have run")
		return false
	}
	header.Del(fateHeader)
	header.Set(tokenHeader, strconv.FormatInt(a.of.token, 10))
	if strings.HasPrefix(header.Get("Content-Type"), "text/event-stream") {
		a.long.Store(true)
	}
	long := a.r.ContentLength < 0 || a.r.ContentLength > a.of.rt.cfg.MaxReplay || a.r.Header["Expect"] != nil // HTTP/2 hides Expect
	if long && status/100 == 2 && a.r.Header[routeHeader] != nil {
		a.at.WriteHeader(http.StatusContinue) // the handler may read the body later, when net/http does not ask for it any more
		a.asked = true
	}
	a.upgraded = status == http.StatusSwitchingProtocols
	a.at.WriteHeader(status)
	return true
}

func (a *answer) Write(b []byte) (int, error) {
	if !a.begin(http.StatusOK) || a.cutOff || !a.of.holds() {
		a.cutOff = true
		return 0, fmt.Errorf("route: answer for %s: %w: the right to answer has ended", a.of.id, tenure.ErrLost)
	}
	return a.at.Write(b)
}

func (a *answer) Flush() { _ = a.FlushError() }

func (a *answer) FlushError() error {
	if _, err := a.Write(nil); err != nil {
		return err
	}
	return http.NewResponseController(a.at).Flush()
}

// Hijack hands the connection over to the handler. If it is still open DrainFor after the request's context has ended, it is
// closed.
func (a *answer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	if a.begun && !a.upgraded || !a.of.holds() {
		return nil, nil, fmt.Errorf("route: hijack: %w: the answer has begun, or the right to answer has ended", tenure.ErrLost)
	}
	conn, buffered, err := http.NewResponseController(a.at).Hijack()
	if err == nil {
		a.begun = true
		a.hijacked.Store(true)
		a.long.Store(true)
		context.AfterFunc(a.r.Context(), func() { time.AfterFunc(a.of.rt.cfg.DrainFor, func() { _ = conn.Close() }) })
	}
	return conn, buffered, err
}
