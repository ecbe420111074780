// Package objects contains what the stores of all databases share: an object as a row,
// the condition and the fence of a write, the errors of the contract, and the tables.
package objects

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"time"
)

// VersionLimit is far ahead of any clock or counter, so a version at or above it must be
// a mistake. The next version does not continue from it, and no tombstone records it,
// because no version could follow the greatest possible one.
const VersionLimit = 1 << 62

// TombstoneAge is how far the clock must be past a deleted object's last version
// before a store forgets it: further than any clock is set back.
const TombstoneAge = 24 * time.Hour

// SessionTombstoneAge is the same for sessions: for so long after one has ended, rows that still name it are known to be nobody's.
// Its processes may be down meanwhile, or a trigger may keep its rows from being freed.
const SessionTombstoneAge = 100 * 24 * time.Hour

// ID is the key of an object.
type ID struct{ Type, ID string }

func (id ID) String() string { return id.Type + "/" + id.ID }

// Validate rejects a key that no store can accept.
func (id ID) Validate() error {
	switch {
	case id.Type == "":
		return fmt.Errorf("%w: key %q has an empty type", ErrInvalid, id)
	case id.ID == "":
		return fmt.Errorf("%w: key %q has an empty id", ErrInvalid, id)
	}
	return errors.Join(ValidText("key type", id.Type), ValidText("key id", id.ID))
}

// Row is an object as a database stores it.
type Row struct {
	ID      ID
	Name    sql.NullString
	Labels  []byte // JSON; written as text
	Payload []byte
	Version int64
	Created sql.NullInt64 // Unix milliseconds, like Updated; NULL if another program left none
	Updated sql.NullInt64
	Age     time.Duration // by the store's clock
}

// Condition is what must be true of the stored object for a write to happen.
type Condition struct {
	Kind    ConditionKind
	Version int64 // for IfVersion

	Server string // on which the write must happen; empty: on any
	Least  int64  // the write's version is above this one

	// Again says, with IfAbsent, that the object is written again because a failover has lost it. The write is refused if
	// an object with a version above Least has been deleted since: a late one must not bring back what others have followed.
	Again bool
}

// SettledAge is the age of a mark before which nothing can have been lost.
const SettledAge = time.Duration(math.MaxInt64 / 2)

// Lineage is the root package's Lineage.
type Lineage struct {
	Server, Mark string
	Age, Seen    time.Duration
}

// ConditionKind is the kind of a [Condition].
type ConditionKind uint8

// The kinds of a condition.
const (
	IfAbsent ConditionKind = iota
	IfVersion
	Unconditional
)

// Fence is what a write depends on: the record of a lease, or the row of a claim. It does no I/O.
type Fence struct {
	ID     ID     // of the lease's object; of a claim, its kind and its key
	Record []byte // of a lease: the payload that must stand
	Claim  *Claim // of a claim: the row that must stand as it is; nil: the fence is a lease's

	// Server returns the server of the term's last answered write. On another server the record may be missing
	// because a failover has lost it. Empty: unknown. Nil for a claim.
	Server func() string

	// Renew renews a term at once, because the store is on another server than at its last renewal. It reports false
	// if this process does not renew the term. Nil for a claim: see [Renewals].
	Renew func(ctx context.Context) (renewed bool, err error)

	// OnFailover sets a func that is called when a renewal of a term is the first to be answered in a lineage. The
	// renewal counts only if the func returns nil. Nil for a claim.
	OnFailover func(compare func(ctx context.Context, on Lineage) error)

	// Idle is how long a transaction may idle before the server ends it.
	Idle time.Duration

	// Yield waits for a renewal of the lease that is in progress, because the write and the
	// renewal would wait for each other's locks in the database.
	Yield func(ctx context.Context)

	// Refused returns the error of a write whose fence did not hold, an [ErrLost], and ends the
	// lost right. Now is the record that stands in place of the lease's; nil if there is none, or
	// if the fence is a claim's. If the record is not known, why is the reason.
	Refused func(now *Row, why error) error
}

// OfRow reports whether the fence belongs to a claim on a row of a user's table.
func (f *Fence) OfRow() bool { return f != nil && f.Claim != nil && f.Claim.Row }

// OfKey reports whether the fence belongs to a claim in the claims' table.
func (f *Fence) OfKey() bool { return f != nil && f.Claim != nil && !f.Claim.Row }

// Statement returns one of two statements, the one for a record or the one for a claim in the claims' table,
// with its arguments.
func (f *Fence) Statement(ofRecord, ofClaim string, recordArgs func(*Fence) []any) (statement string, args []any) {
	if c := f.Claim; c != nil {
		return ofClaim, []any{c.Kind, c.ID, c.Session, c.Token}
	}
	return ofRecord, recordArgs(f)
}

// Table is a table of objects, in either database.
type Table interface {
	Backend
	Get(ctx context.Context, id ID) (Row, error)
	List(ctx context.Context, objectType, after string, limit int) ([]Row, error)
	Put(ctx context.Context, obj Row, cond Condition, fence *Fence) (Row, error)
	Delete(ctx context.Context, id ID, cond Condition, fence *Fence, wake bool) error
	Wake(ctx context.Context, id ID) error
	FenceStatement(fence *Fence) (query string, args []any, err error)
	PutStatement(obj Row, version int64) (query string, args []any, err error)
}

// mark is the key of a mark in a context. Marks pass through wrappers to the store.
type mark string

const (
	leaseCall   mark = "lease call"
	claimCall   mark = "claim call"
	withoutSync mark = "without sync"
)

// WithLeaseCall marks a call to the store as a lease's. On Postgres it then uses connections that only
// leases use.
func WithLeaseCall(ctx context.Context) context.Context {
	return context.WithValue(ctx, leaseCall, true)
}

// IsLeaseCall reports whether a call is a lease's.
func IsLeaseCall(ctx context.Context) bool { return ctx.Value(leaseCall) != nil }

// WithClaimCall marks a call to the store as a claim's. Claims also have connections of their own on
// Postgres.
func WithClaimCall(ctx context.Context) context.Context {
	return context.WithValue(ctx, claimCall, true)
}

// IsClaimCall reports whether a call is a claim's.
func IsClaimCall(ctx context.Context) bool { return ctx.Value(claimCall) != nil }

// WithoutSync marks writes of claims that need not wait for the disk, because they are repeated if a
// crash of the database undoes them.
func WithoutSync(ctx context.Context) context.Context {
	return context.WithValue(ctx, withoutSync, true)
}

// IsWithoutSync reports whether a write need not wait for the disk.
func IsWithoutSync(ctx context.Context) bool { return ctx.Value(withoutSync) != nil }

// RightKey is the type of the context keys for a func's right: a job's term or a claim.
type RightKey string

// Right is the key of the right of the innermost func that a context comes from.
const Right RightKey = "right"

type serverKey struct{}

// OnServer names the server on which a statement of claims must happen, as a [Condition] does for writes of objects. On
// any other server it fails with [ErrMoved].
func OnServer(ctx context.Context, server string) context.Context {
	return context.WithValue(ctx, serverKey{}, server)
}

// ServerOf returns the server that [OnServer] has named, or "".
func ServerOf(ctx context.Context) string {
	server, _ := ctx.Value(serverKey{}).(string)
	return server
}

// Stamp returns a row's time, or the zero time if the column is NULL.
func Stamp(ms sql.NullInt64) time.Time {
	if !ms.Valid {
		return time.Time{}
	}
	return time.UnixMilli(ms.Int64)
}

// Age returns how long before now a row was stamped. The stamp was truncated to
// milliseconds, so the write may have been up to one later. A row without a stamp gets
// age 0, because it may be new.
func Age(updated sql.NullInt64, now time.Time) time.Duration {
	if !updated.Valid {
		return 0
	}
	switch d := now.Sub(Stamp(updated)); { // Sub saturates, so that no stamp overflows
	case d >= time.Millisecond:
		return d - time.Millisecond
	case d >= 0:
		return 0
	default:
		return d
	}
}

// EncodeName returns NULL for an empty name, so that any number of objects can be nameless.
func EncodeName(name string) sql.NullString {
	return sql.NullString{String: name, Valid: name != ""}
}

// EncodePayload keeps an empty payload from becoming NULL.
func EncodePayload(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// EncodeLabels returns labels as a JSON object.
func EncodeLabels(labels map[string]string) string {
	if len(labels) == 0 {
		return "{}"
	}
	b, _ := json.Marshal(labels) // strings always encode
	return string(b)
}

// DecodeLabels accepts anything that a program may have stored; it replaces a value that is not a
// string by its JSON text. Labels are for people to read, and must not make a lease unreadable.
func DecodeLabels(b []byte) map[string]string {
	var raw map[string]json.RawMessage
	if json.Unmarshal(b, &raw) != nil || len(raw) == 0 {
		return nil
	}
	labels := make(map[string]string, len(raw))
	for k, v := range raw {
		var s string
		if json.Unmarshal(v, &s) != nil {
			s = string(v)
		}
		labels[k] = s
	}
	return labels
}

// IsNil reports whether an interface is nil, or contains a nil pointer, map, slice, func or
// channel, such as an unset variable of a concrete type, whose methods would panic.
func IsNil(v any) bool {
	switch value := reflect.ValueOf(v); value.Kind() {
	case reflect.Invalid:
		return true
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Func, reflect.Chan:
		return value.IsNil()
	}
	return false
}

// As returns the store as a T, or the first of the stores that it wraps which is one.
func As[T, Store any](store Store) (T, bool) {
	for !IsNil(store) {
		if able, ok := any(store).(T); ok {
			return able, true
		}
		wrapper, ok := any(store).(interface{ Unwrap() Store })
		if !ok {
			break
		}
		store = wrapper.Unwrap()
	}
	var none T
	return none, false
}
