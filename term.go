package tenure

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
)

// The causes with which a term ends. The job finds them with [context.Cause].
var (
	// ErrLost means that a term is over because another replica has the lease, or because its
	// record is gone.
	ErrLost = objects.ErrLost

	// ErrDeadline means that a term is over because it was not renewed in time, or that it
	// never began because the answer to its acquire came too late.
	ErrDeadline = errors.New("lease not renewed in time")

	// ErrResigned means that [Coordinator.Resign] gave the term up, or that another process
	// requested that: see [Lease.RequestRelease].
	ErrResigned = errors.New("lease resigned")

	// ErrShutdown means that the context of [Coordinator.Run] is done.
	ErrShutdown = errors.New("replica is shutting down")

	// ErrUnhealthy means that a term is over because [CoordinatorConfig.Check] failed, or
	// because FencePredecessor kept failing for a TTL.
	ErrUnhealthy = errors.New("replica is unhealthy")

	// ErrJobEnded means that one of the job's funcs returned or panicked during the term.
	ErrJobEnded = errors.New("job ended")
)

// isLoss reports whether a term with this cause is over because the lease is lost, and not
// because this replica ended it. An error of the job or of its check does not count, whatever
// it wraps.
func isLoss(cause error) bool {
	return (errors.Is(cause, ErrLost) || errors.Is(cause, ErrDeadline)) &&
		!errors.Is(cause, ErrJobEnded) && !errors.Is(cause, ErrUnhealthy)
}

// isLossOf reports whether an error means that this term is lost. A bare [ErrLost] may come from
// another lease, or from a gate.
func isLossOf(term *Term, err error) bool {
	var lost *lostError
	return errors.Is(err, ErrLost) && (!term.Valid() || errors.As(err, &lost) && lost.key == term.key)
}

// Term is one unbroken holding of a lease, from its acquire or steal until its release or
// loss. All methods are safe for concurrent use and do no I/O. A nil Term, as
// [TermFromContext] returns it outside a job, is not valid and has no time remaining; its
// other methods panic and say so.
type Term struct {
	key        Key
	id         string
	holder     string
	token      int64
	acquiredAt time.Time
	payload    []byte        // of the record, the same bytes for the whole term
	trusted    time.Duration // TTL − Margin
	resumed    *Object       // the record of a term that Resume continues; nil: this lease began the term
	witnessed  bool          // the record names a witness
	confirms   bool          // whoever takes the lease over confirms that

	stolenFrom   *Holding                  // nil: no replica held the lease
	predecessors atomic.Pointer[[]Holding] // see unconfirmed

	ended      atomic.Pointer[error]          // why the term is over; nil: it is not
	request    atomic.Pointer[record.Request] // to release the lease; the last one seen
	deleteSent atomic.Bool                    // by a release whose answer we don't know
	sealed     atomic.Bool                    // see [Lease.Seal]
	trust      atomic.Pointer[trust]          // nil: a local term, which no time ends
	longRun    atomic.Pointer[time.Time]      // when the oldest run of the job began, if the record is to say so; nil: it is not
	clock      clock.Clock                    // nil for a local term
	renewer    atomic.Pointer[renewer]        // nil: no keeper renews the term
	comparison atomic.Pointer[comparison]     // of what the term owns beside its record; nil: it owns nothing, or another process knows

	at position // of the record in the store

	mu       sync.Mutex      // guards the fields below; never held across I/O
	offered  *record.Payload // what the release puts in place of the record; nil: nothing
	renewing chan struct{}   // closed when the latest renewal ends
}

const termKey objects.RightKey = "term"

// withTerm returns the context of a job that runs for a term.
func withTerm(ctx context.Context, term *Term) context.Context {
	return context.WithValue(context.WithValue(ctx, termKey, term), objects.Right, term)
}

// TermFromContext returns the term for which a job runs, or nil if ctx is not derived from
// a job's context. [Term] says what a nil Term does.
func TermFromContext(ctx context.Context) *Term {
	term, _ := ctx.Value(termKey).(*Term)
	return term
}

// trust is the time until which a holder may believe in its term: attempt + TTL − Margin, on both
// clocks of the process. While the machine is suspended, the monotonic clock stands still but the
// TTL keeps running, so the clock that shows less time is right.
type trust struct{ deadline clock.Reading }

func newTrust(attempt clock.Reading, d time.Duration) *trust {
	return &trust{deadline: attempt.Add(d)}
}

// local reports whether there is no lease to lose.
func (t *Term) local() bool { return t.payload == nil }

// must returns the term, or panics if it is nil: a token of 0 would pass a gate that has seen none.
func (t *Term) must(method string) *Term {
	if t == nil {
		panic("tenure: " + method + " of a nil Term; TermFromContext returns one for a context that does not come from a job")
	}
	return t
}

// Key returns the key of the lease.
func (t *Term) Key() Key { return t.must("Key").key }

// Record returns the payload of the lease's object, which a [Fencer] compares. The bytes stay
// the same for the whole term, and are unique to it. The caller must not change them. It is nil
// if there is no lease to lose: see [Traits].
func (t *Term) Record() []byte { return t.must("Record").payload }

// ID returns the term's UUID.
func (t *Term) ID() string { return t.must("ID").id }

// Token returns the fencing token: of two terms of one lease, the later always has the greater
// one. If there is no lease to lose, the token comes from the process clock, and increases as
// long as that clock is not set back between two processes.
func (t *Term) Token() int64 { return t.must("Token").token }

// Holder returns the name under which the term was acquired.
func (t *Term) Holder() string { return t.must("Holder").holder }

// AcquiredAt returns when the term began, by the clock of the process that began it.
func (t *Term) AcquiredAt() time.Time { return t.must("AcquiredAt").acquiredAt }

// Witnessed reports whether the record names a witness, which was told of the term. When this process and all others under the
// witness are dead, the witness releases the lease, so that standbys need not wait until it expires. The lease still has to
// expire if the term is too young, if the lease is in another store than the one that the witness opens, or if the witness has
// itself died. See package witness.
func (t *Term) Witnessed() bool { return t.must("Witnessed").witnessed }

// timeLeft returns how long the term may still be trusted, by both clocks: 0 or less if it may
// not. All questions about the trust in a term are answered here.
func (t *Term) timeLeft() time.Duration {
	trust := t.trust.Load()
	if trust == nil {
		return math.MaxInt64
	}
	return trust.deadline.Until(t.clock())
}

// trustLasts reports whether the term could still be trusted if it were not over.
func (t *Term) trustLasts() bool { return t.trust.Load() != nil && t.timeLeft() > 0 }

// sinceRenewal returns how long ago the last successful acquire or renewal was sent, by both
// clocks. It is negative for a local term.
func (t *Term) sinceRenewal() time.Duration { return t.trusted - t.timeLeft() }

// Deadline returns when the trust in the term ends unless it is renewed. It is the zero time if
// there is no lease to lose.
//
// It is computed from both clocks of the process at the time of the call. After the machine was
// suspended, less time remains than [time.Until] says, so prefer [Term.Remaining].
func (t *Term) Deadline() time.Time {
	trust := t.must("Deadline").trust.Load()
	if trust == nil {
		return time.Time{}
	}
	now := t.clock()
	return now.Mono.Add(trust.deadline.Until(now))
}

// Remaining returns how much trust is left: 0 once the term is over. It also reads the wall
// clock, so it is right even after the machine was suspended.
func (t *Term) Remaining() time.Duration {
	if !t.Valid() {
		return 0
	}
	return max(0, t.timeLeft())
}

// Valid reports whether the caller may still rely on the term. Once false, it stays false. True
// means that no other replica had begun a term at the time of the call, under the conditions that
// the package documentation names; it cannot vouch for the next instant. Where that matters,
// fence the write.
func (t *Term) Valid() bool {
	if t == nil || t.id == "" || t.ended.Load() != nil {
		return false
	}
	if t.timeLeft() > 0 {
		return true
	}
	t.end(ErrDeadline) // otherwise the term would be valid again if the wall clock were set back
	return false
}

// end makes the term invalid for good. The first cause counts.
func (t *Term) end(cause error) { t.ended.CompareAndSwap(nil, &cause) }

// lostTo ends the term, and returns why.
func (t *Term) lostTo(lost *lostError) error {
	t.end(lost)
	return lost
}

// over returns why the term is not valid, or nil if it is.
func (t *Term) over() error {
	if t.Valid() {
		return nil
	}
	return *t.ended.Load()
}

// isFor returns an error if a lease with this key cannot act on the term.
func (t *Term) isFor(op string, key Key) error {
	if t == nil || t.id == "" {
		return fmt.Errorf("tenure: %s %s: %w: no term is given", op, key, ErrInvalid)
	}
	if t.key != key {
		return fmt.Errorf("tenure: %s %s: %w: the term is one of %s", op, key, ErrInvalid, t.key)
	}
	return nil
}

// unconfirmed returns the earlier holders that may still be working, oldest first. It is nil if
// there are none, or once the takeover is confirmed.
func (t *Term) unconfirmed() []Holding {
	if predecessors := t.predecessors.Load(); predecessors != nil {
		return *predecessors
	}
	return nil
}

// confirm notes that the predecessors are gone, or that no check of them will follow.
func (t *Term) confirm() { t.predecessors.Store(nil) }

// extend takes the answer to a renewal that was sent at attempt. It returns false if the
// term was over before the answer came: a late yes is a no.
func (t *Term) extend(version int64, attempt clock.Reading, on Lineage) bool {
	t.at.confirmRenewal(version, on)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.Valid() {
		return false
	}
	if !attempt.Mono.Before(t.lastAttempt().Mono) {
		t.trust.Store(newTrust(attempt, t.trusted))
	}
	return true
}

// lastAttempt returns the instant before the last successful acquire or renewal was sent.
func (t *Term) lastAttempt() clock.Reading { return t.trust.Load().deadline.Add(-t.trusted) }

// renewal notes that a renewal is under way, until done is called.
func (t *Term) renewal() (done func()) {
	renewing := make(chan struct{})
	t.mu.Lock()
	defer t.mu.Unlock()
	t.renewing = renewing
	return func() { close(renewing) }
}

// giveWay lets a renewal that is under way go first. Fenced writes share their lock on the record
// and overtake a renewal that waits for it, so a stream of them could delay the renewal for longer
// than the trust lasts.
func (t *Term) giveWay(ctx context.Context) {
	const longest = 100 * time.Millisecond // a renewal that hangs must not stop the writes
	t.mu.Lock()
	renewing := t.renewing
	t.mu.Unlock()
	if renewing == nil {
		return
	}
	timer := time.NewTimer(longest)
	defer timer.Stop()
	select {
	case <-renewing:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// comparison checks what a term owns against the store, in a new lineage.
type comparison func(ctx context.Context, on objects.Lineage) error

// renewer renews a term before its renewal is due.
type renewer func(ctx context.Context) error

// renewNow renews the term, which lets it write on the server that the store is on now. It reports false if the term is
// over, or no keeper renews it.
func (t *Term) renewNow(ctx context.Context) (bool, error) {
	renew := t.renewer.Load()
	if renew == nil || !t.Valid() {
		return false, nil
	}
	return true, (*renew)(ctx)
}

// offer returns what a release puts in place of the term's record, or nil if it puts nothing there.
// Each attempt gets the same offer, so that it is recognised if the answer was lost. After a failover
// only an offer, which shows that the term was valid, frees the lease at once, and shows that no holder was lost.
func (t *Term) offer(lasts time.Duration, failedOver bool) *record.Payload {
	t.mu.Lock()
	defer t.mu.Unlock()
	var to string
	if request := t.request.Load(); request != nil && request.To != t.holder && lasts > 0 {
		to = request.To
	}
	switch {
	case to == "" && t.unconfirmed() == nil && !failedOver:
		t.offered = nil
	case t.offered == nil || t.offered.Holder != to:
		t.offered = record.Offer(to, lasts)
	}
	return t.offered
}

// hasOffered reports whether a record is the offer that this term's release has made.
func (t *Term) hasOffered(h *Holding) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.offered != nil && h != nil && h.Term == t.offered.Term
}
