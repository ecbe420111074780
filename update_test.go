package tenure_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestOfUpdatesAtOnceNoneIsLost(t *testing.T) {
	eachStore(t, func(t *testing.T, open func() tenure.Store) {
		key := tenure.Key{Type: "counter", ID: "1"}
		store := open()
		_, err := store.PutIf(t.Context(), tenure.Object{Key: key, Name: "one", Labels: map[string]string{"a": "b"}, Payload: []byte("0")}, tenure.MustCreate())
		require.NoError(t, err)
		const writers, each = 4, 10
		var all sync.WaitGroup
		for range writers {
			all.Go(func() {
				for range each {
					_, err := tenure.Update(t.Context(), store, key, func(obj tenure.Object) (tenure.Object, error) {
						n, err := strconv.Atoi(string(obj.Payload))
						obj.Payload = strconv.AppendInt(nil, int64(n+1), 10)
						return obj, err
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		got, err := store.Get(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, strconv.Itoa(writers*each), string(got.Payload))
		require.Equal(t, "one", got.Name)
		require.Equal(t, map[string]string{"a": "b"}, got.Labels)
	})
}

func TestAnUpdateThatCannotSucceedEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, key := storetest.NewMem(), tenure.Key{Type: "counter", ID: "1"}
		same := func(obj tenure.Object) (tenure.Object, error) { return obj, nil }
		_, err := tenure.Update(t.Context(), store, key, same)
		require.ErrorIs(t, err, tenure.ErrNotFound)
		_, err = tenure.Update(t.Context(), nil, key, same)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		_, err = tenure.Update(t.Context(), store, key, nil)
		require.ErrorIs(t, err, tenure.ErrInvalid)

		_, err = store.PutIf(t.Context(), tenure.Object{Key: key, Payload: []byte("x")}, tenure.MustCreate())
		require.NoError(t, err)
		_, err = tenure.Update(t.Context(), store, key, func(obj tenure.Object) (tenure.Object, error) {
			obj.Key.ID = "2"
			return obj, nil
		})
		require.ErrorIs(t, err, tenure.ErrInvalid)
		refused := errors.New("not that one")
		_, err = tenure.Update(t.Context(), store, key, func(obj tenure.Object) (tenure.Object, error) { return obj, refused })
		require.Equal(t, refused, err)

		ctx, cancel := context.WithCancel(t.Context())
		tries := 0
		_, err = tenure.Update(ctx, store, key, func(obj tenure.Object) (tenure.Object, error) {
			if tries++; tries == 20 {
				cancel()
			}
			_, err := store.PutIf(t.Context(), obj, tenure.Unconditional()) // somebody is always quicker
			return obj, err
		})
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, 20, tries)
	})
}

func TestAnUpdateThroughAFencedStoreIsFenced(t *testing.T) {
	store, key := storetest.NewMem(), tenure.Key{Type: "counter", ID: "1"}
	_, err := store.PutIf(t.Context(), tenure.Object{Key: key, Payload: []byte("x")}, tenure.MustCreate())
	require.NoError(t, err)
	lease := newLease(t, store, tenure.LeaseConfig{})
	fenced, err := tenure.Fence(store, mustAcquire(t, lease))
	require.NoError(t, err)
	touch := func(obj tenure.Object) (tenure.Object, error) {
		obj.Payload = append(obj.Payload, '+')
		return obj, nil
	}
	_, err = tenure.Update(t.Context(), fenced, key, touch)
	require.NoError(t, err)
	holding, err := lease.Read(t.Context())
	require.NoError(t, err)
	require.NoError(t, store.DeleteIf(t.Context(), leaseKey, holding.Version))
	_, err = tenure.Update(t.Context(), fenced, key, touch)
	require.ErrorIs(t, err, tenure.ErrLost)
	got, err := store.Get(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, "x+", string(got.Payload))
}
