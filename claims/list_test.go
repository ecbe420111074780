package claims_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestListTellsWhoOwnsWhat(t *testing.T) {
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		w := newWorld(t, open())
		a, b := w.start("a"), w.start("b")
		others, err := claims.NewKeys(b.session, "other")
		require.NoError(t, err)
		listing, err := a.session.List(t.Context(), "tenant", "other")
		require.NoError(t, err)
		require.Empty(t, listing.Claims)
		require.Zero(t, listing.At)

		before := time.Now()
		want := append(a.claim("one", "two"), b.claimOne("three"))
		got, err := others.TryClaim(t.Context(), "one")
		require.NoError(t, err)
		free := a.claimOne("free")
		require.NoError(t, a.keys.Release(t.Context(), free))
		_, err = w.table.Take(t.Context(), "a session that is gone", "tenant", nil, nil, []string{"gone"}, testkit.Patience)
		require.NoError(t, err)

		listing, err = a.session.List(t.Context(), "tenant")
		require.NoError(t, err)
		require.ElementsMatch(t, want, listing.Claims)
		for _, c := range listing.Claims {
			require.GreaterOrEqual(t, listing.Age(c), time.Duration(0))
			require.LessOrEqual(t, listing.Age(c), time.Since(before)+time.Millisecond)
		}
		listing, err = a.session.List(t.Context(), "tenant", "other")
		require.NoError(t, err)
		require.ElementsMatch(t, append(want, got...), listing.Claims)

		require.NoError(t, a.keys.Forget(t.Context()))
		rows, err := w.table.Look(t.Context(), "tenant", []string{"one", "two", "three", "free", "gone"}, testkit.Patience)
		require.NoError(t, err)
		require.Len(t, rows, 4, "only what is free is forgotten")

		_, err = a.session.List(t.Context())
		require.ErrorIs(t, err, tenure.ErrInvalid)
		_, err = a.session.List(t.Context(), "tenant", "\xff")
		require.ErrorIs(t, err, tenure.ErrInvalid)
	})
}

// A watch is woken. While it stands, crashed sessions are removed as soon as during a Claim.
func TestAWatchIsWokenWhenKeysAreFreed(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		watch := b.keys.Watch()
		defer watch.Stop()
		woken := func() bool {
			time.Sleep(time.Second)
			select {
			case <-watch.C():
				return true
			default:
				return false
			}
		}
		woken()
		c := a.claimOne("one")
		require.False(w, woken())
		require.NoError(w, a.keys.Release(w.Context(), c))
		require.True(w, woken())
		a.keys.Wake()
		require.True(w, woken())

		a.claimOne("one")
		began := time.Now()
		a.crash()
		select {
		case <-watch.C():
		case <-time.After(ttl + 100*time.Millisecond):
			w.Error("not woken")
		}
		require.LessOrEqual(w, time.Since(began), ttl+100*time.Millisecond)
		require.Equal(w, ttl, b.session.Config().TTL)
		require.Equal(w, testkit.Quiet, b.session.Config().Logger)
	})
}
