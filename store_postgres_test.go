package tenure_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	neturl "net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
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
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	storetest.Run(t, func(t *testing.T) tenure.Store {
		testkit.ExecPostgres(t, pool, `DELETE FROM objects WHERE object_type <> 'tenure.lineage'; TRUNCATE objects_tombstones`)
		return groupedStore{store}
	})
}

func TestAVersionIsDrawnAfterAGroupsWaitForALock(t *testing.T) {
	ctx, url := t.Context(), testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	key := tenure.Key{Type: "t", ID: "waited-for"}
	for range 20 { // whether the group waits no longer than it does for locks is luck
		old := testkit.Put(t, store, tenure.Object{Key: key})
		tx, err := pool.Begin(ctx)
		testkit.WantErr(t, err, nil)
		testkit.ExecPostgres(t, tx, `DELETE FROM objects WHERE id = $1`, key.ID)
		created := make(chan tenure.Object)
		go func() {
			obj, err := groupedStore{store}.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent())
			if err != nil {
				t.Error(err)
			}
			created <- obj
		}()
		testkit.AwaitLockWait(t, pool)
		deleted := old.Version + int64(time.Hour/time.Microsecond)
		testkit.ExecPostgres(t, tx, `INSERT INTO objects_tombstones VALUES ($1, $2, $3) ON CONFLICT (object_type, id) DO UPDATE SET resource_version = $3`,
			key.Type, key.ID, deleted)
		testkit.WantErr(t, tx.Commit(ctx), nil)
		obj := <-created
		if obj.Version <= deleted {
			t.Fatalf("version %d of the new object is not above %d of the deleted one", obj.Version, deleted)
		}
		testkit.WantErr(t, store.DeleteIf(ctx, key, tenure.IfVersion(obj.Version)), nil)
	}
}

func TestLeasesThatAreBusyAtOnceShareTransactions(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	const leases, renewals, writes = 64, 5, 64 * (1 + 5 + 1)
	// When a group is rolled back because the server was slow, which happens on a busy machine,
	// every write is sent alone for a second.
	for began := time.Now(); time.Since(began) < testkit.Patience; time.Sleep(time.Second) {
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
	testkit.WantErr(t, pool.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text::bigint`).Scan(&n), nil)
	return n
}

func manyLeases(t *testing.T, store tenure.Store, n int) (leases []*tenure.Lease) {
	for i := range n {
		leases = append(leases, testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}}))
	}
	return leases
}

// The rows of two of three leases are locked: one lease is being renewed alone, and the other
// is in a group with the third. The session's own limit does not help here.
func TestALockedRowHoldsUpNoOtherLease(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url+"&lock_timeout=1h", tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	leases := manyLeases(t, groupedStore{store}, 3)
	var terms []*tenure.Term
	for _, lease := range leases {
		terms = append(terms, testkit.MustAcquire(t, lease))
	}
	tx, err := pool.Begin(t.Context())
	testkit.WantErr(t, err, nil)
	defer tx.Rollback(context.Background())
	testkit.ExecPostgres(t, tx, `SELECT FROM objects WHERE id < '2' FOR UPDATE`)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var alone, grouped sync.WaitGroup
	alone.Go(func() {
		if err := leases[0].Renew(ctx, terms[0]); err != nil {
			t.Error(err)
		}
	})
	testkit.AwaitLockWait(t, pool)
	for range 5 { // whether both get into one group is luck
		other, cancel := context.WithCancel(ctx)
		grouped.Go(func() { _ = leases[1].Renew(other, terms[1]) })
		if err := leases[2].Renew(ctx, terms[2]); err != nil {
			t.Error(err)
		}
		cancel()
		grouped.Wait()
	}
	testkit.WantErr(t, tx.Commit(t.Context()), nil)
	alone.Wait()
}

// A lease with a short TTL has no time for a group that is rolled back. The server would log
// the rollback, because only the statements of a group have a timeout of their own.
func TestACallThatHasLittleTimeGoesAlone(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	leases := manyLeases(t, groupedStore{store}, 2)
	locked, term := testkit.MustAcquire(t, leases[0]), testkit.MustAcquire(t, leases[1])
	tx, err := pool.Begin(t.Context())
	testkit.WantErr(t, err, nil)
	defer tx.Rollback(context.Background())
	testkit.ExecPostgres(t, tx, `SELECT FROM objects WHERE id = '0' FOR UPDATE`)
	before := testkit.PostgresLog(t)
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
	if log := strings.TrimPrefix(testkit.PostgresLog(t), before); strings.Contains(log, "statement timeout") {
		t.Errorf("the server logged:\n%s", log)
	}
}

func TestAWriteThatIsRefusedTakesNoneOfItsGroupWithIt(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	testkit.ExecPostgres(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'never'; END$$`)
	testkit.ExecPostgres(t, pool, `CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON objects FOR EACH ROW WHEN (NEW.id = '3') EXECUTE FUNCTION refuse()`)
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
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := groupedStore{store}.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.IfAbsent())
	testkit.WantErr(t, err, context.Canceled)
	// Another write of the same group; after it, the first would be there too.
	_, err = groupedStore{store}.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}}, tenure.IfAbsent())
	testkit.WantErr(t, err, nil)
	_, err = store.Get(t.Context(), tenure.Key{Type: "t", ID: "1"})
	testkit.WantErr(t, err, tenure.ErrNotFound)
}

// Each call of a group waits no longer than its own context allows, and the connection ends
// with the last call.
func TestAGroupThatIsNotAnsweredEndsWithItsContexts(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	hangWrites(t, pool, `INSERT`, `NEW.id = 'hangs'`)
	short, cancelShort := context.WithCancel(t.Context())
	defer cancelShort()
	long, cancelLong := context.WithCancel(t.Context())
	defer cancelLong()
	a, b := createInGroup(short, store, "hangs"), createInGroup(long, store, "waits")
	testkit.AwaitHung(t, pool, 1)
	cancelShort()
	testkit.WantErr(t, <-a, context.Canceled)
	// The other call may have been sent before it or with it; in its group it keeps waiting.
	cancelLong()
	if err := <-b; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	testkit.WantErr(t, store.Close(), nil) // it waits for the group's connection
}

// The server's shutdown, or an administrator, may end a session when its transaction
// has just been committed: here while it waits for a replica.
func TestAGroupWhoseSessionEndsAsItCommitsIsNotWrittenAgain(t *testing.T) {
	url := testkit.StartPostgres(t, "synchronous_standby_names=nobody").URL()
	admin := testkit.PostgresPool(t, url+"&synchronous_commit=local")
	local := testkit.OpenPostgres(t, url+"&synchronous_commit=local", tenure.PostgresConfig{})
	testkit.Migrate(t, local)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	key := tenure.Key{Type: "t", ID: "1"}
	done := make(chan error)
	go func() {
		_, err := groupedStore{store}.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent())
		done <- err
	}()
	for ended := false; !ended; time.Sleep(5 * time.Millisecond) {
		err := admin.QueryRow(t.Context(), `SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`).Scan(&ended)
		testkit.WantErr(t, err, nil)
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
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	hangWrites(t, pool, `UPDATE`, `true`)
	var hung sync.WaitGroup
	for i := range testkit.LeaseConns {
		large := strings.Repeat("x", 600) // too large for a group
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, Labels: map[string]string{"large": large}})
		term := testkit.MustAcquire(t, lease)
		hung.Go(func() { _ = lease.Renew(t.Context(), term) })
		testkit.AwaitHung(t, pool, i+1)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stays, leaves := createInGroup(t.Context(), store, "stays"), createInGroup(ctx, store, "leaves")
	time.AfterFunc(300*time.Millisecond, cancel) // both wait for a connection by then
	testkit.WantErr(t, <-leaves, context.Canceled)
	testkit.ExecPostgres(t, pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'`)
	testkit.WantErr(t, <-stays, nil)
	hung.Wait()
	_, err := store.Get(t.Context(), tenure.Key{Type: "t", ID: "leaves"})
	testkit.WantErr(t, err, tenure.ErrNotFound)
}

// For the race detector: the group's answer may come after the caller has gone.
func TestTheAnswerToAWriteThatWasGivenUpIsNotRead(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	testkit.ExecPostgres(t, testkit.PostgresPool(t, url), `
		CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END$$;
		CREATE TRIGGER linger BEFORE UPDATE ON objects FOR EACH ROW WHEN (NEW.id = 'leaves') EXECUTE FUNCTION linger()`)
	leaves, stays := tenure.Object{Key: tenure.Key{Type: "t", ID: "leaves"}}, tenure.Object{Key: tenure.Key{Type: "t", ID: "stays"}}
	testkit.Await(t, "a write is given up after its group was sent", func() bool {
		leaves, stays := testkit.Put(t, store, leaves), testkit.Put(t, store, stays)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // long enough for a group
		defer cancel()
		done := make(chan error)
		go func() {
			_, err := groupedStore{store}.PutIf(t.Context(), stays, tenure.IfVersion(stays.Version))
			done <- err
		}()
		time.AfterFunc(rand.N(100*time.Millisecond), cancel)
		_, err := groupedStore{store}.PutIf(ctx, leaves, tenure.IfVersion(leaves.Version))
		testkit.WantErr(t, <-done, nil)
		return err != nil && testkit.Get(t, store, leaves.Key).Version > leaves.Version
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
	testkit.ExecPostgres(t, pool, `CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(3600); RETURN NEW; END$$`)
	testkit.ExecPostgres(t, pool, fmt.Sprintf(`CREATE TRIGGER hang BEFORE %s ON objects FOR EACH ROW WHEN (%s) EXECUTE FUNCTION hang()`, write, when))
}

func TestASlowWriteHoldsUpNoOtherLease(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	hangWrites(t, pool, `INSERT`, `NEW.id = 'a'`)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	hangs, giveUp := context.WithCancel(ctx)
	done := createInGroup(hangs, store, "a")
	testkit.WantErr(t, <-createInGroup(ctx, store, "b"), nil)
	giveUp()
	testkit.WantErr(t, <-done, context.Canceled)
}

// A hook may choose or prepare a connection by a value in its context, such as a tenant.
func TestWhereTheCallersHooksPrepareConnectionsEachWriteIsAlone(t *testing.T) {
	config, err := pgxpool.ParseConfig(testkit.PostgresURL(t))
	testkit.WantErr(t, err, nil)
	config.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { return true, nil }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	testkit.WantErr(t, err, nil)
	defer pool.Close()
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{}))
	defer store.Close()
	testkit.Migrate(t, store)
	const leases = 32
	before := transactions(t, pool)
	var wg sync.WaitGroup
	for _, lease := range manyLeases(t, store, leases) {
		wg.Go(func() { testkit.MustAcquire(t, lease) })
	}
	wg.Wait()
	if used := transactions(t, pool) - before; used < leases {
		t.Errorf("%d writes took %d transactions", leases, used)
	}
}

// Another program's table may contain values that ours never does.
func TestARowThatAnotherProgramLeftUntimedIsRenewed(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	testkit.ExecPostgres(t, pool, `ALTER TABLE objects ALTER created_at_ms DROP NOT NULL`)
	testkit.ExecPostgres(t, pool, `UPDATE objects SET created_at_ms = NULL`)
	testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
}

// A row that a write returns comes before its commit, which may still fail.
func TestAWriteOnPostgresWhoseCommitFailsIsNotReportedAsDone(t *testing.T) {
	for _, mode := range []string{"cache_statement", "cache_describe", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			ctx, url := t.Context(), testkit.PostgresURL(t)
			store := testkit.OpenPostgres(t, url+"&default_query_exec_mode="+mode, tenure.PostgresConfig{})
			testkit.Migrate(t, store)
			obj := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
			testkit.ExecPostgres(t, testkit.PostgresPool(t, url), `
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

// chain records what became of the versions of one object.
type chain struct {
	made  map[int64]bool   // by a write that was answered
	taken map[int64]string // by a write or delete that was answered, which expected it
	maybe map[int64]bool   // expected by a write or delete that was not
	blind bool             // a create was not answered
}

// Two stores write the same objects in groups while connections are killed, rows are locked and
// contexts end: every answered write has happened exactly once, and nothing else has.
func TestWhatIsWrittenInGroupsIsNeitherLostNorDoubled(t *testing.T) {
	const keys, workers = 6, 24
	url := testkit.PostgresURL(t)
	admin := testkit.PostgresPool(t, url)
	stores := []*tenure.PostgresStore{testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: testkit.Quiet}), testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: testkit.Quiet})}
	testkit.Migrate(t, stores[0])

	var mu sync.Mutex
	chains := map[tenure.Key]*chain{}
	answered, unknown := 0, 0
	key := func() tenure.Key { return tenure.Key{Type: "t", ID: fmt.Sprint(rand.N(keys))} }
	note := func(key tenure.Key, note func(*chain)) {
		mu.Lock()
		defer mu.Unlock()
		if chains[key] == nil {
			chains[key] = &chain{made: map[int64]bool{}, taken: map[int64]string{}, maybe: map[int64]bool{}}
		}
		note(chains[key])
	}
	// judge records the outcome of a call that expected one version, if any, and made another,
	// if any.
	judge := func(key tenure.Key, op string, expected, made int64, err error) {
		note(key, func(c *chain) {
			switch {
			case err == nil:
				answered++
				if by, twice := c.taken[expected]; expected > 0 && twice {
					t.Errorf("%s: version %d was replaced by a %s and by a %s", key, expected, by, op)
				}
				if made > 0 && c.made[made] {
					t.Errorf("%s: version %d was written twice", key, made)
				}
				c.taken[expected], c.made[made] = op, true
			case errors.Is(err, tenure.ErrExists), errors.Is(err, tenure.ErrConflict), errors.Is(err, tenure.ErrNotFound):
				answered++
			default:
				unknown++
				c.maybe[expected] = true
				c.blind = c.blind || expected == 0
			}
		})
	}

	testkit.UntilEnough(t, 3*time.Second, func(ctx context.Context, slower time.Duration) {
		var wg sync.WaitGroup
		for i := range workers {
			store := groupedStore{stores[i%len(stores)]}
			wg.Go(func() {
				for ctx.Err() == nil {
					key := key()
					obj, err := store.Get(t.Context(), key)
					ctx, cancel := context.WithCancel(t.Context()) // with a deadline so short it would be sent alone
					ends := time.AfterFunc(rand.N(slower*400*time.Millisecond), cancel)
					switch {
					case errors.Is(err, tenure.ErrNotFound):
						made, err := store.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent())
						judge(key, "create", 0, made.Version, err)
					case err == nil && rand.N(4) == 0:
						judge(key, "delete", obj.Version, 0, store.DeleteAndWake(ctx, key, tenure.IfVersion(obj.Version)))
					case err == nil:
						made, err := store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
						judge(key, "replace", obj.Version, made.Version, err)
					}
					ends.Stop()
					cancel()
				}
			})
		}
		wg.Go(func() {
			for ctx.Err() == nil {
				trouble(t, admin, key())
			}
		})
		wg.Wait()
	}, func() bool { return answered >= 500 && unknown >= 20 })

	// The connections of the stores above may be those that were killed last.
	reader := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: testkit.Quiet})
	for key, c := range chains {
		stands, err := reader.Get(t.Context(), key)
		if err != nil && !errors.Is(err, tenure.ErrNotFound) {
			t.Fatal(err)
		}
		for made := range c.made {
			if made != 0 && c.taken[made] == "" && !c.maybe[made] && made != stands.Version {
				t.Errorf("%s: version %d was written, and is gone although no call has replaced it", key, made)
			}
		}
		for taken := range c.taken {
			if taken != 0 && !c.made[taken] && !c.blind && len(c.maybe) == 0 {
				t.Errorf("%s: version %d was replaced, and no call has written it", key, taken)
			}
		}
	}
	t.Logf("%d calls were answered, %d were not", answered, unknown)
}

// trouble locks a row for about as long as a group waits, or kills a connection.
func trouble(t *testing.T, admin *pgxpool.Pool, key tenure.Key) {
	ctx := t.Context()
	if rand.N(8) == 0 {
		testkit.ExecPostgres(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'tenure' ORDER BY random() LIMIT 1`)
		return
	}
	tx, err := admin.Begin(ctx)
	testkit.WantErr(t, err, nil)
	testkit.ExecPostgres(t, tx, `SELECT FROM objects WHERE object_type = $1 AND id = $2 FOR UPDATE`, key.Type, key.ID)
	testkit.ExecPostgres(t, tx, `SELECT pg_sleep(0.02 * random())`)
	testkit.WantErr(t, tx.Rollback(ctx), nil)
}

// hashPartitioned is a table whose names can't be unique.
const hashPartitioned = `
	CREATE TABLE objects (object_type text, id text, name text, labels jsonb, payload bytea NOT NULL, resource_version bigint NOT NULL,
		created_at_ms bigint NOT NULL, updated_at_ms bigint NOT NULL, PRIMARY KEY (object_type, id)) PARTITION BY HASH (object_type, id);
	CREATE TABLE objects_0 PARTITION OF objects FOR VALUES WITH (MODULUS 2, REMAINDER 0);
	CREATE %s TABLE objects_1 PARTITION OF objects FOR VALUES WITH (MODULUS 2, REMAINDER 1)`

func TestNoTwoTermsAreValidAtOnceThoughACrashEmptiesTables(t *testing.T) {
	testkit.Slow(t)
	server := testkit.StartPostgres(t)
	admin := testkit.PostgresPool(t, server.URL())
	for name, c := range map[string]struct{ ddl, begins, schema, refusal string }{
		"a table as Migrate makes it":     {},
		"an unlogged table":               {ddl: `ALTER TABLE objects SET UNLOGGED`, refusal: "UNLOGGED"},
		"a partition that is":             {ddl: `DROP TABLE objects;` + fmt.Sprintf(hashPartitioned, "UNLOGGED"), refusal: "UNLOGGED"},
		"a table that inherits":           {ddl: `CREATE UNLOGGED TABLE more () INHERITS (objects)`, refusal: "UNLOGGED"},
		"a temporary table before it":     {begins: `CREATE TEMPORARY TABLE objects (LIKE objects INCLUDING ALL)`},
		"a temporary table by its schema": {schema: "pg_temp", begins: `CREATE TEMPORARY TABLE IF NOT EXISTS objects (LIKE objects INCLUDING ALL)`, refusal: "TEMPORARY"},
		"a temporary table alone": {ddl: `ALTER TABLE objects RENAME TO elsewhere`,
			begins: `CREATE TEMPORARY TABLE IF NOT EXISTS objects (LIKE objects_tombstones)`, refusal: "does not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			schema := strings.ToLower(strings.ReplaceAll(name, " ", "_"))
			testkit.ExecPostgres(t, admin, `CREATE SCHEMA `+schema)
			url := server.URL() + "&search_path=" + schema
			testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
			if c.ddl != "" {
				testkit.ExecPostgres(t, testkit.PostgresPool(t, url), c.ddl)
			}
			var terms []*tenure.Term
			for range 2 {
				store := testkit.Must(tenure.NewPostgresStore(testkit.OneConn(t, url, c.begins), tenure.PostgresConfig{Schema: c.schema, Logger: testkit.Quiet}))
				t.Cleanup(func() { store.Close() })
				term, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
				switch {
				case err == nil:
					terms = append(terms, term)
				case c.refusal == "":
					testkit.WantErr(t, err, tenure.ErrHeld)
				case !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), c.refusal):
					t.Errorf("got %v, want ErrSetup that says %s", err, c.refusal)
				}
				testkit.WantErr(t, server.Restart("immediate"), nil)
				admin.Reset()
			}
			if len(terms) == 2 && terms[0].Valid() && terms[1].Valid() {
				t.Error("two terms are valid at once")
			}
			if len(terms) > 0 != (c.refusal == "") {
				t.Errorf("%d terms", len(terms))
			}
		})
	}
}

func TestTombstonesThatACrashEmptiesAreUsedAndWarnedOf(t *testing.T) {
	testkit.Slow(t)
	server := testkit.StartPostgres(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}))
	testkit.ExecPostgres(t, testkit.PostgresPool(t, server.URL()), `ALTER TABLE objects_tombstones SET UNLOGGED`)
	var log testkit.SyncBuffer
	store := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	testkit.Await(t, "the warning", func() bool { return strings.Count(log.String(), "unlogged") == 1 })
	var last int64
	for range 2 {
		obj := testkit.Put(t, store, tenure.Object{Key: testkit.LeaseKey})
		if obj.Version <= last {
			t.Errorf("version %d follows %d", obj.Version, last)
		}
		testkit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
		last = obj.Version
		testkit.WantErr(t, server.Restart("immediate"), nil)
		store.Close()
		store = testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
	}
}

func TestALeaseIsReleasedAndAcquiredWhateverBecomesOfTheTombstones(t *testing.T) {
	testkit.Slow(t)
	for name, ddl := range map[string]string{
		"dropped":                  `DROP TABLE objects_tombstones`,
		"renamed":                  `ALTER TABLE objects_tombstones RENAME TO elsewhere`,
		"revoked":                  `REVOKE INSERT ON objects_tombstones FROM {role}`,
		"revoked to read":          `REVOKE SELECT ON objects_tombstones FROM {role}`,
		"under row-level security": `ALTER TABLE objects_tombstones ENABLE ROW LEVEL SECURITY`,
		"under a policy that admits reading": `ALTER TABLE objects_tombstones ENABLE ROW LEVEL SECURITY;
			CREATE POLICY p ON objects_tombstones FOR SELECT USING (true)`,
		"under a policy that admits nothing": `ALTER TABLE objects_tombstones ENABLE ROW LEVEL SECURITY;
			CREATE POLICY p ON objects_tombstones USING (true) WITH CHECK (false)`,
		"of another layout": `ALTER TABLE objects_tombstones RENAME COLUMN resource_version TO v`,
		"without a key":     `ALTER TABLE objects_tombstones DROP CONSTRAINT objects_tombstones_pkey`,
	} {
		t.Run(name, func(t *testing.T) {
			url, owner := testkit.AsWorker(t)
			ddl := strings.ReplaceAll(ddl, "{role}", "worker_"+owner.Config().ConnConfig.Database)
			var log testkit.SyncBuffer
			running := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			grouped := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
			lease := testkit.NewLease(t, running, tenure.LeaseConfig{})
			other := testkit.NewLease(t, groupedStore{grouped}, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "grouped"}})
			terms := []*tenure.Term{testkit.MustAcquire(t, lease), testkit.MustAcquire(t, other)}
			obj := testkit.Put(t, running, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
			if log.String() != "" {
				t.Fatalf("logged before there is a reason:\n%s", log.String())
			}

			testkit.ExecPostgres(t, owner, ddl)
			fresh := testkit.NewLease(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}), tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "fresh"}})
			testkit.WantErr(t, fresh.Release(t.Context(), testkit.MustAcquire(t, fresh)), nil)
			for i, lease := range []*tenure.Lease{lease, other} {
				testkit.WantErr(t, lease.Renew(t.Context(), terms[i]), nil)
				testkit.WantErr(t, lease.Release(t.Context(), terms[i]), nil)
				again := testkit.MustAcquire(t, lease)
				if again.Token() <= terms[i].Token() {
					t.Errorf("token %d follows %d", again.Token(), terms[i].Token())
				}
				testkit.WantErr(t, lease.Release(t.Context(), again), nil)
			}
			testkit.WantErr(t, running.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
			if n := strings.Count(log.String(), "no table of tombstones"); n != 1 {
				t.Errorf("%d lines about it:\n%s", n, log.String())
			}
		})
	}
}

// An ORM hands it on as it is.
func TestTheRawErrorOfAFenceStatementNamesTheFuncToCall(t *testing.T) {
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		store := open().(tenure.Database)
		term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
		query, args, err := store.(tenure.SQLStore).FenceStatement(term)
		testkit.WantErr(t, err, nil)
		testkit.ExecSQL(t, store.DB(), query, args...)
		testkit.ExecSQL(t, store.DB(), `DELETE FROM objects`)
		_, raw := store.DB().Exec(query, args...)
		testkit.WantErr(t, tenure.FenceError(raw), tenure.ErrLost)
		const want = `tenure: the term is over; records that stand: 0; call tenure.FenceError`
		if !strings.Contains(raw.Error(), want) {
			t.Errorf("%v does not contain %s", raw, want)
		}
	})
}

func TestTombstonesThatMigrateIsAboutToCreateAreNotMissed(t *testing.T) {
	for name, migrate := range map[string]bool{"with Migrate": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			url := testkit.PostgresURL(t)
			testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
			testkit.ExecPostgres(t, testkit.PostgresPool(t, url), `DROP TABLE objects_tombstones`) // the table is another program's
			var log testkit.SyncBuffer
			store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			if migrate {
				testkit.Migrate(t, store)
			}
			for _, id := range []string{"1", "2"} {
				testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: id}})
			}
			want := 1
			if migrate {
				want = 0
			}
			if n := strings.Count(log.String(), "\n"); n != want {
				t.Errorf("%d lines, not %d:\n%s", n, want, log.String())
			}
		})
	}
}

func TestWhatWasFoundInTheDatabaseIsLookedAtAgainAfterAWhile(t *testing.T) {
	url := testkit.PostgresURL(t)
	pool := testkit.PostgresPool(t, url)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	testkit.ExecPostgres(t, pool, `ALTER TABLE objects_tombstones RENAME TO elsewhere`)
	obj := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
	testkit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
	testkit.ExecPostgres(t, pool, `ALTER TABLE elsewhere RENAME TO objects_tombstones`)
	store.LookAgain()
	obj = testkit.Put(t, store, tenure.Object{Key: obj.Key})
	testkit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
	var version int64
	testkit.WantErr(t, pool.QueryRow(t.Context(), `SELECT max(resource_version) FROM objects_tombstones`).Scan(&version), nil)
	if version != obj.Version {
		t.Errorf("the last tombstone is of version %d, want %d", version, obj.Version)
	}

	// The table is another program's now.
	testkit.ExecPostgres(t, pool, `DROP TABLE objects`)
	testkit.ExecPostgres(t, pool, fmt.Sprintf(testkit.ForeignTable, "BYTEA", "JSONB"))
	store.LookAgain()
	testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "other", ID: "1"}})
	_, err := store.PutIf(t.Context(), tenure.Object{Key: obj.Key}, tenure.IfAbsent())
	testkit.WantErr(t, err, tenure.ErrTaken)

	testkit.ExecPostgres(t, pool, `ALTER TABLE objects SET UNLOGGED`)
	store.LookAgain()
	_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}}, tenure.IfAbsent())
	testkit.WantErr(t, err, tenure.ErrSetup)
	testkit.ExecPostgres(t, pool, `ALTER TABLE objects SET LOGGED`)
	testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}})
}

// A standby that only reads hears of releases where the table has moved.
func TestAStandbyFollowsATableIntoAnotherSchema(t *testing.T) {
	url := testkit.PostgresURL(t) + "&search_path=one,two"
	pool := testkit.PostgresPool(t, url)
	testkit.ExecPostgres(t, pool, `CREATE SCHEMA one`)
	testkit.ExecPostgres(t, pool, `CREATE SCHEMA two`)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	watch := testkit.LiveWatch(t, store, testkit.LeaseKey)
	testkit.ExecPostgres(t, pool, `ALTER TABLE objects SET SCHEMA two; ALTER TABLE objects_tombstones SET SCHEMA two`)
	store.LookAgain()
	_, err := lease.Read(t.Context())
	testkit.WantErr(t, err, tenure.ErrNotFound)
	other := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.TakeHint(watch)
	testkit.DeleteAndWake(t, other, testkit.Put(t, other, tenure.Object{Key: testkit.LeaseKey}))
	testkit.AwaitHint(t, "released", watch)
}

func TestATableUnderRowLevelSecurityIsRefusedUnlessPoliciesLetItBeWritten(t *testing.T) {
	url, owner := testkit.AsWorker(t)
	running := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	lease := testkit.NewLease(t, running, tenure.LeaseConfig{})
	testkit.WantErr(t, lease.Release(t.Context(), testkit.MustAcquire(t, lease)), nil)
	testkit.ExecPostgres(t, owner, `ALTER TABLE objects ENABLE ROW LEVEL SECURITY`)
	for _, policy := range []string{
		``, `CREATE POLICY r ON objects FOR SELECT USING (true)`, `CREATE POLICY w ON objects FOR UPDATE USING (true)`, `CREATE POLICY a ON objects FOR INSERT WITH CHECK (true)`,
		`CREATE POLICY others ON objects TO pg_monitor USING (true)`, `CREATE POLICY restrictive ON objects AS RESTRICTIVE USING (true)`,
	} {
		if policy != "" {
			testkit.ExecPostgres(t, owner, policy)
		}
		_, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{Logger: testkit.Quiet})
		if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "row-level security") {
			t.Errorf("%s: open: got %v, want ErrSetup that says so", policy, err)
		}
		running.LookAgain()
		if _, err := lease.AcquireOrSteal(t.Context()); !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "row-level security") {
			t.Errorf("%s: acquire: got %v, want ErrSetup that says so", policy, err)
		}
	}
	testkit.ExecPostgres(t, owner, `CREATE POLICY d ON objects FOR DELETE USING (true)`)
	for _, store := range []*tenure.PostgresStore{running, testkit.OpenPostgres(t, url, tenure.PostgresConfig{})} {
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		testkit.WantErr(t, lease.Release(t.Context(), testkit.MustAcquire(t, lease)), nil)
	}
}

func TestATableWithoutUniqueNamesIsWarnedOfOnce(t *testing.T) {
	for name, c := range map[string]struct {
		ddl   string
		warns int
	}{
		"partitioned by hash": {fmt.Sprintf(hashPartitioned, ""), 1},
		"a foreign one":       {fmt.Sprintf(testkit.ForeignTable, "BYTEA", "JSONB"), 0},
		"a foreign one without": {fmt.Sprintf(testkit.ForeignTable, "BYTEA", "JSONB") + `; DROP INDEX objects_names;
			CREATE UNIQUE INDEX i ON objects (object_type, id, name)`, 1},
		"ours": {`SELECT`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			url := testkit.PostgresURL(t)
			testkit.ExecPostgres(t, testkit.PostgresPool(t, url), c.ddl)
			var log testkit.SyncBuffer
			store := testkit.Must(tenure.NewPostgresStore(testkit.PostgresPool(t, url), tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
			t.Cleanup(func() { store.Close() })
			testkit.Migrate(t, store)
			for range 3 {
				store.LookAgain()
				testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: fmt.Sprint(time.Now().UnixNano())}})
			}
			if n := strings.Count(log.String(), "unique index"); n != c.warns {
				t.Errorf("%d lines, want %d:\n%s", n, c.warns, log.String())
			}
		})
	}
}

// A standby need not wait for an operator because its role is refused while the password is
// being rotated.
func TestARoleThatIsRefusedForAWhileNeedsNoPerson(t *testing.T) {
	url, owner := testkit.AsWorker(t)
	role := "worker_" + owner.Config().ConnConfig.Database
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	testkit.ExecPostgres(t, owner, `ALTER ROLE `+role+` NOLOGIN`)
	testkit.ExecPostgres(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '`+role+`'`)
	refused := func() error {
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
			if _, err := lease.Read(t.Context()); err != nil && strings.Contains(err.Error(), "28000") {
				return err
			}
		}
		return nil
	}
	if err := refused(); err == nil || errors.Is(err, tenure.ErrSetup) {
		t.Errorf("got %v, want what the server says and not ErrSetup", err)
	}
	_, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{Logger: testkit.Quiet})
	testkit.WantErr(t, err, tenure.ErrSetup)
	testkit.ExecPostgres(t, owner, `ALTER ROLE `+role+` LOGIN`)
	testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
}

func TestARoleThatCouldNotRenewALeaseDoesNotAcquireIt(t *testing.T) {
	url, owner := testkit.AsWorker(t)
	role := "worker_" + owner.Config().ConnConfig.Database
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	testkit.ExecPostgres(t, owner, `REVOKE UPDATE ON objects FROM `+role)
	testkit.WantErr(t, lease.Renew(t.Context(), term), tenure.ErrSetup)
	testkit.WantErr(t, lease.Release(t.Context(), term), nil)
	_, err := lease.TryAcquire(t.Context())
	testkit.WantErr(t, err, tenure.ErrSetup)
	if !strings.Contains(err.Error(), `GRANT UPDATE ON "public"."objects"`) {
		t.Errorf("the error does not name the remedy: %v", err)
	}
	testkit.ExecPostgres(t, owner, `REVOKE DELETE ON objects FROM `+role)
	store.LookAgain()
	if _, err = lease.TryAcquire(t.Context()); !strings.Contains(err.Error(), `GRANT UPDATE, DELETE ON "public"."objects"`) {
		t.Errorf("the error does not name the remedy: %v", err)
	}
	testkit.ExecPostgres(t, owner, `GRANT DELETE ON objects TO `+role)
	testkit.ExecPostgres(t, owner, `GRANT UPDATE (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms) ON objects TO `+role)
	testkit.WantErr(t, lease.Release(t.Context(), testkit.MustAcquire(t, lease)), nil)
}

// The error of each step has the statements that lead to the next one.
func TestTheErrorOfADeniedRoleHasTheStatementsThatHelp(t *testing.T) {
	for name, cfg := range map[string]tenure.PostgresConfig{
		"in the search_path": {}, "in a schema": {Schema: "Else where", Table: "Leases"},
	} {
		t.Run(name, func(t *testing.T) {
			url := testkit.PostgresURL(t)
			owner := testkit.PostgresPool(t, url)
			role := "Bob " + owner.Config().ConnConfig.Database
			testkit.ExecPostgres(t, owner, fmt.Sprintf(`CREATE ROLE %q LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC`, role)) // the default since PostgreSQL 15
			t.Cleanup(func() { testkit.ExecPostgres(t, owner, fmt.Sprintf(`DROP OWNED BY %[1]q; DROP ROLE %[1]q`, role)) })
			store := testkit.OpenPostgres(t, strings.Replace(url, "postgres@", neturl.PathEscape(role)+"@", 1), cfg)
			help := func(what string, err error) {
				t.Helper()
				testkit.WantErr(t, err, tenure.ErrSetup)
				grants := regexp.MustCompile(`GRANT [^)]*`).FindString(err.Error())
				if !strings.Contains(grants, fmt.Sprintf("TO %q", role)) {
					t.Fatalf("%s: the error has no whole GRANT: %v", what, err)
				}
				testkit.ExecPostgres(t, owner, grants)
				store.LookAgain()
			}
			session := testkit.Must(claims.NewSession(store, claims.SessionConfig{Logger: testkit.Quiet}))
			keys := testkit.Must(claims.NewKeys(session, "tenant"))
			denied := store.Migrate(t.Context())
			testkit.MigrateClaims(t, testkit.OpenPostgres(t, url, cfg))
			if cfg.Schema != "" {
				help("a look", testkit.ErrOf(store.Get(t.Context(), tenure.Key{Type: "t", ID: "1"})))
			}
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
			help("an acquire", testkit.ErrOf(lease.TryAcquire(t.Context())))
			testkit.WantErr(t, lease.Release(t.Context(), testkit.MustAcquire(t, lease)), nil)
			testkit.WantErr(t, keys.Forget(t.Context()), nil)

			testkit.ExecPostgres(t, owner, fmt.Sprintf(`DROP OWNED BY %q`, role)) // all that was granted
			store.LookAgain()
			help("Migrate", denied)
			testkit.WantErr(t, store.Migrate(t.Context()), nil)
			testkit.WantErr(t, lease.Release(t.Context(), testkit.MustAcquire(t, lease)), nil)
			testkit.WantErr(t, keys.Forget(t.Context()), nil)

			table := cmp.Or(cfg.Table, "objects") + "_claims"
			if cfg.Schema != "" {
				table = fmt.Sprintf("%q.%q", cfg.Schema, table)
			}
			testkit.ExecPostgres(t, owner, fmt.Sprintf(`REVOKE DELETE ON %s FROM %q`, table, role))
			store.LookAgain()
			help("a claim", keys.Forget(t.Context()))
			testkit.WantErr(t, keys.Forget(t.Context()), nil)
		})
	}
}

func TestTombstonesArePrunedWhenTheClockIsADayPastThem(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	prune := map[string]func(){
		"by Migrate": func() { testkit.Migrate(t, store) },
		"by a delete, an hour after": func() {
			store.PrunedAt(time.Now().Add(-time.Hour))
			obj := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "other"}})
			testkit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
			testkit.ExecPostgres(t, pool, `DELETE FROM objects_tombstones WHERE id = 'other'`)
		},
	}
	for name, prune := range prune {
		obj := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "new"}})
		testkit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
		testkit.ExecPostgres(t, pool, `INSERT INTO objects_tombstones SELECT 't', 'old' || i, 1 FROM generate_series(1, 10001) i`)
		prune() // most of them
		obj = testkit.Put(t, store, tenure.Object{Key: obj.Key})
		testkit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil) // and the rest
		var ids string
		err := pool.QueryRow(t.Context(), `SELECT string_agg(id, ',') FROM objects_tombstones`).Scan(&ids)
		if err != nil || ids != "new" {
			t.Errorf("%s: got tombstones of %s, %v; want only new", name, ids, err)
		}
	}
}

func TestPruningAndDeletesDoNotDeadlock(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url+"&pool_max_conns=8", tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	for range 40 {
		var objects []tenure.Object
		for i := range 8 {
			key := tenure.Key{Type: "t", ID: fmt.Sprint(i)}
			objects = append(objects, testkit.Put(t, store, tenure.Object{Key: key}))
			testkit.ExecPostgres(t, pool, `INSERT INTO objects_tombstones VALUES ($1, $2, 1)
				ON CONFLICT (object_type, id) DO UPDATE SET resource_version = 1`, key.Type, key.ID)
		}
		var wg sync.WaitGroup
		for _, obj := range objects {
			wg.Go(func() {
				store.PrunedAt(time.Time{})
				if err := store.DeleteIf(context.Background(), obj.Key, tenure.IfVersion(obj.Version)); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
}

// The set-up's queries of the catalogs, and the error of a refused role, on other versions.
func TestEveryVersionOfPostgresIsInspected(t *testing.T) {
	testkit.OnEachPostgres(t, `^Test(Tombstones|ALeaseIsReleasedAndAcquired|WhatWasFound|AStandbyFollows|ATable|ARole|TheErrorOfADenied)`)
}
