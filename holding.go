package tenure

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/sighting"
)

var (
	// ErrHeld says that another replica holds the lease. The error is a [*HeldError].
	ErrHeld = errors.New("lease is held")

	// ErrLost says that a term is over because the lease is another's, or its record is
	// gone. The error is a [*LostError] if the store was asked.
	ErrLost = objects.ErrLost

	// ErrDeadline says that a term is over because it was not renewed in time, or never
	// began because the answer to its acquire came too late.
	ErrDeadline = errors.New("lease not renewed in time")
)

// Holding is what a lease's record says: who holds the lease, and since when.
type Holding struct {
	Key        Key
	Holder     string // for people to read; "unknown" if the record doesn't say; empty: nobody holds the lease
	Term       string // the term's ID; empty in a record of another program
	Version    int64
	TTL        time.Duration // the holder's; the reader's own if the record doesn't say
	AcquiredAt time.Time     // by the holder's clock
	RenewedAt  time.Time     // by the store's clock
	Age        time.Duration // since the last renewal, by the store's clock, when it was read
	Labels     map[string]string

	// OfferedTo is the replica to which the last holder has offered the lease, if Holder is
	// empty. Until the TTL has passed only that one may take it. If OfferedTo is empty too,
	// any replica may.
	OfferedTo string

	unconfirmed []Holding // see [Term.unconfirmed]
	resumed     bool      // another process may go on with the term than the one it names
}

// isOffer reports whether nobody holds the lease because its last holder has offered it to
// one replica, or to all.
func (h *Holding) isOffer() bool { return h.Holder == "" }

// how says who has the lease.
func (h *Holding) how() string {
	switch {
	case !h.isOffer():
		return "held by " + h.Holder
	case h.OfferedTo == "":
		return "offered to any replica"
	default:
		return "offered to " + h.OfferedTo
	}
}

func (h *Holding) sameTerm(other *Holding) bool {
	return h.Term == other.Term && h.Holder == other.Holder
}

// stored converts a lease's object for package record.
func stored(obj Object) record.Object {
	return record.Object{Labels: obj.Labels, Payload: obj.Payload, Version: obj.Version, UpdatedAt: obj.UpdatedAt, Age: obj.Age}
}

// decodeHolding reads a lease's object. It always returns a Holding that a standby can act
// on; the error says what is wrong with the record.
func decodeHolding(obj Object, ownTTL time.Duration) (Holding, error) {
	h, err := record.Read(stored(obj), ownTTL)
	if err != nil {
		err = fmt.Errorf("tenure: record of %s at version %d: %w", obj.Key, obj.Version, err)
	}
	holding := newHolding(obj.Key, h)
	holding.resumed = stored(obj).Resumed()
	return holding, err
}

func newHolding(key Key, r record.Holding) Holding {
	h := Holding{
		Key: key, Holder: r.Holder, Term: r.Term, Version: r.Version, TTL: r.TTL,
		AcquiredAt: r.AcquiredAt, RenewedAt: r.RenewedAt, Age: r.Age, Labels: r.Labels,
	}
	if r.Offered {
		h.Holder, h.OfferedTo = "", r.Holder
	}
	for _, before := range r.Unconfirmed {
		h.unconfirmed = append(h.unconfirmed, newHolding(key, before))
	}
	return h
}

// recorded converts holdings for package record.
func recorded(holdings []Holding) (rs []record.Holding) {
	for _, h := range holdings {
		rs = append(rs, record.Holding{
			Holder: h.Holder, Term: h.Term, Version: h.Version, TTL: h.TTL,
			AcquiredAt: h.AcquiredAt, RenewedAt: h.RenewedAt, Labels: h.Labels,
		})
	}
	return rs
}

// HeldError is the error of an acquire or steal while another replica holds the lease. It
// is [ErrHeld].
type HeldError struct {
	Holding Holding

	canExpireIn time.Duration // until a steal may succeed
	byAge       bool          // canExpireIn goes by the record's age, so looking earlier is useless
}

func (e *HeldError) Error() string {
	if e.Holding.isOffer() {
		return fmt.Sprintf("%v: %s is %s", ErrHeld, e.Holding.Key, e.Holding.how())
	}
	return fmt.Sprintf("%v: %s by %s", ErrHeld, e.Holding.Key, e.Holding.Holder)
}

// Is makes the error match [ErrHeld].
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// LostError is the error of a renewal, a release or a fenced write whose term is over. It
// is [ErrLost].
type LostError struct {
	Key Key
	To  *Holding // who holds the lease now, or who is offered it; nil: the record is gone

	why string // the term is lost although To is that very term
}

func (e *LostError) Error() string {
	switch {
	case e.To == nil:
		return fmt.Sprintf("%v: %s is gone", ErrLost, e.Key)
	case e.why != "":
		return fmt.Sprintf("%v: the term of %s %s", ErrLost, e.Key, e.why)
	}
	return fmt.Sprintf("%v: %s is %s", ErrLost, e.Key, e.To.how())
}

// Is makes the error match [ErrLost].
func (e *LostError) Is(target error) bool { return target == ErrLost }

// isLossOf reports whether an error says that this term is lost. [ErrLost] alone may be
// that of another lease, or of a gate.
func isLossOf(term *Term, err error) bool {
	var lost *LostError
	return errors.Is(err, ErrLost) && (!term.Valid() || errors.As(err, &lost) && lost.Key == term.key)
}

// refusedByFence says what became of a term whose fence has refused a transaction of a database
// that is said to have the lease, and ends the term if it is over.
func (t *Term) refusedByFence(ctx context.Context, store Store, refusal error) error {
	obj, err := store.Get(ctx, t.key)
	switch {
	case err == nil && bytes.Equal(obj.Payload, t.payload):
		return fmt.Errorf("%w: the lease stands, so db is not the database that has it (%v)", ErrInvalid, refusal)
	case err == nil:
		return t.fencedOut(&obj)
	case errors.Is(err, ErrNotFound):
		return t.fencedOut(nil)
	}
	t.end(ErrLost) // nobody knows who holds it now
	return refusal
}

// caller is who calls a lease. The zero value is a program that uses [Lease] directly.
type caller struct {
	timeout  time.Duration // of each call to the store; 0: only the context limits it
	confirms bool          // it confirms a takeover before its job begins
}

func (by caller) read(ctx context.Context) (context.Context, context.CancelFunc) {
	if by.timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, by.timeout)
}

// write returns a context that a shutdown does not end: an acquire that is cut off halfway
// may leave the record of a term that nobody holds, and everybody would wait for its TTL.
func (by caller) write(ctx context.Context) (context.Context, context.CancelFunc) {
	if by.timeout != 0 {
		ctx = context.WithoutCancel(ctx)
	}
	return by.read(ctx)
}

// reading is a lease's object as it was read.
type reading struct {
	Object
	stored  record.Object // the same, for package record
	holding Holding
}

// look reads the record and remembers since when it has stood unchanged.
func (l *Lease) look(ctx context.Context, by caller) (r reading, err error) {
	ctx, cancel := by.read(ctx)
	defer cancel()
	r.Object, err = l.store.Get(objects.WithLeaseCall(ctx), l.cfg.Key)
	answered := time.Now()
	if errors.Is(err, ErrNotFound) {
		l.memory.saw(nil, answered)
	}
	if err != nil {
		return r, err
	}
	return l.note(r.Object, answered), nil
}

// note remembers since when a record has stood unchanged, given when it was seen.
func (l *Lease) note(obj Object, answered time.Time) reading {
	r := reading{Object: obj, stored: stored(obj)}
	var undecodable error
	r.holding, undecodable = decodeHolding(r.Object, l.cfg.TTL)
	if l.memory.saw(&r.stored, answered) && undecodable != nil {
		l.cfg.Logger.Warn("lease record cannot be decoded; it counts as held by unknown until it expires",
			"lease", l.cfg.Key.String(), "replica", l.cfg.Holder, "error", undecodable)
	}
	if r.stored.Resumed() && l.memory.isLast(r.holding.Term) {
		l.memory.foundCopy(r.holding.Term)
	}
	// The versions of other programs' records do not count. Nor does the version of a term
	// that this replica is just beginning, in case the record is read before the answer to
	// its acquire arrives: then its token would seem to repeat a known one.
	if r.holding.Term != "" && !l.memory.isBeginning(r.holding.Term) {
		l.memory.sawVersion(r.Version)
	}
	return r
}

// heldAfter returns who holds the lease according to the last change that a subscription
// has seen. It returns nil if that is unknown, or if an attempt to acquire may do better than
// to read the same.
func (l *Lease) heldAfter(hints Subscription) *HeldError {
	change, ok := lastChange(hints)
	if !ok || change.Deleted || l.memory.isOutdated(change) {
		return nil
	}
	r := l.note(change.Object, change.Arrived)
	if _, ok := l.memory.orphan(r.holding.Term); ok || l.mayTake(r.holding) {
		return nil
	}
	if held := l.held(r); held.canExpireIn > 0 {
		return held
	}
	return nil
}

// heldByUnknown is the error if a record was in the way of an acquire and had vanished when
// it was read.
func (l *Lease) heldByUnknown() *HeldError {
	return &HeldError{Holding: Holding{Key: l.cfg.Key, Holder: record.Unknown}}
}

// mayTake reports whether this lease may take over the record before it expires.
func (l *Lease) mayTake(h Holding) bool { return l.reclaims(h) || l.isOffered(h) }

func (l *Lease) isOffered(h Holding) bool {
	return h.isOffer() && (h.OfferedTo == l.cfg.Holder || h.OfferedTo == "")
}

// reclaims reports whether the record was left by an earlier run of this replica. That it
// names the same holder is not enough: it may be of a term that this very lease has begun,
// or is beginning in another goroutine, or that another process has resumed.
func (l *Lease) reclaims(h Holding) bool {
	return l.cfg.AssumeUniqueHolder && h.Holder == l.cfg.Holder && h.Term != "" && !h.resumed && !l.memory.ofThisRun(h.Term)
}

// predecessors returns the holders that may still be at work if this lease takes over a
// record: the record's own, unless it has released the lease, and those that it had not
// confirmed to be gone; but not this replica. Of each holder only the last term counts.
func (l *Lease) predecessors(h Holding) []Holding {
	others := slices.Clone(h.unconfirmed)
	if !h.isOffer() {
		others = slices.DeleteFunc(others, func(p Holding) bool { return p.Holder == h.Holder && maps.Equal(p.Labels, h.Labels) })
		others = append(others, h)
	}
	return slices.DeleteFunc(others, l.isOwn)
}

// isOwn reports whether a record is of a term of this replica, whose job has returned.
func (l *Lease) isOwn(h Holding) bool {
	_, isOrphan := l.memory.orphan(h.Term)
	return l.memory.isLast(h.Term) || isOrphan || l.reclaims(h)
}

// validHolder refuses a name for which a record has no room.
func validHolder(name string) error {
	if len(name) > record.LongestHolder {
		return fmt.Errorf("%w: Holder has %d bytes, more than %d", ErrInvalid, len(name), record.LongestHolder)
	}
	return nil
}

// orphan is a term whose record may be in the store although nobody relies on it: its
// acquire or its release failed without a clear answer. The record is removed, which wakes
// the standbys, and never taken up again: it would stay young, again and again, and keep the
// lease from a replica that is able to hold it.
type orphan struct {
	term          *Term
	releaseFailed bool          // otherwise it is the acquire that failed
	offerFor      time.Duration // see [Lease.release]
	expires       time.Time     // when the record does, as nobody renews it
}

// memory is what a lease remembers of its record and its terms. Its methods are safe for
// concurrent use and do no I/O.
type memory struct {
	mu        sync.Mutex
	seen      *sighting.Sighting // the record; nil: there is none, or it was not read yet
	orphans   []orphan
	newest    int64    // the greatest version that the record of any term had
	last      string   // the last term that this lease began
	copied    string   // the last term that a copy of this process holds too
	beginning []string // terms whose first write is under way
}

// saw notes a record that was read, or nil if there was none, and when the answer came. It
// reports whether the payload is a new one.
func (m *memory) saw(o *record.Object, answered time.Time) (isNew bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.seen
	switch {
	case o == nil:
		m.seen = nil
	case !before.Of(*o):
		m.seen = &sighting.Sighting{Object: *o, Since: answered}
	}
	// A record that is gone after its release can't come back. One whose acquire was not
	// answered may still appear.
	m.orphans = slices.DeleteFunc(m.orphans, func(r orphan) bool { return r.releaseFailed && (o == nil || !o.IsOf(r.term.id)) })
	return o != nil && (before == nil || !bytes.Equal(before.Object.Payload, o.Payload))
}

// isOutdated reports whether a newer record than that of a change was seen already. It is
// also true if the store's versions went back, and then the record has to be read.
func (m *memory) isOutdated(c Change) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seen != nil && c.Object.Version < m.seen.Object.Version
}

func (m *memory) lastSeen() *sighting.Sighting {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seen
}

// sawVersion notes the version of a term's record and returns the greatest one seen
// before. It ignores one near the limit, because the store does not count on from there:
// all later tokens would be refused for ever.
func (m *memory) sawVersion(v int64) (before int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before = m.newest
	if v < objects.VersionLimit/2 {
		m.newest = max(m.newest, v)
	}
	return before
}

// begins notes that the first write of a term is under way, until done is called.
func (m *memory) begins(term string) (done func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.beginning = append(m.beginning, term)
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.beginning = slices.DeleteFunc(m.beginning, func(id string) bool { return id == term })
	}
}

func (m *memory) isBeginning(term string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Contains(m.beginning, term)
}

// began notes that the first write of a term has succeeded.
func (m *memory) began(term string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = term
}

// foundCopy notes that a copy of this process holds a term of this lease too.
func (m *memory) foundCopy(term string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.copied = term
}

// isLast reports whether a term is the last that this lease began, and no copy holds it.
func (m *memory) isLast(term string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return term != "" && term == m.last && term != m.copied
}

// ofThisRun reports whether a term is the last that this lease began, or one that it is
// beginning.
func (m *memory) ofThisRun(term string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return term == m.last || slices.Contains(m.beginning, term)
}

// addOrphan notes an orphan. Its record expires after the TTL.
func (m *memory) addOrphan(o orphan, ttl time.Duration) {
	const most = 512 // each attempt whose answer is lost makes one, and any of them may have landed
	o.expires = time.Now().Add(ttl)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.orphans = slices.DeleteFunc(m.orphans, func(known orphan) bool { return known.term.id == o.term.id })
	if len(m.orphans) == most {
		m.orphans = m.orphans[1:]
	}
	m.orphans = append(m.orphans, o)
}

func (m *memory) dropOrphan(term string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.orphans = slices.DeleteFunc(m.orphans, func(o orphan) bool { return o.term.id == term })
}

// orphan returns the orphan with a term's ID.
func (m *memory) orphan(term string) (o orphan, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := slices.IndexFunc(m.orphans, func(o orphan) bool { return o.term.id == term })
	if i < 0 {
		return o, false
	}
	return m.orphans[i], true
}

// owesRelease reports whether there may be a record left of a term that could not be
// released.
func (m *memory) owesRelease() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.orphans, func(o orphan) bool { return o.releaseFailed && !time.Now().After(o.expires) })
}

// hasOrphans reports whether the record of any orphan may stand.
func (m *memory) hasOrphans() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.orphans, func(o orphan) bool { return !time.Now().After(o.expires) })
}
