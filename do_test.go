package tenure_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

func TestDoRunsOnceUnderATermAndReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		other := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"})
		held := kit.MustAcquire(t, other)
		time.AfterFunc(10*time.Second, func() { _ = other.Release(context.Background(), held) })
		began, failed, calls := time.Now(), errors.New("this went wrong"), 0
		var waited time.Duration
		var ended error
		err := tenure.Do(t.Context(), kit.NewLease(t, store, tenure.LeaseConfig{}), func(ctx context.Context) error {
			calls++
			waited = time.Since(began)
			time.Sleep(time.Minute) // it is renewed meanwhile
			ended = ctx.Err()
			if !tenure.TermFromContext(ctx).Valid() {
				ended = errors.New("the term is over")
			}
			return failed
		})
		require.Equal(t, failed, err)
		require.Equal(t, 1, calls)
		require.Equal(t, 10*time.Second, waited.Truncate(time.Second))
		require.NoError(t, ended)
		kit.MustAcquire(t, other) // it is free
	})
}

func TestDoSaysThatTheLeaseWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, calls := storetest.NewMem(), 0
		var removed error
		err := tenure.Do(t.Context(), kit.NewLease(t, store, tenure.LeaseConfig{}), func(ctx context.Context) error {
			calls++
			removed = store.DeleteIf(ctx, kit.LeaseKey, tenure.IfVersion(tenure.TermFromContext(ctx).Token()))
			<-ctx.Done()
			return nil
		})
		require.NoError(t, removed)
		require.ErrorIs(t, err, tenure.ErrLost)
		require.Equal(t, 1, calls)
	})
}

func TestDoEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		lease, other := kit.NewLease(t, store, tenure.LeaseConfig{}), kit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"})
		enough := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		var meanwhile error
		err := tenure.Do(ctx, lease, func(ctx context.Context) error {
			time.AfterFunc(time.Second, func() { cancel(enough) })
			<-ctx.Done()
			_, meanwhile = other.TryAcquire(context.Background())
			return nil
		})
		require.NoError(t, err)
		require.ErrorIs(t, meanwhile, tenure.ErrHeld, "it is kept until the work has returned")
		require.ErrorIs(t, tenure.Do(ctx, lease, func(context.Context) error { t.Error("called"); return nil }), enough)
	})
}

func TestDoPassesAPanicOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		require.Panics(t, func() {
			_ = tenure.Do(t.Context(), kit.NewLease(t, store, tenure.LeaseConfig{}), func(context.Context) error { panic("oops") })
		})
		kit.MustAcquire(t, kit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"}))
		require.ErrorIs(t, tenure.Do(t.Context(), kit.NewLease(t, store, tenure.LeaseConfig{}), nil), tenure.ErrInvalid)
		require.ErrorIs(t, tenure.Do(t.Context(), nil, kit.Succeeds), tenure.ErrInvalid)
	})
}

func TestDoCallsAFuncThatEndsByGoexitOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, calls := storetest.NewMem(), 0
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		err := tenure.Do(ctx, kit.NewLease(t, store, tenure.LeaseConfig{}), func(context.Context) error {
			calls++
			runtime.Goexit() // as t.FailNow does
			return nil
		})
		require.ErrorContains(t, err, "tenure: do: runtime.Goexit was called")
		require.Equal(t, 1, calls)
		require.NoError(t, ctx.Err(), "Do returns at once")
		kit.MustAcquire(t, kit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"})) // it is free
	})
}

func TestHoldRunsTheJobForATermThatWasAcquiredBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		lease := kit.NewLease(t, store, tenure.LeaseConfig{})
		var of *tenure.Term
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			of = tenure.TermFromContext(ctx)
			<-ctx.Done()
			return nil
		}})
		require.NoError(t, err)

		term := kit.MustAcquire(t, lease)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.NoError(t, c.Hold(ctx, term), "it is renewed for an hour")
		require.Same(t, term, of)
		require.ErrorIs(t, c.Hold(t.Context(), nil), tenure.ErrInvalid)

		lost := kit.MustAcquire(t, lease) // it is free
		time.AfterFunc(time.Minute, func() { kit.RemoveRecord(t, store) })
		began := time.Now()
		require.ErrorIs(t, c.Hold(t.Context(), lost), tenure.ErrLost)
		require.Less(t, time.Since(began), 2*time.Minute)
		_, err = lease.Read(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound, "it has not competed again")
		require.ErrorIs(t, c.Hold(t.Context(), lost), tenure.ErrLost, "a term that is over")
	})
}

func TestATermThatWasNotRenewedInTimeBeginsNoJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lease := kit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{})
		began := 0
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			began++
			<-ctx.Done()
			return nil
		}})
		require.NoError(t, err)
		for _, age := range []time.Duration{tenure.DefaultTTL, c.Config().RenewDeadline} { // trust is left, but less than the job may take to stop
			term := kit.MustAcquire(t, lease)
			time.Sleep(age)
			require.ErrorIs(t, c.Hold(t.Context(), term), tenure.ErrDeadline)
			require.Zero(t, began, "after %v", age)
		}
	})
}
