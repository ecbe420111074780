package claims_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

func TestTheClaimsOfSessionsAreCountedByKind(t *testing.T) {
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		w := newWorld(t, open())
		count := func(most int) []objects.ClaimCount {
			t.Helper()
			counts, err := w.table.Counts(t.Context(), most, time.Minute)
			require.NoError(t, err)
			return counts
		}
		require.Empty(t, count(10))
		take := func(session, kind string, n int) {
			_, err := w.table.Take(t.Context(), session, kind, nil, nil, names(n), time.Minute)
			require.NoError(t, err)
		}
		take("s2", "tenant", 30)
		take("s1", "sandbox", 7)
		take("s1", "account", 3)
		require.NoError(t, free(w, "s2", "tenant", "t000000"))
		require.Equal(t, []objects.ClaimCount{
			{Session: "s1", Kind: "account", Claims: 3}, {Session: "s1", Kind: "sandbox", Claims: 7}, {Session: "s2", Kind: "tenant", Claims: 29},
		}, count(100))
		require.Equal(t, 10, count(10)[2].Claims, "it counts no further")
	})
}

func free(w *world, session, kind, id string) error {
	rows, err := w.table.Look(context.Background(), kind, []string{id}, time.Minute)
	if err != nil {
		return err
	}
	_, err = w.table.Free(context.Background(), session, kind, []string{id}, []int64{rows[0].Token}, objects.Freeing{}, time.Minute)
	return err
}
