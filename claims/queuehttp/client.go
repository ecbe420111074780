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

	// Lease is how long a task is the worker's if its func does not call [Task.Extend], for a queue that has
	// [claims.QueueConfig.Expires]. The server limits it. Default: the queue's Deadline.
	Lease time.Duration

	// Filter says which tasks the worker wants, for example {"tenant": "acme"}, in the words of the server's
	// [Config.Filter]. Optional.
	Filter map[string]string

	Logger *slog.Logger // default slog.Default()
}

// Client works on the tasks of a queue. It stays with a server until that server fails, and then goes on with
// the next.
//
// All methods are safe for concurrent use.
type Client struct {
	cfg      ClientConfig
	current  atomic.Int64                  // the server that is asked next, counted over all rounds
	lostTake atomic.Pointer[clock.Reading] // when a take last was not answered
	retries  logtext.Retries
}

// NewClient returns a client. It does no I/O. A [tenure.ErrInvalid] names everything that is wrong with the
// config.
func NewClient(cfg ClientConfig) (*Client, error) {
	cfg.Servers, cfg.Filter = slices.Clone(cfg.Servers), maps.Clone(cfg.Filter)
	cfg.Holder, cfg.HTTP = cmp.Or(cfg.Holder, tenure.ReplicaID()), cmp.Or(cfg.HTTP, http.DefaultClient)
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, slog.Default()))
	var problems objects.Problems
	problems.If(len(cfg.Servers) == 0, "Servers is empty: name at least one")
	problems.Duration("Lease", cfg.Lease)
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
	beginLimit = 2 * longestWait // of one try, as long as the TTL is not known
	retryPause = time.Second     // at the longest
)

// Serve takes tasks and calls fn for each, up to n tasks at a time, until ctx is done. Then it takes no more,
// waits until every fn has returned, gives their tasks back, and returns nil. Errors of servers do not end it.
//
// If fn returns no error, Serve finishes the task with the result, as JSON. Otherwise it gives the task back, to
// be taken again after [claims.QueueConfig.Backoff], or at once if the context of fn is done for another reason than its lease. A fn that ends by
// [runtime.Goexit] counts as one that has returned an error. The context ends
// when ctx is done, with the cause [tenure.ErrShutdown]; when the claim has ended, with [tenure.ErrLost]; when its lease
// has run out, with [claims.ErrOverdue], which uses the task's attempt; and
// when the session has ended or may have, with [tenure.ErrLost] or [tenure.ErrDeadline]. A new session begins
// when every fn of the last one has returned. While there is no task, the worker has no session. A panic of fn ends the
// process, as in any goroutine.
func (c *Client) Serve(ctx context.Context, n int, fn func(ctx context.Context, t Task) (result any, err error)) error {
	if n < 1 || fn == nil {
		return fmt.Errorf("queuehttp: serve: %w: %d tasks at a time, or fn is nil", tenure.ErrInvalid, n)
	}
	defer report.Flush(c.cfg.Logger)
	for ctx.Err() == nil {
		if !c.wait(ctx) {
			continue
		}
		out, sent, err := c.send(ctx, beginLimit, "begin", request{Holder: c.cfg.Holder})
		if err != nil {
			c.logRefused(ctx, "failed to begin a session; retrying", err)
			pace.Sleep(ctx, retryPause)
			continue
		}
		w := &work{c: c, n: n, fn: fn, session: *out.Session, ttl: time.Duration(out.Session.TTL),
			has: make(map[claims.Claim]*begun), dropped: make(chan struct{}, 1)}
		w.trust(sent)
		c.cfg.Logger.Info("began session", "session", w.session.ID)
		w.run(ctx)
	}
	return nil
}

// wait waits until there may be a task, without a session, and reports whether there may be one.
func (c *Client) wait(ctx context.Context) bool {
	out, _, err := c.send(ctx, beginLimit, "wait", request{Filter: c.cfg.Filter})
	if err != nil {
		c.logRefused(ctx, "failed to wait for tasks; retrying", err)
		pace.Sleep(ctx, retryPause)
	}
	return out.Ready
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
	for failures := 0; ; {
		in.Again = in.Again && failures == 0 // a try before this one may have taken tasks
		body, err := json.Marshal(in)
		if err != nil {
			return out, sent, err
		}
		i := c.current.Load()
		server := c.cfg.Servers[i%int64(len(c.cfg.Servers))]
		sent = clock.From(ctx)()
		out, err = c.try(ctx, limit, server, name, body)
		if err == nil || errors.As(err, new(*refusal)) {
			c.retries.Reset()
			return out, sent, err
		}
		if now := clock.From(ctx)(); name == "take" {
			c.lostTake.Store(&now)
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
