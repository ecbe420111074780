package tenure_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/pgtest"
	"github.com/tenurelib/tenure/storetest"
)

// I3, over what happens to a database.
func TestTokensIncreaseOverCrashRestartAndRestoreOfTheDatabase(t *testing.T) {
	server := pgtest.Cluster(t)
	var last int64
	begin := func(when string) (*tenure.PostgresStore, *tenure.Lease, *tenure.Term) {
		t.Helper()
		store := openPostgres(t, server.URL(), tenure.PostgresConfig{}) // a new process, as it were
		migrate(t, store)
		lease, term, _ := acquireBriefly(t, store, tenure.LeaseConfig{TTL: 20 * time.Millisecond})
		if term.Token() <= last {
			t.Errorf("%s: token %d follows %d", when, term.Token(), last)
		}
		last = term.Token()
		return store, lease, term
	}
	store, lease, term := begin("first")
	wantErr(t, lease.Release(t.Context(), term), nil)
	store.Close()
	begin("after a release and a restart")
	wantErr(t, server.Restart("immediate"), nil)
	begin("after a crash of the database, the lease being held")
	_, lease, term = begin("after an expiry")
	wantErr(t, lease.Release(t.Context(), term), nil)
	wantErr(t, server.Restart("immediate"), nil)
	begin("after a crash of the database, the lease being free")

	pool := postgresPool(t, server.URL())
	execPostgres(t, pool, `CREATE TABLE dump AS SELECT * FROM objects`)
	for range 5 {
		begin("after an expiry")
	}
	execPostgres(t, pool, `TRUNCATE objects, objects_tombstones`)
	execPostgres(t, pool, `INSERT INTO objects SELECT * FROM dump`)
	begin("after the restore of an older dump")
	execPostgres(t, pool, `TRUNCATE objects, objects_tombstones`)
	begin("after the loss of all rows")
}

// movable is a store that a test can replace behind everybody's back.
type movable struct{ atomic.Pointer[storetest.Mem] }

func movableStore(mem *storetest.Mem) *movable {
	m := &movable{}
	m.Store(mem)
	return m
}

func (m *movable) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	return m.Load().Get(ctx, key)
}

func (m *movable) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	return m.Load().PutIf(ctx, obj, cond)
}

func (m *movable) DeleteIf(ctx context.Context, key tenure.Key, version int64) error {
	return m.Load().DeleteIf(ctx, key, version)
}

// Only a restore together with a clock that is behind can repeat a token. Who
// has seen a greater one refuses, and says so.
func TestAReplicaThatHasSeenAGreaterTokenRefusesASmallerOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, store := t.Context(), movableStore(storetest.NewMem())
		holder := newLease(t, store, tenure.LeaseConfig{Holder: "holder"})
		witness := newLease(t, store, tenure.LeaseConfig{Holder: "witness"})
		term := mustAcquire(t, holder)
		_, err := witness.AcquireOrSteal(ctx)
		wantErr(t, err, tenure.ErrHeld)

		behind := time.Hour
		restored := storetest.NewMem() // which also lacks the tombstones
		restored.Now = func() time.Time { return time.Now().Add(-behind) }
		store.Store(restored)
		wantErr(t, holder.Renew(ctx, term), tenure.ErrLost)
		for _, lease := range []*tenure.Lease{holder, witness, holder} {
			_, err := lease.AcquireOrSteal(ctx)
			if errors.Is(err, tenure.ErrHeld) { // by the other, who refused: until it expires
				time.Sleep(30 * time.Second)
				_, err = lease.AcquireOrSteal(ctx)
			}
			if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), fmt.Sprint("would follow ", term.Token())) ||
				!strings.Contains(err.Error(), "resource_version") {
				t.Errorf("got %v, want ErrSetup that says what to do", err)
			}
		}

		behind = 0 // the operator sets the clock right
		time.Sleep(30 * time.Second)
		if next := mustAcquire(t, witness); next.Token() <= term.Token() {
			t.Errorf("token %d follows %d", next.Token(), term.Token())
		}
	})
}

func TestOpeningWarnsThatCommitsAreNotSynchronous(t *testing.T) {
	url := postgresURL(t)
	for _, setting := range []struct {
		value string
		warns bool
	}{{"off", true}, {"on", false}} {
		var log bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&log, nil))
		store := openPostgres(t, url+"&synchronous_commit="+setting.value, tenure.PostgresConfig{Logger: logger})
		migrate(t, store)
		if got := strings.Contains(log.String(), "synchronous_commit is off"); got != setting.warns {
			t.Errorf("%s: warned: %v; logged:\n%s", setting.value, got, &log)
		}
	}
}
