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
)

// Resume goes on with a term that another process has begun, or this one before it was
// restarted. It renews the record, which keeps its TTL and its labels, and returns the term,
// trusted from before the renewal was sent. id and token are what [Term.ID] and [Term.Token]
// returned where the term began; no later token is needed.
//
// Resume the same term again to renew it, whichever process does so, or pass it to
// [Coordinator.Hold] or [Lease.Renew] in one process. The process that began the term loses it
// at its next renewal or release, with [ErrLost], and so does one that holds what it has
// resumed.
//
// Two processes must not rely on one term. There are two ways to be sure of that:
//
//   - The former process is dead, or has stopped what it did under the term: a program that was
//     restarted, or one that was handed the work. A former process that still runs believes in
//     the term until its own trust ends, and no fence and no token can tell the two apart.
//   - Only a worker relies on the term, and servers resume it for the worker whenever its
//     heartbeat arrives at one of them. The worker trusts the term for TTL − Margin from before
//     it sent the heartbeat that was last answered; the servers' terms mean nothing.
//
// The record goes on to name the process that began the term: [CoordinatorConfig.FencePredecessor]
// is told of that one, so don't use both. A term that is held after it was resumed is lost if a
// renewal gets no answer, and can be resumed again. What [Lease.RequestRelease] asks for reaches
// only [Coordinator.Hold], not a worker behind servers.
//
// It returns [ErrLost] if another term stands, or none does, or if the process that began the
// term is about to end it: see [Lease.Seal]. A record that has expired is resumed if nobody has
// taken the lease over, so that a worker that was late loses nothing. After any other error the
// record may have been renewed; Resume may be called again.
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
	obj, err := l.resumeAsItIs(ctx, id)
	var request *record.Request
	for conflicts := 0; errors.Is(err, ErrNotFound) || errors.Is(err, ErrConflict); conflicts++ {
		// Others may resume it at the same moment. The random pause keeps them from colliding again.
		if conflicts > 0 && !pace.Sleep(ctx, rand.N(time.Millisecond<<min(conflicts, 6))) {
			return nil, fmt.Errorf("tenure: resume %s: %w: %w", l.cfg.Key, context.Cause(ctx), err)
		}
		var read reading
		if read, err = l.resumable(ctx, id); err != nil {
			return nil, err
		}
		obj, request = read.Object, read.stored.Request()
		obj.Labels = read.stored.AsResumed(id)
		if before := read.holding.unconfirmed; before != nil {
			obj.Labels = record.WithUnconfirmed(obj.Labels, id, recorded(before))
		}
		attempt = now()
		obj, err = l.store.PutIf(objects.WithLeaseCall(ctx), obj, MatchVersion(read.Version))
	}
	if err != nil {
		return nil, err
	}
	l.memory.sawVersion(obj.Version)
	if l.memory.isLast(id) {
		l.memory.foundCopy(id) // somebody else may rely on it
	}
	term, err := l.resumedTerm(obj, token, now, attempt)
	if err != nil {
		return nil, fmt.Errorf("tenure: resume %s: %w", l.cfg.Key, err)
	}
	term.request.Store(request) // which the write has removed from the record
	return term, nil
}

// resumer is a store that can renew a record by what it contains, in one round trip.
type resumer interface {
	// resume returns [ErrNotFound] unless the record is the term's, was resumed before, and may
	// be written as it is.
	resume(ctx context.Context, key Key, term string) (Object, error)
}

func (l *Lease) resumeAsItIs(ctx context.Context, id string) (Object, error) {
	store, ok := l.store.(resumer)
	if !ok {
		return Object{}, ErrNotFound
	}
	obj, err := store.resume(objects.WithLeaseCall(ctx), l.cfg.Key, id)
	if err != nil {
		return Object{}, err
	}
	// The statement knows only parts of the record, and somebody else may have written it.
	if h, err := decodeHolding(obj, l.cfg.TTL); err != nil || h.Term != id || h.isOffer() || !h.resumed {
		return Object{}, &LostError{Key: l.cfg.Key, To: &h}
	}
	return obj, nil
}

// resumable returns the record of a term if the lease may go on with it.
func (l *Lease) resumable(ctx context.Context, id string) (reading, error) {
	read, err := l.look(ctx, caller{})
	switch {
	case errors.Is(err, ErrNotFound):
		return read, &LostError{Key: l.cfg.Key}
	case err != nil:
		return read, err
	case read.holding.Term != id || read.holding.isOffer():
		return read, &LostError{Key: l.cfg.Key, To: &read.holding}
	case read.stored.Sealed():
		return read, &LostError{Key: l.cfg.Key, To: &read.holding, why: "is being ended by the process that began it"}
	}
	return read, nil
}

// resumedTerm makes the term of a record that was renewed by a write sent at attempt.
func (l *Lease) resumedTerm(obj Object, token int64, now clock.Clock, attempt clock.Reading) (*Term, error) {
	h, err := decodeHolding(obj, l.cfg.TTL)
	if err != nil {
		return nil, err
	}
	if token > obj.Version {
		return nil, fmt.Errorf("%w: token %d is not of this term: the record is at version %d", ErrInvalid, token, obj.Version)
	}
	margin := l.cfg.Margin
	if h.TTL != l.cfg.TTL { // what counts is the difference of the clocks' rates
		margin = time.Duration(math.Round(float64(margin) / float64(l.cfg.TTL) * float64(h.TTL)))
	}
	term := &Term{
		key: l.cfg.Key, id: h.Term, holder: h.Holder, token: token, acquiredAt: h.AcquiredAt,
		payload: bytes.Clone(obj.Payload), trusted: h.TTL - margin, clock: now,
		version: obj.Version, resumed: &Object{Name: obj.Name, Labels: stored(obj).AsResumed(h.Term)},
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

// Seal renews the term, and makes [Lease.Resume] refuse it from then on, in every process. It
// is for a process that gives up one by one what it owns under a term that others may have
// resumed, before it releases the lease: [ErrLost] says that one has, and then nothing is this
// process's to give up any more. Only the process that began the term may seal it. After any
// other error the term may be sealed or not; Seal may be called again.
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
