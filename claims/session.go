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
	"github.com/tenurelib/tenure/internal/reach"
	"github.com/tenurelib/tenure/internal/report"
)

// ErrClosed says that the context of [Session.Run] is done, so the session claims nothing more.
var ErrClosed = errors.New("session is closed")

const (
	// longestRetryPause limits the pause between two tries of anything that has failed.
	longestRetryPause = 5 * time.Second

	// coalesce is the time between two hints while keys are freed by the thousand, so that
	// those who wait need not look all the time.
	coalesce = 100 * time.Millisecond
)

// SessionConfig configures a [Session]. The zero value is ready to use. The fields that
// [tenure.LeaseConfig] and [tenure.CoordinatorConfig] have too mean what they mean there.
type SessionConfig struct {
	TTL           time.Duration     // default 30s
	Margin        time.Duration     // default TTL/30
	RenewInterval time.Duration     // default TTL/3
	RenewDeadline time.Duration     // default 2/3 of the TTL
	Holder        string            // the process's name, for people to read; default tenure.ReplicaID()
	Labels        map[string]string // shown by [Keys.Owner]: the address for requests, for example
	Expiry        tenure.ExpiryPolicy
	Logger        *slog.Logger // default slog.Default()

	// ReleaseRequested, if set, is called when somebody asks for a claim for which no func of
	// [Keys.Do] runs, see [Keys.RequestRelease]: once for each claim, from one goroutine. It may
	// release the claim, and must return soon.
	ReleaseRequested func(Claim)

	// PollInterval is the longest time between two looks of [Keys.Wait] while it can't expect
	// to be woken when a key is freed. Default TTL/6, and at most 10s.
	PollInterval time.Duration
}

// table is the claims' table of either database.
type table = objects.ClaimsTable

// naming is a table whose rows may name sessions: that of the claims, or one of [Rows].
type naming interface {
	Free(ctx context.Context, session, kind string, ids []string, tokens []int64, limit time.Duration) (locked []objects.Claim, err error)
	Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]objects.Claim, error)
	Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error)
}

// Session is the liveness of one process, and what the process has claimed. If it is lost,
// because the store could not be reached for too long, Run begins another, with another ID.
//
// All methods are safe for concurrent use.
type Session struct {
	store tenure.Store
	table table
	cfg   SessionConfig
	limit time.Duration // of a statement

	groups groups // of the statements on the claims' table

	started atomic.Bool
	sweeper sweeper
	retries logtext.Retries

	mu      sync.Mutex // guards the fields below, and those of Keys; never held across I/O
	term    *term      // nil while there is none
	closed  bool
	changed chan struct{} // closed and replaced when one of the two has changed
	kinds   map[string]*Keys
	history history
}

// term is one session as the store knows it: its ID and its record.
type term struct {
	*tenure.Term
	id          string
	lease       *tenure.Lease
	coordinator *tenure.Coordinator

	stop  context.CancelFunc // releases the lease; called when all has stopped
	ctx   context.Context    // done when the session is lost; set when the term begins to claim
	over  error              // why nothing more may be claimed or begun; nil: it may. Guarded by the session's mu
	ended chan struct{}      // closed when over is set
	busy  sync.WaitGroup     // calls of Do, and goroutines that free rows

	wanted chan struct{} // receives when the sweep has found that somebody asks for a key
}

// NewSession returns a session in a store, a [*tenure.PostgresStore] or [*tenure.SQLiteStore]
// whose Migrate has made its tables. It does no I/O. An [tenure.ErrInvalid] names everything
// that is wrong with the config; any other store is [errors.ErrUnsupported].
func NewSession(store tenure.Store, cfg SessionConfig) (*Session, error) {
	table, err := tableOf(store)
	if err != nil {
		return nil, fmt.Errorf("tenure: new session: %w", err)
	}
	return newSession(store, table, cfg)
}

func tableOf(store tenure.Store) (table, error) {
	if objects.IsNil(store) {
		return nil, fmt.Errorf("%w: store is nil", tenure.ErrInvalid)
	}
	switch s := store.(type) {
	case *tenure.PostgresStore:
		return reach.Postgres(s).Claims(), nil
	case *tenure.SQLiteStore:
		return reach.SQLite(s).Claims(), nil
	case interface{ Claims() table }: // a test's
		return s.Claims(), nil
	}
	return nil, fmt.Errorf("%w: %T has no table of claims", errors.ErrUnsupported, store)
}

func newSession(store tenure.Store, table table, cfg SessionConfig) (*Session, error) {
	cfg.TTL = cmp.Or(cfg.TTL, tenure.DefaultTTL)
	cfg.Margin = cmp.Or(cfg.Margin, cfg.TTL/30)
	cfg.RenewInterval = cmp.Or(cfg.RenewInterval, cfg.TTL/3)
	cfg.RenewDeadline = cmp.Or(cfg.RenewDeadline, cfg.TTL*2/3)
	cfg.PollInterval = cmp.Or(cfg.PollInterval, min(cfg.TTL/6, 10*time.Second))
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, slog.Default()))
	cfg.Labels = maps.Clone(cfg.Labels)
	cfg.Holder = cmp.Or(cfg.Holder, tenure.ReplicaID())
	s := &Session{retries: logtext.Retries{Repeat: true},
		store: store, table: table, cfg: cfg,
		limit:   min((cfg.RenewDeadline-cfg.RenewInterval)/2, 10*time.Second), // as a coordinator's calls have
		changed: make(chan struct{}),
		kinds:   make(map[string]*Keys),
	}
	s.sweeper.init(s)
	_, err := s.newTerm()
	if err == nil && cfg.PollInterval < 0 {
		err = fmt.Errorf("%w: PollInterval %v is negative", tenure.ErrInvalid, cfg.PollInterval)
	}
	if err != nil {
		return nil, fmt.Errorf("tenure: new session: %w", err)
	}
	return s, nil
}

// newTerm returns a term that has not been acquired, with an ID that nobody has ever had.
func (s *Session) newTerm() (t *term, err error) {
	t = &term{id: uuid.NewString(), ended: make(chan struct{}), wanted: make(chan struct{}, 1)}
	t.lease, err = tenure.NewLease(s.store, tenure.LeaseConfig{
		Key:    tenure.Key{Type: objects.SessionType, ID: t.id},
		Holder: s.cfg.Holder, TTL: s.cfg.TTL, Margin: s.cfg.Margin, Labels: s.cfg.Labels,
		Expiry: s.cfg.Expiry, Logger: s.cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	t.coordinator, err = tenure.NewCoordinator(t.lease, tenure.CoordinatorConfig{
		RenewInterval: s.cfg.RenewInterval, RenewDeadline: s.cfg.RenewDeadline,
		Reconcile: func(ctx context.Context) error { return s.live(ctx, t) },
	})
	return t, err
}

// Run begins the session and renews it, and begins another one after a loss, until ctx is done.
// Then it closes: it claims nothing more, tells the funcs of [Keys.Do] to return, frees each
// key when its func has returned, deletes the session's record, and returns nil. As long as a
// func does not return, the session is renewed, and only that func's key is kept. No error of
// the store ends Run. It may be called once.
func (s *Session) Run(ctx context.Context) error {
	if !s.started.CompareAndSwap(false, true) {
		return fmt.Errorf("tenure: run session: %w: it has been run before", tenure.ErrInvalid)
	}
	defer report.Flush(s.cfg.Logger)
	var background sync.WaitGroup
	defer background.Wait()
	background.Go(func() { s.sweeper.run(ctx) })
	defer context.AfterFunc(ctx, func() { s.update(func() { s.closed = true }) })()
	for failures := 0; ctx.Err() == nil; failures++ {
		t, err := s.begin(ctx)
		if err == nil {
			s.retries.Reset()
			background.Go(func() { s.hold(ctx, t) })
			<-t.ended
			failures = 0
		} else if ctx.Err() == nil {
			s.update(func() { s.history.failed = err })
			s.retries.Log(s.cfg.Logger, slog.LevelWarn, "session does not begin, trying again", err)
		}
		pace.Sleep(ctx, pace.Retry(s.cfg.RenewInterval, longestRetryPause, failures))
	}
	return nil
}

// begin acquires a term. Each attempt has an ID of its own: rows that name the ID of an attempt
// whose answer was lost would be free, and then not, if its record appeared late.
func (s *Session) begin(ctx context.Context) (*term, error) {
	t, err := s.newTerm()
	if err != nil {
		return nil, err
	}
	ctx, cancel := s.uncut(ctx) // a record that nobody knows of would stand until it has expired
	defer cancel()
	t.Term, err = t.lease.TryAcquire(ctx)
	return t, err
}

// hold renews a term until everything that was claimed under it has stopped. Then the record
// is deleted.
func (s *Session) hold(run context.Context, t *term) {
	defer context.AfterFunc(run, func() { s.end(t, tenure.ErrShutdown) })()
	var ctx context.Context
	ctx, t.stop = context.WithCancel(context.WithoutCancel(run))
	defer t.stop()
	err := t.coordinator.Hold(ctx, t.Term)
	s.end(t, cmp.Or(err, tenure.ErrShutdown)) // it may have been over before live was called
	s.update(func() { delete(s.history.terms, t) })
}

// live is the job of a term. ctx is done when the session is lost.
func (s *Session) live(ctx context.Context, t *term) error {
	s.enter(ctx, t)
	t.busy.Go(func() { s.hint(sessionsKey) }) // which may hang
	t.busy.Go(func() { s.heed(ctx, t) })
	select {
	case <-t.ended:
	case <-ctx.Done():
		s.end(t, context.Cause(ctx))
	}
	s.drain(ctx, t)
	t.stop() // so that the term ends by a shutdown, and not because its job has
	<-ctx.Done()
	return nil
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

// end makes a term one under which nothing more is claimed, and tells its funcs to return.
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

// drain returns when nothing that was claimed under a term runs any more, and its rows are
// free. If the session is lost, others free the rows.
func (s *Session) drain(ctx context.Context, t *term) {
	for _, k := range s.allKinds() { // a statement that is under way may still take rows
		k.turn <- struct{}{}
		<-k.turn
	}
	idle := make(chan struct{})
	go func() {
		t.busy.Wait()
		close(idle)
	}()
	for failures := 0; ctx.Err() == nil; failures++ {
		// Another process may have resumed the session, see [tenure.Lease.Resume], and its funcs
		// run under what the rows name.
		sealing, cancel := s.uncut(ctx)
		err := t.lease.Seal(sealing, t.Term)
		cancel()
		if err == nil {
			_, err = s.freeAll(ctx, t.id, s.isBusy)
		}
		if err == nil {
			break
		}
		s.cfg.Logger.Warn("keys are not freed", "session", t.id, "error", err)
		select {
		case <-idle: // then it is enough to delete the record
			return
		case <-ctx.Done():
		case <-time.After(pace.Retry(s.cfg.RenewInterval, longestRetryPause, failures)):
		}
	}
	<-idle
	if ctx.Err() == nil {
		_, _ = s.freeAll(ctx, t.id, nil) // those of a claim whose answer was lost
	}
}

// freeAll frees all rows that name a session, except those to skip, and returns how many.
func (s *Session) freeAll(ctx context.Context, id string, skip func(objects.Claim) bool) (freed int, err error) {
	for _, table := range s.tables() { // one that fails does not keep the others
		n, failed := s.freeRows(ctx, table, id, skip)
		freed, err = freed+n, cmp.Or(err, failed)
	}
	return freed, err
}

// tables returns the tables whose rows may name sessions, the claims' first.
func (s *Session) tables() []naming {
	tables := []naming{s.table}
	for _, k := range s.allKinds() {
		if k.table != naming(s.table) {
			tables = append(tables, k.table)
		}
	}
	return tables
}

// groupsOf returns the groups of a table's statements.
func (s *Session) groupsOf(table naming) *groups {
	for _, k := range s.allKinds() {
		if k.table == table {
			return k.groups
		}
	}
	return &s.groups
}

func (s *Session) freeRows(ctx context.Context, table naming, id string, skip func(objects.Claim) bool) (freed int, err error) {
	const first = 20 // they are free in a moment, however many there are
	var last objects.Claim
	var hinted time.Time
	groups := s.groupsOf(table)
	for n := min(first, groups.size()); ; n = min(2*n, groups.size()) {
		rows, err := table.Owned(ctx, id, last.Kind, last.ID, n, s.limit)
		if isTooSlow(err) && n > 1 {
			groups.tooSlow(n)
			continue
		}
		if err != nil || len(rows) == 0 {
			return freed, err
		}
		last = rows[len(rows)-1]
		ofKind := make(map[string][]objects.Claim)
		for _, r := range rows {
			if skip == nil || !skip(r) {
				ofKind[r.Kind] = append(ofKind[r.Kind], r)
			}
		}
		hint := len(rows) < n || time.Since(hinted) > coalesce
		for kind, rows := range ofKind {
			locked, refused, err := s.free(ctx, table, id, kind, rows)
			if err != nil {
				return freed, err
			}
			freed += len(rows) - len(locked) - len(refused)
			if hint {
				s.hint(keyOf(kind))
				hinted = time.Now()
			}
		}
	}
}

// free frees rows of a session, and returns those that it could not free because somebody has
// locked them, and those that the database refuses to have freed.
func (s *Session) free(ctx context.Context, table naming, id, kind string, rows []objects.Claim) (locked, refused []objects.Claim, err error) {
	var why error
	err = inGroups(s.groupsOf(table), rows, func(rows []objects.Claim) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		freeing, cancel := s.uncut(ctx)
		defer cancel()
		more, err := table.Free(freeing, id, kind, idsOf(rows), tokensOf(rows), s.limit)
		locked = append(locked, more...)
		if errors.Is(err, context.DeadlineExceeded) { // to free a claim twice does no harm
			return &objects.TooSlow{Cause: err}
		}
		return err
	}, func(row objects.Claim, err error) {
		refused, why = append(refused, row), err
	})
	if len(refused) > 0 { // one line, however many they are
		s.cfg.Logger.Warn("the database refuses to free a key; trying again within a TTL", "session", id, "kind", kind, "key", refused[0].ID, "keys", len(refused), "error", why)
	}
	return locked, refused, err
}

// uncut returns a context for a write that its caller's context must not cut off, because it
// may land all the same.
func (s *Session) uncut(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), s.limit)
}

// untilEnd returns a context that also ends with the current term.
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

// ID returns the ID of the current session; empty while there is none.
func (s *Session) ID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term == nil {
		return ""
	}
	return s.term.id
}

// Valid reports whether the claims of the current session may be relied upon, as far as it
// goes: see [tenure.Term.Valid]. It does no I/O.
func (s *Session) Valid() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.term != nil && s.term.Valid()
}

// await returns when there is a term.
func (s *Session) await(ctx context.Context) error {
	for {
		s.mu.Lock()
		t, closed, changed := s.term, s.closed, s.changed
		s.mu.Unlock()
		switch {
		case closed:
			return ErrClosed
		case t != nil:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// over returns why claims of a term may not be relied upon; nil: they may. The caller holds the
// mutex.
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

// update changes the fields that mu guards.
func (s *Session) update(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Session) allKinds() []*Keys {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.kinds))
}

// isBusy reports whether a func runs for a row, or the row is being freed after its func has
// returned.
func (s *Session) isBusy(r objects.Claim) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[r.Kind]
	return k != nil && (k.running[r.ID] != nil || k.now != nil && k.now.freeing[r.ID] > 0)
}

// sessionsKey is where a session says that it has begun.
var sessionsKey = tenure.Key{Type: "tenure.claims", ID: "*"}

// keyOf is where those who wait for keys of a kind are woken.
func keyOf(kind string) tenure.Key { return tenure.Key{Type: "tenure.claims", ID: "kind " + kind} }

// hint wakes all that watch a key. Hints may be lost in any case, so errors don't matter.
func (s *Session) hint(key tenure.Key) { hint(s.store, key, s.limit) }

func hint(store tenure.Store, key tenure.Key, limit time.Duration) {
	if notifier, ok := store.(tenure.Notifier); ok {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		_ = notifier.Wake(ctx, key)
	}
}

// hints subscribes to what hint tells.
func (s *Session) hints(key tenure.Key) tenure.Subscription {
	if watcher, ok := s.store.(tenure.Watcher); ok {
		return watcher.Watch(key)
	}
	return noHints{}
}

type noHints struct{}

func (noHints) C() <-chan struct{} { return nil }
func (noHints) Live() bool         { return false }
func (noHints) Stop()              {}
