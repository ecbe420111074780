package claims_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/witnessed"
)

func TestTheKeysOfADeadProcessAreFreeWhenItsWitnessHasReleasedItsSession(t *testing.T) {
	inBubble(t, func(w *world) {
		session, err := claims.NewSession(w.store, claims.SessionConfig{Holder: "dead", Logger: testkit.Quiet})
		require.NoError(w, err)
		keys, err := claims.NewKeys(session, "tenant")
		require.NoError(w, err)
		ctx, kill := context.WithCancel(witnessed.With(context.Background(), "w"))
		ran := make(chan error, 1)
		go func() { ran <- session.Run(ctx) }()
		got, err := keys.TryClaim(w.Context(), "x")
		require.NoError(w, err)
		require.Len(w, got, 1)
		next := w.start("next")
		claimed := make(chan error, 1)
		began := time.Now()
		go func() {
			_, err := next.keys.Claim(w.Context(), "x")
			claimed <- err
		}()
		synctest.Wait()
		lease := testkit.NewLease(w, w.store, tenure.LeaseConfig{Key: claims.SessionKey(session.ID())})
		released, err := lease.ReleaseDead(w.Context(), "w", 0)
		require.NoError(w, err)
		require.True(w, released)
		require.NoError(w, tenure.Wake(w.Context(), w.store, tenure.Key{Type: "tenure.claims", ID: "kind tenant"}))
		require.NoError(w, <-claimed)
		require.Less(w, time.Since(began), time.Second)
		kill()
		require.NoError(w, <-ran)
	})
}
