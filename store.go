package tenure

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// MaxPayload is the greatest length of an [Object]'s payload, in bytes. A store whose server has a
// lower limit accepts at least 64 KiB, and returns [ErrInvalid] for a payload above its limit.
const MaxPayload = 1 << 20

var (
	// ErrNotFound means that there is no object under the key.
	ErrNotFound = objects.ErrNotFound

	// ErrExists means that the object to be created exists already.
	ErrExists = objects.ErrExists

	// ErrConflict means that the object is at another version, which the error names.
	ErrConflict = objects.ErrConflict

	// ErrTaken means that the ID or the name belongs to another object. Retrying does not help.
	ErrTaken = objects.ErrTaken

	// ErrInvalid means that an argument can never be accepted. Nothing was sent to the database,
	// unless only its server knows the limit.
	ErrInvalid = objects.ErrInvalid

	// ErrSetup means that the database needs attention: a table is missing, a column has the
	// wrong type, a role is refused. Retrying soon does not help.
	ErrSetup = objects.ErrSetup

	// ErrClosed means that the store, or the client that it uses, was closed, or has given up for
	// good. No later call can succeed: the process has to be restarted.
	ErrClosed = objects.ErrClosed
)

// Key names one object. Neither part may be empty.
type Key struct {
	Type string // the kind of object, for example "sandbox"
	ID   string // which object of that kind
}

func (k Key) String() string { return k.Type + "/" + k.ID }

// A Replacer builds its tables, kilobytes of them, at its first use.
var (
	escapeType   = strings.NewReplacer("%", "%25", "/", "%2F")
	unescapeType = strings.NewReplacer("%25", "%", "%2F", "/")
)

// MarshalText writes the key as String does, with slashes of its type escaped.
func (k Key) MarshalText() ([]byte, error) {
	return []byte(escapeType.Replace(k.Type) + "/" + k.ID), nil
}

// UnmarshalText reads what MarshalText writes.
func (k *Key) UnmarshalText(text []byte) error {
	kind, id, ok := strings.Cut(string(text), "/")
	if !ok {
		return fmt.Errorf("tenure: %w: key %q has no slash between type and ID", ErrInvalid, text)
	}
	*k = Key{Type: unescapeType.Replace(kind), ID: id}
	return nil
}

// Validate returns an [ErrInvalid] for a key that no store can accept.
func (k Key) Validate() error { return objects.ID(k).Validate() }

// Object is one row of the store's table.
type Object struct {
	Key     Key
	Name    string // unique among the objects of its type; may be empty
	Labels  map[string]string
	Payload []byte // at most MaxPayload bytes

	// The store sets Version, CreatedAt, UpdatedAt and Age, and ignores them in a write.
	// Whatever another program has left in the row, the version is positive, an unreadable
	// time is the zero time, and if UpdatedAt is unreadable, the age is 0.
	Version   int64
	CreatedAt time.Time
	UpdatedAt time.Time

	// Age is the time from the object's last write to the read, by the store's clock. It is
	// never more than the time since the call that wrote the object began; it is negative if
	// the stamp is ahead of the clock, and 0 if the store is Clockless: see [Traits].
	Age time.Duration
}

// Validate returns an [ErrInvalid] for an object that no store can accept.
func (o Object) Validate() error {
	errs := []error{o.Key.Validate(), objects.ValidText("name", o.Name)}
	for k, v := range o.Labels {
		errs = append(errs, objects.ValidText("label", k), objects.ValidText(fmt.Sprintf("label %q:", k), v))
	}
	if len(o.Payload) > MaxPayload {
		errs = append(errs, fmt.Errorf("%w: payload of %s has %d bytes, more than %d", ErrInvalid, o.Key, len(o.Payload), MaxPayload))
	}
	return errors.Join(errs...)
}

// WriteCondition says what must be true of the stored object for a write to happen. The
// zero value is [IfAbsent], which overwrites nothing.
type WriteCondition struct{ c objects.Condition }

// IfAbsent is the condition that the object does not exist.
func IfAbsent() WriteCondition { return WriteCondition{objects.Condition{Kind: objects.IfAbsent}} }

// IfVersion is the condition that the object exists at version v, which must be positive.
func IfVersion(v int64) WriteCondition {
	return WriteCondition{objects.Condition{Kind: objects.IfVersion, Version: v}}
}

// Unconditional is the condition that always holds: the object is created or replaced.
func Unconditional() WriteCondition {
	return WriteCondition{objects.Condition{Kind: objects.Unconditional}}
}

// Validate returns an [ErrInvalid] for a version that no object can have.
func (c WriteCondition) Validate() error {
	if c.c.Kind == objects.IfVersion {
		return objects.ValidVersion(c.c.Version)
	}
	return nil
}

// ValidateDelete returns an [ErrInvalid] unless the condition is an [IfVersion] of a version that an object can have.
func (c WriteCondition) ValidateDelete() error {
	if c.c.Kind != objects.IfVersion {
		return fmt.Errorf("%w: the condition of a delete is %q, and must be IfVersion", ErrInvalid, c)
	}
	return c.Validate()
}

// Check compares the condition with the current version of the object, which is 0 if there is no
// object. It returns nil, [ErrExists] or an [ErrConflict] that names both versions. It is for implementations of
// [Store] that can keep the object unchanged between the check and the write.
func (c WriteCondition) Check(key Key, current int64) error {
	switch {
	case c.c.Kind == objects.IfAbsent && current != 0:
		return ErrExists
	case c.c.Kind == objects.IfVersion && current != c.c.Version:
		return &objects.Conflict{ID: objects.ID(key), Wanted: c.c.Version, Current: current}
	}
	return nil
}

func (c WriteCondition) String() string {
	switch c.c.Kind {
	case objects.IfAbsent:
		return "if absent"
	case objects.IfVersion:
		return fmt.Sprintf("if version %d", c.c.Version)
	default:
		return "unconditional"
	}
}

// Store keeps objects and writes them by compare-and-swap.
//
// A store may also implement [Lister], [Fencer], [SQLStore], [Watcher] and [Notifier], which make it
// faster or do more; no rule hangs on them. A wrapper that embeds a Store keeps every rule, because
// Lineage and Traits belong to the interface. With a method Unwrap() Store it also keeps what the wrapped
// store can do besides. A store for another database is a module of its own, with its own constructor.
// Package storetest tests a store against this contract:
//
//   - A write is atomic, and durable when it returns nil. A failed condition changes nothing.
//   - Versions never go back: the version of a write is greater than every version that any
//     object under that key ever had, including objects deleted since.
//   - Of any number of concurrent writes with [IfAbsent], or with [IfVersion] of one
//     version, exactly one succeeds.
//   - Times and ages are the store's: no caller's clock is compared with another's. A
//     Clockless store has no ages, and its times are for people to read.
//   - A write that fails with an error of this package ([ErrNotFound], [ErrExists], [ErrConflict],
//     [ErrTaken], [ErrInvalid], [ErrSetup], [ErrLost]) has written nothing. After any other error it may
//     or may not have written, but never in part. An error names the operation and the key, and keeps
//     its cause for [errors.Is] and [errors.As].
//   - No call waits for a lock longer than its context allows.
//   - Invalid arguments are [ErrInvalid] before any I/O.
//
// All methods are safe for concurrent use.
type Store interface {
	// Get returns the object, or [ErrNotFound].
	Get(ctx context.Context, key Key) (Object, error)

	// PutIf writes the object if the condition holds, and returns it with its new version
	// and times. Otherwise it returns [ErrExists] or [ErrConflict]. It returns [ErrTaken] if
	// the ID or the name belongs to another object.
	PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error)

	// DeleteIf deletes the object if the condition, which must be an [IfVersion], holds. Otherwise it
	// returns [ErrNotFound] or [ErrConflict].
	DeleteIf(ctx context.Context, key Key, cond WriteCondition) error

	// Lineage returns the store's current lineage. If the store has not been marked in this lineage,
	// Lineage first marks it. It does I/O only at the first call, and after a read or a write has
	// reached a different server. A store that can lose acknowledged writes in a failover or a
	// restore, as [PostgresStore] can, must have lineages; any other one returns the zero Lineage.
	Lineage(ctx context.Context) (Lineage, error)

	// Traits says what the store lacks. It does no I/O, and always returns the same.
	Traits() Traits
}

// Lister is implemented by stores that can enumerate objects: all stores of this module except
// [Static].
type Lister interface {
	// List returns at most limit objects of a type whose IDs come after the given one, ordered
	// by ID as the database orders text. A limit that is not positive is [ErrInvalid], and so
	// is a type that no key can have.
	List(ctx context.Context, objectType, after string, limit int) ([]Object, error)
}

// List yields all objects of a type, page by page. It is not a snapshot: if an object is
// written meanwhile, List may yield it as it was before or after the write, and it may or may not
// yield an object that is created or deleted meanwhile. The first error ends the sequence; for a
// store that is not a [Lister] it is [errors.ErrUnsupported].
func List(ctx context.Context, store Store, objectType string) iter.Seq2[Object, error] {
	const page = 256
	return func(yield func(Object, error) bool) {
		if objects.IsNil(store) {
			yield(Object{}, fmt.Errorf("tenure: list %s: %w: store is nil", objectType, ErrInvalid))
			return
		}
		lister, ok := objects.As[Lister](store)
		if !ok {
			yield(Object{}, fmt.Errorf("tenure: list %s: %w: %T is not a Lister", objectType, errors.ErrUnsupported, store))
			return
		}
		for after := ""; ; {
			objects, err := lister.List(ctx, objectType, after, page)
			if err != nil {
				yield(Object{}, err)
				return
			}
			for _, obj := range objects {
				if !yield(obj, nil) {
					return
				}
			}
			if len(objects) < page {
				return
			}
			after = objects[len(objects)-1].Key.ID
		}
	}
}

// Watcher is implemented by stores that can hint that an object was deleted or changed: all
// stores of this module except [Static]. On any other store, standbys poll, and holders find
// out at their next renewal.
type Watcher interface {
	// Watch begins to watch an object, which need not exist. It does no I/O.
	Watch(key Key) Subscription
}

// Subscription delivers hints about one object. A hint may come late, twice, without a cause, or
// not at all, so a hint alone must not decide anything. All methods are safe for concurrent use.
type Subscription interface {
	// C receives after DeleteAndWake has deleted the object, after a call of Wake, and whenever
	// hints may have been missed; the C of a [ChangeSubscription] receives after every change.
	C() <-chan struct{}

	// Live reports whether hints can be expected. C receives whenever that changes. While it is
	// false, the subscriber has to poll.
	Live() bool

	// Stop ends the subscription.
	Stop()
}

// ChangeSubscription is a [Subscription] of a store on which every write and every deletion is
// an event. It delivers the changes themselves, so a standby neither polls nor reads after each
// renewal: it counts the time since the last change that it has seen, and reads the record once
// before it takes over. A subscription may skip changes, but never the latest one.
type ChangeSubscription interface {
	Subscription

	// Last returns the newest change that has arrived, beginning with the state that the
	// subscription found when it became live. Ok is false while it is not live, or before
	// that state has arrived.
	Last() (change Change, ok bool)
}

// Change is an object after a write or a deletion.
type Change struct {
	// Object is as it was written, and must not be modified. After a deletion it has only a
	// Key and, if the store knows it, the Version of the deletion.
	Object  Object
	Deleted bool      // there is no object
	Arrived time.Time // when this process learned of it, by its own monotonic clock
}

// lastChange returns the newest change that a subscription has seen, if it delivers changes.
func lastChange(s Subscription) (Change, bool) {
	if s, ok := s.(ChangeSubscription); ok {
		return s.Last()
	}
	return Change{}, false
}

// followsChanges reports whether a subscription currently delivers every change.
func followsChanges(s Subscription) bool {
	_, ok := lastChange(s)
	return ok
}

// Watch begins to watch an object in any store. If the store is not a [Watcher], the
// subscription is never live.
func Watch(store Store, key Key) Subscription {
	if watcher, ok := objects.As[Watcher](store); ok {
		return watcher.Watch(key)
	}
	return noHints{}
}

// noHints is a subscription to a store that gives no hints.
type noHints struct{}

func (noHints) C() <-chan struct{} { return nil }

func (noHints) Live() bool { return false }

func (noHints) Stop() {}

// Notifier is implemented by stores on which a change wakes the watches of an object only if
// they are notified. A store on which every change is an event is only a [Watcher], and each of
// its subscriptions is a [ChangeSubscription].
type Notifier interface {
	// DeleteAndWake is DeleteIf, and if it deletes the object, it wakes all watches of the key,
	// in any process. The delete need not be durable when DeleteAndWake returns: a crash of the
	// database may bring the object back as it was.
	DeleteAndWake(ctx context.Context, key Key, cond WriteCondition) error

	// Wake wakes all watches of an object that the caller has just changed, in any process.
	Wake(ctx context.Context, key Key) error
}

// Wake wakes all watches of an object, in any store. If the store is not a [Notifier], it does
// nothing.
func Wake(ctx context.Context, store Store, key Key) error {
	if notifier, ok := objects.As[Notifier](store); ok {
		return notifier.Wake(ctx, key)
	}
	return nil
}

// Traits say what a store lacks, and who else can reach it. A store lacks nothing and is open to other
// processes unless it says otherwise.
type Traits struct {
	// Clockless says that the ages of this store's objects mean nothing: they are 0, and CreatedAt
	// and UpdatedAt may come from the clocks of the writing processes. Leases in such a store expire
	// as with [ExpiryObserved].
	Clockless bool

	// Nameless says that PutIf of an object with a name is [errors.ErrUnsupported]. Leases in such a
	// store have no names.
	Nameless bool

	// Alone, unless it is nil, says that no other process can reach this store. A [Coordinator] then
	// needs no lease: all coordinators of one key take turns, and there is neither a record nor a TTL.
	// It is the same at each call.
	Alone *Turns

	// Join, unless it is nil, is called before a coordinator competes, and leave when it no longer
	// does. [SQLiteStore] finds out here whether another process uses the file in a way that makes
	// one of the two unsafe, which ends [Coordinator.Run]. After any other error Join is called again.
	Join func(ctx context.Context) (leave func(), err error)
}

// ErrMoved means that nothing was written because the store is no longer on the server that the
// write's condition names: see [WriteCondition.OnServer]. It is an [ErrConflict].
var ErrMoved = objects.ErrMoved

// Lineage is a store's lineage, as it was last seen: the history that one primary continues.
type Lineage struct {
	Server string        // the server, and its start, for [WriteCondition.OnServer]
	Mark   string        // different in each lineage
	Age    time.Duration // how long ago the store was marked, by its clock
	Seen   time.Duration // how long ago this process first saw the mark; as long as Age if nothing can have been lost
}

// OnServer makes a write or a delete fail with [ErrMoved] on any server other than the given
// [Lineage.Server], and gives a write a version above least. If server is empty, OnServer changes
// nothing.
func (c WriteCondition) OnServer(server string, least int64) WriteCondition {
	if server != "" {
		c.c.Server, c.c.Least = server, least
	}
	return c
}

// CheckServer returns [ErrMoved] if the condition names another server. It is for
// stores that have lineages.
func (c WriteCondition) CheckServer(server string) error {
	if c.c.Server != "" && c.c.Server != server {
		return ErrMoved
	}
	return nil
}

// Least returns the version that the written version must exceed.
func (c WriteCondition) Least() int64 { return c.c.Least }
