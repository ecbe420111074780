package tenure

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
)

// Term is one unbroken holding of a lease, from its acquire or steal until its
// release or loss. All methods are safe for concurrent use and do no I/O. A nil
// Term, as [TermFromContext] returns it outside a job, is not valid and has no time
// remaining; its other methods panic.
type Term struct {
	key        Key
	id         string
	holder     string
	token      int64
	acquiredAt time.Time
	payload    []byte        // the record, the same bytes for the whole term
	trusted    time.Duration // TTL − Margin

	stolenFrom   *Holding                  // nil: nobody held the lease
	predecessors atomic.Pointer[[]Holding] // see unconfirmed

	ended      atomic.Pointer[error]          // why the term is over; nil: it is not
	asked      atomic.Pointer[record.Request] // to give the lease up; the last request seen
	deleteSent atomic.Bool                    // by a release whose answer we don't know
	trust      atomic.Pointer[trust]          // nil: a local term, which no time ends
	clock      clock.Clock                    // nil for a local term

	mu       sync.Mutex      // guards the fields below; never held across I/O
	version  int64           // of the object, as far as we know
	unsure   int             // writes that expect this version and were not answered, or not yet
	offered  *record.Payload // what the release puts in the place of the term's record; nil: nothing
	renewing chan struct{}   // while a renewal is under way; closed at its end
}

// trust is until when a holder may believe in its term: attempt + TTL − Margin on
// both clocks of the process. The monotonic clock stands still while the machine is
// suspended, and the TTL does not, so whichever clock says that less time is left is
// right.
type trust struct{ deadline clock.Reading }

func newTrust(attempt clock.Reading, d time.Duration) *trust {
	return &trust{deadline: attempt.Add(d)}
}

// newLocalTerm makes the term of a coordinator that has no lease to lose.
func newLocalTerm(key Key, holder string, lastToken int64) *Term {
	now := time.Now()
	return &Term{key: key, id: uuid.NewString(), holder: holder, token: max(lastToken+1, now.UnixMicro()), acquiredAt: now}
}

// Key returns the key of the lease.
func (t *Term) Key() Key { return t.key }

// Record returns the payload of the lease's object, the same bytes for the whole
// term and for no other: what a [Fencer] compares. The caller must not change
// it. It is nil where there is no lease to lose.
func (t *Term) Record() []byte { return t.payload }

// ID returns the term's UUID.
func (t *Term) ID() string { return t.id }

// Token returns the fencing token: of two terms of one lease, the later has the
// greater one, for ever. Where there is no lease to lose, see
// [Exclusive], it is drawn from the process clock, and holds for as long
// as that is not set back between two processes.
func (t *Term) Token() int64 { return t.token }

// Holder returns the name under which the term was acquired.
func (t *Term) Holder() string { return t.holder }

// AcquiredAt returns when the term began, by the clock of this process.
func (t *Term) AcquiredAt() time.Time { return t.acquiredAt }

// timeLeft returns for how long the term may still be trusted, as both clocks see it;
// 0 or less: no longer. Everything that asks for the trust in a term asks here.
func (t *Term) timeLeft() time.Duration {
	trust := t.trust.Load()
	if trust == nil {
		return math.MaxInt64
	}
	return trust.deadline.Until(t.clock())
}

// sinceRenewal returns how long ago the last acquire or renewal that succeeded was
// sent, as both clocks see it. It is for terms that are not local.
func (t *Term) sinceRenewal() time.Duration { return t.trusted - t.timeLeft() }

// Deadline returns when the trust in the term ends unless it is renewed. It is
// the zero time where there is no lease to lose, see [Exclusive].
//
// It is as both clocks of the process saw it when it was asked. A machine that is
// suspended afterwards has less time left than [time.Until] says then, so
// [Term.Remaining] is the better question.
func (t *Term) Deadline() time.Time {
	trust := t.trust.Load()
	if trust == nil {
		return time.Time{}
	}
	now := t.clock()
	if left := trust.deadline.Until(now); left < trust.deadline.Mono.Sub(now.Mono) {
		return now.Mono.Add(left)
	}
	return trust.deadline.Mono
}

// Remaining returns how much trust is left: 0 once the term is over. It goes by the
// wall clock too, so it is right after the machine was suspended.
func (t *Term) Remaining() time.Duration {
	if !t.Valid() {
		return 0
	}
	return max(0, t.timeLeft())
}

// Valid reports whether the term may still be relied upon. Once false it stays
// false. True says that nobody else had begun a term when it was asked, under
// the conditions that the package documentation names; it cannot vouch for the
// next instant. Where that matters, fence the write.
func (t *Term) Valid() bool {
	if t == nil || t.id == "" || t.ended.Load() != nil {
		return false
	}
	if t.timeLeft() > 0 {
		return true
	}
	t.end(ErrDeadline) // or a wall clock that is set back would revive it
	return false
}

// unconfirmed returns the holders from which the lease was taken over and which may still
// be at work, the last of them last. It is nil where there are none, and once the takeover
// is confirmed.
func (t *Term) unconfirmed() []Holding {
	if predecessors := t.predecessors.Load(); predecessors != nil {
		return *predecessors
	}
	return nil
}

// confirm notes that the predecessors are gone, or that nobody is going to make sure of it.
func (t *Term) confirm() { t.predecessors.Store(nil) }

// end makes the term invalid for good. The first cause stays.
func (t *Term) end(cause error) { t.ended.CompareAndSwap(nil, &cause) }

// lostTo ends the term, and returns why.
func (t *Term) lostTo(lost *LostError) error {
	t.end(lost)
	return lost
}

// over returns why the term is not valid, nil while it is.
func (t *Term) over() error {
	if t.Valid() {
		return nil
	}
	return *t.ended.Load()
}

// extend takes the answer to a renewal that was sent at attempt. It returns
// false where the term was over before the answer came: a late yes is a no.
func (t *Term) extend(version int64, attempt clock.Reading) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.movedTo(version)
	if !t.Valid() {
		return false
	}
	if !attempt.Mono.Before(t.lastAttempt().Mono) {
		t.trust.Store(newTrust(attempt, t.trusted))
	}
	return true
}

// lastAttempt returns the instant before the last acquire or renewal that
// succeeded was sent.
func (t *Term) lastAttempt() clock.Reading { return t.trust.Load().deadline.Add(-t.trusted) }

// renewal notes that a renewal is under way, until done is called.
func (t *Term) renewal() (done func()) {
	ended := make(chan struct{})
	t.mu.Lock()
	defer t.mu.Unlock()
	t.renewing = ended
	return func() { close(ended) }
}

// giveWay lets a renewal that is under way go first. Fenced writes share their
// lock on the record and overtake one that waits for it, so that a stream of
// them could keep it waiting for longer than the trust lasts.
func (t *Term) giveWay(ctx context.Context) {
	const longest = 100 * time.Millisecond // one that hangs must not stop the writes
	t.mu.Lock()
	renewing := t.renewing
	t.mu.Unlock()
	if renewing == nil {
		return
	}
	select {
	case <-renewing:
		return
	default:
	}
	timer := time.NewTimer(longest)
	defer timer.Stop()
	select {
	case <-renewing:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// writing notes that a renewal is sent, and returns the version that it expects. If
// the store refuses it, refused is called: otherwise it may land, or have landed.
func (t *Term) writing() (version int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unsure++
	return t.version
}

// refused notes that a renewal that expected a version has changed nothing.
func (t *Term) refused(version int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.version == version {
		t.unsure--
	}
}

func (t *Term) currentVersion() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.version
}

// movedTo notes the version of the record. Writes that expected an earlier one can
// land no more. It needs the mutex.
func (t *Term) movedTo(version int64) {
	if version > t.version {
		t.version, t.unsure = version, 0
	}
}

// recognise reports whether a version of the record, which has the payload of this
// term, can be of its own making, or of a request to it; then it is the term's
// version from now on. A version that this term can't have written is by a copy of
// it: one machine was restored from a snapshot while the other runs on, and each
// would take the renewals of the other for its own.
//
// Known is the version that the term had when the record was asked for. One below it
// says that the database has lost the last renewal, as a failover may.
func (t *Term) recognise(known, version int64, request *record.Request) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if version < known && t.version == known {
		t.version, t.unsure = version, 0
	}
	ours := version <= t.version || t.unsure > 0 || request != nil && request.Version <= t.version
	if ours {
		t.movedTo(version)
	}
	return ours
}

// local reports whether there is no lease to lose.
func (t *Term) local() bool { return t.payload == nil }

// offer returns what a release puts in the place of the term's record; nil: nothing. It
// is the same one each time, so that it is known again where the answer was lost.
func (t *Term) offer(leave time.Duration) *record.Payload {
	t.mu.Lock()
	defer t.mu.Unlock()
	var to string
	if request := t.asked.Load(); request != nil && request.To != t.holder && leave > 0 {
		to = request.To
	}
	switch {
	case to == "" && t.unconfirmed() == nil:
		t.offered = nil
	case t.offered == nil || t.offered.Holder != to:
		t.offered = record.Offer(to, leave)
	}
	return t.offered
}

// hasOffered reports whether a holding is what the term's release has put in its place.
func (t *Term) hasOffered(h *Holding) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.offered != nil && h != nil && h.isOffer() && h.Term == t.offered.Term && h.OfferedTo == t.offered.Holder
}

// fences refuses a term that no write can depend on.
func (t *Term) fences(op string) error {
	if t == nil || t.id == "" {
		return fmt.Errorf("tenure: %s: %w: no term is given; see TermFromContext", op, ErrInvalid)
	}
	if over := t.over(); !t.local() && errors.Is(over, ErrLost) {
		return fmt.Errorf("tenure: %s by %s: %w", op, t.key, over) // known already; for all others the store decides
	}
	return nil
}

// fence returns what a store needs to know of the term; nil for none, and for a local
// one, which has no lease to lose.
func (t *Term) fence() *objects.Fence {
	if t == nil || t.local() {
		return nil
	}
	return &objects.Fence{ID: objects.ID(t.key), Record: t.payload, Yield: t.giveWay}
}

// fenceFor refuses a fenced write to the record that its fence depends on.
func (t *Term) fenceFor(key Key) error {
	if t != nil && key == t.key {
		return fmt.Errorf("%w: the lease's own object can't be written through its fence", ErrInvalid)
	}
	return nil
}

// fencedOut ends a term whose record is not, or no longer, the lease's. The row is what
// stands in its place; nil: nothing.
func (t *Term) fencedOut(now *objects.Row) error {
	if now == nil {
		return t.lostTo(&LostError{Key: t.key})
	}
	holding, _ := decodeHolding(objectOf(*now), 0) // one that can't be decoded is held by unknown
	return t.lostTo(&LostError{Key: t.key, To: &holding})
}

// Gate keeps stale holders away from a resource outside the database. The
// resource asks it, under the same lock or in the same transaction as what it
// then does: a gate cannot stop a write that passed it and is still under way.
//
// A gate is for the tokens of one lease; those of two do not compare. The zero
// value is ready, and admits every term's token until it has seen one. It
// forgets what it has seen with its process: a resource that outlives it keeps
// the token beside its data, as the example shows in SQL. A Gate is safe for
// concurrent use, and must not be copied after its first use.
type Gate struct {
	highest atomic.Int64
}

// Admit returns nil for a fencing token that is not below the highest seen, and
// [ErrLost] for one that is: its term is over, for a later one has been here. A
// token that is not positive is no term's, and [ErrInvalid].
func (g *Gate) Admit(token int64) error {
	if token <= 0 {
		return fmt.Errorf("tenure: gate: %w: token %d is not positive", ErrInvalid, token)
	}
	for {
		highest := g.highest.Load()
		if token < highest {
			return fmt.Errorf("tenure: gate: %w: token %d is below %d", ErrLost, token, highest)
		}
		if g.highest.CompareAndSwap(highest, token) {
			return nil
		}
	}
}
