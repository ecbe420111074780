package tenure

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/witnessed"
)

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
			if l.absentSettlesIn(on) <= 0 {
				term, err := l.begin(ctx, by, IfAbsent(), on, l.lostHolder(by, on, ""))
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
	read, err := l.look(ctx, by)
	switch {
	case errors.Is(err, ErrNotFound):
		return nil, &HeldError{Holding: Holding{Key: l.cfg.Key, Holder: record.Unknown}}
	case err != nil:
		return nil, err
	}
	return nil, l.heldError(read)
}

// takeOver begins a term in place of the record that stands, if this lease may take it
// unexpired or, where it may steal, if it has expired.
func (l *Lease) takeOver(ctx context.Context, by caller, steal bool) (*Term, error) {
	read, err := l.look(ctx, by)
	switch in := l.absentSettlesIn(read.on); {
	case errors.Is(err, ErrNotFound) && in > 0:
		return nil, &HeldError{Holding: Holding{Key: l.cfg.Key, Holder: record.Unknown}, canExpireIn: in, byAge: true, settlesIn: in}
	case err != nil:
		return nil, err
	}
	held := l.heldError(read)
	from := held.Holding
	if !steal || held.canExpireIn > 0 { // the rules are CanExpireIn and SettlesIn of package sighting
		switch removed, err := l.removeOrphan(ctx, by, read); {
		case err != nil:
			return nil, err
		case removed:
			return nil, fmt.Errorf("tenure: steal %s: %w", l.cfg.Key, ErrNotFound)
		case held.settlesIn > 0 || !l.mayTakeUnexpired(from):
			return nil, held
		}
	}
	stolen := !from.isOffer() && !l.mayTakeUnexpired(from)
	term, err := l.begin(ctx, by, IfVersion(from.Version), read.on, append(l.predecessors(from), l.lostHolder(by, read.on, read.stored.Mark())...))
	if err == nil && stolen {
		term.stolenFrom = &from
	}
	if err == nil && held.canExpireIn > 0 && l.cfg.TTL < from.TTL {
		l.wake(ctx) // the standbys are waiting for the old record, which would have expired later
	}
	return term, err
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
	id := l.process.NewTerm()
	term := &Term{
		key: l.cfg.Key, id: id, holder: l.cfg.Holder, acquiredAt: attempt.Mono, witnessed: witness != "",
		trusted: l.cfg.TTL - l.cfg.Margin,
		clock:   now, confirms: by.confirms,
		at: position{inDoubt: 1, on: on}, // by the write that begins it
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
	answered := err == nil || objects.Refusal(err)
	if answered && witness != "" {
		witnessed.Answered(ctx, l.cfg.Key.Type, l.cfg.Key.ID)
	}
	if err != nil {
		if !answered {
			l.memory.AddOrphan(term.id, orphan{term: term}, false, l.cfg.TTL)
		}
		return nil, err
	}
	term.token = obj.Version
	term.at.acquired(obj.Version, on)
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
		l.warn("no witness; if this process dies, its leases have to expire", err)
	}
	return witness
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
	is := l.saysOf(term.writesIn(on))
	obj.Labels = record.WithLineage(obj.Labels, term.id, is.Mark, is.Server)
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
		attempt := term.clock()
		version, on, cond := term.at.startRenewal()
		obj, err := l.put(ctx, l.object(term, on), cond)
		if objects.Refusal(err) {
			term.at.refused(version)
		}
		switch {
		case err == nil:
			l.memory.SawVersion(obj.Version)
			if err := term.compare(ctx, obj.Version, on); err != nil {
				return fmt.Errorf("tenure: renew %s: %w", l.cfg.Key, err)
			}
			wrote := term.writesIn(on)
			if !term.extend(obj.Version, attempt, on) {
				return fmt.Errorf("tenure: renew %s: %w", l.cfg.Key, ErrDeadline)
			}
			if wrote.Mark != on.Mark { // once more, because the record still says that the claims are not compared
				return l.Renew(ctx, term)
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

// Resume continues a term that another process has begun, or that this one began before it was
// restarted. It renews the record, which keeps its TTL and its labels, and returns the term,
// trusted from before the renewal was sent. id and token are what [Term.ID] and [Term.Token]
// returned where the term began; no later token is needed.
//
// To renew the term, resume it again, in any process, or pass it to [Coordinator.Hold] or
// [Lease.Renew] in one process. The process that began the term loses it at its next renewal or
// release, with [ErrLost]; a process that holds what it has resumed loses it likewise when
// another one resumes it.
//
// Two processes must not rely on one term. There are two ways to be sure of that:
//
//   - The former process is dead, or has stopped what it did under the term: a program that was restarted, or one that
//     handed its work over. A former process that still runs trusts the term until its own trust ends, and no fence
//     and no token can tell the two apart.
//   - Only a worker relies on the term, and servers resume it for the worker whenever its
//     heartbeat arrives at one of them. The worker trusts the term for TTL − Margin from before
//     it sent the heartbeat that was last answered; the servers' terms mean nothing.
//
// The record continues to name the process that began the term. [CoordinatorConfig.FencePredecessor] gets that name,
// so don't use both. A resumed term that a process holds is lost if a renewal was stored but its answer was lost; it
// can be resumed again. A request of [Lease.RequestRelease] reaches only [Coordinator.Hold], not a worker behind servers.
//
// After a failover of the database, Resume returns [ErrHeld] until the failover has settled: another term may have
// followed, and its record may have been lost. It returns [ErrLost] if the record is another term's or is gone, or
// if the process that began the term is about to end it: see [Lease.Seal]. It resumes an expired record if no
// replica has taken the lease over, so that a late worker loses nothing. After any other error the record may have
// been renewed; Resume may be called again.
//
// On Postgres it takes one round trip, except the first time.
func (l *Lease) Resume(ctx context.Context, id string, token int64) (*Term, error) {
	err := cmp.Or(objects.ValidText("term", id), ctx.Err())
	switch {
	case id == "":
		err = fmt.Errorf("%w: the term's ID is empty", ErrInvalid)
	case token <= 0:
		err = fmt.Errorf("%w: token %d is not positive", ErrInvalid, token)
	}
	if err != nil {
		return nil, fmt.Errorf("tenure: resume %s: %w", l.cfg.Key, err)
	}
	now := clock.From(ctx)
	attempt := now()
	on, err := l.lineage(ctx)
	if err != nil {
		return nil, err
	}
	obj, err := l.resumeAsItIs(ctx, id, on)
	var request *record.Request
	for conflicts := 0; errors.Is(err, ErrNotFound) || errors.Is(err, ErrConflict); conflicts++ {
		// Others may resume the term at the same moment. The random pause keeps them apart.
		if conflicts > 0 && !pace.Sleep(ctx, rand.N(time.Millisecond<<min(conflicts, 6))) {
			return nil, fmt.Errorf("tenure: resume %s: %w: %w", l.cfg.Key, context.Cause(ctx), err)
		}
		var read reading
		if read, err = l.resumable(ctx, id); err != nil {
			return nil, err
		}
		obj, request, on = read.Object, read.stored.Request(), read.on
		is := l.saysOf(on)
		obj.Labels = record.WithLineage(read.stored.AsResumed(id), id, is.Mark, is.Server)
		if before := read.holding.unconfirmed; before != nil {
			obj.Labels = record.WithUnconfirmed(obj.Labels, id, recorded(before))
		}
		attempt = now()
		obj, err = l.put(ctx, obj, IfVersion(read.Version).OnServer(on.Server, 0))
	}
	if err != nil {
		return nil, err
	}
	l.memory.SawVersion(obj.Version)
	if l.memory.IsLast(id) {
		l.memory.FoundCopy(id) // another process may rely on it
	}
	term, err := l.resumedTerm(obj, token, on, now, attempt)
	if err != nil {
		return nil, fmt.Errorf("tenure: resume %s: %w", l.cfg.Key, err)
	}
	term.request.Store(request) // which the write has removed from the record
	return term, nil
}

// resumer is a store that can renew a record by what it contains, in one round trip.
type resumer interface {
	// resume returns [ErrNotFound] unless the record is the term's, was resumed before, and may
	// be written as it is, on the server and with this part of its lineage's label.
	resume(ctx context.Context, key Key, term, lineage, server string) (Object, error)
}

func (l *Lease) resumeAsItIs(ctx context.Context, id string, on Lineage) (Object, error) {
	store, ok := l.store.(resumer)
	if !ok {
		return Object{}, ErrNotFound
	}
	is := l.saysOf(on)
	obj, err := store.resume(objects.WithLeaseCall(ctx), l.cfg.Key, id, record.LineagePart(is.Mark, is.Server), on.Server)
	if err != nil {
		return Object{}, err
	}
	// The statement checks only parts of the record, and another program may have written it.
	if h, err := decodeHolding(obj, l.cfg.TTL); err != nil || h.Term != id || h.isOffer() || !h.resumed {
		return Object{}, &lostError{key: l.cfg.Key, to: &h}
	}
	return obj, nil
}

// resumable returns the record of a term if the lease may continue the term.
func (l *Lease) resumable(ctx context.Context, id string) (reading, error) {
	read, err := l.look(ctx, caller{})
	switch {
	case errors.Is(err, ErrNotFound):
		return read, &lostError{key: l.cfg.Key}
	case err != nil:
		return read, err
	case read.holding.Term != id || read.holding.isOffer():
		return read, &lostError{key: l.cfg.Key, to: &read.holding}
	case read.stored.Sealed():
		return read, &lostError{key: l.cfg.Key, to: &read.holding, why: "is being ended by the process that began it"}
	case read.settlesIn(l) > 0: // another term, whose record is lost, may be valid
		return read, l.heldError(read)
	}
	return read, nil
}

// resumedTerm makes the term of a record that a write, sent at attempt, has renewed.
func (l *Lease) resumedTerm(obj Object, token int64, on Lineage, now clock.Clock, attempt clock.Reading) (*Term, error) {
	h, err := decodeHolding(obj, l.cfg.TTL)
	if err != nil {
		return nil, err
	}
	if token > obj.Version {
		return nil, fmt.Errorf("%w: token %d is not of this term: the record is at version %d", ErrInvalid, token, obj.Version)
	}
	margin := l.cfg.Margin
	if h.TTL != l.cfg.TTL { // a margin covers clocks whose rates differ, so it is a share of the TTL
		margin = time.Duration(math.Round(float64(margin) / float64(l.cfg.TTL) * float64(h.TTL)))
	}
	term := &Term{
		key: l.cfg.Key, id: h.Term, holder: h.Holder, token: token, acquiredAt: h.AcquiredAt,
		payload: bytes.Clone(obj.Payload), trusted: h.TTL - margin, clock: now,
		at: position{version: obj.Version, greatest: obj.Version, on: on, vouched: on}, resumed: &Object{Name: obj.Name, Labels: stored(obj).AsResumed(h.Term)},
	}
	if h.unconfirmed != nil {
		term.predecessors.Store(&h.unconfirmed)
	}
	term.trust.Store(newTrust(attempt, term.trusted))
	if !term.Valid() {
		return nil, fmt.Errorf("the answer took %v: %w", term.sinceRenewal(), ErrDeadline)
	}
	return term, nil
}

// Seal renews the term, and makes [Lease.Resume] refuse it from then on, in every process. It is
// for a process that gives up piece by piece what it owns under a term, before it releases the
// lease, if other processes may have resumed the term. [ErrLost] means that one of them has;
// this process then has nothing left to give up. Only the process that began the term may seal
// it. After any other error the term may be sealed or not; Seal may be called again.
func (l *Lease) Seal(ctx context.Context, term *Term) error {
	if err := term.isFor("seal", l.cfg.Key); err != nil {
		return err
	}
	if term.resumed != nil {
		return fmt.Errorf("tenure: seal %s: %w: the term was begun by another process", l.cfg.Key, ErrInvalid)
	}
	term.sealed.Store(true)
	return l.Renew(ctx, term)
}
