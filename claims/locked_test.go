package claims_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A key becomes free even if one that was released before it is locked.
func TestARowThatIsLockedHoldsUpNoLaterRelease(t *testing.T) {
	url := testkit.PostgresURL(t)
	w := newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	a := w.start("a")
	one, two := a.claimOne("one"), a.claimOne("two")
	tx, err := testkit.PostgresPool(t, url).Begin(t.Context())
	require.NoError(t, err)
	testkit.ExecPostgres(t, tx, `SELECT FROM objects_claims WHERE id = 'one' FOR SHARE`)
	released := make(chan error, 1)
	go func() { released <- a.keys.Release(context.Background(), one) }()
	time.Sleep(200 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	err = a.keys.Release(ctx, two)
	require.NoError(t, tx.Rollback(context.Background()))
	require.NoError(t, <-released)
	require.NoError(t, err)
}
