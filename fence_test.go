package tenure_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func TestTokensIncreaseOverCrashRestartAndRestoreOfTheDatabase(t *testing.T) {
	testkit.Slow(t)
	server := testkit.StartPostgres(t)
	var last int64
	begin := func(when string) (*tenure.PostgresStore, *tenure.Lease, *tenure.Term) {
		t.Helper()
		store := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}) // as a new process would
		testkit.Migrate(t, store)
		lease, term, _ := testkit.AcquireBriefly(t, store, tenure.LeaseConfig{TTL: 20 * time.Millisecond})
		require.Greater(t, term.Token(), last, when)
		last = term.Token()
		return store, lease, term
	}
	store, lease, term := begin("first")
	require.NoError(t, lease.Release(t.Context(), term))
	store.Close()
	begin("after a release and a restart")
	require.NoError(t, server.Restart("immediate"))
	begin("after a crash of the database, the lease being held")
	_, lease, term = begin("after an expiry")
	require.NoError(t, lease.Release(t.Context(), term))
	require.NoError(t, server.Restart("immediate"))
	begin("after a crash of the database, the lease being free")

	pool := testkit.PostgresPool(t, server.URL())
	testkit.ExecPostgres(t, pool, `CREATE TABLE dump AS SELECT * FROM objects`)
	for range 5 {
		begin("after an expiry")
	}
	testkit.ExecPostgres(t, pool, `TRUNCATE objects, objects_tombstones`)
	testkit.ExecPostgres(t, pool, `INSERT INTO objects SELECT * FROM dump`)
	begin("after the restore of an older dump")
	testkit.ExecPostgres(t, pool, `TRUNCATE objects, objects_tombstones`)
	begin("after the loss of all rows")
}

func TestAReplicaThatHasSeenAGreaterTokenRefusesASmallerOne(t *testing.T) {
	inBubble(t, func(t *scene) {
		ctx, store := t.Context(), testkit.NewMovable(storetest.NewMem())
		holder := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "holder"})
		witness := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "witness"})
		term := testkit.MustAcquire(t, holder)
		t.wantHeld(witness)

		behind := store.Restore()
		require.ErrorIs(t, holder.Renew(ctx, term), tenure.ErrLost)
		for _, lease := range []*tenure.Lease{holder, witness, holder} {
			_, err := lease.AcquireOrSteal(ctx)
			if errors.Is(err, tenure.ErrHeld) { // by the other, which refused: until it expires
				time.Sleep(30 * time.Second)
				_, err = lease.AcquireOrSteal(ctx)
			}
			require.ErrorIs(t, err, tenure.ErrSetup)
			require.ErrorContains(t, err, fmt.Sprint("would follow ", term.Token()))
			require.ErrorContains(t, err, "resource_version", "what to do")
		}

		behind.Store(0) // the operator sets the clock right
		time.Sleep(30 * time.Second)
		require.Greater(t, testkit.MustAcquire(t, witness).Token(), term.Token())
	})
}

func TestATokenThatOneReplicaRefusesIsLeftToAnother(t *testing.T) {
	inBubble(t, func(t *scene) {
		store := testkit.NewMovable(storetest.NewMem())
		witness := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "witness"})
		term := testkit.MustAcquire(t, witness)
		require.NoError(t, witness.Release(t.Context(), term))
		store.Restore()
		_, err := witness.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrSetup)
		testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "fresh"}))
	})
	inBubble(t, func(t *scene) { // the restored table has the record of a dead holder
		store := testkit.NewMovable(storetest.NewMem())
		t.store = store
		witness := t.start("witness")
		time.Sleep(time.Minute)
		store.Restore()
		testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "dead"}))
		time.Sleep(10 * time.Minute)
		require.Equal(t, tenure.RoleStandby, witness.Status().Role)
		require.Contains(t, witness.Status().LastError, "fencing token")
		t.start("fresh", t.fencing(testkit.Succeeds))
		time.Sleep(time.Minute)
		require.Equal(t, []string{"fresh fences dead at ", "fresh works"}, t.said())
	})
}
