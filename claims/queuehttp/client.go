package queuehttp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

// ClientConfig configures a [Client]. Servers is required.
type ClientConfig struct {
	Servers []string     // URLs of handlers of one queue, without the names of requests
	Holder  string       // the worker's name, for people to read; default tenure.ReplicaID()
	HTTP    *http.Client // for example one that authenticates the worker; default http.DefaultClient
	Logger  *slog.Logger // default slog.Default()
}

// Client works on the tasks of a queue. It stays with a server until that server fails, and then goes on with
// the next.
//
// All methods are safe for concurrent use.
type Client struct {
	cfg     ClientConfig
	current atomic.Int64 // the server that is asked next, counted over all rounds
	retries logtext.Retries
}

// NewClient returns a client. It does no I/O. A [tenure.ErrInvalid] names everything that is wrong with the
// config.
func NewClient(cfg ClientConfig) (*Client, error) {
	cfg.Servers, cfg.Holder, cfg.HTTP = slices.Clone(cfg.Servers), cmp.Or(cfg.Holder, tenure.ReplicaID()), cmp.Or(cfg.HTTP, http.DefaultClient)
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, slog.Default()))
	var problems objects.Problems
	problems.If(len(cfg.Servers) == 0, "Servers is empty: name at least one")
	for _, server := range cfg.Servers {
		u, err := url.Parse(server)
		problems.If(err != nil || u.Host == "", "the server %q is not a URL such as http://127.0.0.1:8080/tasks", server)
	}
	if err := problems.Err(); err != nil {
		return nil, fmt.Errorf("queuehttp: new client: %w", err)
	}
	c := &Client{cfg: cfg}
	c.current.Store(rand.Int64N(int64(len(cfg.Servers))))
	return c, nil
}

const (
	beginLimit = 10 * time.Second // of one try, as long as the TTL is not known
	retryPause = time.Second      // at the longest
)

// Serve takes tasks and calls fn for each, up to n tasks at a time, until ctx is done. Then it takes no more,
// waits until every fn has returned, gives their tasks back, and returns nil. Errors of servers do not end it.
//
// If fn returns no error, Serve finishes the task with the result, as JSON. Otherwise it gives the task back, to
// be taken again after [claims.QueueConfig.Backoff], or at once if the context of fn is done. A fn that ends by
// [runtime.Goexit] counts as one that has returned an error. The context ends
// when ctx is done, with the cause [tenure.ErrShutdown]; when the claim has ended, with [tenure.ErrLost]; and
// when the session has ended or may have, with [tenure.ErrLost] or [tenure.ErrDeadline]. A new session begins
// when every fn of the last one has returned. A panic of fn ends the process, as in any goroutine.
func (c *Client) Serve(ctx context.Context, n int, fn func(ctx context.Context, t Task) (result any, err error)) error {
	if n < 1 || fn == nil {
		return fmt.Errorf("queuehttp: serve: %w: %d tasks at a time, or fn is nil", tenure.ErrInvalid, n)
	}
	defer report.Flush(c.cfg.Logger)
	for ctx.Err() == nil {
		out, sent, err := c.send(ctx, beginLimit, "begin", request{Holder: c.cfg.Holder})
		if err != nil {
			c.logRefused(ctx, "failed to begin a session; retrying", err)
			pace.Sleep(ctx, retryPause)
			continue
		}
		w := &work{c: c, n: n, fn: fn, session: *out.Session, ttl: time.Duration(out.Session.TTL),
			has: make(map[claims.Claim]context.CancelCauseFunc), dropped: make(chan struct{}, 1)}
		w.trust(sent)
		c.cfg.Logger.Info("began session", "session", w.session.ID)
		w.run(ctx)
	}
	return nil
}

// work is what a client does under one session.
type work struct {
	c       *Client
	n       int
	fn      func(context.Context, Task) (any, error)
	session session
	ttl     time.Duration

	running sync.WaitGroup
	dropped chan struct{} // receives when a claim was dropped

	mu       sync.Mutex                               // guards the fields below
	has      map[claims.Claim]context.CancelCauseFunc // ends the context of the claim's fn
	deadline clock.Reading                            // of the trust in the session
}

// trust trusts the session for a TTL, less a margin for clocks of different rates, from when a request that was
// answered was sent.
func (w *work) trust(sent clock.Reading) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadline = sent.Add(w.ttl - w.ttl/30)
}

// left returns for how long the session may still be trusted.
func (w *work) left(ctx context.Context) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.deadline.Until(clock.From(ctx)())
}

// run works until ctx is done or the session is lost, and returns once all funcs have.
func (w *work) run(ctx context.Context) {
	live, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	var beside sync.WaitGroup
	defer beside.Wait()
	defer lose(nil)
	beside.Go(func() { w.watch(live, lose) })
	beside.Go(func() { w.renew(live, lose) })
	working, stop := context.WithCancelCause(live)
	defer context.AfterFunc(ctx, func() { stop(tenure.ErrShutdown) })()
	for working.Err() == nil {
		w.take(working, lose)
	}
	w.running.Wait()
	if live.Err() != nil {
		w.c.cfg.Logger.Warn("lost session", "session", w.session.ID, "error", context.Cause(live))
		return
	}
	if _, err := w.send(ctx, "goodbye", request{Session: &w.session}); err != nil && !errors.Is(err, tenure.ErrLost) {
		w.c.cfg.Logger.Warn("failed to end a session; it will expire", "session", w.session.ID, "error", err)
	}
}

// watch ends the trust in the session in time. It looks more often than a timer would fire, because a machine
// that is suspended stops its timers.
func (w *work) watch(ctx context.Context, lose context.CancelCauseFunc) {
	for {
		left := w.left(ctx)
		if left <= 0 {
			lose(tenure.ErrDeadline)
			return
		}
		if !pace.Sleep(ctx, min(left, w.ttl/12)) {
			return
		}
	}
}

// renew sends heartbeats, and ends the contexts of claims that have ended.
func (w *work) renew(ctx context.Context, lose context.CancelCauseFunc) {
	for pace.Sleep(ctx, w.ttl/3) {
		out, sent, err := w.c.send(ctx, w.ttl/6, "heartbeat", request{Session: &w.session, Have: w.have()})
		switch {
		case errors.Is(err, tenure.ErrLost):
			lose(tenure.ErrLost)
			return
		case err != nil:
			w.c.logRefused(ctx, "failed to renew a session; retrying", err)
			continue
		}
		w.trust(sent)
		w.mu.Lock()
		for _, c := range out.Ended {
			if end := w.has[c]; end != nil { // it may have been finished meanwhile
				end(tenure.ErrLost)
			}
		}
		w.mu.Unlock()
	}
}

// take takes as many tasks as fit, and begins work on them. It waits for a func to return if none fits.
func (w *work) take(ctx context.Context, lose context.CancelCauseFunc) {
	have := w.have()
	if len(have) >= w.n {
		select {
		case <-w.dropped:
		case <-ctx.Done():
		}
		return
	}
	out, _, err := w.c.send(ctx, w.ttl/3, "take", request{Session: &w.session, N: w.n - len(have), Have: have})
	switch {
	case errors.Is(err, tenure.ErrLost):
		lose(tenure.ErrLost)
	case err != nil:
		w.c.logRefused(ctx, "failed to take tasks; retrying", err)
		pace.Sleep(ctx, retryPause)
	}
	for _, t := range out.Tasks {
		if w.left(ctx) <= 0 { // the answer came late, and others may have the task by now
			lose(tenure.ErrDeadline)
		}
		if ctx.Err() != nil {
			return
		}
		one, end := context.WithCancelCause(ctx)
		w.mu.Lock()
		w.has[t.Claim] = end
		w.mu.Unlock()
		w.running.Go(func() {
			defer w.drop(t.Claim)
			var result any
			err := report.ErrGoexit
			defer func() { // also if fn ends by runtime.Goexit: the next take would bring the task again at once
				if p := recover(); p != nil {
					panic(p)
				}
				w.finishOrGiveBack(one, t, result, logtext.Sound(err))
			}()
			result, err = w.fn(one, t)
		})
	}
}

func (w *work) have() []claims.Claim {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Keys(w.has))
}

func (w *work) drop(c claims.Claim) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.has[c](nil)
	delete(w.has, c)
	select {
	case w.dropped <- struct{}{}:
	default:
	}
}

// finishOrGiveBack finishes a task, or gives it back. The database decides whether that comes too late.
func (w *work) finishOrGiveBack(ctx context.Context, t Task, result any, err error) {
	logger := w.c.cfg.Logger.With("task", t.Claim.String(), "attempt", t.Claim.Attempt)
	if err != nil && ctx.Err() != nil {
		w.giveBack(ctx, logger, "abandon", t.Claim)
		return
	}
	if err == nil {
		var text []byte
		if text, err = json.Marshal(result); err == nil {
			_, err = w.send(ctx, "finish", request{Results: []Result{{t.Claim, text}}})
			if errors.Is(err, tenure.ErrLost) { // or an earlier try has finished the task, and its answer was lost
				logger.Warn("the result of a task was refused", "error", err)
				return
			}
		}
	}
	if err == nil {
		return
	}
	logger.Warn("failed to finish a task; giving it back", "error", err)
	w.giveBack(ctx, logger, "nack", t.Claim)
}

// giveBack gives a task back. It sends the request until it is answered: if the claim were dropped before that, the
// next take would bring it again, and a request that arrives late would free the row beside its new func. Once ctx,
// which is the func's, is done, no take brings the claim, so giveBack goes on for up to a TTL.
func (w *work) giveBack(ctx context.Context, logger *slog.Logger, name string, c claims.Claim) {
	sending, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { pace.Sleep(sending, w.ttl); cancel() })()
	if _, _, err := w.c.send(sending, w.ttl/6, name, request{Claims: []claims.Claim{c}}); err != nil && !errors.Is(err, tenure.ErrLost) {
		logger.Warn("failed to give a task back", "error", err)
	}
}

// send sends a request that ends something, for up to a TTL, even if ctx is done.
func (w *work) send(ctx context.Context, name string, in request) (answer, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), w.ttl)
	defer cancel()
	out, _, err := w.c.send(ctx, w.ttl/6, name, in)
	return out, err
}

// refusal is a server's answer that would be the same if the request were repeated.
type refusal struct {
	status int
	text   string
}

func (r *refusal) Error() string {
	return fmt.Sprintf("%d %s: %s", r.status, http.StatusText(r.status), r.text)
}

// Is makes a refusal match [tenure.ErrLost] if a session or claim has ended, and [tenure.ErrInvalid] otherwise.
func (r *refusal) Is(target error) bool {
	if r.status == http.StatusConflict {
		return target == tenure.ErrLost
	}
	return target == tenure.ErrInvalid
}

// send sends a request to one server after another until one answers it, or ctx is done. Each try has a limit.
// It also returns when the answered try was sent.
func (c *Client) send(ctx context.Context, limit time.Duration, name string, in request) (out answer, sent clock.Reading, err error) {
	body, err := json.Marshal(in)
	if err != nil {
		return out, sent, err
	}
	for failures := 0; ; {
		i := c.current.Load()
		server := c.cfg.Servers[i%int64(len(c.cfg.Servers))]
		sent = clock.From(ctx)()
		out, err = c.try(ctx, limit, server, name, body)
		if err == nil || errors.As(err, new(*refusal)) {
			c.retries.Reset()
			return out, sent, err
		}
		if ctx.Err() != nil {
			return out, sent, fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		c.current.CompareAndSwap(i, i+1)
		c.retries.Log(c.cfg.Logger, slog.LevelWarn, "failed to reach a server; trying the next one", err, "server", server)
		if failures++; failures%len(c.cfg.Servers) == 0 {
			pace.Sleep(ctx, pace.Retry(limit, retryPause, failures/len(c.cfg.Servers)))
		}
	}
}

func (c *Client) try(ctx context.Context, limit time.Duration, server, name string, body []byte) (out answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	to, err := url.JoinPath(server, name)
	if err != nil {
		return out, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return out, err
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := c.cfg.HTTP.Do(r)
	if err != nil {
		return out, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return out, err
	}
	err = json.Unmarshal(text, &out) // a proxy's answer may be something else
	switch response.StatusCode {
	case http.StatusOK:
		if err == nil && name == "begin" && (out.Session == nil || out.Session.TTL <= 0) {
			err = errors.New("the server's answer has no session")
		}
		return out, err
	case http.StatusConflict, http.StatusBadRequest, http.StatusRequestEntityTooLarge:
		return answer{}, &refusal{response.StatusCode, out.Error}
	}
	return answer{}, fmt.Errorf("%s: %s", response.Status, out.Error)
}

// logRefused logs that a server has refused a request, unless ctx is done.
func (c *Client) logRefused(ctx context.Context, msg string, err error) {
	if ctx.Err() == nil {
		c.retries.Log(c.cfg.Logger, slog.LevelWarn, msg, err)
	}
}
