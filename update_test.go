package tenure_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
)

var counterKey = tenure.Key{Type: "counter", ID: "1"}

func TestNoConcurrentUpdateIsLost(t *testing.T) {
	kit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		store := open()
		kit.Put(t, store, tenure.Object{Key: counterKey, Name: "one", Labels: map[string]string{"a": "b"}, Payload: []byte("0")})
		const writers, each = 4, 10
		var all sync.WaitGroup
		for range writers {
			all.Go(func() {
				for range each {
					_, err := tenure.Update(t.Context(), store, counterKey, func(obj tenure.Object) (tenure.Object, error) {
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
		got := kit.Get(t, store, counterKey)
		require.Equal(t, strconv.Itoa(writers*each), string(got.Payload))
		require.Equal(t, "one", got.Name)
		require.Equal(t, map[string]string{"a": "b"}, got.Labels)
	})
}

func TestAnUpdateThatCannotSucceedEnds(t *testing.T) {
	inBubbles(t, func(t *scene) {
		same := func(obj tenure.Object) (tenure.Object, error) { return obj, nil }
		_, err := tenure.Update(t.Context(), t.store, counterKey, same)
		require.ErrorIs(t, err, tenure.ErrNotFound)
		_, err = tenure.Update(t.Context(), nil, counterKey, same)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		_, err = tenure.Update(t.Context(), t.store, counterKey, nil)
		require.ErrorIs(t, err, tenure.ErrInvalid)

		kit.Put(t, t.store, tenure.Object{Key: counterKey, Payload: []byte("x")})
		_, err = tenure.Update(t.Context(), t.store, counterKey, func(obj tenure.Object) (tenure.Object, error) {
			obj.Key.ID = "2"
			return obj, nil
		})
		require.ErrorIs(t, err, tenure.ErrInvalid)
		refused := errors.New("not that one")
		_, err = tenure.Update(t.Context(), t.store, counterKey, func(obj tenure.Object) (tenure.Object, error) { return obj, refused })
		require.Equal(t, refused, err)

		ctx, cancel := context.WithCancel(t.Context())
		tries := 0
		_, err = tenure.Update(ctx, t.store, counterKey, func(obj tenure.Object) (tenure.Object, error) {
			if tries++; tries == 20 {
				cancel()
			}
			kit.Put(t, t.store, obj) // another writer is always faster
			return obj, nil
		})
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, 20, tries)
	})
}

func TestAnUpdateThroughAFencedStoreIsFenced(t *testing.T) {
	inBubble(t, func(t *scene) {
		kit.Put(t, t.store, tenure.Object{Key: counterKey, Payload: []byte("x")})
		fenced, err := tenure.Fence(t.store, kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{})))
		require.NoError(t, err)
		touch := func(obj tenure.Object) (tenure.Object, error) {
			obj.Payload = append(obj.Payload, '+')
			return obj, nil
		}
		_, err = tenure.Update(t.Context(), fenced, counterKey, touch)
		require.NoError(t, err)
		kit.RemoveRecord(t, t.store)
		_, err = tenure.Update(t.Context(), fenced, counterKey, touch)
		require.ErrorIs(t, err, tenure.ErrLost)
		require.Equal(t, "x+", string(kit.Get(t, t.store, counterKey).Payload))
	})
}
