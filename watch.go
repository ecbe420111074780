package tenure

import (
	"context"
	"time"
)

// Watcher is implemented by stores that can tell, by hints, when an object is deleted or
// changed. All stores of this module do, except that of [Static]. With a store that does
// not, standbys poll, and holders find out at their next renewal.
type Watcher interface {
	// Watch begins to watch an object, which need not exist. It does no I/O.
	Watch(key Key) Subscription
}

// Subscription is a subscription to one object; it delivers hints. A hint may come late,
// twice, without a cause, or not at all, so nothing is decided by one alone. All methods
// are safe for concurrent use.
type Subscription interface {
	// C receives when the object was deleted by DeleteAndWake, when somebody has called
	// Wake, and whenever hints may have been missed; that of a [ChangeSubscription] after
	// every change.
	C() <-chan struct{}

	// Live reports whether hints can be expected. Whenever that has changed, C receives.
	// While it is false, the subscriber has to poll.
	Live() bool

	// Stop ends the subscription.
	Stop()
}

// ChangeSubscription is a [Subscription] of a store on which every write and every deletion
// is an event. It tells what has changed, so a standby neither polls nor reads after each
// renewal: it counts the silence since the last change that it has seen, and reads the record
// once before it takes over. Changes may be left out, but not those that come last.
type ChangeSubscription interface {
	Subscription

	// Last returns the newest change that has arrived, beginning with the state that the
	// subscription found when it became live. Ok is false while it is not live, or before
	// that state has arrived.
	Last() (change Change, ok bool)
}

// Change is what a write or a deletion has made of an object.
type Change struct {
	// Object is as it was written, and must not be modified. If there is none any more it
	// has only a Key and, if the store knows it, the Version of the deletion.
	Object  Object
	Deleted bool      // there is no object
	Arrived time.Time // when this process got to know, by its own monotonic clock
}

// lastChange returns the newest change that a subscription has seen, if it tells any.
func lastChange(s Subscription) (Change, bool) {
	if s, ok := s.(ChangeSubscription); ok {
		return s.Last()
	}
	return Change{}, false
}

// followsChanges reports whether a subscription tells of every change for now.
func followsChanges(s Subscription) bool {
	_, ok := lastChange(s)
	return ok
}

// subscribe watches an object in any store.
func subscribe(store Store, key Key) Subscription {
	if watcher, ok := store.(Watcher); ok {
		return watcher.Watch(key)
	}
	return noHints{}
}

// noHints is a subscription to a store that gives none.
type noHints struct{}

func (noHints) C() <-chan struct{} { return nil }
func (noHints) Live() bool         { return false }
func (noHints) Stop()              {}

// Notifier is implemented by stores on which a change wakes those that watch an object only
// if they are notified of it. All stores of this module do, except that of [Static]. A store
// on which every change is an event is only a [Watcher], whose subscriptions are each a
// [ChangeSubscription].
type Notifier interface {
	// DeleteAndWake is DeleteIf, and wakes all that watch the key, in other processes too;
	// none if nothing was deleted. The delete need not be durable when it returns: a crash
	// of the database may bring the object back, as it was.
	DeleteAndWake(ctx context.Context, key Key, version int64) error

	// Wake wakes all that watch an object that the caller has just changed, wherever they are.
	Wake(ctx context.Context, key Key) error
}

// deleteAndWake deletes an object from any store.
func deleteAndWake(ctx context.Context, store Store, key Key, version int64) error {
	if notifier, ok := store.(Notifier); ok {
		return notifier.DeleteAndWake(ctx, key, version)
	}
	return store.DeleteIf(ctx, key, version)
}

// wakeAll wakes all that watch an object in any store. It ignores errors, since hints may
// be lost in any case.
func wakeAll(ctx context.Context, store Store, key Key) {
	if notifier, ok := store.(Notifier); ok {
		// The change has been written, perhaps just before ctx ended.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = notifier.Wake(ctx, key)
	}
}
