package testkit

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// Movable is a replica's store, which reaches one server after another: the one that was last stored.
type Movable struct{ atomic.Pointer[storetest.Mem] }

// NewMovable returns a store that reaches a server.
func NewMovable(server *storetest.Mem) *Movable {
	m := new(Movable)
	m.Store(server)
	return m
}

func (m *Movable) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	return m.Load().Get(ctx, key)
}

func (m *Movable) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	return m.Load().PutIf(ctx, obj, cond)
}

func (m *Movable) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return m.Load().DeleteIf(ctx, key, cond)
}

func (m *Movable) Lineage(ctx context.Context) (tenure.Lineage, error) { return m.Load().Lineage(ctx) }

func (m *Movable) Traits() tenure.Traits { return m.Load().Traits() }

// Restore replaces the server with a restored one whose tombstones are lost, as its rows are, and whose clock is behind by
// as much as the returned value says: only so can it repeat a token.
func (m *Movable) Restore() (behind *atomic.Int64) {
	behind = new(atomic.Int64)
	behind.Store(int64(time.Hour))
	server := storetest.NewMem()
	server.Now = func() time.Time { return time.Now().Add(-time.Duration(behind.Load())) }
	m.Store(server)
	return behind
}
