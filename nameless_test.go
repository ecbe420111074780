package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// nameless is a store that keeps no names.
type nameless struct{ *storetest.EventMem }

func (nameless) Traits() tenure.Traits { return tenure.Traits{Clockless: true, Nameless: true} }

func (s nameless) Fence(guard tenure.Guard) (tenure.Store, error) {
	fenced, err := s.EventMem.Fence(guard)
	if err != nil {
		return nil, err
	}
	return nameless{fenced.(*storetest.EventMem)}, nil
}

func (s nameless) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	if err := obj.Validate(); err == nil && obj.Name != "" {
		return tenure.Object{}, fmt.Errorf("put %s: %w: the store keeps no names", obj.Key, errors.ErrUnsupported)
	}
	return s.EventMem.PutIf(ctx, obj, cond)
}

func TestALeaseInAStoreWithoutNamesHasNone(t *testing.T) {
	store := storetest.Faulty(nameless{storetest.NewEventMem()}, nil) // it passes on that there are none
	cfg := tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}, Holder: "a"}
	lease, err := tenure.NewLease(store, cfg)
	require.NoError(t, err)
	require.Empty(t, lease.Config().Name)
	for range 2 {
		term, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		require.NoError(t, lease.Renew(t.Context(), term))
		require.NoError(t, lease.Release(t.Context(), term))
	}

	// An offer is a write of its own.
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, lease.RequestHandover(t.Context(), "b"))
	require.NoError(t, lease.Renew(t.Context(), term))
	require.NoError(t, lease.Release(t.Context(), term))

	cfg.Name = "the sweeper's"
	_, err = tenure.NewLease(store, cfg)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, `"the sweeper's"`)
}

func TestAStoreWithoutNamesKeepsTheContract(t *testing.T) {
	storetest.Run(t, func(*testing.T) tenure.Store { return nameless{storetest.NewEventMem()} })
}
