package tenure

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"
)

// ExpiryPolicy says by what a standby judges that a holder's TTL has passed.
type ExpiryPolicy uint8

const (
	// StoreClock steals when the record's age, by the store's clock, has
	// reached its TTL, or when [Observed] would.
	StoreClock ExpiryPolicy = iota

	// Observed steals when this replica has watched the record stand unchanged
	// for its TTL, on its own monotonic clock. It is for databases whose clock
	// may jump, and costs a TTL of waiting after each start.
	Observed
)

// sighting is the object as it was last read, and since when it has stood
// unchanged: the instant after the first answer that showed it so.
type sighting struct {
	object Object
	since  time.Time
}

func (s *sighting) of(obj Object) bool {
	if s == nil {
		return false
	}
	// A program that starts its versions at 1 again after a delete repeats
	// them, so the version alone does not tell that nothing has changed. That its
	// holder is asked to go is no change.
	was, is := asRenewed(s.object), asRenewed(obj)
	return was.Version == is.Version && wholeMilli(was.UpdatedAt) == wholeMilli(is.UpdatedAt) &&
		bytes.Equal(was.Payload, is.Payload)
}

// leftover is a term whose record this lease may have left in the store although
// nobody relies on it: its acquire or its release failed without a clear answer. Such
// a record is never taken up again. It is removed, which wakes the others: one that
// was taken up again and again would stay young, and keep the lease from a replica
// that could hold it.
type leftover struct {
	term    *Term
	leave   time.Duration // see [Lease.release]
	release bool          // that failed; otherwise an acquire
	at      time.Time
}

// look reads the record and notes since when it has stood as it is.
func (l *Lease) look(ctx context.Context) (Object, error) {
	obj, err := l.store.Get(leaseCall(ctx), l.cfg.Key)
	answered := time.Now()
	l.mu.Lock()
	before := l.seen
	switch {
	case errors.Is(err, ErrNotFound):
		l.seen = nil
	case err == nil && !before.of(obj):
		l.seen = &sighting{object: obj, since: answered}
	}
	if err == nil || errors.Is(err, ErrNotFound) {
		// A record that has been released can't come back. One that was acquired without
		// an answer may still come.
		l.leftover = slices.DeleteFunc(l.leftover, func(o leftover) bool { return o.release && !isTermOf(o.term.id, obj) })
	}
	l.mu.Unlock()

	if err == nil && (before == nil || !bytes.Equal(before.object.Payload, obj.Payload)) {
		if _, err := decodeHolding(obj, l.cfg.TTL); err != nil {
			l.cfg.Logger.Warn("lease record cannot be decoded; it counts as held by unknown until it expires",
				"lease", l.cfg.Key.String(), "replica", l.cfg.Holder, "error", err)
		}
	}
	return obj, err
}

func (l *Lease) lastSeen() *sighting {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen
}

// held says who holds the lease, by an object that was just read, and how soon
// it can expire: at once where it has.
func (l *Lease) held(obj Object) *HeldError {
	holding := l.decode(obj)
	left, byAge := holding.TTL, false
	if seen := l.lastSeen(); seen.of(obj) {
		left -= time.Since(seen.since)
	}
	// A record without a term was stamped by another program, by whatever clock
	// it has, and one of negative age by a clock that was ahead: their age tells
	// nothing.
	if l.cfg.Expiry == StoreClock && holding.Term != "" && holding.Age > 0 {
		left, byAge = min(left, holding.TTL-holding.Age), true
	}
	return &HeldError{Holding: holding, canExpireIn: left, byAge: byAge}
}

// heldByUnknown is for a record that was gone again when it was looked at.
func (l *Lease) heldByUnknown() *HeldError {
	return &HeldError{Holding: Holding{Key: l.cfg.Key, Holder: unknownHolder}}
}

func (l *Lease) decode(obj Object) Holding {
	holding, _ := decodeHolding(obj, l.cfg.TTL) // look has logged the error
	l.mu.Lock()
	own := slices.Contains(l.sent, holding.Term)
	l.mu.Unlock()
	// Another program's versions say nothing of ours; and a term that we are about to
	// begin, whose answer is under way while somebody reads, does not follow itself.
	if holding.Term != "" && !own {
		l.sawVersion(obj.Version)
	}
	return holding
}

// sends notes that the first write of a term is under way, until done is called.
func (l *Lease) sends(term string) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent = append(l.sent, term)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.sent = slices.DeleteFunc(l.sent, func(id string) bool { return id == term }); len(l.sent) == 0 {
			l.sent = nil // a lease that is held has no use for it
		}
	}
}

// sawVersion notes a version that a term's record has, and returns the greatest
// seen before.
func (l *Lease) sawVersion(v int64) (before int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before = l.newest
	l.newest = max(l.newest, v)
	return before
}

// leave notes a term that may stand in the store although nobody relies on it.
func (l *Lease) leave(left leftover) {
	const most = 64 // a store that is down makes one at each attempt
	left.at = time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leftover = slices.DeleteFunc(l.leftover, func(o leftover) bool {
		return o.term.id == left.term.id || l.hasExpired(o)
	})
	if len(l.leftover) == most {
		l.leftover = l.leftover[1:]
	}
	l.leftover = append(l.leftover, left)
}

// hasExpired reports whether a leftover's record has expired by now, like any record
// that nobody renews.
func (l *Lease) hasExpired(o leftover) bool { return time.Since(o.at) > l.cfg.TTL }

// leftoverIn returns the leftover whose record a holding is.
func (l *Lease) leftoverIn(holding Holding) (o leftover, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.leftover, func(o leftover) bool { return o.term.id == holding.Term && !l.hasExpired(o) })
	if i < 0 {
		return o, false
	}
	return l.leftover[i], true
}

func (l *Lease) isLeftover(holding Holding) bool {
	_, ok := l.leftoverIn(holding)
	return ok
}

// removeLeftover removes the record of a leftover as it was read, or leaves it to the
// replica to which it was to be handed over. It returns nil also where somebody else
// came first.
func (l *Lease) removeLeftover(ctx context.Context, holding Holding) error {
	o, ok := l.leftoverIn(holding)
	if !ok {
		return nil
	}
	o.term.atVersion(holding.Version)
	err := l.giveUp(ctx, o.term, o.leave)
	if errors.Is(err, ErrNotFound) || errors.Is(err, ErrConflict) {
		return nil
	}
	return err
}

// owesRelease reports whether a release has failed whose record may still stand.
func (l *Lease) owesRelease() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.leftover, func(o leftover) bool { return o.release && !l.hasExpired(o) })
}

// leftAnything reports whether anything may stand that this lease has left behind.
func (l *Lease) leftAnything() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.leftover, func(o leftover) bool { return !l.hasExpired(o) })
}

// mayTake reports whether the record need not expire before this lease takes it
// over.
func (l *Lease) mayTake(holding Holding) bool { return l.reclaims(holding) || l.offered(holding) }

func (l *Lease) offered(holding Holding) bool {
	return holding.Offered && (holding.Holder == l.cfg.Holder || holding.Holder == "")
}

// reclaims reports whether the record is one that an earlier life of this replica
// has left. That it names the same holder does not tell: it may be the term that
// this very lease has begun, or begins in another goroutine.
func (l *Lease) reclaims(holding Holding) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cfg.Reclaim && holding.Term != "" && holding.Term != l.begun && !slices.Contains(l.sent, holding.Term) &&
		holding.Holder == l.cfg.Holder
}
