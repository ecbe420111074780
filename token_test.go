package tenure_test

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

func TestTokensIncreaseOverCrashRestartAndRestoreOfTheDatabase(t *testing.T) {
	testkit.Slow(t)
	server := kit.StartPostgres(t)
	var last int64
	begin := func(when string) (*tenure.PostgresStore, *tenure.Lease, *tenure.Term) {
		t.Helper()
		store := kit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}) // as a new process would
		kit.Migrate(t, store)
		lease, term, _ := kit.AcquireBriefly(t, store, tenure.LeaseConfig{TTL: 20 * time.Millisecond})
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

	pool := kit.PostgresPool(t, server.URL())
	kit.ExecPostgres(t, pool, `CREATE TABLE dump AS SELECT * FROM objects`)
	for range 5 {
		begin("after an expiry")
	}
	kit.ExecPostgres(t, pool, `TRUNCATE objects, objects_tombstones`)
	kit.ExecPostgres(t, pool, `INSERT INTO objects SELECT * FROM dump`)
	begin("after the restore of an older dump")
	kit.ExecPostgres(t, pool, `TRUNCATE objects, objects_tombstones`)
	begin("after the loss of all rows")
}

// restorable is a store that a test can replace with another, as restoring a dump does.
type restorable struct{ kit.Movable }

// restore replaces the store with a restored one whose tombstones are lost. That can repeat a
// token only if the clock is behind as well.
func (r *restorable) restore() (behind *atomic.Int64) {
	behind = new(atomic.Int64)
	behind.Store(int64(time.Hour))
	mem := storetest.NewMem()
	mem.Now = func() time.Time { return time.Now().Add(-time.Duration(behind.Load())) }
	r.Store(mem)
	return behind
}

func newRestorable() *restorable {
	r := new(restorable)
	r.Store(storetest.NewMem())
	return r
}

func TestAReplicaThatHasSeenAGreaterTokenRefusesASmallerOne(t *testing.T) {
	inBubble(t, func(t *scene) {
		ctx, store := t.Context(), newRestorable()
		holder := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "holder"})
		witness := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "witness"})
		term := kit.MustAcquire(t, holder)
		t.wantHeld(witness)

		behind := store.restore()
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
		require.Greater(t, kit.MustAcquire(t, witness).Token(), term.Token())
	})
}

func TestATokenThatOneReplicaRefusesIsLeftToAnother(t *testing.T) {
	inBubble(t, func(t *scene) {
		store := newRestorable()
		witness := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "witness"})
		term := kit.MustAcquire(t, witness)
		require.NoError(t, witness.Release(t.Context(), term))
		store.restore()
		_, err := witness.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrSetup)
		kit.MustAcquire(t, kit.NewLease(t, store, tenure.LeaseConfig{Holder: "fresh"}))
	})
	inBubble(t, func(t *scene) { // the restored table has the record of a dead holder
		store := newRestorable()
		t.store = store
		witness := t.start("witness")
		time.Sleep(time.Minute)
		store.restore()
		kit.MustAcquire(t, kit.NewLease(t, store, tenure.LeaseConfig{Holder: "dead"}))
		time.Sleep(10 * time.Minute)
		require.Equal(t, tenure.RoleStandby, witness.Status().Role)
		require.Contains(t, witness.Status().LastError, "fencing token")
		t.start("fresh", t.fencing(kit.Succeeds))
		time.Sleep(time.Minute)
		require.Equal(t, []string{"fresh fences dead at ", "fresh works"}, t.said())
	})
}
