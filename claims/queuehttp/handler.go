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
	"net/http"
	"path"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/internal/seconds"
)

// Config configures a [Handler]. The zero value is ready to use.
type Config struct {
	// TTL is how long the session of a worker stands after its last heartbeat. Default 30s.
	TTL time.Duration

	// Payloads returns what workers are told of rows, by the rows' IDs. The values are encoded as JSON; a row
	// without one has the payload null. Rows whose values can't be encoded are given back, and held back for
	// the queue's Backoff. If Payloads returns an error, that happens to all rows of the call. The attempts
	// of such rows count. Default: workers get the claims alone.
	Payloads func(ctx context.Context, ids []string) (map[string]any, error)

	// Finish ends the claims of results together with what it writes, with FinishPostgres or FinishSQLite
	// of the queue, and returns their error, which names the claims that have ended. There is at least one result, each is of another row of the
	// queue, and a result that the worker has left out is null. An error that is [tenure.ErrInvalid] tells the worker that
	// its result is invalid; the worker then gives the task back. Default: [claims.Queue.Finish], and results other
	// than null are refused.
	Finish func(ctx context.Context, results []Result) error

	// MaxLease is the longest lease that a worker may ask for, if the queue has [claims.QueueConfig.Expires]; the
	// shortest is a second. A worker that does not ask gets the queue's Deadline. Default: that Deadline.
	MaxLease time.Duration

	// Filter returns the condition on the rows that a worker gets, as for [claims.TakeOptions], from the filter of its
	// request. It decides which filters are allowed: what it refuses with [tenure.ErrInvalid] the worker is told. It is
	// called for each take and wait, with nil if a worker sends no filter, so it can also go by what a handler in front of
	// this one has put into ctx. What a worker sends belongs into args. Workers with different conditions are waited for
	// separately, at the cost of a look per PollInterval and per hint each. Default: filters are refused.
	Filter func(ctx context.Context, filter map[string]string) (where string, args []any, err error)

	Logger *slog.Logger // default slog.Default()
}

// Handler serves one queue. It has no access control: wrap it. It looks only at the last element of a request's
// path, so it can be mounted anywhere. If the [http.Server] has a WriteTimeout, it must be longer than five seconds and
// than half of the TTL, which a take may last.
//
// All methods are safe for concurrent use.
type Handler struct {
	store   tenure.Store
	queue   *claims.Queue
	session *claims.Session
	cfg     Config
	retries logtext.Retries
}

// NewHandler returns a handler for a queue, which must be in the store. The queue's config needs NotBefore, for
// tasks that are given back for a while. With Expires, a task is its worker's until its lease runs out; without, as long
// as the worker's session stands, even if the task hangs. NewHandler does no I/O. A [tenure.ErrInvalid] names what is wrong
// with the config.
func NewHandler(store tenure.Store, queue *claims.Queue, cfg Config) (*Handler, error) {
	h, err := newHandler(store, queue, cfg)
	if err != nil {
		return nil, fmt.Errorf("queuehttp: new handler: %w", err)
	}
	return h, nil
}

func newHandler(store tenure.Store, queue *claims.Queue, cfg Config) (*Handler, error) {
	cfg.TTL = cmp.Or(cfg.TTL, tenure.DefaultTTL)
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, slog.Default()))
	var problems objects.Problems
	problems.If(queue == nil, "queue is nil")
	problems.If(queue != nil && queue.Config().NotBefore == "", "the queue has no column for tasks that are given back for a while: set NotBefore")
	problems.Duration("MaxLease", cfg.MaxLease)
	problems.If(queue != nil && queue.Config().Expires == "" && cfg.MaxLease > 0, "MaxLease needs a column that keeps the time until which a task is its worker's: set Expires and Deadline of the queue")
	if queue != nil && queue.Config().Expires != "" {
		usual := queue.Config().Deadline
		cfg.MaxLease = cmp.Or(cfg.MaxLease, usual)
		problems.If(usual < shortestLease, "the queue's Deadline %v is less than %v, the shortest lease", usual, shortestLease)
		problems.If(cfg.MaxLease < usual, "MaxLease %v is less than the queue's Deadline %v, which a worker gets that does not ask", cfg.MaxLease, usual)
	}
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: cfg.TTL, Logger: cfg.Logger})
	problems.Add(err)
	if problems.Err() == nil {
		_, err = claims.NewWorker(session, queue) // so that session frees the rows of workers that are gone
		problems.Add(err)
	}
	return &Handler{store: store, queue: queue, session: session, cfg: cfg}, problems.Err()
}

const (
	maxBytes      = 4 << 20         // of a request's body; http.MaxBytesHandler in front of the handler sets a lower limit
	longestWait   = 5 * time.Second // for tasks
	shortestLease = time.Second
)

// Run frees the rows of workers that are gone, until ctx is done. At least one server of a queue must run it,
// unless some process runs a session with a [claims.Worker] of the queue. It behaves as [claims.Session.Run]
// does, and may be called once.
func (h *Handler) Run(ctx context.Context) error { return h.session.Run(ctx) }

// ServeHTTP answers one request of the protocol.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	status, out := h.answer(w, r)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(out) // fails only if the worker is gone
}

func (h *Handler) answer(w http.ResponseWriter, r *http.Request) (status int, out answer) {
	name := path.Base(r.URL.Path)
	do, ok := map[string]func(context.Context, request) (answer, error){
		"wait": h.wait, "begin": h.begin, "heartbeat": h.heartbeat, "take": h.take, "goodbye": h.goodbye,
		"extend": h.extend, "finish": h.finish, "nack": h.nack, "abandon": h.abandon,
	}[name]
	switch {
	case !ok:
		return http.StatusNotFound, answer{Error: fmt.Sprintf("there is no request %q: see the documentation of package queuehttp", name)}
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		return http.StatusMethodNotAllowed, answer{Error: "use POST"}
	}
	in, err := readRequest(http.MaxBytesReader(w, r.Body, maxBytes))
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		return http.StatusRequestEntityTooLarge, answer{Error: fmt.Sprintf("the request has more than %d bytes: send fewer tasks at once, or smaller results", tooLarge.Limit)}
	} else if err != nil {
		return http.StatusBadRequest, answer{Error: fmt.Sprintf("the body must be a JSON object, as the documentation of package queuehttp shows: %v", err)}
	}
	if err = h.check(name, in); err == nil {
		out, err = do(r.Context(), in)
	}
	var ended *claims.EndedError
	switch {
	case err == nil:
		return http.StatusOK, out
	case errors.As(err, &ended):
		return http.StatusConflict, answer{Error: err.Error(), Ended: ended.Claims}
	case errors.Is(err, tenure.ErrLost): // the session
		return http.StatusConflict, answer{Error: err.Error()}
	case errors.Is(err, tenure.ErrInvalid):
		return http.StatusBadRequest, answer{Error: err.Error()}
	case r.Context().Err() == nil: // otherwise the worker has gone
		h.retries.Log(h.cfg.Logger, slog.LevelWarn, "failed to answer a worker", err, "request", name)
	}
	return http.StatusServiceUnavailable, answer{Error: "the server can't do this now, and its log says why: repeat the request"}
}

// known has all fields that a request may have. Of what a server made, a newer one may have made more.
type known struct {
	Holder, Session, N, Have, Again, Filter, Claims, Each json.RawMessage

	Results []struct{ Claim, Result json.RawMessage }
	After   json.RawMessage `json:"after_seconds"`
	Lease   json.RawMessage `json:"lease_seconds"`
}

// readRequest reads a body, which is one object. A field that is not known is an error, because its sender relies on it.
func readRequest(body io.Reader) (in request, err error) {
	var object json.RawMessage
	from := json.NewDecoder(body)
	if err = from.Decode(&object); err != nil {
		return in, err
	}
	strict := json.NewDecoder(bytes.NewReader(object))
	strict.DisallowUnknownFields()
	if err = cmp.Or(strict.Decode(new(known)), json.Unmarshal(object, &in)); err != nil {
		return in, err
	}
	switch _, err = from.Token(); err {
	case io.EOF:
		return in, nil
	case nil:
		err = errors.New("something follows the object")
	}
	return in, err
}

// check returns a [tenure.ErrInvalid] that says what the protocol does not allow in a request. Whatever the queue and
// the funcs of the config get has passed it. It fills in what a worker may leave out of claims and results.
func (h *Handler) check(name string, in request) error {
	invalid := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{tenure.ErrInvalid}, args...)...)
	}
	if in.Filter != nil && h.cfg.Filter == nil {
		return invalid("this queue has no filters: send none, or set Config.Filter at the server")
	}
	if expires := h.queue.Config().Expires != ""; !expires && (in.Lease != nil || name == "extend") {
		return invalid("the tasks of this queue have no leases: leave lease_seconds out, or set Expires of the queue at the server")
	} else if d := h.lasts(in); expires && (d < shortestLease || d > h.cfg.MaxLease) && in.Lease != nil {
		return invalid("lease_seconds is %v: this server allows %v to %v", d, shortestLease, h.cfg.MaxLease)
	}
	var given []*claims.Claim
	ends := false
	switch s := in.Session; name {
	case "begin":
		if in.Holder == "" {
			return invalid("holder is empty: name the worker")
		}
	case "heartbeat", "take", "goodbye":
		if s == nil || s.ID == "" || s.Term == "" || s.Token <= 0 {
			return invalid("session is missing or incomplete: send what begin has returned")
		}
		if err := objects.ValidText("session", s.ID); err != nil {
			return err
		}
		if name == "take" && in.N < 1 {
			return invalid("%d rows are asked for", in.N)
		}
		given = pointers(in.Have, func(c *claims.Claim) *claims.Claim { return c })
	case "finish":
		for i := range in.Results {
			r := &in.Results[i]
			if r.Result == nil {
				r.Result = json.RawMessage("null")
			}
			if h.cfg.Finish == nil && string(r.Result) != "null" {
				return invalid("this queue takes no results: send none, or set Config.Finish at the server")
			}
		}
		given, ends = pointers(in.Results, func(r *Result) *claims.Claim { return &r.Claim }), true
	case "extend", "nack", "abandon":
		if in.After != nil && *in.After < 0 {
			return invalid("after_seconds is negative")
		}
		given, ends = pointers(in.Claims, func(c *claims.Claim) *claims.Claim { return c }), true
	}
	if ends && len(given) == 0 {
		return invalid("no claims are given")
	}
	table, seen := h.queue.Config().Table, make(map[tenure.Key]bool, len(given))
	for _, c := range given {
		if _, err := c.Fence(); err != nil { // it is no claim at all
			return err
		}
		if c.Key.Type != table || c.Attempt < 0 {
			return invalid("%s with attempt %d is not a claim of this queue", c, c.Attempt)
		}
		if ends && seen[c.Key] { // a worker may have an earlier claim on a row, whose func has not returned
			return invalid("the claim of %s is given twice", c)
		}
		seen[c.Key], c.Row = true, true
	}
	return nil
}

// pointers returns a pointer into each element.
func pointers[T, P any](all []T, to func(*T) *P) (pointers []*P) {
	for i := range all {
		pointers = append(pointers, to(&all[i]))
	}
	return pointers
}

// lease returns the lease that is a worker's session.
func (h *Handler) lease(id, holder string) (*tenure.Lease, error) {
	return tenure.NewLease(h.store, tenure.LeaseConfig{Key: claims.SessionKey(id), Holder: holder, TTL: h.cfg.TTL, Logger: h.cfg.Logger})
}

// lasts returns how long the lease of a task lasts that a request takes or extends, if the queue has leases.
func (h *Handler) lasts(in request) time.Duration {
	if in.Lease != nil {
		return time.Duration(*in.Lease)
	}
	return h.queue.Config().Deadline
}

// wanted returns which rows a worker wants.
func (h *Handler) wanted(ctx context.Context, in request) (where string, args []any, err error) {
	if h.cfg.Filter == nil {
		return "", nil, nil
	}
	if where, args, err = h.cfg.Filter(ctx, in.Filter); err != nil && !errors.Is(err, tenure.ErrInvalid) {
		err = fmt.Errorf("Filter: %v", err) // whatever it wraps, the session has not ended
	}
	return where, args, err
}

// waiting returns the context of a request that waits for tasks.
func (h *Handler) waiting(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, min(longestWait, h.cfg.TTL/6))
}

// wait waits for a task without a session, so that a worker that has nothing to do needs none.
func (h *Handler) wait(ctx context.Context, in request) (answer, error) {
	where, args, err := h.wanted(ctx, in)
	if err != nil {
		return answer{}, err
	}
	waiting, cancel := h.waiting(ctx)
	defer cancel()
	if err = h.queue.AwaitReady(waiting, where, args...); err != nil && waiting.Err() != nil {
		return answer{}, ctx.Err() // there is none yet
	}
	return answer{Ready: err == nil}, err
}

func (h *Handler) begin(ctx context.Context, in request) (answer, error) {
	id := uuid.NewString() // never one that was used before
	lease, err := h.lease(id, in.Holder)
	if err != nil {
		return answer{}, err
	}
	term, err := lease.TryAcquire(ctx)
	if err != nil {
		return answer{}, err
	}
	return answer{Session: &session{ID: id, Term: term.ID(), Token: term.Token(), TTL: seconds.Duration(h.cfg.TTL)}}, nil
}

// resume renews a worker's session, whichever server began it. Only the worker relies on the session, and this
// server never does.
func (h *Handler) resume(ctx context.Context, s *session) (*tenure.Lease, *tenure.Term, error) {
	lease, err := h.lease(s.ID, "")
	if err != nil {
		return nil, nil, err
	}
	term, err := lease.Resume(ctx, s.Term, s.Token)
	return lease, term, err
}

func (h *Handler) heartbeat(ctx context.Context, in request) (answer, error) {
	if _, _, err := h.resume(ctx, in.Session); err != nil || len(in.Have) == 0 {
		return answer{}, err
	}
	looking, cancel := context.WithTimeout(ctx, h.cfg.TTL/12) // a table that is locked must not cost the worker its session
	defer cancel()
	owned, err := h.queue.OwnedBy(looking, in.Session.ID)
	if err != nil {
		h.retries.Log(h.cfg.Logger, slog.LevelWarn, "failed to look at a worker's claims; retrying at its next heartbeat", err)
		return answer{}, nil
	}
	return answer{Ended: slices.DeleteFunc(in.Have, func(c claims.Claim) bool {
		return slices.ContainsFunc(owned, func(o claims.Claim) bool { return o.Key == c.Key && o.Token == c.Token })
	})}, nil
}

func (h *Handler) take(ctx context.Context, in request) (answer, error) {
	o := claims.TakeOptions{N: in.N}
	if !in.Again {
		o.Have = append([]claims.Claim{}, in.Have...)
	}
	var out answer
	var err error
	if o.Where, o.Args, err = h.wanted(ctx, in); err != nil {
		return out, err
	}
	arrived, got := time.Now(), []claims.Claim(nil)
	take := func() {
		if h.queue.Config().Expires != "" {
			o.Lasts = h.lasts(in)
			lease := seconds.Duration(o.Lasts + time.Since(arrived)) // the worker counts from before the request arrived
			out.Lease = &lease
		}
		taking, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.cfg.TTL/6) // a statement that is cut off may still take rows
		defer cancel()
		got, err = h.queue.TryTakeFor(taking, in.Session.ID, o)
	}
	if !in.Again {
		take()
	}
	if err == nil && len(got) == 0 {
		waiting, cancel := h.waiting(ctx)
		defer cancel()
		// Rows that an earlier statement, whose answer was lost, takes only now are returned by the next take.
		o.Have = nil
		switch err = h.queue.AwaitReady(waiting, o.Where, o.Args...); {
		case err == nil:
			take()
		case waiting.Err() != nil: // there is none yet
			err = nil
		}
	}
	if err != nil || len(got) == 0 {
		return answer{}, err
	}
	var payloads map[string]any
	if h.cfg.Payloads != nil {
		ids := make([]string, len(got))
		for i, c := range got {
			ids[i] = c.Key.ID
		}
		if payloads, err = h.cfg.Payloads(ctx, ids); err != nil {
			if ctx.Err() == nil { // otherwise the next take returns these tasks
				_ = h.putOff(ctx, got)
			}
			return answer{}, fmt.Errorf("Payloads: %v", err) // whatever it wraps, the request is not at fault
		}
	}
	var bad []claims.Claim
	for _, c := range got {
		payload, err := json.Marshal(payloads[c.Key.ID])
		if err != nil {
			h.cfg.Logger.Error("the payload of a task does not become JSON; giving the task back", "task", c.String(), "attempt", c.Attempt, "error", err)
			bad = append(bad, c)
			continue
		}
		out.Tasks = append(out.Tasks, Task{Claim: c, Payload: payload})
	}
	return out, h.putOff(ctx, bad)
}

// putOff gives back tasks that no worker can be told of, so that others come before them. If that fails, the take has to
// fail as well: then the next one returns them.
func (h *Handler) putOff(ctx context.Context, cs []claims.Claim) error {
	if len(cs) == 0 {
		return nil
	}
	err := h.queue.ReleaseAfter(ctx, h.backoff(cs), cs...)
	if errors.Is(err, tenure.ErrLost) {
		return nil
	}
	if err != nil {
		err = fmt.Errorf("give tasks back: %v", err) // of which the worker knows nothing
	}
	return err
}

// backoff returns the longest of the claims' backoffs.
func (h *Handler) backoff(cs []claims.Claim) (d time.Duration) {
	for _, c := range cs {
		d = max(d, h.queue.Config().Backoff(c))
	}
	return d
}

// extend extends the leases of tasks, and not the worker's session.
func (h *Handler) extend(ctx context.Context, in request) (answer, error) {
	return answer{}, h.queue.Extend(ctx, h.lasts(in), in.Claims...)
}

func (h *Handler) finish(ctx context.Context, in request) (out answer, err error) {
	if !in.Each {
		return out, h.finishAll(ctx, in.Results)
	}
	err = h.finishEach(ctx, in.Results, &out)
	return out, err
}

// finishEach finishes the results that it can, and notes the others. If the config refuses some, it finishes each half by
// itself.
func (h *Handler) finishEach(ctx context.Context, results []Result, out *answer) error {
	for len(results) > 0 {
		err := h.finishAll(ctx, results)
		var ended *claims.EndedError
		switch {
		case errors.As(err, &ended):
			out.Ended = append(out.Ended, ended.Claims...)
			results = slices.DeleteFunc(slices.Clone(results), func(r Result) bool { return isOf(err, []Result{r}) })
			continue
		case !errors.Is(err, tenure.ErrInvalid):
			return err
		case len(results) == 1:
			out.Refused = append(out.Refused, refused{results[0].Claim, err.Error()})
			return nil
		}
		half := len(results) / 2
		if err := h.finishEach(ctx, results[:half:half], out); err != nil {
			return err
		}
		results = results[half:]
	}
	return nil
}

// finishAll finishes all results, or none.
func (h *Handler) finishAll(ctx context.Context, results []Result) error {
	if h.cfg.Finish != nil {
		err := h.cfg.Finish(ctx, results)
		if errors.Is(err, tenure.ErrLost) && !isOf(err, results) {
			err = fmt.Errorf("Finish: %v", err) // of another lease: the worker must repeat the request
		}
		return err
	}
	var done []claims.Claim
	for _, r := range results {
		done = append(done, r.Claim)
	}
	return h.queue.Finish(ctx, done...)
}

// isOf reports whether an error says that the claims of some results have ended.
func isOf(err error, results []Result) bool {
	var ended *claims.EndedError
	return errors.As(err, &ended) && slices.ContainsFunc(results, func(r Result) bool {
		return slices.ContainsFunc(ended.Claims, func(c claims.Claim) bool { return c.Key == r.Claim.Key && c.Token == r.Claim.Token })
	})
}

func (h *Handler) nack(ctx context.Context, in request) (answer, error) {
	if in.After == nil {
		return answer{}, h.queue.ReleaseAfter(ctx, h.backoff(in.Claims), in.Claims...)
	}
	return answer{}, h.queue.ReleaseAfter(ctx, time.Duration(*in.After), in.Claims...)
}

func (h *Handler) abandon(ctx context.Context, in request) (answer, error) {
	return answer{}, h.queue.Release(ctx, in.Claims...)
}

// goodbye ends a worker's session once the worker has stopped all its work.
func (h *Handler) goodbye(ctx context.Context, in request) (answer, error) {
	lease, term, err := h.resume(ctx, in.Session) // fails if it is not the worker's
	if err != nil {
		return answer{}, err
	}
	left, err := h.queue.OwnedBy(ctx, in.Session.ID)
	if err == nil && len(left) > 0 {
		err = h.queue.Release(ctx, left...)
	}
	if err != nil { // rows that are not released become free with the session
		h.retries.Log(h.cfg.Logger, slog.LevelWarn, "failed to release the rows of a worker that stops", err)
	}
	return answer{}, lease.Release(ctx, term)
}
