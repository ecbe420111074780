package kit

import (
	"context"
	"sync/atomic"

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
