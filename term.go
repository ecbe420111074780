package tenure

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
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

	stolenFrom   *Holding    // nil: nobody held the lease
	predecessors []Holding   // who may still be at work, the last of them last
	unconfirmed  atomic.Bool // and it is to be made sure that they are not

	ended      atomic.Pointer[error]          // why the term is over; nil: it is not
	asked      atomic.Pointer[releaseRequest] // to give the lease up; the last request seen
	deleteSent atomic.Bool                    // by a release whose answer we don't know
	trust      atomic.Pointer[trust]          // nil: a local term, which no time ends

	mu       sync.Mutex    // guards the fields below; never held across I/O
	version  int64         // of the object, as far as we know
	left     *record       // what the release puts in the place of the term's record; nil: nothing
	renewing chan struct{} // while a renewal is under way; closed at its end
}

// trust is the time for which a holder may believe in its term.
type trust struct {
	deadline time.Time // attempt + TTL − Margin, on the monotonic clock
	wall     time.Time // the same on the wall clock
}

func newTrust(attempt time.Time, d time.Duration) *trust {
	deadline := attempt.Add(d)
	return &trust{deadline: deadline, wall: deadline.Round(0)}
}

// covers reports whether now lies within the trust. The wall clock is asked too:
// the monotonic clock stands still while a machine is suspended, and the TTL
// does not.
func (t *trust) covers(now time.Time) bool {
	return t.past(now) < 0
}

// past returns how long ago the trust ended; less than 0: it has not.
func (t *trust) past(now time.Time) time.Duration {
	return max(now.Sub(t.deadline), now.Round(0).Sub(t.wall))
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
// [Store.SingleReplica], it is drawn from the process clock, and holds for as long
// as that is not set back between two processes.
func (t *Term) Token() int64 { return t.token }

// Holder returns the name under which the term was acquired.
func (t *Term) Holder() string { return t.holder }

// AcquiredAt returns when the term began, by the clock of this process.
func (t *Term) AcquiredAt() time.Time { return t.acquiredAt }

// Deadline returns when the trust in the term ends unless it is renewed. It is
// the zero time where there is no lease to lose, see [Store.SingleReplica].
func (t *Term) Deadline() time.Time {
	if trust := t.trust.Load(); trust != nil {
		return trust.deadline
	}
	return time.Time{}
}

// Remaining returns how much trust is left: 0 once the term is over.
func (t *Term) Remaining() time.Duration {
	if !t.Valid() {
		return 0
	}
	if trust := t.trust.Load(); trust != nil {
		return max(0, time.Until(trust.deadline))
	}
	return math.MaxInt64
}

// Valid reports whether the term may still be relied upon. Once false it stays
// false. True says that nobody else had begun a term when it was asked, under
// the conditions that the package documentation names; it cannot vouch for the
// next instant. Where that matters, fence the write.
func (t *Term) Valid() bool {
	if t == nil || t.id == "" || t.ended.Load() != nil {
		return false
	}
	trust := t.trust.Load()
	if trust == nil || trust.covers(time.Now()) {
		return true
	}
	t.end(ErrDeadline) // or a wall clock that is set back would revive it
	return false
}

// end makes the term invalid for good. The first cause stays.
func (t *Term) end(cause error) { t.ended.CompareAndSwap(nil, &cause) }

// lostTo ends the term, and returns to whom it was lost; nil: nobody, the record
// is gone.
func (t *Term) lostTo(holding *Holding) error {
	lost := &LostError{Key: t.key, To: holding}
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
func (t *Term) extend(version int64, attempt time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.version = max(t.version, version)
	if !t.Valid() {
		return false
	}
	if attempt.After(t.lastAttempt()) {
		t.trust.Store(newTrust(attempt, t.trusted))
	}
	return true
}

// lastAttempt returns the instant before the last acquire or renewal that
// succeeded was sent.
func (t *Term) lastAttempt() time.Time { return t.trust.Load().deadline.Add(-t.trusted) }

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

func (t *Term) currentVersion() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.version
}

func (t *Term) local() bool { return t.trust.Load() == nil }

// successor returns the record that a release puts in the place of the term's; nil:
// there is to be none. It is the same one each time, so that it is known again where
// the answer was lost.
func (t *Term) successor(leave time.Duration) *record {
	t.mu.Lock()
	defer t.mu.Unlock()
	var to string
	if request := t.asked.Load(); request != nil && request.To != t.holder && leave > 0 {
		to = request.To
	}
	switch {
	case to == "" && !t.unconfirmed.Load():
		t.left = nil
	case t.left == nil || t.left.Holder != to:
		t.left = leftTo(to, leave)
	}
	return t.left
}

// hasLeft reports whether a holding is what the term's release has put in its place.
func (t *Term) hasLeft(h *Holding) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.left != nil && t.left.is(h)
}
