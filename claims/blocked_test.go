package claims_test

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestALogThatBlocksKeepsNoFuncFromBeingToldAndNoKeyFromItsNextOwner(t *testing.T) {
	inBubble(t, func(w *world) {
		release := make(chan struct{})
		defer close(release)
		blocked := claims.SessionConfig{Logger: slog.New(testkit.BlockedLog(release))}
		a, b := w.startWith("a", blocked), w.startWith("b", blocked)
		c := a.claimOne("x")
		returned := a.work(c, 8*time.Second)
		time.Sleep(time.Minute)
		require.True(w, a.keys.Holds(c), "it is renewed")
		a.fault(testkit.Hang)
		got, err := b.keys.Claim(w.Context(), "x")
		require.NoError(w, err)
		b.work(got[0], 0) // and the jobs of the world would fail the test if a's func still ran
		synctest.Wait()
		require.ErrorIs(w, <-returned, tenure.ErrDeadline)
		a.fault(nil)
		b.stop()
		got, err = a.keys.Claim(w.Context(), "x") // in a's next session
		require.NoError(w, err)
		require.Len(w, got, 1)
	})
}
