package tenure

import (
	"context"
	"errors"
	"fmt"
)

// Static returns a store that keeps nothing, for a deployment of one replica
// without a database: a [Coordinator] over it always holds, and runs its job as
// over any other store. Its reads find nothing, its writes are
// [errors.ErrUnsupported]. It is safe for concurrent use.
func Static() Store { return static{} }

type static struct{}

func (static) SingleReplica() bool { return true }

func (static) Get(ctx context.Context, key Key) (Object, error) {
	return Object{}, opError(ctx, "get", key, ErrNotFound)
}

func (static) PutIf(_ context.Context, obj Object, _ WriteCondition) (Object, error) {
	return Object{}, fmt.Errorf("tenure: put %s: %w: a static store keeps nothing", obj.Key, errors.ErrUnsupported)
}

func (static) DeleteIf(_ context.Context, key Key, _ int64) error {
	return fmt.Errorf("tenure: delete %s: %w: a static store keeps nothing", key, errors.ErrUnsupported)
}
