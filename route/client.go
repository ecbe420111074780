package route

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

var (
	errLate    = fmt.Errorf("route: %w: the right to answer has ended", os.ErrDeadlineExceeded)
	errStalled = fmt.Errorf("route: %w: the client has neither sent nor read anything for MaxStall", os.ErrDeadlineExceeded)
	errSlow    = fmt.Errorf("route: %w: the client has not sent the body within MaxWait", os.ErrDeadlineExceeded)
	errOver    = errors.New("route: the request is over")
)

// mostAtOnce limits how many bytes one call on a client's connection moves, and so what counts as progress.
const mostAtOnce = 32 << 10

// client is the client's side of a request: the ResponseWriter and the body. A client that sends no more of its body, or
// reads no more of the answer, blocks a handler where no context reaches it. Deadlines don't always help: a middleware may hide
// them, and on HTTP/2 a write deadline has no effect while the connection itself is stuck. So each call that may wait for the
// client runs in a goroutine of its own, and the handler goes on without it if its direction is cut off.
type client struct {
	rt     *Route
	r      *http.Request // with this client's body
	w      http.ResponseWriter
	body   io.ReadCloser
	header http.Header // the handler's; a call that was left behind may still be reading that of the ResponseWriter
	begun  atomic.Bool // the answer has begun

	mu      sync.Mutex // guards the fields below, and the begin of calls
	over    bool
	late    bool           // the request should have ended
	left    time.Duration  // for which calls may still wait then, in all
	calls   sync.WaitGroup // that run, also those that were left behind
	in, out direction
}

// direction is one direction of the connection: the body, or the answer.
type direction struct {
	running  int           // number of calls that the handler waits for
	off      chan struct{} // closed if it is cut off: no call begins any more, and nothing waits for one that runs
	err      error         // why
	deadline func(*http.ResponseController, time.Time) error
	buffer   []byte // the handler's memory is not for calls that may outlive it
}

func newClient(rt *Route, w http.ResponseWriter, r *http.Request) *client {
	c := &client{rt: rt, w: w, body: r.Body, header: w.Header().Clone()}
	if c.header == nil {
		c.header = http.Header{}
	}
	c.in = direction{off: make(chan struct{}), deadline: (*http.ResponseController).SetReadDeadline}
	c.out = direction{off: make(chan struct{}), deadline: (*http.ResponseController).SetWriteDeadline}
	request := *r
	if r.Body != nil && r.Body != http.NoBody {
		request.Body = clientBody{c}
	}
	c.r = &request
	return c
}

// call runs a call that may wait for the client. It returns an error if the direction is cut off before the call has
// returned. The call must then use nothing of the caller's.
func (c *client) call(d *direction, do func()) error {
	c.mu.Lock()
	if c.over || d.err != nil {
		defer c.mu.Unlock()
		if d.err != nil {
			return d.err
		}
		return errOver
	}
	c.calls.Add(1)
	d.running++
	patience, late, began := c.rt.cfg.MaxStall, c.late, time.Now()
	if late {
		patience = c.left
	}
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		d.running--
		if late {
			c.left -= time.Since(began)
		}
	}()
	ended := make(chan any, 1)
	go func() {
		defer c.calls.Done()
		defer func() { ended <- recover() }()
		do()
	}()
	stalled := time.NewTimer(patience)
	defer stalled.Stop()
	for {
		select {
		case p := <-ended:
			if p != nil {
				panic(p)
			}
			return nil
		case <-d.off:
			return d.err
		case <-stalled.C:
			c.mu.Lock()
			if c.late || d == &c.out || !c.begun.Load() { // a stream whose answer has begun may be silent
				c.cut(d, errStalled)
			}
			c.mu.Unlock()
		}
	}
}

// hurry ends the calls that wait for the client now. Calls that begin later may wait for a while in all, so that a handler
// that has been told to return can still answer a client that listens. It never blocks.
func (c *client) hurry(left time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.late {
		return
	}
	c.late, c.left = true, left
	for _, d := range []*direction{&c.in, &c.out} {
		if d.running > 0 {
			c.cut(d, errLate)
		}
	}
}

// cut ends the calls of a direction. It never blocks. The caller holds mu.
func (c *client) cut(d *direction, err error) {
	if c.over || d.err != nil {
		return
	}
	d.err = err
	close(d.off)
	c.calls.Go(func() { // frees the connection
		if err := d.deadline(http.NewResponseController(c.w), time.Unix(1, 0)); errors.Is(err, http.ErrNotSupported) {
			c.rt.log.Log(c.rt.cfg.Logger, slog.LevelWarn, "route: a client was too slow, and its connection can't be closed: give the ResponseWriter of each middleware a method Unwrap", err)
		}
	})
}

// stop ends the reading of the body, which a transport may be waiting for although the answer is complete.
func (c *client) stop(err error) (stopped bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.in.running > 0 {
		c.cut(&c.in, err)
		return true
	}
	return false
}

// discard sends what there is of the answer, and reads the rest of the body, for a while. Otherwise net/http would close the
// connection while the body is being sent, and the sender would get an error instead of the answer.
func (c *client) discard(most time.Duration) {
	_ = c.FlushError()
	enough := time.AfterFunc(most, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.cut(&c.in, errOver)
	})
	defer enough.Stop()
	rest := make([]byte, mostAtOnce) // not the handler's, which may have left a reader behind
	for {
		var err error
		if cut := c.call(&c.in, func() { _, err = c.body.Read(rest) }); cut != nil || err != nil {
			return
		}
	}
}

// close waits for calls that were left behind, because the server must not use the connection beside them. It breaks the
// connection if the answer was cut off, because the server would complete it.
func (c *client) close() {
	c.stop(errOver)
	c.mu.Lock()
	inErr, outErr := c.in.err, c.out.err
	c.mu.Unlock()
	if outErr == nil {
		maps.Copy(c.w.Header(), c.header) // trailers
		if inErr != nil && c.begun.Load() {
			_ = c.FlushError() // the client need not send the rest to hear the answer
		}
	}
	c.mu.Lock()
	c.over = true
	outErr = c.out.err
	c.mu.Unlock()
	c.calls.Wait()
	if outErr != nil {
		panic(http.ErrAbortHandler)
	}
	if inErr != nil && c.r.ProtoMajor == 1 {
		c.linger()
	}
}

// linger has net/http close the connection only a while after the answer, as it does for a body that is too large. Otherwise
// it would close it at once, since the body can't be read to its end, and a client that still sends might lose the answer.
func (c *client) linger() {
	w := c.w
	for {
		outer, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			break
		}
		w = outer.Unwrap()
	}
	_, _ = http.MaxBytesReader(w, io.NopCloser(strings.NewReader("too large")), 0).Read(make([]byte, 1))
}

func (c *client) Header() http.Header { return c.header }

// Unwrap lets [http.ResponseController] set deadlines and take over the connection.
func (c *client) Unwrap() http.ResponseWriter { return c.w }

func (c *client) WriteHeader(status int) {
	header := c.header.Clone()
	if status >= 200 || status == http.StatusSwitchingProtocols {
		c.begun.Store(true)
		select {
		case <-c.in.off:
			if c.r.ProtoMajor == 1 {
				header.Set("Connection", "close") // otherwise net/http reads the rest of the body before it answers
			}
		default:
		}
	}
	_ = c.call(&c.out, func() {
		to := c.w.Header()
		clear(to)
		maps.Copy(to, header)
		c.w.WriteHeader(status)
	})
}

func (c *client) Write(b []byte) (n int, err error) {
	if !c.begun.Load() {
		c.WriteHeader(http.StatusOK)
	}
	for {
		part := append(c.out.buffer[:0], b[n:min(len(b), n+mostAtOnce)]...)
		c.out.buffer = part
		var wrote int
		var writing error
		if err := c.call(&c.out, func() { wrote, writing = c.w.Write(part) }); err != nil {
			c.out.buffer = nil
			return n, err
		}
		if n += wrote; writing != nil || n >= len(b) {
			return n, writing
		}
	}
}

func (c *client) FlushError() error {
	var flushing error
	if err := c.call(&c.out, func() { flushing = http.NewResponseController(c.w).Flush() }); err != nil {
		return err
	}
	return flushing
}

// clientBody is the body that handlers get.
type clientBody struct{ c *client }

func (b clientBody) Read(to []byte) (int, error) {
	in := &b.c.in
	if size := min(len(to), mostAtOnce); len(in.buffer) < size {
		in.buffer = make([]byte, size)
	}
	buffer := in.buffer[:min(len(to), len(in.buffer))]
	var n int
	var reading error
	if err := b.c.call(in, func() { n, reading = b.c.body.Read(buffer) }); err != nil {
		in.buffer = nil
		return 0, err
	}
	return copy(to, buffer[:n]), reading
}

func (b clientBody) Close() error {
	if b.c.stop(errOver) {
		return nil
	}
	var closing error
	if err := b.c.call(&b.c.in, func() { closing = b.c.body.Close() }); err != nil {
		return err
	}
	return closing
}
