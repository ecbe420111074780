package claims

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/witnessed"
)

// kind owns the state of a session's claims of one kind, and runs their statements. [Keys] and [Worker] use
// only its methods.
type kind struct {
	s     *Session
	name  string
	table *ownerTable
	queue *Queue        // on a table of the user; nil: the kind is one of keys
	turn  chan struct{} // held while a statement that takes rows is under way; taken before the session's mu

	// The session's mu guards the fields below.
	ledger  *ledger          // of the latest term; nil before the first
	running map[string]*call // the funcs of do by key, also those of terms that were lost
	strays  map[string]bool  // the keys in running whose claims have ended
}

// call is one call of do.
type call struct {
	of     *ledger
	token  int64
	cancel context.CancelCauseFunc
	kept   bool          // the key is not freed when the func returns: the claim has ended, or freeAfter frees it
	freed  chan struct{} // closed when the func has returned and its key is free
	late   *time.Timer   // of a func that was told to return; nil: it was not told
	states bool          // the func has a statement that ends the claim, of which the session learns nothing
}

// tooLong is how long a func may take to return once it was told to, before a warning says that it does not.
const tooLong = 10 * time.Second

// noteStatement notes that the func of a claim has a statement that ends it.
func (k *kind) noteStatement(c Claim) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if call := k.running[c.Key.ID]; call.isFor(c.Session, c.Token) {
		call.states = true
	}
}

// hasStatement reports whether the func of a claim has a statement that ends it.
func (k *kind) hasStatement(c Claim) bool {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	call := k.running[c.Key.ID]
	return call.isFor(c.Session, c.Token) && call.states
}

// isFor reports whether a call, which may be nil, is for a claim.
func (call *call) isFor(session string, token int64) bool {
	return call != nil && call.of.term.id == session && call.token == token
}

// newKind adds a kind of keys, or the rows of a queue, to a session.
func newKind(s *Session, table *ownerTable, queue *Queue, name string) (*kind, error) {
	s.mu.Lock()
	if s.kinds[name] != nil {
		s.mu.Unlock()
		return nil, fmt.Errorf("%w: the session has keys of kind %q, or rows of that table, already", tenure.ErrInvalid, name)
	}
	k := &kind{s: s, name: name, table: table, queue: queue, turn: make(chan struct{}, 1), running: make(map[string]*call), strays: make(map[string]bool)}
	s.kinds[name] = k
	if s.term != nil {
		k.enter(s.term)
	}
	s.mu.Unlock()
	hint := keyOf(name)                    // without the lock, because it may wait for a moment
	witnessed.TellWake(hint.Type, hint.ID) // so that callers in other processes need not wait until the session would have expired
	return k, nil
}

// ofRows reports whether the claims are on rows of a table of the user.
func (k *kind) ofRows() bool { return k.table != k.s.table }

// enter begins to claim under a term. The caller holds the session's mu.
func (k *kind) enter(t *term) {
	l := newLedger(t, k.s.cfg.TTL)
	k.ledger = l
	t.busy.Go(func() { k.reconcile(l) })
	if k.queue != nil && k.queue.cfg.Expires != "" {
		t.busy.Go(func() { k.queue.freeExpiredUntil(t) })
	}
	if k.queue != nil && k.queue.cfg.Canceled != "" {
		t.busy.Go(func() { k.tellCanceled(l) })
	}
}

// stop tells the funcs that run under a term to return. The caller holds the session's mu.
func (k *kind) stop(t *term, cause error) {
	for _, call := range k.running {
		if call.of.term == t {
			call.cancel(cause)
		}
	}
}

// begin waits for a session, and then for the turn to take rows. The caller calls done when its
// statements have been answered.
func (k *kind) begin(ctx context.Context) (l *ledger, done func(), err error) {
	if err := k.s.await(ctx); err != nil {
		return nil, nil, err
	}
	select {
	case k.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	k.ledger.late = false
	return k.ledger, func() { <-k.turn }, nil
}

// over returns why nothing more may be claimed for a ledger, or nil. Rows that are taken after its term
// would name a session that is gone.
func (k *kind) over(l *ledger) error {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if k.s.drained {
		return errGivenBack
	}
	return k.s.over(l.term)
}

// claimable returns the keys that the session may claim. A key is not claimable while a func still runs
// for it under a term that was lost, because no key may run twice.
func (k *kind) claimable(l *ledger, ids []string) ([]string, error) {
	if err := k.over(l); err != nil {
		return nil, err
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	return slices.DeleteFunc(l.claimable(ids), func(id string) bool { return k.running[id] != nil }), nil
}

// keep turns rows that were taken into claims. If a func of this process still runs for a row, keep frees
// that row instead. An answer counts as an error if it comes after the trust in the session has ended, or so late after a
// failover that the session has compared its claims without these.
func (k *kind) keep(l *ledger, rows []objects.Claim) (kept []Claim, err error) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if err := k.s.over(l.term); err != nil {
		return nil, err
	}
	if l.late {
		k.doubt(l, 0, 0)
		return nil, tenure.ErrMoved
	}
	if l.add(rows) {
		l.term.recheckRequests()
	}
	kept = make([]Claim, 0, len(rows))
	for _, r := range rows {
		if k.running[r.ID] != nil {
			k.strays[r.ID] = true // a Take that is woken by this would take the row again
			k.free(l, true, r)
		} else if k.s.drained { // since the statement was sent
			k.free(l, true, r)
		} else {
			kept = append(kept, claimOf(k.name, l.term.id, r, k.ofRows()))
		}
	}
	return kept, nil
}

// do calls fn for a claim, see [Keys.Do].
func (k *kind) do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	if fn == nil {
		return opError("do "+c.String(), fmt.Errorf("%w: fn is nil", tenure.ErrInvalid))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	call, err := k.beginFunc(c, cancel)
	if err != nil {
		return opError("do "+c.String(), err)
	}
	unused := false
	defer func() { k.endFunc(c, call, unused) }() // even after a panic
	defer context.AfterFunc(ctx, func() { k.await(c, call, context.Cause(ctx)) })()
	err = fn(context.WithValue(context.WithValue(ctx, claimKey, c), objects.Right, c))
	cause := context.Cause(ctx)
	told := errors.Is(cause, tenure.ErrShutdown) || errors.Is(cause, tenure.ErrResigned) || errors.Is(cause, context.Canceled)
	unused = told || cause == nil && err == nil
	if errors.Is(cause, tenure.ErrLost) || errors.Is(cause, tenure.ErrDeadline) || errors.Is(cause, ErrOverdue) || errors.Is(cause, ErrCanceled) {
		err = errors.Join(opError("do "+c.String(), cause), err)
	}
	return err
}

func (k *kind) beginFunc(c Claim, cancel context.CancelCauseFunc) (*call, error) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if err := k.check(c); err != nil {
		return nil, err
	}
	if k.running[c.Key.ID] != nil {
		return nil, fmt.Errorf("%w: a func runs for it", tenure.ErrInvalid)
	}
	call := &call{of: k.ledger, token: c.Token, cancel: cancel, freed: make(chan struct{})}
	k.running[c.Key.ID] = call
	switch {
	case k.s.drained:
		cancel(errGivenBack)
	case k.ledger.requested[c.Key.ID]:
		cancel(errRequested)
	}
	k.ledger.term.busy.Add(1)
	return call, nil
}

// await warns if a func that was told to return does not.
func (k *kind) await(c Claim, call *call, cause error) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if k.running[c.Key.ID] != call {
		return
	}
	call.late = time.AfterFunc(tooLong, func() {
		k.s.mu.Lock()
		defer k.s.mu.Unlock()
		if k.running[c.Key.ID] == call {
			k.s.cfg.Logger.Warn("func was told to return and has not", "claim", c.String(), "cause", logtext.OneLine(cause), "since", tooLong)
		}
	})
}

// endFunc frees the key of a func that has returned, and waits until it is free or the session is lost. unused
// says that the func has not failed.
func (k *kind) endFunc(c Claim, call *call, unused bool) {
	defer call.of.term.busy.Done()
	defer close(call.freed)
	k.s.mu.Lock()
	if delete(k.running, c.Key.ID); call.late != nil {
		call.late.Stop()
	}
	delete(k.strays, c.Key.ID)
	k.s.noteGivenBack()
	var batches []*batch
	if !call.kept {
		batches = k.free(call.of, unused, c.row())
	} else if !k.ofRows() { // callers of this process could not take the key while the func ran
		call.of.term.busy.Go(func() { k.s.wake(keyOf(k.name)) })
	}
	k.s.mu.Unlock()
	for _, b := range batches {
		<-b.done
	}
}

// holds reports whether the session holds a claim and may rely on it.
func (k *kind) holds(c Claim) bool {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	return k.check(c) == nil
}

// keeps reports whether a func runs for a claim, has not ended it, and may still rely on it.
func (k *kind) keeps(c Claim) bool {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	call := k.running[c.Key.ID]
	return c.Key.Type == k.name && call.isFor(c.Session, c.Token) && !call.kept && call.of.term.Valid()
}

// check returns why the session does not hold a claim; nil: it does. The caller holds the session's mu.
func (k *kind) check(c Claim) error {
	switch {
	case c.Key.Type != k.name:
		return fmt.Errorf("%w: its kind is not %q", tenure.ErrInvalid, k.name)
	case k.ledger == nil || c.Session != k.ledger.term.id:
		return fmt.Errorf("%w: its session %s has ended, or is another's", tenure.ErrLost, c.Session)
	}
	if over := k.s.over(k.ledger.term); over != nil {
		return fmt.Errorf("%w: its session has ended: %w", tenure.ErrLost, over)
	}
	if !k.ledger.holds(c.Key.ID, c.Token) {
		return fmt.Errorf("%w: it was released or detached", tenure.ErrLost)
	}
	return nil
}

// release frees keys, see [Keys.Release].
func (k *kind) release(ctx context.Context, claims []Claim) error {
	waits, err := k.startRelease(claims)
	for _, freed := range waits {
		select {
		case <-freed:
		case <-ctx.Done():
			return opError("release "+k.name, context.Cause(ctx))
		}
	}
	return opError("release "+k.name, err)
}

// startRelease returns channels that are closed when the keys are free. While the session closes, which
// tells its funcs to return, the keys of funcs that still run may be released as well.
func (k *kind) startRelease(claims []Claim) (waits []chan struct{}, err error) {
	if err := validClaims(claims); err != nil {
		return nil, err
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for _, c := range claims {
		call := k.running[c.Key.ID]
		closing := call.isFor(c.Session, c.Token) && !call.kept && errors.Is(call.of.term.over, tenure.ErrShutdown)
		if err := k.check(c); err != nil && !closing {
			return nil, fmt.Errorf("%s: %w", c, err)
		}
	}
	var idle []objects.Claim
	for _, c := range claims {
		if call := k.running[c.Key.ID]; call != nil {
			call.cancel(tenure.ErrResigned)
			waits = append(waits, call.freed)
		} else {
			idle = append(idle, c.row())
		}
	}
	for _, b := range k.free(k.ledger, true, idle...) {
		waits = append(waits, b.done)
	}
	return waits, nil
}

// detach ends the session's own use of claims, see [Keys.Detach].
func (k *kind) detach(claims []Claim) error {
	return opError("detach "+k.name, k.startDetach(claims))
}

func (k *kind) startDetach(claims []Claim) error {
	if err := validClaims(claims); err != nil {
		return err
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for _, c := range claims {
		err := k.check(c)
		if err == nil && k.running[c.Key.ID] != nil {
			err = fmt.Errorf("%w: a func runs for it", tenure.ErrInvalid)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
	}
	l := k.ledger
	defer k.s.noteGivenBack()
	if l.detach(claims); len(l.detached) >= l.forgetAt {
		l.forgetAt = math.MaxInt
		k.doubt(l, 0, 0)
	}
	return nil
}

// ended notes that claims have ended. If lost is not nil, their funcs are told to return, with lost as
// the cause.
func (k *kind) ended(lost error, claims ...Claim) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for _, c := range claims {
		k.end(lost, c)
	}
}

// end marks one claim as ended, and cancels its func with lost, if that is not nil. The caller holds the session's mu.
func (k *kind) end(lost error, c Claim) {
	if l := k.ledger; l != nil && l.term.id == c.Session {
		if l.requested[c.Key.ID] && l.term.over == nil {
			l.term.busy.Go(func() { k.s.wake(keyOf(k.name)) }) // who attaches may learn that it is done
		}
		l.end(c.Key.ID, c.Token)
		k.s.noteGivenBack()
	}
	if call := k.running[c.Key.ID]; call.isFor(c.Session, c.Token) {
		call.kept, k.strays[c.Key.ID] = true, true
		if lost != nil {
			call.cancel(lost)
		}
	}
}

// endRow is end for the claim of a row that says otherwise.
func (k *kind) endRow(l *ledger, r objects.Claim) {
	c := claimOf(k.name, l.term.id, r, k.ofRows())
	k.end(&EndedError{Claims: []Claim{c}}, c)
}

// unended reports whether a func runs for a claim and has not ended it.
func (k *kind) unended(c Claim) bool {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	call := k.running[c.Key.ID]
	return call.isFor(c.Session, c.Token) && !call.kept
}

// strayIDs returns the keys for which a func still runs although its claim has ended.
func (k *kind) strayIDs() []string {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	return slices.AppendSeq([]string{}, maps.Keys(k.strays))
}

// background runs fn in a goroutine that the term waits for. If the term is over, it does nothing, because then
// all rows are freed.
func (k *kind) background(l *ledger, fn func(context.Context)) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if l.term.over == nil {
		l.term.busy.Go(func() { fn(l.term.ctx) })
	}
}

// freeAfter frees the key of a claim whose func has failed, once d has passed.
func (k *kind) freeAfter(d time.Duration, c Claim) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if k.check(c) != nil {
		return
	}
	l := k.ledger
	l.spent[c.Key.ID] = c.Token
	if k.s.drained { // then the key is freed at once, by endFunc if its func runs
		if k.running[c.Key.ID] == nil {
			k.free(l, false, c.row())
		}
		return
	}
	if call := k.running[c.Key.ID]; call.isFor(c.Session, c.Token) {
		call.kept = true
	}
	time.AfterFunc(d, func() {
		k.s.mu.Lock()
		defer k.s.mu.Unlock()
		if l.term.over == nil && l.holds(c.Key.ID, c.Token) {
			k.free(l, false, c.row())
		}
	})
}
