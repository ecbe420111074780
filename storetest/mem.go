package storetest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/wake"
)

// Mem is an in-memory [tenure.Store], [tenure.Lister], [tenure.Fencer],
// [tenure.Watcher] and [tenure.Notifier] for tests; create one with [NewMem]. It keeps
// the whole contract and never blocks, so it works in a bubble of testing/synctest.
// All methods are safe for concurrent use.
type Mem struct {
	// Now is the database's clock, which a test may set wrong or make jump; nil
	// means time.Now. Set it before the first use.
	Now func() time.Time

	// Single is what SingleReplica returns. Set it before the first use.
	Single bool

	watches *wake.Hub[tenure.Key]

	mu      sync.Mutex
	objects map[tenure.Key]tenure.Object
	version int64 // the last one assigned to any object, deleted ones included

	// changed, if set, is told of each change while mu is held; then a deletion has a
	// version too. It does not modify the object.
	changed func(obj tenure.Object, deleted bool)
}

// NewMem returns an empty store.
func NewMem() *Mem {
	return &Mem{objects: make(map[tenure.Key]tenure.Object), watches: wake.NewHub[tenure.Key](true)}
}

// SingleReplica returns the field Single.
func (m *Mem) SingleReplica() bool { return m.Single }

// Get returns a copy of the object, or [tenure.ErrNotFound].
func (m *Mem) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	if err := cmp.Or(key.Validate(), ctx.Err()); err != nil {
		return tenure.Object{}, fmt.Errorf("storetest: get %s: %w", key, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	obj, ok := m.objects[key]
	if !ok {
		return tenure.Object{}, fmt.Errorf("storetest: get %s: %w", key, tenure.ErrNotFound)
	}
	return read(obj, m.now()), nil
}

// PutIf writes a copy of the object if the condition holds. Its version is
// the time in microseconds, or the last version plus one if that is greater.
func (m *Mem) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	return m.putIf(ctx, obj, cond, nil)
}

func (m *Mem) putIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition, fence *tenure.Term) (tenure.Object, error) {
	if err := cmp.Or(obj.Validate(), cond.Validate(), notItself(fence, obj.Key), ctx.Err()); err != nil {
		return tenure.Object{}, fmt.Errorf("storetest: put %s: %w", obj.Key, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	current, exists := m.objects[obj.Key]
	if err := cmp.Or(m.check(fence), cond.Check(obj.Key, current.Version), m.nameTaken(obj)); err != nil {
		return tenure.Object{}, fmt.Errorf("storetest: put %s: %w", obj.Key, err)
	}
	now := m.now()
	m.version = max(m.version+1, now.UnixMicro())
	obj = clone(obj)
	obj.Version, obj.CreatedAt, obj.UpdatedAt = m.version, now, now
	if exists {
		obj.CreatedAt = current.CreatedAt
	}
	m.objects[obj.Key] = obj
	if m.changed != nil {
		m.changed(obj, false)
	}
	return read(obj, now), nil
}

// DeleteIf deletes the object if it is at that version.
func (m *Mem) DeleteIf(ctx context.Context, key tenure.Key, version int64) error {
	return m.deleteIf(ctx, key, version, nil)
}

func (m *Mem) deleteIf(ctx context.Context, key tenure.Key, version int64, fence *tenure.Term) error {
	cond := tenure.MatchVersion(version)
	if err := cmp.Or(key.Validate(), cond.Validate(), notItself(fence, key), ctx.Err()); err != nil {
		return fmt.Errorf("storetest: delete %s: %w", key, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.check(fence); err != nil {
		return fmt.Errorf("storetest: delete %s: %w", key, err)
	}
	obj, ok := m.objects[key]
	if !ok {
		return fmt.Errorf("storetest: delete %s: %w", key, tenure.ErrNotFound)
	}
	if err := cond.Check(key, obj.Version); err != nil {
		return fmt.Errorf("storetest: delete %s: %w", key, err)
	}
	delete(m.objects, key)
	if m.changed != nil {
		m.version++
		m.changed(tenure.Object{Key: key, Version: m.version}, true)
	}
	return nil
}

// Watch watches an object; it is live at once.
func (m *Mem) Watch(key tenure.Key) tenure.Subscription { return m.watches.Watch(key) }

// DeleteAndWake deletes the object if it is at that version, and wakes every watch of
// it.
func (m *Mem) DeleteAndWake(ctx context.Context, key tenure.Key, version int64) error {
	return m.deleteAndWake(ctx, key, version, nil)
}

// Wake wakes every watch of the object.
func (m *Mem) Wake(ctx context.Context, key tenure.Key) error {
	if err := cmp.Or(key.Validate(), ctx.Err()); err != nil {
		return fmt.Errorf("storetest: wake %s: %w", key, err)
	}
	m.watches.Wake(key)
	return nil
}

func (m *Mem) deleteAndWake(ctx context.Context, key tenure.Key, version int64, fence *tenure.Term) error {
	err := m.deleteIf(ctx, key, version, fence)
	if err == nil {
		m.watches.Wake(key)
	}
	return err
}

// Fence returns the store with its writes fenced by the term.
func (m *Mem) Fence(term *tenure.Term) (tenure.Store, error) {
	switch {
	case term == nil || term.ID() == "":
		return nil, fmt.Errorf("storetest: fence: %w: no term is given", tenure.ErrInvalid)
	case term.Record() == nil: // a single replica's
		return m, nil
	}
	return &fencedMem{m, term}, nil
}

type fencedMem struct {
	*Mem
	term *tenure.Term
}

func (m *fencedMem) Fence(*tenure.Term) (tenure.Store, error) {
	return nil, fmt.Errorf("storetest: fence: %w: the store is fenced already", errors.ErrUnsupported)
}

func (m *fencedMem) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	return m.putIf(ctx, obj, cond, m.term)
}

func (m *fencedMem) DeleteIf(ctx context.Context, key tenure.Key, version int64) error {
	return m.deleteIf(ctx, key, version, m.term)
}

func (m *fencedMem) DeleteAndWake(ctx context.Context, key tenure.Key, version int64) error {
	return m.deleteAndWake(ctx, key, version, m.term)
}

// notItself rejects a fenced write to the record that its fence depends on.
func notItself(fence *tenure.Term, key tenure.Key) error {
	if fence != nil && fence.Key() == key {
		return fmt.Errorf("%w: the lease's own object can't be written through its fence", tenure.ErrInvalid)
	}
	return nil
}

// check returns ErrLost if the term's record is no longer in the store. A nil fence
// always passes.
func (m *Mem) check(fence *tenure.Term) error {
	if fence == nil || bytes.Equal(m.objects[fence.Key()].Payload, fence.Record()) {
		return nil
	}
	return &tenure.LostError{Key: fence.Key()}
}

// List returns copies of at most limit objects of a type, sorted by the bytes of
// their IDs, beginning after the given ID.
func (m *Mem) List(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
	arguments := tenure.Object{Key: tenure.Key{Type: objectType, ID: "any"}, Name: after}
	if limit < 1 || arguments.Validate() != nil {
		return nil, fmt.Errorf("storetest: list %q after %q, limit %d: %w", objectType, after, limit, tenure.ErrInvalid)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("storetest: list %s: %w", objectType, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	var objects []tenure.Object
	for key, obj := range m.objects {
		if key.Type == objectType && key.ID > after {
			objects = append(objects, read(obj, now))
		}
	}
	slices.SortFunc(objects, func(a, b tenure.Object) int { return cmp.Compare(a.Key.ID, b.Key.ID) })
	return objects[:min(limit, len(objects))], nil
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

// read returns a copy of a stored object with its age at that time.
func read(obj tenure.Object, now time.Time) tenure.Object {
	obj = clone(obj)
	obj.Age = now.Sub(obj.UpdatedAt)
	return obj
}

func clone(obj tenure.Object) tenure.Object {
	obj.Labels = maps.Clone(obj.Labels)
	obj.Payload = bytes.Clone(obj.Payload)
	return obj
}
