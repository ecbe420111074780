package storetest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/wake"
	"github.com/tenurelib/tenure/storekit"
)

// Mem is an in-memory [tenure.Store], [tenure.Lister], [tenure.Fencer],
// [tenure.Watcher] and [tenure.Notifier] for tests; create one with [NewMem]. It keeps
// the whole contract and never blocks, so it works in a bubble of testing/synctest.
// All methods are safe for concurrent use.
type Mem struct {
	// Now is the database's clock, which a test may set wrong or make jump; nil
	// means time.Now. Set it before the first use.
	Now func() time.Time

	// Lineages gives the store lineages, so that a move to a [Mem.Fork] can lose writes. Set it
	// before the first use.
	Lineages bool

	// Events makes the store one without a clock, on which every change is an event, as natstenure's
	// and etcdtenure's are: it is Clockless, and each subscription is a [tenure.ChangeSubscription].
	// Set it before the first use.
	Events bool

	*memory
	term *tenure.Term // whose fence the writes have to pass; nil: none
}

// memory is shared by a store and the fenced stores made from it.
type memory struct {
	watches *wake.Hub[tenure.Key]

	mu      sync.Mutex
	objects map[tenure.Key]tenure.Object
	version int64 // the last one assigned to any object, including deleted ones

	lineage lineage

	cut    bool                         // no event arrives
	events map[tenure.Key]tenure.Change // the newest one of each object, as the watches know it
}

// NewMem returns an empty store.
func NewMem() *Mem {
	return &Mem{memory: &memory{
		objects: make(map[tenure.Key]tenure.Object),
		watches: wake.NewHub[tenure.Key](true),
		lineage: firstLineage(),
		events:  make(map[tenure.Key]tenure.Change),
	}}
}

// Traits says whether the store is Clockless.
func (m *Mem) Traits() tenure.Traits { return tenure.Traits{Clockless: m.Events} }

// Get returns a copy of the object, or [tenure.ErrNotFound].
func (m *Mem) Get(ctx context.Context, key tenure.Key) (obj tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "storetest: get", key)
	if err := cmp.Or(key.Validate(), ctx.Err()); err != nil {
		return tenure.Object{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	obj, ok := m.objects[key]
	if !ok {
		return tenure.Object{}, tenure.ErrNotFound
	}
	return m.read(obj, m.now()), nil
}

// PutIf writes a copy of the object if the condition holds. Its version is
// the time in microseconds, or the last version plus one if that is greater.
func (m *Mem) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (written tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "storetest: put", obj.Key)
	if err := cmp.Or(obj.Validate(), cond.Validate(), storekit.CheckFenced(m.term, obj.Key), ctx.Err()); err != nil {
		return tenure.Object{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	current, exists := m.objects[obj.Key]
	if err := cmp.Or(cond.CheckServer(m.lineage.server), m.checkTerm(), cond.Check(obj.Key, current.Version), m.nameTaken(obj)); err != nil {
		return tenure.Object{}, err
	}
	now := m.now()
	m.version = max(m.version+1, now.UnixMicro(), cond.Least()+1)
	obj = clone(obj)
	obj.Version, obj.CreatedAt, obj.UpdatedAt = m.version, now, now
	if exists {
		obj.CreatedAt = current.CreatedAt
	}
	m.objects[obj.Key] = obj
	m.event(obj, false)
	return m.read(obj, now), nil
}

// DeleteIf deletes the object if it is at that version.
func (m *Mem) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) (err error) {
	defer storekit.OpError(ctx, &err, "storetest: delete", key)
	if err := cmp.Or(key.Validate(), cond.ValidateDelete(), storekit.CheckFenced(m.term, key), ctx.Err()); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := cond.CheckServer(m.lineage.server); err != nil {
		return err
	}
	if err := m.checkTerm(); err != nil {
		return err
	}
	obj, ok := m.objects[key]
	if !ok {
		return tenure.ErrNotFound
	}
	if err := cond.Check(key, obj.Version); err != nil {
		return err
	}
	delete(m.objects, key)
	if m.Events {
		m.version++
	}
	m.event(tenure.Object{Key: key, Version: m.version}, true)
	return nil
}

// event notes a change, if each one is an event. The caller holds the lock.
func (m *Mem) event(obj tenure.Object, deleted bool) {
	if m.Events && !m.cut {
		m.events[obj.Key] = tenure.Change{Object: clone(obj), Deleted: deleted, Arrived: time.Now()}
		m.watches.Wake(obj.Key)
	}
}

// Watch watches an object. The subscription is live at once, unless SetLive(false) was called.
func (m *Mem) Watch(key tenure.Key) tenure.Subscription {
	if !m.Events {
		return m.watches.Watch(key)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.snapshot(key)
	return eventWatch{m.watches.Watch(key), m.memory, key}
}

type eventWatch struct {
	*wake.Watch[tenure.Key]
	m   *memory
	key tenure.Key
}

func (w eventWatch) Last() (tenure.Change, bool) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	change, ok := w.m.events[w.key]
	return change, ok
}

// SetLive says whether changes arrive at the watches from now on. A test uses it to simulate a
// connection that is lost and made again.
func (m *Mem) SetLive(live bool) {
	m.mu.Lock()
	m.cut = !live
	clear(m.events)
	for _, key := range m.watches.Keys() {
		m.snapshot(key)
	}
	m.mu.Unlock()
	m.watches.SetLive(live)
}

// snapshot notes the present state of an object as the newest event. The caller holds the lock.
func (m *Mem) snapshot(key tenure.Key) {
	if _, known := m.events[key]; known || m.cut {
		return
	}
	obj, ok := m.objects[key]
	if !ok {
		obj = tenure.Object{Key: key}
	}
	m.events[key] = tenure.Change{Object: clone(obj), Deleted: !ok, Arrived: time.Now()}
}

// DeleteAndWake deletes the object if it is at that version, and wakes every watch of
// it.
func (m *Mem) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	err := m.DeleteIf(ctx, key, cond)
	if err == nil {
		m.watches.Wake(key)
	}
	return err
}

// Wake wakes every watch of the object.
func (m *Mem) Wake(ctx context.Context, key tenure.Key) (err error) {
	defer storekit.OpError(ctx, &err, "storetest: wake", key)
	if err := cmp.Or(key.Validate(), ctx.Err()); err != nil {
		return err
	}
	m.watches.Wake(key)
	return nil
}

// Fence returns the store with its writes fenced by a term. For any other guard it returns
// [errors.ErrUnsupported].
func (m *Mem) Fence(guard tenure.Guard) (tenure.Store, error) {
	term, err := storekit.FenceTerm(m.term, guard)
	if err != nil {
		return nil, fmt.Errorf("storetest: fence: %w", err)
	}
	if term == nil {
		return m, nil
	}
	fenced := *m
	fenced.term = term
	return &fenced, nil
}

// checkTerm returns [tenure.ErrLost] if the writes are fenced by a term whose record is no
// longer in the store, and [tenure.ErrMoved] if the term was not renewed on this server. The caller holds the lock.
func (m *Mem) checkTerm() error {
	if m.term == nil {
		return nil
	}
	fence, err := m.term.Fence()
	switch {
	case err != nil:
		return err
	case !bytes.Equal(m.objects[m.term.Key()].Payload, m.term.Record()):
		return fence.Refused(nil, nil)
	case fence.Server() != "" && fence.Server() != m.lineage.server:
		return tenure.ErrMoved
	}
	return nil
}

// List returns copies of at most limit objects of a type, sorted by the bytes of
// their IDs, beginning after the given ID.
func (m *Mem) List(ctx context.Context, objectType, after string, limit int) (found []tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "storetest: list", objectType)
	if err := cmp.Or(storekit.CheckList(objectType, after, limit), ctx.Err()); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	for key, obj := range m.objects {
		if key.Type == objectType && key.ID > after {
			found = append(found, m.read(obj, now))
		}
	}
	slices.SortFunc(found, func(a, b tenure.Object) int { return cmp.Compare(a.Key.ID, b.Key.ID) })
	return found[:min(limit, len(found))], nil
}

func (m *Mem) nameTaken(obj tenure.Object) error {
	if obj.Name == "" {
		return nil
	}
	for key, other := range m.objects {
		if key.Type == obj.Key.Type && key.ID != obj.Key.ID && other.Name == obj.Name {
			return fmt.Errorf("%w: name %q is %s's", tenure.ErrTaken, obj.Name, key)
		}
	}
	return nil
}

// now returns the time without its monotonic reading, which a database's times don't
// have either.
func (m *Mem) now() time.Time {
	if m.Now != nil {
		return m.Now().UTC().Round(0)
	}
	return time.Now().UTC().Round(0)
}

// read returns a copy of a stored object, with its age at that time unless the store has no clock.
func (m *Mem) read(obj tenure.Object, now time.Time) tenure.Object {
	obj = clone(obj)
	obj.Age = 0
	if !m.Events {
		obj.Age = now.Sub(obj.UpdatedAt)
	}
	return obj
}

func clone(obj tenure.Object) tenure.Object {
	obj.Labels = maps.Clone(obj.Labels)
	obj.Payload = bytes.Clone(obj.Payload)
	return obj
}
