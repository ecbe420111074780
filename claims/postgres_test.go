package claims_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	osexec "os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// eachServer runs a test on a real Postgres and on a SQLite file. open returns another handle on
// the same database.
func eachServer(t *testing.T, test func(t *testing.T, open func() tenure.Database)) {
	t.Run("postgres", func(t *testing.T) {
		t.Parallel() // most of these tests wait until something has expired
		url := testkit.PostgresURL(t)
		test(t, func() tenure.Database { return testkit.OpenPostgres(t, url, tenure.PostgresConfig{}) })
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "tenure.db")
		test(t, func() tenure.Database { return testkit.OpenSQLite(t, path) })
	})
}

func TestProcessesShareKeysOnAServer(t *testing.T) {
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		a, b := newWorld(t, open()).start("a"), newWorld(t, open()).start("b")
		ids := names(1200) // more than a statement has
		var both sync.WaitGroup
		var ofA, ofB []claims.Claim
		both.Go(func() { ofA = a.claim(ids...) })
		both.Go(func() { ofB = b.claim(ids...) })
		both.Wait()
		for len(ofA)+len(ofB) < len(ids) { // a row that the other has just locked is left
			ofA, ofB = append(ofA, a.claim(ids...)...), append(ofB, b.claim(ids...)...)
		}
		owners := map[string]bool{}
		for _, c := range append(ofA, ofB...) {
			require.False(t, owners[c.Key.ID], c)
			owners[c.Key.ID] = true
		}
		require.Len(t, owners, len(ids))

		for range 2 { // now all rows exist
			if len(ofA) > 0 {
				require.NoError(t, a.keys.Release(t.Context(), ofA...))
			}
			if len(ofB) > 0 {
				require.NoError(t, b.keys.Release(t.Context(), ofB...))
			}
			both.Go(func() { ofA = a.claim(ids...) })
			both.Go(func() { ofB = b.claim(ids...) })
			both.Wait()
			clear(owners)
			for _, c := range append(slices.Clone(ofA), ofB...) {
				require.False(t, owners[c.Key.ID], c)
				owners[c.Key.ID] = true
			}
		}
		sessionOfB := b.session.ID()
		b.stop()
		require.Empty(t, b.w.owned(sessionOfB))
		require.Len(t, append(ofA, a.claim(ids...)...), len(ids))
	})
}

// S3.
func TestTokensIncreaseWhateverTheServersClockSays(t *testing.T) {
	url := testkit.PostgresURL(t)
	p := newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{})).start("a")
	require.NoError(t, p.keys.Release(t.Context(), p.claimOne("one")))
	ahead := time.Now().Add(time.Hour).UnixMicro()
	testkit.ExecPostgres(t, testkit.PostgresPool(t, url), `UPDATE objects_claims SET token = $1`, ahead)
	require.Equal(t, ahead+1, p.claimOne("one").Token)
}

func TestWhatACrashedProcessOwnedIsClaimedOnAServer(t *testing.T) {
	testkit.Slow(t)
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		cfg := claims.SessionConfig{TTL: 6 * time.Second}
		a, b := newWorld(t, open()).startWith("a", cfg), newWorld(t, open()).startWith("b", cfg)
		ids := names(1500)
		require.Len(t, a.claim(ids...), len(ids))
		id := a.session.ID()
		a.crash()
		got, err := b.keys.Claim(t.Context(), ids...)
		require.NoError(t, err)
		testkit.Await(t, "the rows are free or claimed", func() bool { return len(b.w.owned(id)) == 0 })
		for len(got) < len(ids) {
			more, err := b.keys.Claim(t.Context(), ids...)
			require.NoError(t, err)
			got = append(got, more...)
		}
	})
}

func TestAWaitOnPostgresIsWokenByAnotherProcess(t *testing.T) {
	url := testkit.PostgresURL(t)
	open := func() *world { return newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{})) }
	cfg := claims.SessionConfig{TTL: 10 * time.Minute, PollInterval: 5 * time.Minute}
	a, b := open().startWith("a", cfg), open().startWith("b", cfg)
	c := a.claimOne("one")
	got := make(chan []claims.Claim)
	go func() {
		claimed, _ := b.keys.Claim(t.Context(), "one")
		got <- claimed
	}()
	time.Sleep(100 * time.Millisecond)
	require.NoError(t, a.keys.Release(t.Context(), c))
	select {
	case claimed := <-got:
		require.Len(t, claimed, 1)
	case <-time.After(testkit.Patience):
		t.Fatal("not woken")
	}
}

// otherProcess is where the test of this process keeps its database. If it is set, this process is the
// other one.
const otherProcess = "TENURE_TEST_OTHER_PROCESS"

// A process of its own claims a key, and releases it when it is told to.
func TestOnSQLiteAWaitIsWokenByAnotherProcess(t *testing.T) {
	if path := os.Getenv(otherProcess); path != "" {
		p := newWorld(t, testkit.OpenSQLite(t, path)).start("other")
		c := p.claimOne("one")
		fmt.Println("claimed")
		_, _ = os.Stdin.Read(make([]byte, 1)) // until it is closed
		require.NoError(t, p.keys.Release(t.Context(), c))
		return
	}
	path := filepath.Join(t.TempDir(), "tenure.db")
	p := newWorld(t, testkit.OpenSQLite(t, path)).startWith("this", claims.SessionConfig{PollInterval: 20 * time.Second})
	other := osexec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	other.Env = append(os.Environ(), otherProcess+"="+path)
	tell, err := other.StdinPipe()
	require.NoError(t, err)
	says, err := other.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, other.Start())
	t.Cleanup(func() { _ = other.Process.Kill(); _ = other.Wait() })
	line, err := bufio.NewReader(says).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "claimed\n", line)

	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	began := time.Now()
	time.AfterFunc(300*time.Millisecond, func() { _ = tell.Close() })
	_, err = p.keys.Claim(ctx, "one")
	require.NoError(t, err)
	require.Greater(t, time.Since(began), 250*time.Millisecond)
	require.Less(t, time.Since(began), 10*time.Second, "it was not woken")
}

// In transaction mode each transaction may meet another session, without the settings of the last.
func TestClaimsThroughPgBouncer(t *testing.T) {
	t.Parallel()
	direct := testkit.PostgresURL(t)
	url := testkit.StartBouncer(t, direct) + "&default_query_exec_mode=exec"
	open := func() *world { return newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{})) }
	cfg := claims.SessionConfig{TTL: 5 * time.Second, PollInterval: 100 * time.Millisecond} // it hears nothing
	a, b := open().startWith("a", cfg), open().startWith("b", cfg)
	ids := names(1200)
	got := a.claim(ids...)
	require.Len(t, got, len(ids))
	require.Empty(t, b.claim(ids...))
	c := got[0]
	require.NoError(t, a.w.store.(*tenure.PostgresStore).Fenced(t.Context(), c, func(pgx.Tx) error { return nil }))
	require.NoError(t, a.keys.Release(t.Context(), got...))
	require.ErrorIs(t, a.w.store.(*tenure.PostgresStore).Fenced(t.Context(), c, func(pgx.Tx) error { return nil }), tenure.ErrLost)
	returned := b.work(b.claimOne("one"), 0)
	a.request("one")
	wantResigned(t, returned)
	a.wait("one")
	listing, err := b.session.List(t.Context(), "tenant")
	require.NoError(t, err)
	require.Len(t, listing.Claims, 1)
	a.crash()
	b.wait("one")
	_, _, err = b.w.table.Prune(t.Context(), 0, 10, testkit.Patience)
	require.NoError(t, err)
}

// Without that setting pgx prepares statements, which a pooler may give to others.
func TestThroughPgBouncerPreparedStatementsWorkOrTheRemedyIsNamed(t *testing.T) {
	direct := testkit.PostgresURL(t)
	testkit.MigrateClaims(t, testkit.OpenPostgres(t, direct, tenure.PostgresConfig{}))
	store := testkit.OpenPostgres(t, testkit.StartBouncer(t, direct), tenure.PostgresConfig{})
	table := store.Backend().Claims()
	var all sync.WaitGroup
	for i := range 10 {
		all.Go(func() {
			for j := range 20 {
				_, err := table.Look(t.Context(), "tenant", []string{fmt.Sprint(i, j)}, testkit.Patience)
				if err != nil && !strings.Contains(err.Error(), "default_query_exec_mode=exec") {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

// A constraint or a trigger refuses one row of a thousand. It stays as it is, and the others are
// claimed and freed.
func TestARowThatTheDatabaseRefusesHoldsUpNoOther(t *testing.T) {
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		w := newWorld(t, open())
		switch store := w.store.(type) {
		case *tenure.PostgresStore:
			_, err := store.Pool().Exec(t.Context(), `ALTER TABLE objects_claims ADD CHECK (id <> 't000500'), ADD CHECK (id <> 't000700' OR session IS NOT NULL)`)
			require.NoError(t, err)
		case *tenure.SQLiteStore:
			testkit.ExecSQL(t, store.DB(), `CREATE TRIGGER never BEFORE INSERT ON objects_claims WHEN NEW.id = 't000500' BEGIN SELECT RAISE(ABORT, 'never'); END`)
			testkit.ExecSQL(t, store.DB(), `CREATE TRIGGER stuck BEFORE UPDATE ON objects_claims WHEN NEW.id = 't000700' AND NEW.session IS NULL BEGIN SELECT RAISE(ABORT, 'stuck'); END`)
		}
		a, b := w.start("a"), newWorld(t, open()).start("b")
		ids := names(1200)
		got, err := a.keys.TryClaim(t.Context(), ids...)
		require.ErrorContains(t, err, `"t000500"`)
		require.Len(t, got, 1199)
		_, err = a.keys.TryClaim(t.Context(), "t000500")
		require.ErrorContains(t, err, `the database refuses the key "t000500"`)

		ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
		defer cancel()
		require.NoError(t, a.keys.Release(ctx, got...))
		id := a.session.ID()
		require.Equal(t, []string{"t000700"}, idsOf(w.owned(id)))
		require.Empty(t, a.claim("t000700"))
		got, err = b.keys.TryClaim(t.Context(), ids...)
		require.Error(t, err)
		require.Len(t, got, 1198)
		a.stop() // does not wait for the row
		require.Equal(t, []string{"t000700"}, idsOf(w.owned(id)))
		require.Equal(t, "t000700", b.claimOne("t000700").Key.ID, "its session is gone")
	})
}

// S4 as well: the application uses all connections of its pool.
func TestOnPostgresClaimsDoNotWaitForTheApplicationsQueries(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	url := testkit.PostgresURL(t)
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 2
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store, err := tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet})
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	cfg := claims.SessionConfig{TTL: 6 * time.Second}
	a := newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{})).startWith("a", cfg)
	b := newWorld(t, store).startWith("b", cfg)
	b.claimOne("mine")
	a.claim("one", "two")
	for range 2 {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		defer conn.Release()
	}
	id := b.session.ID()
	a.crash()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	got, err := b.keys.Claim(ctx, "one")
	require.NoError(t, err, "the session of a is not removed")
	require.NoError(t, b.keys.Release(ctx, got...))
	_, err = b.keys.Owner(ctx, "mine")
	require.NoError(t, err)
	require.NoError(t, b.keys.RequestRelease(ctx, "mine"))
	require.Equal(t, id, b.session.ID())
}

// S4: a session is not lost because its process claims much.
func TestOnPostgresClaimsDelayNoRenewal(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	url := testkit.PostgresURL(t)
	w := newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	p := w.startWith("a", claims.SessionConfig{TTL: 6 * time.Second})
	p.claimOne("mine")
	id := p.session.ID()
	var many sync.WaitGroup
	defer many.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
	defer cancel()
	err := pgx.BeginFunc(ctx, testkit.PostgresPool(t, url), func(tx pgx.Tx) error {
		testkit.ExecPostgres(t, tx, `LOCK TABLE objects_claims`)
		for range 20 { // each waits for the table
			many.Go(func() {
				for ctx.Err() == nil {
					_, _ = w.table.Look(ctx, "tenant", []string{"one"}, time.Minute)
				}
			})
		}
		<-ctx.Done()
		return nil
	})
	require.Error(t, err)
	require.Equal(t, id, p.session.ID())
}

// A transaction that hangs before its commit holds up its own key, and no other.
func TestARowThatIsLockedHoldsUpNoOther(t *testing.T) {
	url := testkit.PostgresURL(t)
	w := newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	a, b := w.start("a"), w.start("b")
	got := a.claim("one", "two", "three")
	require.NoError(t, a.keys.Release(t.Context(), got...))

	tx, err := testkit.PostgresPool(t, url).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	testkit.ExecPostgres(t, tx, `SELECT FROM objects_claims WHERE id = 'two' FOR SHARE`)
	got = a.claim("one", "two", "three")
	require.Len(t, got, 2)
	testkit.ExecPostgres(t, tx, `SELECT FROM objects_claims WHERE id = $1 FOR SHARE`, got[0].Key.ID)
	released := make(chan error, 1)
	go func() { released <- a.keys.Release(context.Background(), got...) }()
	require.Eventually(t, func() bool { return len(b.claim(got[1].Key.ID)) == 1 }, testkit.Patience, 10*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-released)
	b.claimOne(got[0].Key.ID)
	b.claimOne("two")
}

func TestARoleWithoutRightsHasLeasesAndNoClaims(t *testing.T) {
	url, owner := testkit.AsWorker(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	p := newWorld(t, store).start("a")
	_, err := p.keys.TryClaim(t.Context(), "one")
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "permission denied")
	require.NotEmpty(t, p.session.ID(), "its session is a lease")

	testkit.ExecPostgres(t, owner, `DROP TABLE objects_claims`)
	without := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, without)
	err = claims.Migrate(t.Context(), without)
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "permission denied")
	_, err = p.keys.TryClaim(t.Context(), "one")
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "call claims.Migrate once")
	testkit.MigrateClaims(t, testkit.OpenPostgres(t, strings.Replace(url, "worker_"+owner.Config().ConnConfig.Database+"@", "postgres@", 1), tenure.PostgresConfig{}))
	testkit.ExecPostgres(t, owner, `GRANT ALL ON objects_claims, objects_requests TO public`)
	p.claimOne("one")
}

// S2.
var raceTrials = flag.Int("race.trials", 250, "races of a late fenced write with the next claim, on each database")

func TestAFencedWriteIsNeverLate(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	trials := *raceTrials
	t.Run("postgres", func(t *testing.T) {
		url := testkit.PostgresURL(t)
		store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
		w := newWorld(t, store)
		db := testkit.OpenSQL(t, "pgx", url)
		for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			race(w, db, level, "$1", trials/3+1, func(ctx context.Context, c claims.Claim, write func(exec) error) error {
				return store.Fenced(ctx, c, func(tx pgx.Tx) error {
					if level != sql.LevelReadCommitted {
						if _, err := tx.Exec(ctx, "SET TRANSACTION ISOLATION LEVEL "+level.String()); err != nil {
							return err
						}
					}
					return write(func(ctx context.Context, query string, args ...any) error {
						_, err := tx.Exec(ctx, query, args...)
						return err
					})
				})
			})
		}
	})
	t.Run("sqlite", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "tenure.db")
		store := testkit.OpenSQLite(t, file)
		db := testkit.OpenSQL(t, "sqlite", "file:"+file+"?_txlock=immediate&_pragma=busy_timeout(10000)")
		race(newWorld(t, store), db, sql.LevelDefault, "?1", trials, func(ctx context.Context, c claims.Claim, write func(exec) error) error {
			return store.Fenced(ctx, c, func(tx *sql.Tx) error {
				return write(func(ctx context.Context, query string, args ...any) error {
					_, err := tx.ExecContext(ctx, query, args...)
					return err
				})
			})
		})
	})
}

type exec func(ctx context.Context, query string, args ...any) error

// race makes late fenced writes of each kind race against the next
// claim of the key, whose session was removed. After that claim has begun, no write of the
// earlier one may appear.
func race(w *world, db *sql.DB, level sql.IsolationLevel, placeholder string, trials int, fenced func(context.Context, claims.Claim, func(exec) error) error) {
	w.Helper()
	ctx := w.Context()
	_, err := db.Exec(`CREATE TABLE IF NOT EXISTS ledger (token bigint NOT NULL)`)
	require.NoError(w, err)
	insert := `INSERT INTO ledger VALUES (` + placeholder + `)`
	count := func(token int64) (n int) {
		require.NoError(w, db.QueryRow(fmt.Sprint(`SELECT count(*) FROM ledger WHERE token = `, token)).Scan(&n))
		return n
	}
	var committed, refused int
	for trial := range trials {
		id, first, next := fmt.Sprint(level, trial), fmt.Sprint("first ", level, trial), fmt.Sprint("next ", level, trial)
		testkit.Put(w, w.store, tenure.Object{Key: claims.SessionKey(first)})
		rows, err := w.table.Take(ctx, first, "tenant", nil, nil, []string{id}, testkit.Patience)
		require.NoError(w, err)
		c := claims.Claim{Key: tenure.Key{Type: "tenant", ID: id}, Session: first, Token: rows[0].Token}
		var both sync.WaitGroup
		var late error
		both.Go(func() {
			time.Sleep(rand.N(3 * time.Millisecond))
			write := func(exec exec) error {
				err := exec(ctx, insert, c.Token)
				time.Sleep(rand.N(2 * time.Millisecond))
				return err
			}
			switch trial % 4 {
			case 0, 3:
				late = fenced(ctx, c, write)
			case 1:
				late = byStatement(ctx, w.store.(tenure.SQLStore), db, level, c, write)
			default:
				late = tenure.FencedTx(ctx, w.store.(tenure.SQLStore), c, db, &sql.TxOptions{Isolation: level}, func(tx *sql.Tx) error {
					return write(func(ctx context.Context, query string, args ...any) error {
						_, err := tx.ExecContext(ctx, query, args...)
						return err
					})
				})
			}
		})
		time.Sleep(rand.N(8 * time.Millisecond))
		// Half of the claims find the row freed, the others take it as that of a session that is gone.
		if trial%4 < 2 {
			_, err = w.table.Free(ctx, first, "tenant", []string{id}, []int64{c.Token}, objects.Freeing{}, 10*time.Second)
			require.NoError(w, err)
		}
		var taken int64
		for taken == 0 { // while the late write has the row locked, the claim is refused
			rows, err := w.table.Take(ctx, next, "tenant", []string{id}, []string{first}, nil, 10*time.Second)
			require.NoError(w, err)
			for _, r := range rows {
				taken = r.Token
			}
		}
		require.Greater(w, taken, c.Token)
		seen := count(c.Token)
		both.Wait()
		require.Equal(w, seen, count(c.Token), "trial %d: the claim has written after the next one began (%v)", trial, late)
		switch {
		case late == nil && seen == 1:
			committed++
		case seen == 0 && (errors.Is(late, tenure.ErrLost) || late != nil && strings.Contains(late.Error(), "could not serialize")):
			refused++
		default:
			w.Fatalf("trial %d: %d rows, and the write says %v", trial, seen, late)
		}
	}
	w.Logf("%v: %d committed, %d refused", level, committed, refused)
	if committed == 0 || refused == 0 {
		w.Error("writes and claims never raced")
	}
}

// byStatement is a write of any driver.
func byStatement(ctx context.Context, store tenure.SQLStore, db *sql.DB, level sql.IsolationLevel, c claims.Claim, write func(exec) error) error {
	fence, args, err := store.FenceStatement(c)
	if err != nil {
		return err
	}
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	err = write(func(ctx context.Context, query string, args ...any) error {
		_, err := tx.ExecContext(ctx, query, args...)
		return err
	})
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, fence, args...); err != nil {
		return tenure.FenceError(err)
	}
	time.Sleep(rand.N(time.Millisecond))
	return tenure.FenceError(tx.Commit())
}

func TestBadInputToFences(t *testing.T) {
	store := testkit.OpenSQLite(t, ":memory:")
	testkit.MigrateClaims(t, store)
	good := claims.Claim{Key: tenure.Key{Type: "tenant", ID: "one"}, Session: "s", Token: 1}
	never := func(*sql.Tx) error { t.Error("called"); return nil }
	for _, c := range []claims.Claim{{}, {Key: good.Key}, {Key: good.Key, Session: "s"}, {Key: good.Key, Session: "\xff", Token: 1}, {Session: "s", Token: 1}} {
		require.ErrorIs(t, store.Fenced(t.Context(), c, never), tenure.ErrInvalid)
		_, _, err := store.FenceStatement(c)
		require.ErrorIs(t, err, tenure.ErrInvalid)
	}
	require.ErrorIs(t, store.Fenced(t.Context(), good, nil), tenure.ErrInvalid)
	require.ErrorIs(t, store.Fenced(t.Context(), nil, never), tenure.ErrInvalid)
	require.ErrorIs(t, store.Fenced(t.Context(), good, never), tenure.ErrLost, "it was never claimed")
	require.ErrorIs(t, tenure.FencedTx(t.Context(), store, good, nil, nil, never), tenure.ErrInvalid)
	require.ErrorIs(t, tenure.FencedTx(t.Context(), store, good, store.DB(), nil, nil), tenure.ErrInvalid)
	require.ErrorIs(t, tenure.FencedTx(t.Context(), store, good, store.DB(), nil, func(*sql.Tx) error { return nil }), tenure.ErrLost)
	_, _, err := store.FenceStatement(nil)
	require.ErrorIs(t, err, tenure.ErrInvalid)
}

// The halves of a statement that was refused have rows that are free and rows that are missing.
func TestARefusedRowHoldsUpNeitherFreeNorMissingRows(t *testing.T) {
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		w := newWorld(t, open())
		p := w.start("a")
		require.NoError(t, p.keys.Release(t.Context(), p.claim("f1", "f2", "f3", "f4")...))
		refuseToClaim(t, w, "m4")
		got, err := p.keys.TryClaim(t.Context(), "f1", "f2", "f3", "f4", "m1", "m2", "m3", "m4")
		require.ErrorContains(t, err, `"m4"`)
		var ids []string
		for _, c := range got {
			ids = append(ids, c.Key.ID)
		}
		require.ElementsMatch(t, []string{"f1", "f2", "f3", "f4", "m1", "m2", "m3"}, ids)
	})
}

// refuseToClaim makes a trigger refuse a key.
func refuseToClaim(t *testing.T, w *world, id string) {
	switch store := w.store.(type) {
	case *tenure.PostgresStore:
		testkit.ExecPostgres(t, store.Pool(), fmt.Sprintf(`CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN IF NEW.id = '%s' THEN RAISE EXCEPTION 'never'; END IF; RETURN NEW; END $$`, id))
		testkit.ExecPostgres(t, store.Pool(), `CREATE TRIGGER never BEFORE INSERT OR UPDATE ON objects_claims FOR EACH ROW EXECUTE FUNCTION never()`)
	case *tenure.SQLiteStore:
		testkit.ExecSQL(t, store.DB(), fmt.Sprintf(`CREATE TRIGGER never BEFORE INSERT ON objects_claims WHEN NEW.id = '%s' BEGIN SELECT RAISE(ABORT, 'never'); END`, id))
	}
}
