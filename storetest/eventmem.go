package storetest

import (
	"context"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/wake"
)

// EventMem is an in-memory store of the kind that has no clock and on which every change is
// an event: a [tenure.Store], [tenure.Lister], [tenure.Fencer] and
// [tenure.Watcher], whose subscriptions are each a [tenure.ChangeSubscription]. Create one with
// [NewEventMem]. It never blocks, so it works in a bubble of testing/synctest. All methods are
// safe for concurrent use.
type EventMem struct {
	mem    *Mem // its hub has this store's watches
	events *events
	fenced tenure.Store // mem, or a fenced store over it
}

// events has the newest change of each object, as the watches know it.
type events struct {
	mu   sync.Mutex // locked after mem.mu
	live bool
	last map[tenure.Key]tenure.Change
}

// NewEventMem returns an empty store.
func NewEventMem() *EventMem {
	m := &EventMem{mem: NewMem(), events: &events{live: true, last: make(map[tenure.Key]tenure.Change)}}
	m.fenced = m.mem
	m.mem.changed = m.changed
	return m
}

// SetLive says whether changes arrive at the watches from now on. A test uses it to simulate a
// connection that is lost and made again.
func (m *EventMem) SetLive(live bool) {
	m.mem.mu.Lock()
	m.events.mu.Lock()
	m.events.live = live
	clear(m.events.last)
	for _, key := range m.mem.watches.Keys() {
		m.snapshot(key)
	}
	m.events.mu.Unlock()
	m.mem.mu.Unlock()
	m.mem.watches.SetLive(live)
}

// snapshot notes the present state of an object. The caller holds both locks.
func (m *EventMem) snapshot(key tenure.Key) {
	if _, known := m.events.last[key]; known || !m.events.live {
		return
	}
	obj, ok := m.mem.objects[key]
	if !ok {
		obj = tenure.Object{Key: key}
	}
	m.events.last[key] = tenure.Change{Object: clone(obj), Deleted: !ok, Arrived: time.Now()}
}

// changed notes a change. The caller holds the lock of mem.
func (m *EventMem) changed(obj tenure.Object, deleted bool) {
	m.events.mu.Lock()
	defer m.events.mu.Unlock()
	if m.events.live {
		m.events.last[obj.Key] = tenure.Change{Object: clone(obj), Deleted: deleted, Arrived: time.Now()}
		m.mem.watches.Wake(obj.Key)
	}
}

// Traits says that the store is Clockless.
func (m *EventMem) Traits() tenure.Traits { return tenure.Traits{Clockless: true} }

// Lineage returns the zero Lineage.
func (m *EventMem) Lineage(context.Context) (tenure.Lineage, error) { return tenure.Lineage{}, nil }

// Get returns a copy of the object, or [tenure.ErrNotFound].
func (m *EventMem) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := m.mem.Get(ctx, key)
	return ageless(obj), err
}

// PutIf writes a copy of the object if the condition holds.
func (m *EventMem) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	obj, err := m.fenced.PutIf(ctx, obj, cond)
	return ageless(obj), err
}

// DeleteIf deletes the object if it is at that version.
func (m *EventMem) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return m.fenced.DeleteIf(ctx, key, cond)
}

// List returns copies of at most limit objects of a type, as [Mem.List] does.
func (m *EventMem) List(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
	objects, err := m.mem.List(ctx, objectType, after, limit)
	for i, obj := range objects {
		objects[i] = ageless(obj)
	}
	return objects, err
}

// Fence returns the store with its writes fenced by a term.
func (m *EventMem) Fence(guard tenure.Guard) (tenure.Store, error) {
	fenced, err := m.fenced.(tenure.Fencer).Fence(guard)
	if err != nil {
		return nil, err
	}
	return &EventMem{mem: m.mem, events: m.events, fenced: fenced}, nil
}

// Watch watches an object. The subscription is live at once, unless SetLive(false) was called.
func (m *EventMem) Watch(key tenure.Key) tenure.Subscription {
	m.mem.mu.Lock()
	defer m.mem.mu.Unlock()
	m.events.mu.Lock()
	defer m.events.mu.Unlock()
	m.snapshot(key)
	return eventWatch{m.mem.watches.Watch(key), m.events, key}
}

type eventWatch struct {
	*wake.Watch[tenure.Key]
	events *events
	key    tenure.Key
}

func (w eventWatch) Last() (tenure.Change, bool) {
	w.events.mu.Lock()
	defer w.events.mu.Unlock()
	change, ok := w.events.last[w.key]
	return change, ok
}

func ageless(obj tenure.Object) tenure.Object {
	obj.Age = 0
	return obj
}
