package tenure

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/sighting"
)

// Lease is the right to do one job, as one replica sees it. It acquires, steals, renews
// and releases. Most programs leave that to a [Coordinator].
//
// All methods are safe for concurrent use. They return errors of the store as they are. After
// such an error the write may or may not have happened; the next call finds out.
type Lease struct {
	store   Store
	traits  Traits // of the store
	cfg     LeaseConfig
	process record.Process // which makes this lease
	memory  sighting.Memory[orphan]
}

// orphan is what a lease keeps of a term that nothing relies on any more, but whose record may
// still stand.
type orphan struct {
	term     *Term
	offerFor time.Duration // see [Lease.release]
}

// NewLease returns a lease in a store. It does no I/O. An [ErrInvalid] names everything
// that is wrong with the config.
func NewLease(store Store, cfg LeaseConfig) (*Lease, error) {
	if objects.IsNil(store) {
		return nil, fmt.Errorf("tenure: new lease: %w: store is nil", ErrInvalid)
	}
	name := cfg.Name
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("tenure: new lease: %w", err)
	}
	traits := store.Traits()
	if traits.Nameless {
		if name != "" {
			return nil, fmt.Errorf("tenure: new lease: %w: Name is %q, and the store keeps no names", errors.ErrUnsupported, name)
		}
		cfg.Name = ""
	}
	if traits.Clockless {
		cfg.Expiry = ExpiryObserved
	}
	return &Lease{store: store, traits: traits, cfg: cfg, process: record.ThisProcess()}, nil
}

// Config returns the config of the lease with its defaults filled in.
func (l *Lease) Config() LeaseConfig {
	cfg := l.cfg
	cfg.Labels = maps.Clone(cfg.Labels)
	return cfg
}

// Key returns the key of the lease.
func (l *Lease) Key() Key { return l.cfg.Key }

// get, put and remove mark their call as a lease's: on Postgres it then gets a connection,
// however busy the application is.

func (l *Lease) get(ctx context.Context) (Object, error) {
	return l.store.Get(objects.WithLeaseCall(ctx), l.cfg.Key)
}

func (l *Lease) put(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	return l.store.PutIf(objects.WithLeaseCall(ctx), obj, cond)
}

// remove deletes the object, if the store is on that server, and wakes its watches, if the
// store can.
func (l *Lease) remove(ctx context.Context, version int64, on Lineage) error {
	ctx = objects.WithLeaseCall(ctx)
	cond := IfVersion(version).OnServer(on.Server, 0)
	if notifier, ok := l.store.(Notifier); ok {
		return notifier.DeleteAndWake(ctx, l.cfg.Key, cond)
	}
	err := l.store.DeleteIf(ctx, l.cfg.Key, cond) // and not that of a store which this one wraps
	if err == nil || !objects.Refusal(err) {
		l.wake(ctx)
	}
	return err
}

// wake wakes all watches of the record. The record has just been written, perhaps in the moment
// before ctx ended. wake ignores errors, because a hint may be lost in any case.
func (l *Lease) wake(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = Wake(ctx, l.store, l.cfg.Key)
}

func (l *Lease) warn(msg string, err error) {
	id := objects.ID(l.cfg.Key)
	l.cfg.Logger.Warn(logtext.Line(id, msg), append(logtext.Attrs(id, l.cfg.Holder), "error", err)...)
}

// caller says how a lease's methods are called. The zero value is for a program that uses
// [Lease] directly.
type caller struct {
	timeout  time.Duration // of each call to the store; 0: only the context limits it
	confirms bool          // the caller confirms a takeover before its job begins
}

func (by caller) read(ctx context.Context) (context.Context, context.CancelFunc) {
	if by.timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, by.timeout)
}

// write returns a context that a shutdown does not end: an acquire that is cut off halfway may
// leave the record of a term that no replica holds, and all replicas would wait for its TTL.
func (by caller) write(ctx context.Context) (context.Context, context.CancelFunc) {
	if by.timeout != 0 {
		ctx = context.WithoutCancel(ctx)
	}
	return by.read(ctx)
}

// Read returns who holds the lease, or to which replica the lease is offered: see
// [Holding.OfferedTo]. It returns [ErrNotFound] if there is no record.
func (l *Lease) Read(ctx context.Context) (Holding, error) {
	read, err := l.see(ctx)
	return read.holding, err
}

// reading is a lease's object as it was read.
type reading struct {
	Object
	stored  record.Object // the same, for package record
	holding Holding
	on      Lineage // in which it was read; zero if that does not matter
}

// see reads the record and remembers since when it has stood unchanged.
func (l *Lease) see(ctx context.Context) (r reading, err error) {
	r.Object, err = l.get(ctx)
	answered := time.Now()
	if errors.Is(err, ErrNotFound) {
		l.memory.Saw(nil, answered)
	}
	if err != nil {
		return r, err
	}
	return l.note(r.Object, answered), nil
}

// look is see for a decision that depends on the lineage. The reading has a lineage even if there is no
// record.
func (l *Lease) look(ctx context.Context, by caller) (r reading, err error) {
	ctx, cancel := by.read(ctx)
	defer cancel()
	on, err := l.lineage(ctx)
	for tries := 0; err == nil && tries < 3; tries++ {
		var readErr error
		if r, readErr = l.see(ctx); readErr != nil && !errors.Is(readErr, ErrNotFound) {
			return r, readErr
		}
		before := on
		// This does I/O only if the read has come from another server.
		if on, err = l.lineage(ctx); err == nil && on.Server == before.Server && on.Mark == before.Mark {
			r.on = on
			return r, readErr
		}
	}
	return reading{}, cmp.Or(err, ErrMoved)
}

// note remembers since when a record has stood unchanged, given the time when it was seen.
func (l *Lease) note(obj Object, answered time.Time) reading {
	r := reading{Object: obj, stored: stored(obj)}
	var undecodable error
	r.holding, undecodable = decodeHolding(r.Object, l.cfg.TTL)
	if l.memory.Saw(&r.stored, answered) && undecodable != nil {
		l.warn("lease record cannot be decoded; it counts as held by unknown until it expires", undecodable)
	}
	if r.stored.Resumed() && l.memory.IsLast(r.holding.Term) {
		l.memory.FoundCopy(r.holding.Term)
	}
	// The versions of other programs' records do not count. Neither does that of a term which
	// this replica is just beginning: if its record is read before its acquire is answered, its
	// token would seem to repeat a known one.
	if r.holding.Term != "" && !l.memory.IsBeginning(r.holding.Term) {
		l.memory.SawVersion(r.Version)
	}
	return r
}

// heldAfter returns who holds the lease, according to the last change that a subscription has
// seen. It returns nil if that is unknown, or if an attempt to acquire may do more than read
// the same again.
func (l *Lease) heldAfter(hints Subscription) *HeldError {
	change, ok := lastChange(hints)
	if !ok || change.Deleted || l.memory.HasSeenNewer(change.Object.Version) {
		return nil
	}
	r := l.note(change.Object, change.Arrived)
	if _, ok := l.memory.Orphan(r.holding.Term); ok || l.mayTakeUnexpired(r.holding) {
		return nil
	}
	if held := l.heldError(r); held.canExpireIn > 0 {
		return held
	}
	return nil
}

// heldError returns who holds the lease, and how soon the record can expire: 0 or less if it has
// expired, so that a standby may steal the lease.
func (l *Lease) heldError(r reading) *HeldError {
	h := record.Holding{Term: r.holding.Term, TTL: r.holding.TTL, Age: r.holding.Age}
	held := &HeldError{Holding: r.holding, settlesIn: r.settlesIn(l)}
	held.canExpireIn, held.byAge = l.memory.LastSeen().CanExpireIn(r.stored, h, l.cfg.Expiry == ExpiryObserved)
	if held.settlesIn > held.canExpireIn { // a failover has to settle first, and an earlier look does not help
		held.canExpireIn, held.byAge = held.settlesIn, true
	}
	return held
}

// mayTakeUnexpired reports whether this lease may take over the record before it expires.
func (l *Lease) mayTakeUnexpired(h Holding) bool { return l.reclaims(h) || l.isOffered(h) }

func (l *Lease) isOffered(h Holding) bool {
	return h.isOffer() && (h.OfferedTo == l.cfg.Holder || h.OfferedTo == "")
}

// reclaims reports whether an earlier run of this replica left the record. The same holder's
// name is not enough: the term may be one that this process has begun or is beginning, through
// this lease or another one, or one that another process has resumed.
func (l *Lease) reclaims(h Holding) bool {
	return l.cfg.AssumeUniqueHolder && h.Holder == l.cfg.Holder && h.Labels[UniqueWithin] == l.cfg.Labels[UniqueWithin] && h.Term != "" && !h.resumed && !l.process.HasBegun(h.Term)
}

// predecessors returns the holders that may still be working if this lease takes a record over:
// the record's holder, unless it has released the lease, and the holders that it had not
// confirmed to be gone, but never this replica. Of each holder only the last term counts.
func (l *Lease) predecessors(h Holding) []Holding {
	others := slices.Clone(h.unconfirmed)
	if !h.isOffer() {
		others = slices.DeleteFunc(others, func(p Holding) bool { return p.Holder == h.Holder && maps.Equal(p.Labels, h.Labels) })
		others = append(others, h)
	}
	return slices.DeleteFunc(others, l.isOwn)
}

// lostHolder returns the holder that a failover may have lost, if a record has that mark; empty: there is none. It may hang, and
// nobody knows its name. The first term of a lineage confirms that it is gone, unless a holder has gone on over the failover.
// Later ones find a record or an offer of this lineage.
func (l *Lease) lostHolder(by caller, on Lineage, mark string) []Holding {
	if !by.confirms || on.isWhole() || mark == on.Mark {
		return nil
	}
	return []Holding{{Key: l.cfg.Key, Holder: record.Unknown}}
}

// isWhole reports whether nothing can have been lost before this lineage began.
func (on Lineage) isWhole() bool { return on.Mark == "" || on.Age >= objects.SettledAge }

// isOwn reports whether a record is that of a term of this replica, whose job has returned.
func (l *Lease) isOwn(h Holding) bool {
	_, isOrphan := l.memory.Orphan(h.Term)
	return l.memory.IsLast(h.Term) || isOrphan || l.reclaims(h)
}

// reread looks at the record of a term after a write has found a version that the term does not
// know. If the record is still the term's, because the answer to a write was lost, reread notes the
// version and returns nil, as it does if a failover has lost the record. Otherwise it ends the
// term, unless the read failed, or a release of the term may have deleted the record.
func (l *Lease) reread(ctx context.Context, term *Term) error {
	known, _ := term.at.last()
	r, err := l.look(ctx, caller{})
	missing := errors.Is(err, ErrNotFound)
	switch {
	case err != nil && !missing:
		return err
	case (missing || !bytes.Equal(r.Payload, term.payload)) && term.Valid() && term.mayReassert(r, !missing):
		term.at.noteLost(r.Version, r.on)
		return nil
	case missing && !term.deleteSent.Load():
		return term.lostTo(&lostError{key: l.cfg.Key})
	case missing:
		return err
	case !bytes.Equal(r.Payload, term.payload):
		return term.lostTo(&lostError{key: l.cfg.Key, to: &r.holding})
	case !l.recognises(term, known, r):
		why := "is renewed by a copy of this process"
		if r.stored.Resumed() {
			why = "was resumed elsewhere"
		}
		return term.lostTo(&lostError{key: l.cfg.Key, to: &r.holding, why: why})
	}
	term.at.seenIn(r.on)
	return nil
}

// recognises reports whether the term itself, and not another process, wrote a record that has
// the term's payload. If so, it notes the version and any request.
func (l *Lease) recognises(term *Term, known int64, r reading) bool {
	request := r.stored.Request()
	elsewhere := r.stored.Resumed() && term.resumed == nil // whatever the version says
	if elsewhere || !term.at.recognise(known, r.Version, term.resumed != nil, request) {
		l.memory.FoundCopy(term.id)
		return false
	}
	if request != nil {
		term.request.Store(request)
	}
	return true
}

// lineage returns the lineage of the lease's store, or the zero Lineage if it has none.
func (l *Lease) lineage(ctx context.Context) (Lineage, error) {
	return l.store.Lineage(ctx)
}

// absentSettlesIn returns how long it is until the lease may be taken if there is no record: a failover may have
// lost the record of a holder that still trusts its term. 0 or less: the lease may be taken.
func (l *Lease) absentSettlesIn(on Lineage) time.Duration {
	if l.cfg.Key.Type == objects.SessionType { // its ID is new, so no process can have held it
		return 0
	}
	return sighting.SettlesIn(objects.Lineage(on), "", l.cfg.TTL, l.cfg.Expiry == ExpiryObserved)
}

// settlesIn returns how long it is until a record that may be from an earlier lineage may be taken over.
func (r reading) settlesIn(l *Lease) time.Duration {
	return sighting.SettlesIn(objects.Lineage(r.on), r.stored.Mark(), max(l.cfg.TTL, r.holding.TTL), l.cfg.Expiry == ExpiryObserved)
}

// isCurrent reports whether the record was written by a term that was valid in this lineage.
func (r reading) isCurrent() bool { return r.on.Mark == "" || r.stored.Mark() == r.on.Mark }

// mayReassert reports whether a valid term has to write its record again, because a failover has
// lost it: any record that stands is older than the term, and the term has not written in this
// lineage yet. Exists says whether there is a record.
func (t *Term) mayReassert(r reading, exists bool) bool {
	return !t.at.vouchedIn(r.on) && (!exists || !r.isCurrent() && r.stored.AsRenewed().Version < t.token)
}

// compare judges a renewal that has been answered. If it was the first one in its lineage, and the term owns more
// than its record, compare has that checked against the store: the renewal must not extend a claim whose row a
// failover has lost.
func (t *Term) compare(ctx context.Context, version int64, on Lineage) error {
	compare := t.comparison.Load()
	if t.at.vouchedIn(on) || compare == nil && t.key.Type != objects.SessionType {
		return nil
	}
	t.at.advance(version)
	if compare == nil {
		return fmt.Errorf("%w: the database has failed over, and only the process that began a session knows its claims", ErrHeld)
	}
	return (*compare)(ctx, objects.Lineage(on))
}

// saysOf returns what the record of a term says of its lineage: only a session's names the server, for the processes that
// write under its claims.
func (l *Lease) saysOf(on Lineage) Lineage {
	if l.cfg.Key.Type != objects.SessionType {
		on.Server = ""
	}
	return on
}

// writesIn returns what the record of a valid term is written with in a lineage. A session's record keeps what it says of
// an earlier one until its claims are compared, so that no other process resumes it, and no claim that the session has lost
// fences a write.
func (t *Term) writesIn(on Lineage) Lineage {
	if vouched := t.at.vouchedBy(); t.key.Type == objects.SessionType && vouched.Mark != "" && vouched.Mark != on.Mark {
		return vouched
	}
	return on
}
