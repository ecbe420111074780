package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// groupedStore writes in groups, even groups of one.
type groupedStore struct{ *tenure.PostgresStore }

func (s groupedStore) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	return s.PostgresStore.PutIf(s.Grouped(ctx), obj, cond)
}

func (s groupedStore) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return s.PostgresStore.DeleteAndWake(s.Grouped(ctx), key, cond)
}

func (s groupedStore) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return s.DeleteIf(ctx, key, cond)
}

func TestPostgresKeepsTheContractInGroups(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	storetest.Run(t, func(t *testing.T) tenure.Store {
		kit.ExecPostgres(t, pool, `DELETE FROM objects WHERE object_type <> 'tenure.lineage'; TRUNCATE objects_tombstones`)
		return groupedStore{store}
	})
}

func TestAVersionIsDrawnAfterAGroupsWaitForALock(t *testing.T) {
	ctx, url := t.Context(), kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	key := tenure.Key{Type: "t", ID: "waited-for"}
	for range 20 { // whether the group waits no longer than it does for locks is luck
		old := kit.Put(t, store, tenure.Object{Key: key})
		tx, err := pool.Begin(ctx)
		kit.WantErr(t, err, nil)
		kit.ExecPostgres(t, tx, `DELETE FROM objects WHERE id = $1`, key.ID)
		created := make(chan tenure.Object)
		go func() {
			obj, err := groupedStore{store}.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent())
			if err != nil {
				t.Error(err)
			}
			created <- obj
		}()
		kit.AwaitLockWait(t, pool)
		deleted := old.Version + int64(time.Hour/time.Microsecond)
		kit.ExecPostgres(t, tx, `INSERT INTO objects_tombstones VALUES ($1, $2, $3) ON CONFLICT (object_type, id) DO UPDATE SET resource_version = $3`,
			key.Type, key.ID, deleted)
		kit.WantErr(t, tx.Commit(ctx), nil)
		obj := <-created
		if obj.Version <= deleted {
			t.Fatalf("version %d of the new object is not above %d of the deleted one", obj.Version, deleted)
		}
		kit.WantErr(t, store.DeleteIf(ctx, key, tenure.IfVersion(obj.Version)), nil)
	}
}

func TestLeasesThatAreBusyAtOnceShareTransactions(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	const leases, renewals, writes = 64, 5, 64 * (1 + 5 + 1)
	// When a group is rolled back because the server was slow, which happens on a busy machine,
	// every write is sent alone for a second.
	for began := time.Now(); time.Since(began) < kit.Patience; time.Sleep(time.Second) {
		before := transactions(t, pool)
		var wg sync.WaitGroup
		for _, lease := range manyLeases(t, store, leases) {
			wg.Go(func() { useLease(t, lease, renewals) })
		}
		wg.Wait()
		used := transactions(t, pool) - before
		if used <= writes/3 || t.Failed() {
			return
		}
		t.Logf("%d writes took %d transactions", writes, used)
	}
	t.Error("too many transactions, again and again")
}

// useLease acquires a lease, renews and releases it.
func useLease(t *testing.T, lease *tenure.Lease, renewals int) {
	term, err := lease.AcquireOrSteal(t.Context())
	if err != nil {
		t.Error(err)
		return
	}
	for range renewals {
		if err := lease.Renew(t.Context(), term); err != nil {
			t.Error(err)
		}
	}
	if holding, err := lease.Read(t.Context()); err != nil || holding.Term != term.ID() || holding.Version <= term.Token() {
		t.Errorf("%s: got %+v, %v; want a renewed record of %s", lease.Key(), holding, err, term.ID())
	}
	if err := lease.Release(t.Context(), term); err != nil {
		t.Error(err)
	}
	if _, err := lease.Read(t.Context()); !errors.Is(err, tenure.ErrNotFound) {
		t.Errorf("%s: after the release: %v", lease.Key(), err)
	}
}

// transactions counts the transactions that have written.
func transactions(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	kit.WantErr(t, pool.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text::bigint`).Scan(&n), nil)
	return n
}

func manyLeases(t *testing.T, store tenure.Store, n int) (leases []*tenure.Lease) {
	for i := range n {
		leases = append(leases, kit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}}))
	}
	return leases
}

// The rows of two of three leases are locked: one lease is being renewed alone, and the other
// is in a group with the third. The session's own limit does not help here.
func TestALockedRowHoldsUpNoOtherLease(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url+"&lock_timeout=1h", tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	leases := manyLeases(t, groupedStore{store}, 3)
	var terms []*tenure.Term
	for _, lease := range leases {
		terms = append(terms, kit.MustAcquire(t, lease))
	}
	tx, err := pool.Begin(t.Context())
	kit.WantErr(t, err, nil)
	defer tx.Rollback(context.Background())
	kit.ExecPostgres(t, tx, `SELECT FROM objects WHERE id < '2' FOR UPDATE`)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var alone, grouped sync.WaitGroup
	alone.Go(func() {
		if err := leases[0].Renew(ctx, terms[0]); err != nil {
			t.Error(err)
		}
	})
	kit.AwaitLockWait(t, pool)
	for range 5 { // whether both get into one group is luck
		other, cancel := context.WithCancel(ctx)
		grouped.Go(func() { _ = leases[1].Renew(other, terms[1]) })
		if err := leases[2].Renew(ctx, terms[2]); err != nil {
			t.Error(err)
		}
		cancel()
		grouped.Wait()
	}
	kit.WantErr(t, tx.Commit(t.Context()), nil)
	alone.Wait()
}

// A lease with a short TTL has no time for a group that is rolled back. The server would log
// the rollback, because only the statements of a group have a timeout of their own.
func TestACallThatHasLittleTimeGoesAlone(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	leases := manyLeases(t, groupedStore{store}, 2)
	locked, term := kit.MustAcquire(t, leases[0]), kit.MustAcquire(t, leases[1])
	tx, err := pool.Begin(t.Context())
	kit.WantErr(t, err, nil)
	defer tx.Rollback(context.Background())
	kit.ExecPostgres(t, tx, `SELECT FROM objects WHERE id = '0' FOR UPDATE`)
	before := kit.PostgresLog(t)
	for range 10 { // whether both get into one group would be luck
		ctx, cancel := context.WithTimeout(t.Context(), 900*time.Millisecond)
		var other sync.WaitGroup
		other.Go(func() { _ = leases[0].Renew(ctx, locked) })
		if err := leases[1].Renew(ctx, term); err != nil && ctx.Err() == nil {
			t.Error(err)
		}
		cancel()
		other.Wait()
	}
	if log := strings.TrimPrefix(kit.PostgresLog(t), before); strings.Contains(log, "statement timeout") {
		t.Errorf("the server logged:\n%s", log)
	}
}

func TestAWriteThatIsRefusedTakesNoneOfItsGroupWithIt(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	kit.ExecPostgres(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'never'; END$$`)
	kit.ExecPostgres(t, pool, `CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON objects FOR EACH ROW WHEN (NEW.id = '3') EXECUTE FUNCTION refuse()`)
	var wg sync.WaitGroup
	for _, lease := range manyLeases(t, store, 16) {
		wg.Go(func() {
			for range 20 {
				term, err := lease.AcquireOrSteal(t.Context())
				if lease.Key().ID == "3" {
					if refused := (*pgconn.PgError)(nil); !errors.As(err, &refused) || refused.Message != "never" {
						t.Errorf("got %v, want what the trigger says", err)
					}
					continue
				}
				if err == nil {
					err = lease.Release(t.Context(), term)
				}
				if err != nil {
					t.Errorf("%s: %v", lease.Key(), err)
				}
			}
		})
	}
	wg.Wait()
}

func TestAWriteWhoseContextEndsBeforeItsGroupIsSentIsNotWritten(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := groupedStore{store}.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.IfAbsent())
	kit.WantErr(t, err, context.Canceled)
	// Another write of the same group; after it, the first would be there too.
	_, err = groupedStore{store}.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}}, tenure.IfAbsent())
	kit.WantErr(t, err, nil)
	_, err = store.Get(t.Context(), tenure.Key{Type: "t", ID: "1"})
	kit.WantErr(t, err, tenure.ErrNotFound)
}

// Each call of a group waits no longer than its own context allows, and the connection ends
// with the last call.
func TestAGroupThatIsNotAnsweredEndsWithItsContexts(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	hangWrites(t, pool, `INSERT`, `NEW.id = 'hangs'`)
	short, cancelShort := context.WithCancel(t.Context())
	defer cancelShort()
	long, cancelLong := context.WithCancel(t.Context())
	defer cancelLong()
	a, b := createInGroup(short, store, "hangs"), createInGroup(long, store, "waits")
	kit.AwaitHung(t, pool, 1)
	cancelShort()
	kit.WantErr(t, <-a, context.Canceled)
	// The other call may have been sent before it or with it; in its group it keeps waiting.
	cancelLong()
	if err := <-b; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	kit.WantErr(t, store.Close(), nil) // it waits for the group's connection
}

// The server's shutdown, or an administrator, may end a session when its transaction
// has just been committed: here while it waits for a replica.
func TestAGroupWhoseSessionEndsAsItCommitsIsNotWrittenAgain(t *testing.T) {
	url := kit.StartPostgres(t, "synchronous_standby_names=nobody").URL()
	admin := kit.PostgresPool(t, url+"&synchronous_commit=local")
	local := kit.OpenPostgres(t, url+"&synchronous_commit=local", tenure.PostgresConfig{})
	kit.Migrate(t, local)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	key := tenure.Key{Type: "t", ID: "1"}
	done := make(chan error)
	go func() {
		_, err := groupedStore{store}.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent())
		done <- err
	}()
	for ended := false; !ended; time.Sleep(5 * time.Millisecond) {
		err := admin.QueryRow(t.Context(), `SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`).Scan(&ended)
		kit.WantErr(t, err, nil)
	}
	if err := <-done; err == nil || errors.Is(err, tenure.ErrExists) {
		t.Errorf("got %v, want what ended the session", err)
	}
	if _, err := local.Get(t.Context(), key); err != nil {
		t.Errorf("it was not committed, so this test tells nothing: %v", err)
	}
}

// A call of a group that waits for a connection gives up: its record must not appear long
// after, with no holder.
func TestAWriteThatWasGivenUpBeforeItsGroupWasSentIsNotWritten(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	hangWrites(t, pool, `UPDATE`, `true`)
	var hung sync.WaitGroup
	for i := range kit.LeaseConns {
		large := strings.Repeat("x", 600) // too large for a group
		lease := kit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, Labels: map[string]string{"large": large}})
		term := kit.MustAcquire(t, lease)
		hung.Go(func() { _ = lease.Renew(t.Context(), term) })
		kit.AwaitHung(t, pool, i+1)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stays, leaves := createInGroup(t.Context(), store, "stays"), createInGroup(ctx, store, "leaves")
	time.AfterFunc(300*time.Millisecond, cancel) // both wait for a connection by then
	kit.WantErr(t, <-leaves, context.Canceled)
	kit.ExecPostgres(t, pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'`)
	kit.WantErr(t, <-stays, nil)
	hung.Wait()
	_, err := store.Get(t.Context(), tenure.Key{Type: "t", ID: "leaves"})
	kit.WantErr(t, err, tenure.ErrNotFound)
}

// For the race detector: the group's answer may come after the caller has gone.
func TestTheAnswerToAWriteThatWasGivenUpIsNotRead(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	kit.ExecPostgres(t, kit.PostgresPool(t, url), `
		CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END$$;
		CREATE TRIGGER linger BEFORE UPDATE ON objects FOR EACH ROW WHEN (NEW.id = 'leaves') EXECUTE FUNCTION linger()`)
	leaves, stays := tenure.Object{Key: tenure.Key{Type: "t", ID: "leaves"}}, tenure.Object{Key: tenure.Key{Type: "t", ID: "stays"}}
	kit.Await(t, "a write is given up after its group was sent", func() bool {
		leaves, stays := kit.Put(t, store, leaves), kit.Put(t, store, stays)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // long enough for a group
		defer cancel()
		done := make(chan error)
		go func() {
			_, err := groupedStore{store}.PutIf(t.Context(), stays, tenure.IfVersion(stays.Version))
			done <- err
		}()
		time.AfterFunc(rand.N(100*time.Millisecond), cancel)
		_, err := groupedStore{store}.PutIf(ctx, leaves, tenure.IfVersion(leaves.Version))
		kit.WantErr(t, <-done, nil)
		return err != nil && kit.Get(t, store, leaves.Key).Version > leaves.Version
	})
}

// createInGroup begins to create an object, and returns where its error will be.
func createInGroup(ctx context.Context, store *tenure.PostgresStore, id string) chan error {
	done := make(chan error, 1)
	go func() {
		_, err := groupedStore{store}.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: id}}, tenure.IfAbsent())
		done <- err
	}()
	return done
}

// hangWrites makes writes of the matching rows hang.
func hangWrites(t *testing.T, pool *pgxpool.Pool, write, when string) {
	t.Helper()
	kit.ExecPostgres(t, pool, `CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(3600); RETURN NEW; END$$`)
	kit.ExecPostgres(t, pool, fmt.Sprintf(`CREATE TRIGGER hang BEFORE %s ON objects FOR EACH ROW WHEN (%s) EXECUTE FUNCTION hang()`, write, when))
}

func TestASlowWriteHoldsUpNoOtherLease(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	hangWrites(t, pool, `INSERT`, `NEW.id = 'a'`)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	hangs, giveUp := context.WithCancel(ctx)
	done := createInGroup(hangs, store, "a")
	kit.WantErr(t, <-createInGroup(ctx, store, "b"), nil)
	giveUp()
	kit.WantErr(t, <-done, context.Canceled)
}

// A hook may choose or prepare a connection by a value in its context, such as a tenant.
func TestWhereTheCallersHooksPrepareConnectionsEachWriteIsAlone(t *testing.T) {
	config, err := pgxpool.ParseConfig(kit.PostgresURL(t))
	kit.WantErr(t, err, nil)
	config.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { return true, nil }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	kit.WantErr(t, err, nil)
	defer pool.Close()
	store := kit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{}))
	defer store.Close()
	kit.Migrate(t, store)
	const leases = 32
	before := transactions(t, pool)
	var wg sync.WaitGroup
	for _, lease := range manyLeases(t, store, leases) {
		wg.Go(func() { kit.MustAcquire(t, lease) })
	}
	wg.Wait()
	if used := transactions(t, pool) - before; used < leases {
		t.Errorf("%d writes took %d transactions", leases, used)
	}
}

// Another program's table may contain values that ours never does.
func TestARowThatAnotherProgramLeftUntimedIsRenewed(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	lease := kit.NewLease(t, store, tenure.LeaseConfig{})
	term := kit.MustAcquire(t, lease)
	kit.ExecPostgres(t, pool, `ALTER TABLE objects ALTER created_at_ms DROP NOT NULL`)
	kit.ExecPostgres(t, pool, `UPDATE objects SET created_at_ms = NULL`)
	kit.WantErr(t, lease.Renew(t.Context(), term), nil)
}

// A row that a write returns comes before its commit, which may still fail.
func TestAWriteOnPostgresWhoseCommitFailsIsNotReportedAsDone(t *testing.T) {
	for _, mode := range []string{"cache_statement", "cache_describe", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			ctx, url := t.Context(), kit.PostgresURL(t)
			store := kit.OpenPostgres(t, url+"&default_query_exec_mode="+mode, tenure.PostgresConfig{})
			kit.Migrate(t, store)
			obj := kit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
			kit.ExecPostgres(t, kit.PostgresPool(t, url), `
				CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused at the commit'; END $$;
				CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE OR DELETE ON objects DEFERRABLE INITIALLY DEFERRED
					FOR EACH ROW EXECUTE FUNCTION refuse()`)
			for name, store := range map[string]tenure.Store{"alone": store, "in a group": groupedStore{store}} {
				_, replaced := store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
				_, put := store.PutIf(ctx, obj, tenure.Unconditional())
				_, created := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}}, tenure.IfAbsent())
				deleted := store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version))
				for what, err := range map[string]error{"replace": replaced, "put": put, "create": created, "delete": deleted} {
					if err == nil || !strings.Contains(err.Error(), "refused at the commit") {
						t.Errorf("%s %s: got %v, want that the commit was refused", what, name, err)
					}
				}
			}
		})
	}
}
