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

// call is a call of Serve.
type call struct {
	right
	rt  *Route
	h   http.Handler
	ctx context.Context // of Serve

	closed  error // why no request is admitted any more; nil: they are
	running map[*answer]bool
	busy    sync.WaitGroup // the same
	quiet   time.Time      // when the last request ended
}

// Serve lets h answer requests for a key in this process. Call it where the right is, with the context there: in a job of
// the lease's coordinator, in a func of [claims.Keys.Do], or in the Work of a shard. It returns nil when ctx is done or
// no request came for [Config.Idle], and every request is answered; so the right is not given up before. The error is
// [tenure.ErrInvalid] if ctx has no right of this route, or Serve runs for the key already.
//
// The context of a request ends with the right, with the same cause, and [tenure.TermFromContext] and
// [claims.ClaimFromContext] find in it what they find in ctx. When ctx ends in order, new requests are refused at once, and the
// contexts of those that run end after [Config.DrainFor]; those of upgraded connections and event streams end at once,
// and connections that outlive that by DrainFor are closed. When the right is lost, all contexts end at once, and an
// answer that has not begun becomes unknown. A handler that ignores its context keeps the key.
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

// close ends admission if ctx is done or no request came for too long. Otherwise it returns when to call it again.
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

// drain returns when every request is answered. ctx no longer tells when the right ends.
func (c *call) drain() {
	lost := errors.Is(c.closed, tenure.ErrLost) || errors.Is(c.closed, tenure.ErrDeadline) || errors.Is(c.closed, tenure.ErrUnhealthy)
	answered := make(chan struct{})
	go func() { c.busy.Wait(); close(answered) }()
	for end := time.Now().Add(c.rt.cfg.DrainFor); ; {
		all := lost || !time.Now().Before(end) || !c.holds()
		c.rt.mu.Lock()
		for a := range c.running {
			if all || a.long.Load() {
				a.cancel(c.closed)
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

// answer is a request that was admitted, and the guard of its answer: the handler's ResponseWriter.
type answer struct {
	of     *call
	w      http.ResponseWriter
	r      *http.Request
	cancel context.CancelCauseFunc
	long   atomic.Bool // it is an upgraded connection or an event stream

	begun, hijacked bool
	lost            bool // the right had ended before it began
	cutOff          bool // the right has ended since
}

// answer lets the handler answer a request, and reports whether it was admitted.
func (c *call) answer(w http.ResponseWriter, r *http.Request) (admitted bool) {
	ctx, cancel := context.WithCancelCause(r.Context())
	a := &answer{of: c, w: w, r: r.WithContext(rightContext{ctx, c.ctx}), cancel: cancel}
	inner := a.r
	if r.Header[routeHeader] != nil { // it is not for what the handler itself asks
		inner = r.WithContext(a.r.Context())
		inner.Header = r.Header.Clone()
		inner.Header.Del(routeHeader)
	}
	defer cancel(nil)
	c.rt.mu.Lock()
	if c.closed != nil || c.ctx.Err() != nil || !c.holds() {
		c.rt.mu.Unlock()
		return false
	}
	c.running[a] = true
	c.busy.Add(1)
	c.rt.mu.Unlock()
	defer c.busy.Done()
	defer func() {
		c.rt.mu.Lock()
		defer c.rt.mu.Unlock()
		delete(c.running, a)
		c.quiet = time.Now()
	}()
	c.h.ServeHTTP(a, inner)
	if !a.hijacked && a.begin(http.StatusOK) && (a.cutOff || !c.holds()) {
		panic(http.ErrAbortHandler) // a clean end would look complete
	}
	return true
}

// rightContext is the context of a request, with the values of the context of Serve. A handler that has another right may
// have made the request.
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

func (a *answer) Header() http.Header { return a.w.Header() }

// Unwrap is for [http.ResponseController], which sets deadlines with it.
func (a *answer) Unwrap() http.ResponseWriter { return a.w }

func (a *answer) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		a.begin(status)
	} else if !a.begun {
		a.w.WriteHeader(status)
	}
}

// begin begins the answer if it has not begun. It reports whether the answer is the handler's.
func (a *answer) begin(status int) bool {
	if a.begun {
		return !a.lost
	}
	a.begun = true
	header := a.Header()
	if a.lost = !a.of.holds(); a.lost {
		clear(header)
		fail(a.w, a.r, http.StatusBadGateway, unknown, "the right to answer has ended, and the request may have run")
		return false
	}
	header.Del(fateHeader)
	header.Set(tokenHeader, strconv.FormatInt(a.of.token, 10))
	if strings.HasPrefix(header.Get("Content-Type"), "text/event-stream") {
		a.long.Store(true)
	}
	a.w.WriteHeader(status)
	return true
}

func (a *answer) Write(b []byte) (int, error) {
	if !a.begin(http.StatusOK) || a.cutOff || !a.of.holds() {
		a.cutOff = true
		return 0, fmt.Errorf("route: answer for %s: %w: the right to answer has ended", a.of.id, tenure.ErrLost)
	}
	return a.w.Write(b)
}

func (a *answer) Flush() { _ = a.FlushError() }

func (a *answer) FlushError() error {
	if _, err := a.Write(nil); err != nil {
		return err
	}
	return http.NewResponseController(a.w).Flush()
}

// Hijack hands over the connection, which is closed if it outlives the request's context by DrainFor.
func (a *answer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	if a.begun || !a.of.holds() {
		return nil, nil, fmt.Errorf("route: hijack: %w: the answer has begun, or the right to answer has ended", tenure.ErrLost)
	}
	conn, buffered, err := http.NewResponseController(a.w).Hijack()
	if err == nil {
		a.begun, a.hijacked = true, true
		a.long.Store(true)
		context.AfterFunc(a.r.Context(), func() { time.AfterFunc(a.of.rt.cfg.DrainFor, func() { _ = conn.Close() }) })
	}
	return conn, buffered, err
}
