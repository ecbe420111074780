package tenure

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure/internal/record"
)

// ReplicaID returns a name for this replica, for people to read. It is the first of the
// environment variables TENURE_REPLICA_ID and HOSTNAME that is set, or else the host's name, or
// else a new UUID. Two replicas may have the same name: safety never depends on it.
func ReplicaID() string {
	for _, name := range []string{"TENURE_REPLICA_ID", "HOSTNAME"} {
		if id := os.Getenv(name); id != "" {
			return id
		}
	}
	if host, err := os.Hostname(); err == nil && host != "" {
		return host
	}
	return uuid.NewString()
}

// Role is what a replica does with regard to a lease.
type Role string

const (
	RoleStandby    Role = "standby"    // it waits for the lease
	RoleConfirming Role = "confirming" // it has taken the lease over, and confirms that its predecessor is gone before the job begins
	RoleHolder     Role = "holder"     // it holds the lease, and its job runs
	RoleStopping   Role = "stopping"   // its job has been told to return; then the lease is released
)

// Holding is what a lease's record says: who holds the lease, and since when.
type Holding struct {
	Key        Key
	Holder     string // for people to read; "unknown" if the record doesn't say; empty: no replica holds the lease
	Term       string // the term's ID; empty in a record of another program
	Version    int64
	TTL        time.Duration // the holder's; the reader's own if the record doesn't say
	AcquiredAt time.Time     // by the holder's clock
	RenewedAt  time.Time     // by the store's clock
	Age        time.Duration // since the last renewal, by the store's clock, when it was read
	Labels     map[string]string

	// RunningSince is when the oldest unfinished run of the holder's job began, by the holder's
	// clock, if that run has lasted for a TTL; otherwise it is zero. See [RecordRun].
	RunningSince time.Time

	// If Holder is empty, OfferedTo is the replica to which the last holder has offered the
	// lease. Until the TTL has passed, only that replica may take it. If OfferedTo is empty too,
	// any replica may.
	OfferedTo string

	unconfirmed []Holding // see [Term.unconfirmed]
	resumed     bool      // a process other than Holder may have continued the term
	witness     string    // see [Lease.ReleaseDead]
}

// isOffer reports whether the lease is free because its last holder has offered it to one
// replica, or to all.
func (h *Holding) isOffer() bool { return h.Holder == "" }

// how describes in words who has the lease.
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

// decodeHolding reads a lease's object. It always returns a Holding that a standby can act on;
// the error says what is wrong with the record.
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
		AcquiredAt: r.AcquiredAt, RenewedAt: r.RenewedAt, Age: r.Age, Labels: r.Labels, RunningSince: r.RunningSince, witness: r.Witness,
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

// ErrHeld means that another replica holds the lease. The error is a [*HeldError].
var ErrHeld = errors.New("lease is held")

// HeldError is the error of an acquire or steal while another replica holds the lease. It
// matches [ErrHeld].
type HeldError struct {
	Holding Holding

	canExpireIn time.Duration // until a steal may succeed
	byAge       bool          // canExpireIn goes by an age in the store, so an earlier look does not bring it closer
	settlesIn   time.Duration // until a failover of the database has settled; no replica takes the lease before
}

func (e *HeldError) Error() string {
	if e.settlesIn > 0 {
		return fmt.Sprintf("%v: %s is not taken before a failover of the database has settled, in %v", ErrHeld, e.Holding.Key, e.settlesIn.Round(time.Millisecond))
	}
	if e.Holding.isOffer() {
		return fmt.Sprintf("%v: %s is %s", ErrHeld, e.Holding.Key, e.Holding.how())
	}
	return fmt.Sprintf("%v: %s by %s", ErrHeld, e.Holding.Key, e.Holding.Holder)
}

// Is makes the error match [ErrHeld].
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// lostError is the error of a renewal, a release or a fenced write whose term is over. It
// matches [ErrLost].
type lostError struct {
	key Key
	to  *Holding // what the record says now; nil: the record is gone

	why string // why the term is lost although To is the term itself
}

func (e *lostError) Error() string {
	switch {
	case e.to == nil:
		return fmt.Sprintf("%v: %s is gone", ErrLost, e.key)
	case e.why != "":
		return fmt.Sprintf("%v: the term of %s %s", ErrLost, e.key, e.why)
	}
	return fmt.Sprintf("%v: %s is %s", ErrLost, e.key, e.to.how())
}

// Is makes the error match [ErrLost].
func (e *lostError) Is(target error) bool { return target == ErrLost }
