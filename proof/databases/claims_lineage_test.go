package databases_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

var queuedTasks = claims.QueueConfig{Table: "tasks", Attempts: "attempts", Ready: "status = 'queued'", Done: "status = 'done'"}

// claimant is a process with a session, keys and a worker.
type claimant struct {
	store   *tenure.PostgresStore
	session *claims.Session
	keys    *claims.Keys
	queue   *claims.Queue
	worker  *claims.Worker
	stop    func()
}

func startClaimant(t testing.TB, url string, ttl time.Duration) *claimant {
	return startClaimantOn(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: testkit.Quiet}), ttl)
}

func startClaimantOn(t testing.TB, store *tenure.PostgresStore, ttl time.Duration) *claimant {
	c := &claimant{store: store}
	c.session = testkit.Must(claims.NewSession(c.store, claims.SessionConfig{TTL: ttl, Logger: testkit.Quiet}))
	c.keys = testkit.Must(claims.NewKeys(c.session, "tenant"))
	c.queue = testkit.Must(claims.NewQueue(c.store, queuedTasks))
	c.worker = testkit.Must(claims.NewWorker(c.session, c.queue))
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	over := make(chan struct{})
	go func() { defer close(over); _ = c.session.Run(ctx) }()
	c.stop = func() { cancel(); <-over }
	t.Cleanup(c.stop)
	return c
}

func queueTasks(t testing.TB, url string, n int) *pgxpool.Pool {
	admin := testkit.PostgresPool(t, url)
	testkit.MigrateClaims(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	testkit.ExecPostgres(t, admin, `CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued')`)
	testkit.ExecPostgres(t, admin, testkit.Must(queuedTasks.PostgresDDL()))
	testkit.ExecPostgres(t, admin, `INSERT INTO tasks SELECT generate_series(1, $1)`, n)
	return admin
}

func TestAStatementOfClaimsThatNamesAnotherServerWritesNothing(t *testing.T) {
	testkit.Slow(t)
	url := testkit.PostgresURL(t)
	admin := queueTasks(t, url, 1)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	table := store.Backend().Claims()
	queue := testkit.Must(claims.NewQueue(store, queuedTasks))
	const limit = time.Minute
	taken, err := table.Take(t.Context(), "a", "tenant", nil, nil, []string{"1"}, limit)
	require.NoError(t, err)
	got, err := queue.TryTakeFor(t.Context(), "a", claims.TakeOptions{N: 1})
	require.ErrorIs(t, err, tenure.ErrLost, "it has no record")
	require.Empty(t, got)

	elsewhere := objects.OnServer(t.Context(), "1")
	_, err = table.Take(elsewhere, "b", "tenant", []string{"1"}, []string{"a"}, []string{"2"}, limit)
	require.ErrorIs(t, err, tenure.ErrMoved)
	_, _, err = table.Move(elsewhere, "b", "tenant", taken, limit)
	require.ErrorIs(t, err, tenure.ErrMoved)
	_, err = table.Free(elsewhere, "a", "tenant", []string{"1"}, []int64{taken[0].Token}, objects.Freeing{}, limit)
	require.ErrorIs(t, err, tenure.ErrMoved)
	rows, err := table.Look(t.Context(), "tenant", []string{"1", "2"}, limit)
	require.NoError(t, err)
	require.Len(t, rows, 1)
	require.Equal(t, "a", rows[0].Session)
	require.Equal(t, taken[0].Token, rows[0].Token)
	_, err = queue.OwnedBy(elsewhere, "a")
	require.ErrorIs(t, err, tenure.ErrMoved)
	var owned int
	require.NoError(t, admin.QueryRow(t.Context(), `SELECT count(*) FROM tasks WHERE session IS NOT NULL`).Scan(&owned))
	require.Zero(t, owned)
}

// A restart shows as another server, of the same lineage.
func TestClaimsGoOnOverARestartOfTheServer(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t)
	queueTasks(t, server.URL(), 10)
	c := startClaimant(t, server.URL(), time.Minute)
	all, err := c.keys.TryClaim(t.Context(), "1", "2")
	require.NoError(t, err)
	require.Len(t, all, 2)
	rows, err := c.worker.Take(t.Context(), 2)
	require.NoError(t, err)
	require.Len(t, rows, 2)
	other := startClaimant(t, server.URL(), time.Minute)
	seen, err := other.keys.TryClaim(t.Context(), "3", "4")
	require.NoError(t, err)
	remote := startClaimant(t, server.URL(), time.Minute)
	testkit.Await(t, "the session begins", remote.session.Valid)
	require.NoError(t, server.Restart("fast"))
	for _, store := range []*tenure.PostgresStore{c.store, remote.store} { // connections that are gone
		testkit.Await(t, "it is up", func() bool {
			_, err := store.Get(t.Context(), testkit.LeaseKey)
			return errors.Is(err, tenure.ErrNotFound)
		})
	}
	for i, keys := range []*claims.Keys{c.keys, remote.keys} { // so are those of claims
		testkit.Await(t, "claims are up", func() bool { _, err := keys.TryClaim(t.Context(), fmt.Sprint("up", i)); return err == nil })
	}

	got, err := c.keys.TryClaim(t.Context(), "5")
	require.NoError(t, err)
	require.Len(t, got, 1)
	more, err := c.worker.TryClaim(t.Context(), "5")
	require.NoError(t, err)
	require.Len(t, more, 1)
	moved, err := c.keys.Move(t.Context(), seen[0])
	require.NoError(t, err)
	require.Len(t, moved, 1)
	taken, err := remote.queue.TryTakeFor(t.Context(), remote.session.ID(), claims.TakeOptions{N: 1})
	require.NoError(t, err)
	require.Len(t, taken, 1)
	require.True(t, c.keys.Holds(all[0]) && c.worker.Holds(rows[0]))
}

// running counts the funcs that run for keys and rows.
type running struct {
	mu    sync.Mutex
	funcs map[string]int
	most  int // for one of them
	told  []string
}

func (r *running) run(name string, ctx context.Context) error {
	r.mu.Lock()
	r.funcs[name]++
	r.most = max(r.most, r.funcs[name])
	r.mu.Unlock()
	<-ctx.Done()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.funcs[name]--
	r.told = append(r.told, name+": "+context.Cause(ctx).Error())
	return ctx.Err()
}

func (r *running) now(names ...string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range names {
		if r.funcs[name] != 1 {
			return false
		}
	}
	return true
}

// ended returns which funcs have ended, and why.
func (r *running) ended() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.told)
}

// A standby is promoted that lacks the session's begin, its claims, or their releases. What is not lost goes on, funcs of
// lost claims are told, and nobody else gets a key or a row before that, and before the failover has settled.
func TestOverAFailoverThatLosesCommitsNothingIsClaimedTwice(t *testing.T) {
	ttl := *failoverTTL * 6 / 5
	for _, lost := range []string{"claims", "claims and the session's begin", "releases"} {
		for try := range *failovers {
			t.Run(fmt.Sprintf("%s/%d", lost, try), func(t *testing.T) {
				t.Parallel()
				f := &failover{T: t, try: try, primary: testkit.StartPostgres(t)}
				queueTasks(t, f.primary.URL(), 20)
				f.standby, _ = standbyOf(t, f.primary)
				reach := func() (*claimant, *rig.Proxy) {
					proxy, err := rig.NewProxy(addressOf(t, f.primary), nil)
					require.NoError(t, err)
					t.Cleanup(proxy.Close)
					u := testkit.Must(url.Parse(f.primary.URL()))
					u.Host = proxy.Addr()
					at := u.String()
					if try%2 == 1 {
						at = testkit.StartBouncer(t, at) + "&default_query_exec_mode=exec"
					}
					return startClaimant(t, at, ttl), proxy
				}
				funcs := &running{funcs: map[string]int{}}
				serveKey := func(c *claimant, key claims.Claim) {
					go func() {
						_ = c.keys.Do(t.Context(), key, func(ctx context.Context) error { return funcs.run(key.String(), ctx) })
					}()
				}
				serveRow := func(c *claimant, row claims.Claim) {
					go func() {
						_ = c.worker.Do(t.Context(), row, func(ctx context.Context) error { return funcs.run(row.String(), ctx) })
					}()
				}
				claim := func(c *claimant, id string) (key claims.Claim) {
					keys, err := c.keys.Claim(t.Context(), id)
					require.NoError(t, err)
					rows, err := c.worker.Claim(t.Context(), id)
					require.NoError(t, err)
					serveKey(c, keys[0])
					serveRow(c, rows[0])
					return keys[0]
				}
				survives := lost != "claims and the session's begin"
				if !survives {
					f.awaitStandby()
					f.lag()
				}
				a, toA := reach()
				b, toB := reach()
				claim(a, "1")
				var freed claims.Claim
				if lost == "releases" {
					keys, err := b.keys.Claim(t.Context(), "2")
					require.NoError(t, err)
					freed = keys[0]
				}
				if survives {
					f.awaitStandby()
					f.lag()
				}
				if lost == "releases" {
					require.NoError(t, b.keys.Release(t.Context(), freed))
				}
				second := claim(a, "2")
				testkit.Await(t, "its funcs run", func() bool { return funcs.now("tenant/1", "tenant/2", "tasks/1", "tasks/2") })
				session := a.session.ID()
				require.NoError(t, f.primary.Stop("immediate"))
				require.NoError(t, f.standby.Promote())
				promoted := time.Now()
				toB.Redirect(addressOf(t, f.standby))
				if try%3 == 2 { // a comes later
					toA.Set(rig.Weather{Refuse: true})
					testkit.Sleep(t.Context(), ttl/4)
					toA.Set(rig.Weather{})
				}
				toA.Redirect(addressOf(t, f.standby))

				write := func(c *claimant, under claims.Claim) error {
					return c.store.Fenced(t.Context(), under, func(pgx.Tx) error { return nil })
				}
				keys, rows := map[string]bool{}, map[string]bool{} // that b gets
				for time.Since(promoted) < 3*ttl {
					require.Error(t, write(a, second), "it is lost")
					if lost == "releases" {
						require.Error(t, write(b, freed), "it is late")
					}
					got, _ := b.keys.TryClaim(t.Context(), "1", "2")
					more, _ := b.worker.TryClaim(t.Context(), "1", "2")
					for _, key := range got {
						keys[key.Key.ID] = true
						serveKey(b, key)
					}
					for _, row := range more {
						rows[row.Key.ID] = true
						serveRow(b, row)
					}
					if len(got)+len(more) > 0 {
						require.GreaterOrEqual(t, time.Since(promoted), ttl, "it has not settled")
					}
					testkit.Sleep(t.Context(), 20*time.Millisecond)
				}
				is := map[string]bool{"2": true}
				if !survives {
					is["1"] = true
				}
				require.Equal(t, is, keys, "a's funcs were told %v", funcs.ended())
				require.Equal(t, is, rows, "a's funcs were told %v", funcs.ended())
				testkit.Await(t, "all funcs run", func() bool { return funcs.now("tenant/1", "tenant/2", "tasks/1", "tasks/2") })
				require.Len(t, funcs.ended(), 2*len(is))
				for _, why := range funcs.ended() {
					require.Contains(t, why, tenure.ErrLost.Error())
				}
				require.Equal(t, session, a.session.ID())
				require.Equal(t, 1, funcs.most)
				free, err := b.keys.TryClaim(t.Context(), "3")
				require.NoError(t, err)
				require.Len(t, free, 1)
				owned, err := a.queue.OwnedBy(t.Context(), session)
				require.NoError(t, err)
				require.Len(t, owned, 2-len(is))
			})
		}
	}
}

// No session is about to renew: whoever writes under a claim has its session renewed first, which compares its claims. What is
// written under a claim that the failover has lost does not land.
func TestAWriteAfterAFailoverLandsIfItsClaimIsNotLost(t *testing.T) {
	t.Parallel()
	f := &failover{T: t, primary: testkit.StartPostgres(t)}
	queueTasks(t, f.primary.URL(), 40)
	testkit.ExecPostgres(t, testkit.PostgresPool(t, f.primary.URL()), `CREATE TABLE effects (name text)`)
	f.standby, _ = standbyOf(t, f.primary)

	type held struct {
		*claimant
		db       *sql.DB
		key, row claims.Claim
	}
	insert := func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES ('tx')`)
		return err
	}
	put := func(ctx context.Context, h *held, guard tenure.Guard) error {
		fenced, err := tenure.Fence(h.store, guard)
		require.NoError(t, err)
		_, err = fenced.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "effect", ID: h.key.Session}}, tenure.Unconditional())
		return err
	}
	fenced := func(ctx context.Context, h *held, guard tenure.Guard) error {
		return h.store.Fenced(ctx, guard, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ('fenced')`)
			return err
		})
	}
	writes := map[string]struct {
		write func(ctx context.Context, h *held) error
		again bool // the first one does not stand, and says that the next one may
	}{
		"Finish":     {func(ctx context.Context, h *held) error { return h.queue.Finish(ctx, h.row) }, false},
		"FinishEach": {func(ctx context.Context, h *held) error { return h.queue.FinishEach(ctx, h.row) }, false},
		"FinishPostgres": {func(ctx context.Context, h *held) error {
			return h.queue.FinishPostgres(ctx, []claims.Claim{h.row}, func(pgx.Tx) error { return nil })
		}, false},
		"Release":           {func(ctx context.Context, h *held) error { return h.queue.Release(ctx, h.row) }, false},
		"a fenced put, row": {func(ctx context.Context, h *held) error { return put(ctx, h, h.row) }, false},
		"a fenced put, key": {func(ctx context.Context, h *held) error { return put(ctx, h, h.key) }, false},
		"Fenced, row":       {func(ctx context.Context, h *held) error { return fenced(ctx, h, h.row) }, true},
		"Fenced, key":       {func(ctx context.Context, h *held) error { return fenced(ctx, h, h.key) }, true},
		"FencedTx, with key": {func(ctx context.Context, h *held) error {
			return tenure.FencedTx(ctx, h.store, h.key, h.db, nil, func(tx *sql.Tx) error { return insert(ctx, tx) })
		}, true},
	}
	proxy, err := rig.NewProxy(addressOf(t, f.primary), nil)
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	u := testkit.Must(url.Parse(f.primary.URL()))
	u.Host = proxy.Addr()
	kept, lost := map[string]*held{}, map[string]*held{}
	for name := range writes {
		for _, all := range []map[string]*held{kept, lost} {
			h := &held{db: testkit.OpenSQL(t, "pgx", u.String())}
			// Without a subscription nothing makes it renew sooner than in minutes.
			h.claimant = startClaimantOn(t, testkit.OpenPostgres(t, u.String(), tenure.PostgresConfig{Logger: testkit.Quiet, PollOnly: true}), time.Hour)
			all[name] = h
		}
	}
	claimAll := func(all map[string]*held, of string) {
		for name, h := range all {
			testkit.Await(t, "its session begins", h.session.Valid)
			keys, err := h.keys.TryClaim(t.Context(), of+name)
			require.NoError(t, err)
			require.Len(t, keys, 1)
			rows, err := h.worker.Take(t.Context(), 1)
			require.NoError(t, err)
			h.key, h.row = keys[0], rows[0]
		}
	}
	claimAll(kept, "kept ")
	f.awaitStandby()
	f.lag()
	claimAll(lost, "lost ")
	require.NoError(t, f.primary.Stop("immediate"))
	require.NoError(t, f.standby.Promote())
	proxy.Redirect(addressOf(t, f.standby))

	write := func(name string, h *held) (err error) {
		testkit.Await(t, name+" reaches the new primary", func() bool { // a connection is broken, or was
			err = writes[name].write(t.Context(), h)
			return err == nil || errors.Is(err, tenure.ErrLost) || errors.Is(err, tenure.ErrMoved)
		})
		return err
	}
	for name := range writes {
		h := kept[name]
		err := write(name, h)
		if writes[name].again {
			require.ErrorIs(t, err, tenure.ErrMoved, name)
			err = write(name, h)
		}
		require.NoError(t, err, name)
		require.True(t, h.session.Valid())
		require.True(t, h.keys.Holds(h.key), name)

		h = lost[name]
		if err = write(name, h); errors.Is(err, tenure.ErrMoved) {
			err = write(name, h)
		}
		require.ErrorIs(t, err, tenure.ErrLost, name)
		require.True(t, h.session.Valid())
	}
	var tasks, effects int
	pool := testkit.PostgresPool(t, f.standby.URL())
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM tasks WHERE status = 'done'`).Scan(&tasks))
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM effects`).Scan(&effects))
	require.Equal(t, 3, tasks)
	require.Equal(t, 3, effects, "no write was done twice, and none of those that did not stand")

	// One that has ended is lost as ever.
	h := kept["Fenced, key"]
	testkit.ExecPostgres(t, pool, `UPDATE objects_claims SET session = NULL WHERE id = 'kept Fenced, key'`)
	require.ErrorIs(t, fenced(t.Context(), h, h.key), tenure.ErrLost)
	require.ErrorIs(t, h.queue.Finish(t.Context(), kept["Finish"].row), tenure.ErrLost)
}

// Each func has written when the failover comes. Some leases and claims are lost by it.
func TestATransactionThatAFailoverInterruptsWritesNothingAndCanBeRepeatedIfItsRightIsNotLost(t *testing.T) {
	t.Parallel()
	const each = 8
	f := &failover{T: t, primary: testkit.StartPostgres(t)}
	queueTasks(t, f.primary.URL(), each)
	testkit.ExecPostgres(t, testkit.PostgresPool(t, f.primary.URL()), `CREATE TABLE effects (name text)`)
	f.standby, _ = standbyOf(t, f.primary)
	proxy, err := rig.NewProxy(addressOf(t, f.primary), nil)
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	u := testkit.Must(url.Parse(f.primary.URL()))
	u.Host = proxy.Addr()
	db := testkit.OpenSQL(t, "pgx", u.String())
	c := startClaimant(t, u.String()+"&pool_max_conns=40", time.Hour)
	testkit.Await(t, "its session begins", c.session.Valid)

	type write struct {
		name  string
		lost  bool // what it depends on, by the failover
		renew func() error
		do    func(fn func() error) error // fn is called when the transaction has written
	}
	var writes []write
	insert := `INSERT INTO effects VALUES ($1)`
	add := func(i int) {
		name := fmt.Sprint(i)
		lease := testkit.NewLease(t, c.store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: name}, TTL: time.Hour})
		term := testkit.MustAcquire(t, lease)
		keys, err := c.keys.TryClaim(t.Context(), name)
		require.NoError(t, err)
		rows, err := c.worker.Take(t.Context(), 1)
		require.NoError(t, err)
		in := func(name string, fn func() error) func(pgx.Tx) error {
			return func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), insert, name)
				return cmp.Or(err, fn())
			}
		}
		renew := func() error { return lease.Renew(t.Context(), term) }
		none := func() error { return nil }
		lost := i >= each/2
		writes = append(writes, write{"Fenced, lease " + name, false, renew, func(fn func() error) error {
			return c.store.Fenced(t.Context(), term, in("Fenced, lease "+name, fn))
		}}, write{"FencedTx, lease " + name, false, renew, func(fn func() error) error {
			return tenure.FencedTx(t.Context(), c.store, term, db, nil, func(tx *sql.Tx) error {
				_, err := tx.ExecContext(t.Context(), insert, "FencedTx, lease "+name)
				return cmp.Or(err, fn())
			})
		}}, write{"Fenced, key " + name, lost, none, func(fn func() error) error {
			return c.store.Fenced(t.Context(), keys[0], in("Fenced, key "+name, fn))
		}}, write{"FinishPostgres " + name, lost, none, func(fn func() error) error {
			return c.queue.FinishPostgres(t.Context(), rows, in("FinishPostgres "+name, fn))
		}})
	}
	for i := range each {
		if i == each/2 {
			f.awaitStandby()
			f.lag()
		}
		add(i)
	}
	var written, returned sync.WaitGroup
	failedOver := make(chan struct{})
	for _, w := range writes {
		written.Add(1)
		returned.Go(func() {
			wrote := sync.OnceFunc(written.Done)
			defer wrote()
			err := w.do(func() error { wrote(); <-failedOver; return nil })
			assert.Error(t, err, w.name)
		})
	}
	written.Wait()
	require.NoError(t, f.primary.Stop("immediate"))
	require.NoError(t, f.standby.Promote())
	proxy.Redirect(addressOf(t, f.standby))
	close(failedOver)
	returned.Wait()
	pool := testkit.PostgresPool(t, f.standby.URL())
	count := func(of string) (n int) {
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(`+of+`) FROM effects`).Scan(&n))
		return n
	}
	require.Zero(t, count("*"))

	stand := 0
	for _, w := range writes {
		testkit.Await(t, w.name+" is repeated", func() bool {
			err := w.renew()
			if err == nil {
				err = w.do(func() error { return nil })
			}
			require.False(t, errors.Is(err, tenure.ErrLost) && !w.lost, w.name)
			require.False(t, err == nil && w.lost, w.name)
			return err == nil || errors.Is(err, tenure.ErrLost)
		})
		if !w.lost {
			stand++
		}
	}
	require.Equal(t, stand, count("*"))
	require.Equal(t, stand, count("DISTINCT name"))
}
