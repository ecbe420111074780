// Package objects contains what the stores of all databases share: an object as a row,
// the condition and the fence of a write, the errors of the contract, and the tables.
package objects

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
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
	Version int64 // for MatchVersion
}

// ConditionKind is the kind of a [Condition].
type ConditionKind uint8

// The kinds of a condition.
const (
	MustCreate ConditionKind = iota
	MatchVersion
	Unconditional
)

// Fence makes a write depend on a lease's record, or on a claim.
type Fence struct {
	ID     ID
	Record []byte // the payload that the record must have

	Claim *Claim // the row that must stand as it is; nil: the fence depends on a record

	// Yield waits for a renewal of the lease that is in progress, because the two would
	// wait for each other's locks in the database.
	Yield func(ctx context.Context)
}

type leaseCallKey struct{}

// WithLeaseCall marks a call to the store as one of a lease. The mark passes through
// wrappers to the store on Postgres, which has connections that only leases use.
func WithLeaseCall(ctx context.Context) context.Context {
	return context.WithValue(ctx, leaseCallKey{}, true)
}

// IsLeaseCall reports whether a call is one of a lease.
func IsLeaseCall(ctx context.Context) bool { return ctx.Value(leaseCallKey{}) != nil }

type claimCallKey struct{}

// WithClaimCall marks a call to the store as one of claims, which have connections of their own
// on Postgres as well.
func WithClaimCall(ctx context.Context) context.Context {
	return context.WithValue(ctx, claimCallKey{}, true)
}

// IsClaimCall reports whether a call is one of claims.
func IsClaimCall(ctx context.Context) bool { return ctx.Value(claimCallKey{}) != nil }

type withoutSyncKey struct{}

// WithoutSync marks writes of claims that need not wait for the disk: if a crash of the database
// undoes them, they are done again.
func WithoutSync(ctx context.Context) context.Context {
	return context.WithValue(ctx, withoutSyncKey{}, true)
}

// IsWithoutSync reports whether a write need not wait for the disk.
func IsWithoutSync(ctx context.Context) bool { return ctx.Value(withoutSyncKey{}) != nil }

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

// EncodeName returns NULL for an empty name, so that any number of objects may have no
// name.
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

// DecodeLabels accepts whatever a program may have stored: a value that is not a string
// becomes its JSON text. Labels are for people to read, and must not make a lease
// unreadable.
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

// IsNil reports whether an interface is nil or has a nil pointer, map, slice or func in it: a
// variable of a concrete type that was never set, whose methods would panic.
func IsNil(v any) bool {
	switch value := reflect.ValueOf(v); value.Kind() {
	case reflect.Invalid:
		return true
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Func, reflect.Chan:
		return value.IsNil()
	}
	return false
}
