package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/reach"
)

// ErrOverdue is why a func's context ends at [RowsConfig.Deadline].
var ErrOverdue = errors.New("the claim's deadline has passed")

// Rows are claims of a session on the rows of a table of the user. The claim of a row stands in
// the row itself: which session owns it, and under which fencing token. Holding it costs nothing.
//
// A [Claim] of a row has the table's name as its Key.Type, and the row's ID as text in Key.ID.
//
// All methods are safe for concurrent use. Those that are said to need no session can be used
// if [Session.Run] is never called.
type Rows struct {
	s     *Session
	cfg   RowsConfig
	table objects.RowsTable
	keys  *Keys // which knows what the session holds

	leads chan struct{} // held by the call of Take that takes for all others
	mu    sync.Mutex    // guards the fields below; never held across I/O, nor with the session's
	takes []*taking     // calls of Take that have got nothing yet, the longest waiting first
	ends  []*ending     // rows to be finished one by one
	busy  bool          // a goroutine finishes them

	refused map[refusal]leaving

	// The session's mu guards it.
	due overdue
}

// NewRows returns the rows of a table as claims of a session, which has at most one Rows for
// each table. It does no I/O. An [tenure.ErrInvalid] names everything that is wrong with the
// config.
func NewRows(s *Session, cfg RowsConfig) (*Rows, error) {
	if s == nil {
		return nil, fmt.Errorf("tenure: new rows: %w: session is nil", tenure.ErrInvalid)
	}
	return newRows(s, cfg, func(cfg objects.RowsConfig) (objects.RowsTable, error) {
		switch store := s.store.(type) {
		case *tenure.PostgresStore:
			return reach.Postgres(store).Rows(cfg, s.cfg.Logger), nil
		case *tenure.SQLiteStore:
			return reach.SQLite(store).Rows(cfg, s.cfg.Logger), nil
		}
		return nil, fmt.Errorf("%w: %T has no rows", errors.ErrUnsupported, s.store)
	})
}

func newRows(s *Session, cfg RowsConfig, open func(objects.RowsConfig) (objects.RowsTable, error)) (*Rows, error) {
	cfg = cfg.withDefaults(s.cfg.TTL)
	err := cfg.validate()
	if err != nil {
		return nil, fmt.Errorf("tenure: new rows: %w", err)
	}
	r := &Rows{s: s, cfg: cfg, leads: make(chan struct{}, 1), refused: make(map[refusal]leaving)}
	if r.table, err = open(cfg.statements()); err == nil {
		r.keys, err = newKeys(s, cfg.Table, r.table, new(groups), func(ctx context.Context, ids []string) ([]objects.Claim, error) {
			return r.table.Look(ctx, ids, s.limit)
		})
	}
	if err != nil {
		return nil, fmt.Errorf("tenure: new rows: %w", err)
	}
	return r, nil
}

// Check returns a [tenure.ErrSetup] if the table is not fit for claims. Its text says what is
// missing, with the DDL that adds it. The first statement checks that too; Check is for programs
// that want to fail when they start. It needs no session.
func (r *Rows) Check(ctx context.Context) error {
	return r.failed("check", r.table.Check(ctx, r.s.limit))
}

func (r *Rows) failed(what string, err error) error {
	if err != nil {
		err = fmt.Errorf("tenure: %s rows of %s: %w", what, r.cfg.Table, err)
	}
	return err
}

// OwnedBy returns all claims of a session on rows of the table, by its ID. It needs no session.
func (r *Rows) OwnedBy(ctx context.Context, session string) ([]Claim, error) {
	owned, err := r.owned(ctx, session)
	if err != nil {
		return nil, r.failed("list", err)
	}
	return r.claimsOf(owned), nil
}

func (r *Rows) owned(ctx context.Context, session string) (owned []objects.Claim, err error) {
	for after, more := "", true; more && err == nil; {
		var some []objects.Claim
		if some, more, err = r.keys.owned(ctx, session, after); len(some) > 0 {
			owned, after = append(owned, some...), some[len(some)-1].ID
		}
	}
	return owned, err
}

func (r *Rows) claimsOf(rows []objects.Claim) []Claim {
	claims := make([]Claim, 0, len(rows))
	for _, row := range rows {
		claims = append(claims, Claim{Key: tenure.Key{Type: r.cfg.Table, ID: row.ID}, Session: row.Session, Token: row.Token, Attempt: row.Attempts})
	}
	return claims
}

// Do calls fn with a context that ends when the claim does, and frees the row when fn has
// returned, unless fn has ended the claim itself. Otherwise it is as [Keys.Do]. At
// [RowsConfig.Deadline] the cause is [ErrOverdue], which is then an error of Do as well.
func (r *Rows) Do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	return r.keys.Do(ctx, c, fn)
}

// Release gives rows back: others may take them at once. The rows of this session it releases as
// [Keys.Release] does: a func of Do is told to return, and waited for. Those of other sessions, and
// those that were passed on, it releases by value, see [Rows.PassOn].
//
// If one of those that it releases by value has ended, it returns a [*LostError] and none is
// released. Whether this session still has its own rows it does not ask the database: one that
// was freed or deleted behind its back it forgets, without an error.
func (r *Rows) Release(ctx context.Context, claims ...Claim) error {
	if err := r.valid(claims); err != nil {
		return r.failed("release", err)
	}
	var own, values []Claim
	var closing []<-chan struct{}
	for _, c := range claims {
		if r.Holds(c) {
			own = append(own, c)
		} else if freed := r.closing(c); freed != nil {
			closing = append(closing, freed)
		} else {
			values = append(values, c)
		}
	}
	if len(values) > 0 {
		if err := r.end(ctx, objects.Ending{All: true}, values); err != nil {
			return r.failed("release", err)
		}
		r.keys.Wake()
	}
	if len(own) > 0 {
		if err := r.keys.Release(ctx, own...); err != nil {
			return err
		}
	}
	for _, freed := range closing {
		select {
		case <-freed:
		case <-ctx.Done():
			return r.failed("release", context.Cause(ctx))
		}
	}
	return nil
}

// closing returns what is closed when a row is free for which a func still runs while the session
// closes. The session holds its claim no more, and has told the func to return.
func (r *Rows) closing(c Claim) <-chan struct{} {
	if !r.unended(c) {
		return nil
	}
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if call := r.keys.running[c.Key.ID]; call != nil && errors.Is(call.of.term.over, tenure.ErrShutdown) {
		return call.freed
	}
	return nil
}

// ReleaseAfter gives rows back, and nobody takes them for that long by the database's clock. It
// does not wait for funcs: one that releases its own row returns soon afterwards. Without
// [RowsConfig.NotBefore] it is [tenure.ErrInvalid]. It needs no session.
//
// If one of the claims has ended, it returns a [*LostError] and none is released.
func (r *Rows) ReleaseAfter(ctx context.Context, d time.Duration, claims ...Claim) error {
	err := r.valid(claims)
	switch {
	case r.cfg.NotBefore == "":
		err = fmt.Errorf("%w: ReleaseAfter needs a column that keeps the time: set NotBefore", tenure.ErrInvalid)
	case d < 0:
		err = fmt.Errorf("%w: %v is negative", tenure.ErrInvalid, d)
	}
	if err == nil {
		err = r.end(ctx, objects.Ending{After: max(d, time.Microsecond), All: true}, claims)
	}
	return r.failed("release", err)
}

// PassOn is [Keys.PassOn]: another process finishes or releases the rows by value, or this one
// does.
func (r *Rows) PassOn(claims ...Claim) error { return r.keys.PassOn(claims...) }

// Holds reports whether this session holds the claim, and may rely on it: see
// [tenure.Term.Valid]. It does no I/O.
func (r *Rows) Holds(c Claim) bool { return r.keys.Holds(c) }

// Len returns how many claims the session holds.
func (r *Rows) Len() int { return r.keys.Len() }

// Wake wakes those that wait for rows, in other processes too. Call it after rows were added,
// once for all of them. Errors don't matter: a hint may be lost in any case.
func (r *Rows) Wake() { r.keys.Wake() }

// valid rejects what can't be claims of rows of this table.
func (r *Rows) valid(claims []Claim) error {
	var errs []error
	for _, c := range claims {
		switch {
		case c.Key.Type != r.cfg.Table:
			errs = append(errs, fmt.Errorf("%w: %s is not of table %q", tenure.ErrInvalid, c, r.cfg.Table))
		case c.Session == "" || c.Token <= 0:
			errs = append(errs, fmt.Errorf("%w: no claim is given: %q has no session or no token", tenure.ErrInvalid, c))
		}
		errs = append(errs, objects.ValidText("session", c.Session))
	}
	errs = append(errs, validIDs(keysOf(claims)))
	return errors.Join(errs...)
}

// errUnfinished is why a row is released whose func has returned nil.
var errUnfinished = errors.New("the func returned nil, but did not end its claim, and RowsConfig.Done is not set")

// Serve takes rows and calls fn for each, for at most so many at once, until ctx is done or the
// session closes. Then it takes no more, waits until all funcs have returned, and returns nil.
// fn's context is that of [Rows.Do]; it does not end with ctx, but when the session closes.
//
// fn ends the claim by a Finish method, Release or ReleaseAfter. If it returns nil without
// that, the row is finished as by [Rows.Finish], if [RowsConfig.Done] is set, also while the
// session closes: a func that stops before it is done returns an error. The error is logged, and
// others may take the row after [RowsConfig.Backoff]; the same if fn calls runtime.Goexit.
//
// A panic of fn releases the row and is passed on, without waiting for the other funcs. An
// [tenure.ErrSetup] is returned.
func (r *Rows) Serve(ctx context.Context, workers int, fn func(context.Context, Claim) error) error {
	switch {
	case workers < 1:
		return r.failed("serve", fmt.Errorf("%w: %d workers", tenure.ErrInvalid, workers))
	case fn == nil:
		return r.failed("serve", fmt.Errorf("%w: fn is nil", tenure.ErrInvalid))
	}
	taking, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	idle, panics := make(chan struct{}, workers), make(chan any, 1)
	for range workers {
		idle <- struct{}{}
	}
	work := func(c Claim) {
		defer running.Done()
		defer func() {
			if p := recover(); p != nil {
				select {
				case panics <- p:
				default: // one is enough
				}
				cancel()
				return
			}
			idle <- struct{}{}
		}()
		r.work(context.WithoutCancel(ctx), c, fn, r.finishDone)
	}
	err := r.serve(taking, idle, func(c Claim) {
		running.Add(1)
		go work(c)
	})
	returned := make(chan struct{})
	go func() {
		running.Wait()
		close(returned)
	}()
	select {
	case p := <-panics:
		panic(p)
	case <-returned:
	}
	select {
	case p := <-panics:
		panic(p)
	default:
	}
	if ctx.Err() != nil || errors.Is(err, ErrClosed) {
		return nil
	}
	return err
}

// serve takes as many rows as there are idle workers, and begins them. More would be attempts that
// nobody makes if the process ends.
func (r *Rows) serve(ctx context.Context, idle chan struct{}, begin func(Claim)) error {
	for {
		n := 0
		select {
		case <-idle:
			n++
		case <-ctx.Done():
			return nil
		}
		for more := true; more; {
			select {
			case <-idle:
				n++
			default:
				more = false
			}
		}
		got, err := r.Take(ctx, n)
		for _, c := range got {
			begin(c)
		}
		for range n - len(got) {
			idle <- struct{}{}
		}
		if err != nil {
			return err
		}
	}
}

// work runs fn for a row, and finishes or releases it.
func (r *Rows) work(ctx context.Context, c Claim, fn func(context.Context, Claim) error, done func(context.Context, Claim) error) {
	ended := func(ctx context.Context, err error) error {
		held := r.Holds(c)
		cause := context.Cause(ctx) // is set by now if that is why the claim is not held
		// A session that closes holds nothing any more, but what its funcs have done still counts.
		closing := errors.Is(cause, tenure.ErrShutdown) && err == nil && done != nil && r.unended(c)
		if !held && !closing || err != nil && cause != nil && !errors.Is(cause, ErrOverdue) { // it has ended, or others may go on at once
			return err
		}
		if err == nil && done != nil {
			if closing { // the session is renewed until this func returns
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), r.s.cfg.TTL)
				defer cancel()
			}
			err = done(ctx, c)
		} else if err == nil {
			err = errUnfinished
		}
		if err != nil && r.Holds(c) {
			r.later(c, r.backoff(c))
		}
		return err
	}
	told := func(err error) {
		if err != nil {
			r.s.cfg.Logger.Warn("a row is not finished", "table", r.cfg.Table, "id", c.Key.ID, "attempt", c.Attempt, "error", err)
		}
	}
	told(r.Do(ctx, c, func(ctx context.Context) error {
		over := false
		defer func() {
			if over {
				return
			}
			if p := recover(); p != nil { // it releases the row at once
				panic(p)
			}
			told(ended(ctx, errGoexit))
		}()
		err := logtext.Sound(fn(ctx, c))
		over = true
		return ended(ctx, err)
	}))
}

// unended reports whether a func runs for a claim that it has not ended.
func (r *Rows) unended(c Claim) bool {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	call := r.keys.running[c.Key.ID]
	return call != nil && call.of.term.id == c.Session && call.token == c.Token && !call.kept
}

// finishDone finishes a row whose func has returned nil. A statement whose answer was lost is repeated.
func (r *Rows) finishDone(ctx context.Context, c Claim) error {
	if r.cfg.Done == "" {
		return errUnfinished
	}
	for failures := 0; ; failures++ {
		lost, err := r.endOne(ctx, c)
		if len(lost) > 0 && failures > 0 { // to an earlier statement, unless the session was lost meanwhile
			lost = nil
		}
		err = r.finished([]Claim{c}, lost, nil, err)
		switch {
		case err == nil:
			return nil
		case (errors.Is(err, errLocked) || isTooSlow(err)) && ctx.Err() == nil: // it has waited, and nothing is written
			failures--
		case errors.Is(err, tenure.ErrLost), errors.Is(err, tenure.ErrInvalid), errors.Is(err, tenure.ErrSetup), isRefused(err):
			return err
		case !pace.Sleep(ctx, pace.Retry(r.s.cfg.RenewInterval, longestRetryPause, failures)):
			return err
		}
	}
}

// later releases a row so that nobody takes it for a while. Without a column for that, the session
// keeps it meanwhile: that costs nothing, and ends if the session does.
func (r *Rows) later(c Claim, d time.Duration) {
	s, k := r.s, r.keys
	if r.cfg.NotBefore != "" {
		ctx, cancel := context.WithTimeout(context.Background(), s.limit)
		defer cancel()
		err := r.ReleaseAfter(ctx, d, c)
		if err == nil || errors.Is(err, tenure.ErrLost) {
			return
		}
		s.cfg.Logger.Warn("a row is not released, and kept meanwhile", "table", r.cfg.Table, "id", c.Key.ID, "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.holds(c) != nil {
		return
	}
	h := k.now
	if call := k.running[c.Key.ID]; call != nil && call.token == c.Token {
		call.kept = true
	}
	time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if h.term.over == nil && h.tokens[c.Key.ID] == c.Token {
			k.free(h, c.row())
		}
	})
}

// LostError is the error of a call that depends on claims of which some have ended: the rows
// were freed, or are another's, or were deleted. Then the call has written nothing. It is
// [tenure.ErrLost].
type LostError struct {
	Claims []Claim // that have ended
}

func (e *LostError) Error() string {
	const most = 5 // named in the text
	var names []string
	for _, c := range e.Claims[:min(len(e.Claims), most)] {
		names = append(names, c.String())
	}
	if more := len(e.Claims) - most; more > 0 {
		names = append(names, fmt.Sprint(more, " more"))
	}
	return fmt.Sprintf("%v: finished, freed, deleted or taken by another: %s", tenure.ErrLost, strings.Join(names, ", "))
}

// Is makes the error match [tenure.ErrLost].
func (e *LostError) Is(target error) bool { return target == tenure.ErrLost }

// lost makes the error of claims that had ended, which this session may believe it has.
func (r *Rows) lost(given []Claim, rows []objects.Claim) error {
	if len(rows) == 0 {
		return nil
	}
	var lost []Claim
	for _, row := range rows {
		i := slices.IndexFunc(given, func(c Claim) bool { return c.Key.ID == row.ID })
		lost = append(lost, given[i])
	}
	err := &LostError{lost}
	r.ended(err, lost...)
	return err
}

func (r *Rows) ended(lost error, claims ...Claim) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	r.keys.ended(lost, claims...)
}
