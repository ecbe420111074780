package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/internal/witnessed"
)

// ErrClosed reports that the context of [Session.Run] is done, so the session claims nothing more.
var ErrClosed = errors.New("session is closed")

const (
	// longestRetryPause is the longest pause before a retry.
	longestRetryPause = 5 * time.Second

	// coalesce is the time between two hints while thousands of keys are freed, so that waiting callers do not
	// look constantly.
	coalesce = 100 * time.Millisecond
)

// SessionConfig configures a [Session]. The zero value is ready to use. Fields that [tenure.LeaseConfig] or
// [tenure.CoordinatorConfig] also has mean the same here.
type SessionConfig struct {
	TTL           time.Duration     // default 30s, and at most a day
	Margin        time.Duration     // default TTL/30
	RenewInterval time.Duration     // default TTL/3
	RenewDeadline time.Duration     // default 2/3 of the TTL
	Holder        string            // the process's name, for people to read; default tenure.ReplicaID()
	Labels        map[string]string // returned by [Keys.Owner], for example the address for requests
	Expiry        tenure.ExpiryPolicy
	Logger        *slog.Logger // default slog.Default()

	// ReleaseRequested, if set, handles the request of another process for a claim for which no func of [Keys.Do]
	// runs, see [Keys.RequestRelease] and [Keys.Attach]. It is called once per claim, from one goroutine. It may have
	// another goroutine release the claim, and must return promptly: a release waits for a session that attaches.
	ReleaseRequested func(Claim)

	// PollInterval is the longest time between two attempts of [Keys.Claim] while it can't expect a hint when a
	// key is freed. Default TTL/6, and at most 10s.
	PollInterval time.Duration

	// Drain, if set, makes the session release what it holds while the replica is drained, and claim nothing.
	// Funcs are told to return, with the cause [tenure.ErrResigned]. Other claims are passed
	// to ReleaseRequested, or released if that is not set. Detached claims stay.
	Drain *tenure.Drain
}

// SessionKey returns the key of a session's lease, by the session's ID. A server needs it to renew the sessions
// of workers that cannot reach the database: see [tenure.Lease.Resume].
func SessionKey(id string) tenure.Key { return tenure.Key{Type: objects.SessionType, ID: id} }

// Session stands for one live process and owns what the process has claimed. If the session is lost,
// because the store could not be reached for too long, Run begins another one with a new ID.
//
// All methods are safe for concurrent use.
type Session struct {
	store  tenure.Store
	claims objects.ClaimsTable
	table  *ownerTable // the same as claims
	cfg    SessionConfig
	limit  time.Duration // of a statement

	settling *settling
	renewals *objects.Renewals

	started  atomic.Bool // Run was called
	returned atomic.Bool // and has returned
	missed   atomic.Bool // a warning says that it was not called
	sweeper  sweeper
	retries  logtext.Retries
	joining  sync.Mutex       // held while a worker is added, so that two queues on a table share one kind
	wishes   map[string]*Keys // by the kind of what is wished for; guarded by joining

	mu      sync.Mutex // guards the fields below, and those of the kinds; never held across I/O
	term    *term      // nil while there is none
	closed  bool
	drained bool
	changed chan struct{} // closed and replaced when one of these fields changes
	kinds   map[string]*kind
	history history
}

// term is one session as the store knows it: its ID and its record.
type term struct {
	*tenure.Term
	id          string
	lease       *tenure.Lease
	coordinator *tenure.Coordinator

	stop  context.CancelFunc // releases the lease; called when everything has stopped
	ctx   context.Context    // done when the session is lost; set when the term begins to claim
	over  error              // why nothing more may be claimed or begun, or nil; guarded by the session's mu
	ended chan struct{}      // closed when over is set
	busy  sync.WaitGroup     // calls of Do, and goroutines that free rows

	requested chan struct{} // receives when there are requests to read, or asks
	asks      []Claim       // claims with which to call ReleaseRequested; guarded by the session's mu

	right      *objects.Fence // of its record
	comparison *comparison    // the last one; guarded by the session's mu
	comparing  sync.WaitGroup
}

// NewSession returns a session in a [*tenure.PostgresStore] or [*tenure.SQLiteStore] for which [Migrate]
// has made the tables. It does no I/O. A [tenure.ErrInvalid] names everything that is wrong with the
// config. For any other store, the error is [errors.ErrUnsupported].
func NewSession(store tenure.Store, cfg SessionConfig) (*Session, error) {
	backend, err := backendOf(store)
	if err != nil {
		return nil, opError("new session", err)
	}
	table := backend.Claims()
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, slog.Default()))
	s := &Session{
		retries: logtext.Retries{Repeat: true},
		store:   store, claims: table, cfg: cfg, renewals: backend.Renewals(),
		changed: make(chan struct{}),
		kinds:   make(map[string]*kind),
	}
	t, err := s.newTerm()
	if err == nil {
		err = objects.ValidDuration("PollInterval", cfg.PollInterval, "time.Second")
	}
	if err == nil && cfg.TTL > longestTTL {
		err = fmt.Errorf("%w: TTL %v is more than %v, which is the longest that a session may have", tenure.ErrInvalid, cfg.TTL, longestTTL)
	}
	if err != nil {
		return nil, opError("new session", err)
	}
	lease, intervals := t.lease.Config(), t.coordinator.Config()
	s.cfg = SessionConfig{
		TTL: lease.TTL, Margin: lease.Margin, RenewInterval: intervals.RenewInterval, RenewDeadline: intervals.RenewDeadline,
		Holder: lease.Holder, Labels: lease.Labels, Expiry: lease.Expiry, Logger: lease.Logger,
		ReleaseRequested: cfg.ReleaseRequested, PollInterval: cmp.Or(cfg.PollInterval, min(lease.TTL/6, 10*time.Second)), Drain: cfg.Drain,
	}
	s.limit = min((s.cfg.RenewDeadline-s.cfg.RenewInterval)/2, 10*time.Second) // as a coordinator's calls have
	s.table = &ownerTable{table, new(groups), s.limit, true, ""}
	s.settling = &settling{store: store, ttl: s.cfg.TTL, limit: s.limit, expiry: s.cfg.Expiry, logger: s.cfg.Logger}
	s.sweeper.init(s)
	return s, nil
}

// newTerm returns a term with a new ID, which has not been acquired.
func (s *Session) newTerm() (t *term, err error) {
	t = &term{id: uuid.NewString(), ended: make(chan struct{}), requested: make(chan struct{}, 1)}
	t.lease, err = tenure.NewLease(s.store, tenure.LeaseConfig{
		Key:    SessionKey(t.id),
		Holder: s.cfg.Holder, TTL: s.cfg.TTL, Margin: s.cfg.Margin, Labels: s.cfg.Labels,
		Expiry: s.cfg.Expiry, Logger: s.cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	t.coordinator, err = tenure.NewCoordinator(t.lease, tenure.CoordinatorConfig{
		RenewInterval: s.cfg.RenewInterval, RenewDeadline: s.cfg.RenewDeadline,
		Reconcile: func(ctx context.Context) error { return s.runTerm(ctx, t) },
	})
	return t, err
}

// Config returns the session's config, with its defaults.
func (s *Session) Config() SessionConfig {
	cfg := s.cfg
	cfg.Labels, cfg.Logger = maps.Clone(cfg.Labels), report.Original(cfg.Logger)
	return cfg
}

// Run begins the session and renews it until ctx is done. If the session is lost, Run begins another.
// When ctx is done, Run closes the session: it claims nothing more, tells the funcs of [Keys.Do] to
// return, frees each key when its func has returned, deletes the session's record, and returns nil.
// While a func does not return, the session is renewed, and only that func's key is kept. Errors of the
// store do not end Run, except [tenure.ErrClosed]. Run may be called once.
func (s *Session) Run(ctx context.Context) error {
	if !s.started.CompareAndSwap(false, true) {
		return fmt.Errorf("claims: run session: %w: it has been run before", tenure.ErrInvalid)
	}
	defer report.Flush(s.cfg.Logger)
	defer s.returned.Store(true)
	s.cfg.Drain.AwaitMark(ctx)
	defer s.cfg.Drain.Follow(s.setDrained)()
	var background sync.WaitGroup
	defer background.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	background.Go(func() { s.sweeper.run(ctx) })
	defer context.AfterFunc(ctx, func() { s.update(func() { s.closed = true }) })()
	for failures := 0; ctx.Err() == nil; failures++ {
		t, err := s.begin(ctx)
		if err == nil {
			s.retries.Reset()
			background.Go(func() { s.hold(ctx, t) })
			<-t.ended
			failures = 0
		} else if objects.IsClosed(err) && ctx.Err() == nil {
			s.update(func() { s.closed, s.history.failed = true, err })
			return fmt.Errorf("claims: run session: %w", objects.Closed(err))
		} else if ctx.Err() == nil {
			s.update(func() { s.history.failed = err })
			s.retries.Log(s.cfg.Logger, slog.LevelWarn, "failed to begin a session; retrying", err)
		}
		pace.Sleep(ctx, pace.Retry(s.cfg.RenewInterval, longestRetryPause, failures))
	}
	return nil
}

// begin acquires a term. Each attempt has its own ID. If attempts shared an ID and an answer was lost, rows
// with that ID would look free until the late record appeared.
func (s *Session) begin(ctx context.Context) (*term, error) {
	t, err := s.newTerm()
	if err != nil {
		return nil, err
	}
	ctx, cancel := s.writeContext(ctx) // if ctx cut it off, a record that was created might stand until it expires
	defer cancel()
	if t.Term, err = t.lease.TryAcquire(witnessed.Own(ctx)); err != nil {
		return nil, err
	}
	if t.right, err = t.Fence(); err != nil {
		return nil, err
	}
	if t.right != nil { // otherwise no other process uses the database
		t.right.OnFailover(func(ctx context.Context, on objects.Lineage) error { return s.compareAll(ctx, t, on) })
	}
	return t, nil
}

// hold renews a term until everything that was claimed under it has stopped, and then deletes its record.
func (s *Session) hold(run context.Context, t *term) {
	defer context.AfterFunc(run, func() { s.end(t, tenure.ErrShutdown) })()
	var ctx context.Context
	ctx, t.stop = context.WithCancel(context.WithoutCancel(run))
	defer t.stop()
	if t.right != nil {
		defer s.renewals.Add(t.id, func(ctx context.Context) (bool, error) { return s.renewNow(ctx, t) })()
	}
	err := t.coordinator.Hold(ctx, t.Term)
	s.end(t, cmp.Or(err, tenure.ErrShutdown)) // if runTerm was never called
	t.comparing.Wait()
	s.update(func() { delete(s.history.terms, t) })
}

// runTerm is the job of a term. ctx is done when the session is lost.
func (s *Session) runTerm(ctx context.Context, t *term) error {
	s.enter(ctx, t)
	t.busy.Go(func() { s.wake(sessionsKey) }) // in a goroutine, because it may hang
	t.busy.Go(func() { s.serveRequests(ctx, t) })
	select {
	case <-t.ended:
	case <-ctx.Done():
		s.end(t, context.Cause(ctx))
	}
	s.windDown(ctx, t)
	t.stop() // the term ends by a shutdown, not because its job has returned
	<-ctx.Done()
	return nil
}

// hasEnded reports whether nothing more may be claimed under a term.
func (t *term) hasEnded() bool {
	return isClosed(t.ended)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// enter makes a term the one under which the session claims.
func (s *Session) enter(ctx context.Context, t *term) {
	s.update(func() {
		if t.ctx = ctx; t.over != nil {
			return
		}
		s.term = t
		s.history.began(t)
		for _, k := range s.kinds {
			k.enter(t)
		}
	})
}

// end stops a term from claiming anything more, and tells its funcs to return.
func (s *Session) end(t *term, cause error) {
	s.update(func() {
		if t.over != nil {
			return
		}
		t.over, s.closed = cause, s.closed || errors.Is(cause, tenure.ErrShutdown)
		close(t.ended)
		if s.history.terms[t] && !errors.Is(cause, tenure.ErrShutdown) {
			s.history.lost++
		}
		if s.term == t {
			s.term = nil
		}
		for _, k := range s.kinds {
			k.stop(t, cause)
		}
	})
}

// tables returns the tables whose rows may name sessions, the claims' first.
func (s *Session) tables() []*ownerTable {
	tables := []*ownerTable{s.table}
	for _, k := range s.allKinds() {
		if k.table != s.table {
			tables = append(tables, k.table)
		}
	}
	return tables
}

// writeContext returns a context for a write that the end of ctx must not cut off, because the write may
// land all the same.
func (s *Session) writeContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), s.limit)
}

// untilEnd returns a context that ends with ctx or the current term.
func (s *Session) untilEnd(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	s.mu.Lock()
	t := s.term
	s.mu.Unlock()
	if t != nil {
		go func() {
			defer cancel()
			select {
			case <-t.ended:
			case <-ctx.Done():
			}
		}()
	}
	return ctx, cancel
}

// trustLeft returns for how long the current session is trusted, if it has that ID.
func (s *Session) trustLeft(id string) (left time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term == nil || s.term.id != id {
		return 0, false
	}
	return s.term.Remaining(), true
}

// recheckRequests has the requests for keys of a session read again, if it is the current one.
func (s *Session) recheckRequests(session string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term != nil && s.term.id == session {
		s.term.recheckRequests()
	}
}

// ID returns the ID of the current session; empty while there is none.
func (s *Session) ID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term == nil {
		return ""
	}
	return s.term.id
}

// Valid reports whether there is a session and its claims may be relied upon, see [tenure.Term.Valid]. It
// does no I/O.
func (s *Session) Valid() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.term != nil && s.term.Valid()
}

// await waits until there is a term. If there will be none, it returns [ErrClosed].
func (s *Session) await(ctx context.Context) error {
	if !s.started.Load() {
		defer time.AfterFunc(5*time.Second, s.missRun).Stop()
	}
	closed := false
	err := s.until(ctx, func() bool {
		closed = s.closed
		return closed || s.term != nil
	})
	if closed {
		err = ErrClosed
	}
	return err
}

var errNotRun = errors.New("Session.Run was not called: until it is, nothing can be claimed")

// missRun logs once that a call waits for a session whose Run was not called.
func (s *Session) missRun() {
	if s.started.Load() || !s.missed.CompareAndSwap(false, true) {
		return
	}
	s.update(func() {
		if !s.started.Load() {
			s.history.failed = errNotRun
		}
	})
	s.cfg.Logger.Warn(errNotRun.Error())
}

// until waits until is returns true. It calls is with mu held, at first and whenever a field has changed.
func (s *Session) until(ctx context.Context, is func() bool) error {
	for {
		s.mu.Lock()
		done, changed := is(), s.changed
		s.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// over returns why claims of a term may not be relied upon, or nil. The caller holds mu.
func (s *Session) over(t *term) error {
	switch {
	case s.closed && t.over != nil:
		return ErrClosed
	case t.over != nil:
		return t.over
	case !t.Valid():
		return tenure.ErrDeadline
	}
	return nil
}

// update changes fields that mu guards, and wakes the calls of until.
func (s *Session) update(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	s.signal()
}

// signal wakes the calls of until. The caller holds mu.
func (s *Session) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Session) allKinds() []*kind {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.kinds))
}
