package tenure

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/sighting"
	"github.com/tenurelib/tenure/internal/witnessed"
)

// Lease is the right to do one job, as one replica sees it. It acquires, steals, renews
// and releases. Most programs leave that to a [Coordinator].
//
// All methods are safe for concurrent use. They return errors of the store as they are. After
// such an error the write may or may not have happened; the next call finds out.
type Lease struct {
	store  Store
	cfg    LeaseConfig
	memory sighting.Memory[orphan]
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
	if isNameless(store) {
		if name != "" {
			return nil, fmt.Errorf("tenure: new lease: %w: Name is %q, and the store keeps no names", errors.ErrUnsupported, name)
		}
		cfg.Name = ""
	}
	if isClockless(store) {
		cfg.Expiry = Observed
	}
	return &Lease{store: store, cfg: cfg}, nil
}

// Config returns the config of the lease with its defaults filled in.
func (l *Lease) Config() LeaseConfig {
	cfg := l.cfg
	cfg.Labels = maps.Clone(cfg.Labels)
	return cfg
}

// Key returns the key of the lease.
func (l *Lease) Key() Key { return l.cfg.Key }

// TryAcquire begins a term if the lease is free, with one write. If the record of another term
// stands, even an expired one, it returns [ErrHeld].
func (l *Lease) TryAcquire(ctx context.Context) (*Term, error) {
	return l.acquire(ctx, caller{}, true, false)
}

// StealExpired begins a term in place of an expired record. It returns [ErrHeld] if the record
// has not expired, [ErrNotFound] if there is none, and [ErrConflict] if another replica wrote
// first.
func (l *Lease) StealExpired(ctx context.Context) (*Term, error) {
	return l.takeOver(ctx, caller{}, true)
}

// AcquireOrSteal begins a term if the lease is free or has expired; otherwise it returns
// [ErrHeld]. While the lease is held, it costs one read.
func (l *Lease) AcquireOrSteal(ctx context.Context) (*Term, error) {
	return l.acquire(ctx, caller{}, false, true)
}

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
	ctx = objects.OnServer(objects.WithLeaseCall(ctx), on.Server)
	if notifier, ok := l.store.(Notifier); ok {
		return notifier.DeleteAndWake(ctx, l.cfg.Key, version)
	}
	return l.store.DeleteIf(ctx, l.cfg.Key, version)
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

// acquire creates the record or takes it over, and tries first what is likelier to succeed.
func (l *Lease) acquire(ctx context.Context, by caller, likelyFree, steal bool) (*Term, error) {
	likelyFree = likelyFree || l.memory.LastSeen() == nil
	// Another replica's write may come between our read and our write. If it has done so
	// three times, the lease is held by a faster one.
	for range 3 {
		if likelyFree {
			looking, cancel := by.read(ctx)
			on, err := l.lineage(looking)
			cancel()
			if err != nil {
				return nil, err
			}
			if l.freeIn(on) <= 0 {
				term, err := l.begin(ctx, by, IfAbsent(), on, nil)
				if !errors.Is(err, ErrExists) && !errors.Is(err, ErrMoved) {
					return term, err
				}
			}
		}
		term, err := l.takeOver(ctx, by, steal)
		if !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrConflict) {
			return term, err
		}
		likelyFree = errors.Is(err, ErrNotFound)
	}
	// Each time, a record was in the way that was gone when it was read.
	return nil, &HeldError{Holding: Holding{Key: l.cfg.Key, Holder: record.Unknown}}
}

// takeOver begins a term in place of the record that stands, if this lease may take the record
// or, where it may steal, if the record has expired.
func (l *Lease) takeOver(ctx context.Context, by caller, steal bool) (*Term, error) {
	read, err := l.look(ctx, by)
	switch in := l.freeIn(read.on); {
	case errors.Is(err, ErrNotFound) && in > 0:
		return nil, &HeldError{Holding: Holding{Key: l.cfg.Key, Holder: record.Unknown}, canExpireIn: in, byAge: true, settlesIn: in}
	case err != nil:
		return nil, err
	}
	held := l.held(read)
	from := held.Holding
	if !steal || held.canExpireIn > 0 { // the rules are CanExpireIn and SettlesIn of package sighting
		switch removed, err := l.removeOrphan(ctx, by, read); {
		case err != nil:
			return nil, err
		case removed:
			return nil, fmt.Errorf("tenure: steal %s: %w", l.cfg.Key, ErrNotFound)
		case held.settlesIn > 0 || !l.mayTake(from):
			return nil, held
		}
	}
	stolen := !from.isOffer() && !l.mayTake(from)
	term, err := l.begin(ctx, by, IfVersion(from.Version), read.on, l.predecessors(from))
	if err == nil && stolen {
		term.stolenFrom = &from
	}
	if err == nil && held.canExpireIn > 0 && l.cfg.TTL < from.TTL {
		l.wake(ctx) // the standbys are waiting for the old record, which would have expired later
	}
	return term, err
}

// held returns who holds the lease, and how soon the record can expire: 0 or less if it has
// expired, so that a standby may steal the lease.
func (l *Lease) held(r reading) *HeldError {
	h := record.Holding{Term: r.holding.Term, TTL: r.holding.TTL, Age: r.holding.Age}
	held := &HeldError{Holding: r.holding, settlesIn: r.settlesIn(l)}
	held.canExpireIn, held.byAge = l.memory.LastSeen().CanExpireIn(r.stored, h, l.cfg.Expiry == Observed)
	if held.settlesIn > held.canExpireIn {
		held.canExpireIn, held.byAge = held.settlesIn, true
	}
	return held
}

// begin writes the record of a new term, on the server on which that was decided.
func (l *Lease) begin(ctx context.Context, by caller, cond WriteCondition, on Lineage, predecessors []Holding) (*Term, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("tenure: acquire %s: %w", l.cfg.Key, err)
	}
	ctx, cancel := by.write(ctx)
	defer cancel()
	witness := ""
	// A program that acquires without a coordinator may do so for another process, which continues when this one is
	// dead: see Resume.
	if by != (caller{}) || witnessed.IsOwn(ctx) {
		witness = l.tellWitness(ctx)
	}
	now := clock.From(ctx)
	attempt := now()
	id := uuid.NewString()
	term := &Term{
		key: l.cfg.Key, id: id, holder: l.cfg.Holder, acquiredAt: attempt.Mono, witnessed: witness != "",
		trusted: l.cfg.TTL - l.cfg.Margin,
		clock:   now,
		inDoubt: 1, // the write that begins it
		on:      on,
		payload: record.Payload{
			Holder:       l.cfg.Holder,
			AcquiredAtMS: attempt.Wall.UnixMilli(),
			Term:         id,
			TTLMS:        (l.cfg.TTL + time.Millisecond - 1).Milliseconds(), // never less than we trust
			Witness:      witness,
		}.Encode(),
	}
	if len(predecessors) > 0 {
		term.predecessors.Store(&predecessors)
	}
	defer l.memory.Begins(id)()
	obj, err := l.put(ctx, l.object(term, on), cond.OnServer(on.Server, l.memory.Newest()))
	answered := err == nil || objects.Answered(err)
	if answered && witness != "" {
		witnessed.Answered(ctx, l.cfg.Key.Type, l.cfg.Key.ID)
	}
	if err != nil {
		if !answered {
			l.memory.AddOrphan(term.id, orphan{term: term}, false, l.cfg.TTL)
		}
		return nil, err
	}
	term.token, term.version, term.greatest, term.inDoubt, term.vouched = obj.Version, obj.Version, obj.Version, 0, on.Mark
	term.trust.Store(newTrust(attempt, term.trusted))
	l.memory.Began(id)
	if newest := l.memory.SawVersion(obj.Version); obj.Version <= newest {
		l.abandon(ctx, term) // a replica that has not seen the newer token can still hold the lease
		return nil, fmt.Errorf("tenure: acquire %s: %w: fencing token %d would follow %d: the store was restored from an older state, or made anew, and its versions (resource_version in a table) are behind; raise them above %[4]d",
			l.cfg.Key, ErrSetup, obj.Version, newest)
	}
	if !term.Valid() {
		l.abandon(ctx, term)
		return nil, fmt.Errorf("tenure: acquire %s: the answer took %v: %w", l.cfg.Key, term.sinceRenewal(), ErrDeadline)
	}
	if !by.confirms {
		term.confirm()
	}
	return term, nil
}

// tellWitness returns the name of the witness that will look for a record of this lease when this process is dead, or
// "" if there is none.
func (l *Lease) tellWitness(ctx context.Context) string {
	witness, err := witnessed.Tell(ctx, l.cfg.Key.Type, l.cfg.Key.ID) // before the write: if it lands, the witness knows where to look
	if err != nil {
		l.cfg.Logger.Warn(logLine(l.cfg.Key, "no witness; if this process dies, its leases have to expire"),
			append(logAttrs(l.cfg.Key, l.cfg.Holder), "error", err)...)
	}
	return witness
}

// wake wakes all watches of the record. The record has just been written, perhaps in the moment
// before ctx ended. wake ignores errors, because a hint may be lost in any case.
func (l *Lease) wake(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = Wake(ctx, l.store, l.cfg.Key)
}

// abandon releases a term that has just begun and cannot be used. Otherwise the other replicas
// would have to wait for its TTL.
func (l *Lease) abandon(ctx context.Context, term *Term) {
	term.end(ErrLost)
	if l.vacate(ctx, term, 0) != nil {
		l.memory.AddOrphan(term.id, orphan{term: term}, false, l.cfg.TTL)
	}
}

// object is the record of a valid term in a lineage.
func (l *Lease) object(term *Term, on Lineage) Object {
	obj := Object{Key: l.cfg.Key, Name: l.cfg.Name, Labels: l.cfg.Labels, Payload: term.payload}
	if term.resumed != nil {
		obj.Name, obj.Labels = term.resumed.Name, term.resumed.Labels
	}
	if term.sealed.Load() {
		obj.Labels = record.WithSeal(obj.Labels, term.id)
	}
	if since := term.longRun.Load(); since != nil {
		obj.Labels = record.WithRunning(obj.Labels, term.id, *since)
	}
	if predecessors := term.unconfirmed(); predecessors != nil {
		obj.Labels = record.WithUnconfirmed(obj.Labels, term.id, recorded(predecessors))
	}
	obj.Labels = record.WithMark(obj.Labels, term.id, term.markIn(on))
	return obj
}

// Renew extends the trust in the term, counted from now, with one write. It returns [ErrLost]
// if the record is another term's or is gone, and [ErrDeadline] if the trust had ended before
// the store answered; in both cases the term is over. Any other error leaves the term as it
// was, and Renew may be called again.
func (l *Lease) Renew(ctx context.Context, term *Term) error {
	if err := term.isFor("renew", l.cfg.Key); err != nil {
		return err
	}
	if term.local() {
		return nil
	}
	defer term.renewal()()
	// The second round is for an earlier renewal of ours that landed although its answer was
	// lost: the record is ours, at a version that we did not know. Seeing it extends no trust;
	// only an answered write does. It is also for a failover, over which the record may be lost.
	for range 2 {
		if !term.Valid() {
			return l.tooLate(ctx, term)
		}
		attempt, version, on, cond := term.writing()
		obj, err := l.put(ctx, l.object(term, on), cond)
		if objects.Answered(err) {
			term.refused(version)
		}
		switch {
		case err == nil:
			l.memory.SawVersion(obj.Version)
			if err := term.compare(ctx, obj.Version, on); err != nil {
				return fmt.Errorf("tenure: renew %s: %w", l.cfg.Key, err)
			}
			if !term.extend(obj.Version, attempt, on) {
				return fmt.Errorf("tenure: renew %s: %w", l.cfg.Key, ErrDeadline)
			}
			return nil
		case !errors.Is(err, ErrConflict) && !errors.Is(err, ErrExists):
			return err
		}
		if err := l.reread(ctx, term); err != nil {
			return err
		}
	}
	return fmt.Errorf("tenure: renew %s: another write came first, twice: %w", l.cfg.Key, ErrConflict)
}

// tooLate returns what became of a term that was over before its renewal was sent.
func (l *Lease) tooLate(ctx context.Context, term *Term) error {
	err := l.reread(ctx, term)
	if errors.Is(err, ErrLost) {
		return err
	}
	if err != nil {
		return fmt.Errorf("tenure: renew %s: %w (and %w)", l.cfg.Key, ErrDeadline, err)
	}
	return fmt.Errorf("tenure: renew %s: %w", l.cfg.Key, ErrDeadline)
}

// reread looks at the record of a term after a write has found a version that the term does not
// know. If the record is still the term's, because the answer to a write was lost, reread notes the
// version and returns nil, as it does if a failover has lost the record. Otherwise it ends the
// term.
func (l *Lease) reread(ctx context.Context, term *Term) error {
	known := term.currentVersion()
	r, err := l.look(ctx, caller{})
	missing := errors.Is(err, ErrNotFound)
	switch {
	case err != nil && !missing:
		return err
	case (missing || !bytes.Equal(r.Payload, term.payload)) && term.Valid() && term.mayReassert(r, !missing):
		term.reasserts(r.Version, r.on)
		return nil
	case missing && !term.deleteSent.Load():
		return term.lostTo(&LostError{Key: l.cfg.Key})
	case missing:
		return err
	case !bytes.Equal(r.Payload, term.payload):
		return term.lostTo(&LostError{Key: l.cfg.Key, To: &r.holding})
	case !l.recognises(term, known, r):
		why := "is renewed by a copy of this process"
		if r.stored.Resumed() {
			why = "was resumed elsewhere"
		}
		return term.lostTo(&LostError{Key: l.cfg.Key, To: &r.holding, why: why})
	}
	term.movesTo(r.on)
	return nil
}

// recognises reports whether the term itself, and not another process, wrote a record that has
// the term's payload. If so, it notes the version and any request.
func (l *Lease) recognises(term *Term, known int64, r reading) bool {
	request := r.stored.Request()
	elsewhere := r.stored.Resumed() && term.resumed == nil // whatever the version says
	if elsewhere || !term.recognise(known, r.Version, request) {
		l.memory.FoundCopy(term.id)
		return false
	}
	if request != nil {
		term.request.Store(request)
	}
	return true
}
