package tenure

import (
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
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
	return newHolding(obj.Key, h), err
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
	To  *Holding // who holds the lease now, or to whom it is offered; nil: the record is gone

	toCopy bool // of this process: To is the term that is lost
}

func (e *LostError) Error() string {
	switch {
	case e.To == nil:
		return fmt.Sprintf("%v: %s is gone", ErrLost, e.Key)
	case e.toCopy:
		return fmt.Sprintf("%v: the term of %s is renewed by a copy of this process", ErrLost, e.Key)
	}
	return fmt.Sprintf("%v: %s is %s", ErrLost, e.Key, e.To.how())
}

// Is makes the error match [ErrLost].
func (e *LostError) Is(target error) bool { return target == ErrLost }
