package sim

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/wake"
	"github.com/tenurelib/tenure/storetest"
)

// journal is the database: a storetest.Mem whose writes the judge sees as they
// land. It sends hints through a hub of its own, so that they can get lost.
type journal struct {
	w     *world
	mem   atomic.Pointer[storetest.Mem] // replaced when the table is restored
	clock *testkit.ExpiryStoreClock
	hub   *wake.Hub[tenure.Key]

	hintsLost bool          // guarded by the world's lock
	last      tenure.Change // of the lease's object, guarded by the world's lock
}

func newJournal(w *world) *journal {
	j := &journal{w: w, hub: wake.NewHub[tenure.Key](true)}
	rate := 1.0
	if w.rates {
		rate = 0.99 + 0.02*w.rng.Float64()
	}
	j.clock = testkit.NewStoreClock(rate)
	mem := storetest.NewMem()
	mem.Now = j.clock.Now
	j.mem.Store(mem)
	j.last = tenure.Change{Object: tenure.Object{Key: leaseKey}, Deleted: true, Arrived: time.Now()}
	return j
}

// changed notes a change of the lease's object, and tells of it where changes are events. It
// must be called under the world's lock.
func (j *journal) changed(obj tenure.Object, deleted bool) {
	obj.Age = 0
	j.last = tenure.Change{Object: obj, Deleted: deleted, Arrived: time.Now()}
	if j.w.tellsChanges && !j.hintsLost {
		j.hub.Wake(leaseKey)
	}
}

// loseHints breaks all watches, or mends them. It must be called under the world's lock.
func (j *journal) loseHints(lost bool) {
	j.hintsLost = lost
	j.last.Arrived = time.Now()
	if j.w.tellsChanges {
		j.hub.Wake(leaseKey)
	}
}

// handle is the journal as one of its users sees it.
type handle struct {
	*journal
	who   string
	life  *life // nil if the user is not a replica
	rules bool  // whether the user follows the lease's rules
	fence *tenure.Term
}

// to returns the Mem, fenced if the handle is.
func (h *handle) to() tenure.Store {
	mem := h.mem.Load()
	if h.fence == nil {
		return mem
	}
	fenced, err := mem.Fence(h.fence)
	if err != nil {
		panic(err) // can't happen: Fence has tried it
	}
	return fenced
}

var (
	_ tenure.Fencer   = (*handle)(nil)
	_ tenure.Watcher  = (*handle)(nil)
	_ tenure.Notifier = (*handle)(nil)
)

func (j *journal) handle(who string, l *life, rules bool) *handle {
	return &handle{journal: j, who: who, life: l, rules: rules}
}

func (h *handle) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	var obj tenure.Object
	var err error
	h.w.locked(func() {
		obj, err = h.to().Get(ctx, key)
		h.w.trace.runs(ctx, obj, err)
	})
	if h.w.tellsChanges {
		obj.Age = 0
	}
	return obj, err
}

// Traits says whether the store has no clock, as those whose changes are events.
func (h *handle) Traits() tenure.Traits { return tenure.Traits{Clockless: h.w.tellsChanges} }

func (h *handle) Lineage(context.Context) (tenure.Lineage, error) { return tenure.Lineage{}, nil }

func (h *handle) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	h.w.mu.Lock()
	defer h.w.mu.Unlock()
	stored, err := h.to().PutIf(ctx, obj, cond)
	h.w.trace.runs(ctx, stored, err)
	if err == nil && obj.Key == leaseKey {
		h.changed(stored, false)
	}
	if h.fence != nil {
		h.w.trace.add(step{what: writes, life: h.life, term: h.fence.ID(), done: err == nil})
		h.w.judge.fencedWrite(h.fence, err)
	} else if err == nil && obj.Key == leaseKey {
		h.w.judge.written(h, stored, testkit.CallerGaveUp(ctx))
		if isRequest(stored) && ctx.Value(runKey{}) != nil {
			h.w.judge.wishes(h.life)
		}
	}
	return stored, err
}

func (h *handle) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return h.delete(ctx, key, cond, false)
}

func (h *handle) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return h.delete(ctx, key, cond, true)
}

func (h *handle) delete(ctx context.Context, key tenure.Key, cond tenure.WriteCondition, wakes bool) error {
	h.w.mu.Lock()
	defer h.w.mu.Unlock()
	wakes = wakes && !h.hintsLost
	err := h.to().DeleteIf(ctx, key, cond)
	h.w.trace.runs(ctx, tenure.Object{}, err)
	if err == nil && key == leaseKey {
		h.changed(tenure.Object{Key: key, Version: testkit.VersionOf(cond) + 1}, true)
		h.w.judge.deleted(h, wakes)
		if wakes {
			h.hub.Wake(key)
		}
	}
	return err
}

func (h *handle) Watch(key tenure.Key) tenure.Subscription {
	watch := h.hub.Watch(key)
	if h.w.tellsChanges {
		return eventWatch{watch, h.journal}
	}
	return watch
}

// eventWatch is a watch of the lease's object that tells its changes.
type eventWatch struct {
	*wake.Watch[tenure.Key]
	journal *journal
}

func (w eventWatch) Live() bool {
	_, ok := w.Last()
	return ok
}

func (w eventWatch) Last() (tenure.Change, bool) {
	w.journal.w.mu.Lock()
	defer w.journal.w.mu.Unlock()
	return w.journal.last, !w.journal.hintsLost
}

func (h *handle) Wake(_ context.Context, key tenure.Key) error {
	h.w.locked(h.w.judge.hinted)
	h.hub.Wake(key)
	return nil
}

func (h *handle) Fence(guard tenure.Guard) (tenure.Store, error) {
	if _, err := h.mem.Load().Fence(guard); err != nil {
		return nil, err
	}
	return &handle{journal: h.journal, who: h.who, life: h.life, fence: guard.(*tenure.Term)}, nil
}

// flood sends spurious hints for a while, as any client with the right to notify could.
func (j *journal) flood(d time.Duration) {
	j.w.running.Go(func() {
		for end := time.Now().Add(d); time.Now().Before(end) && j.w.sleep(d/50); {
			j.hub.Wake(leaseKey)
		}
	})
}

// restore replaces the table's content by a backup, which contains only the lease's
// record, if there was one. It must be called under the world's lock.
func (j *journal) restore(backup tenure.Object) {
	mem := storetest.NewMem()
	if backup.Version != 0 {
		at := time.UnixMicro(backup.Version)
		mem.Now = func() time.Time { return at }
		var err error
		if backup, err = mem.PutIf(context.Background(), backup, tenure.IfAbsent()); err != nil {
			panic(err)
		}
	}
	mem.Now = j.clock.Now
	j.mem.Store(mem)
	backup.Key = leaseKey
	j.changed(backup, backup.Version == 0)
}
