package databases_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// What holds of both databases under contention.

func TestOfManyContendersOneAcquiresInEachRound(t *testing.T) {
	testkit.Slow(t)
	const contenders, rounds = 32, 200
	const enoughRounds, long = 20, 20 * time.Second // for a machine that is slow
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		store := open()
		leases := make([]*tenure.Lease, contenders)
		for i := range leases {
			leases[i] = testkit.NewLease(t, store, tenure.LeaseConfig{Holder: fmt.Sprint("r", i), TTL: time.Hour})
		}
		var last int64
		began := time.Now()
		for round := range rounds {
			if round >= enoughRounds && time.Since(began) > long {
				t.Logf("%d rounds", round)
				return
			}
			var wg sync.WaitGroup
			var winner atomic.Pointer[tenure.Term]
			var wins atomic.Int32
			for _, lease := range leases {
				wg.Go(func() {
					term, err := lease.AcquireOrSteal(context.Background())
					switch {
					case err == nil:
						wins.Add(1)
						winner.Store(term)
					case !errors.Is(err, tenure.ErrHeld):
						t.Errorf("round %d: %v", round, err)
					}
				})
			}
			wg.Wait()
			if n := wins.Load(); n != 1 {
				t.Fatalf("round %d: %d winners", round, n)
			}
			term := winner.Load()
			if term.Token() <= last {
				t.Fatalf("round %d: token %d follows %d", round, term.Token(), last)
			}
			last = term.Token()
			testkit.WantErr(t, leases[0].Release(context.Background(), term), nil)
		}
	})
}

// Tokens only grow, as do versions, as the store promises: tried by workers that
// create, renew, steal and release as fast as they can.
func TestVersionsAndTokensNeverGoBackUnderStress(t *testing.T) {
	testkit.Slow(t)
	const workers, ttl = 8, 40 * time.Millisecond
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		store := open()

		// begun is the greatest token that anybody knows of. A term whose acquire
		// was sent afterwards must have a greater one.
		var begun atomic.Int64
		var terms, renewals, steals, releases atomic.Int64
		tokens := sync.Map{}
		work := func(ctx context.Context, lease *tenure.Lease, pause time.Duration) {
			for ctx.Err() == nil {
				before := begun.Load()
				term, err := lease.TryAcquire(ctx)
				if errors.Is(err, tenure.ErrHeld) {
					if term, err = lease.StealExpired(ctx); err == nil {
						steals.Add(1)
					}
				}
				if err != nil {
					testkit.Sleep(ctx, pause) // or all would steal at the same instant, and hardly any hold
					continue
				}
				terms.Add(1)
				token := term.Token()
				if token <= before {
					t.Errorf("token %d was given after %d was known", token, before)
				}
				if other, twice := tokens.LoadOrStore(token, term.ID()); twice {
					t.Errorf("token %d was given to %v and %v", token, other, term.ID())
				}
				for known := begun.Load(); known < token && !begun.CompareAndSwap(known, token); known = begun.Load() {
				}
				for range rand.N(4) {
					if lease.Renew(ctx, term) == nil {
						renewals.Add(1)
					}
				}
				if rand.N(3) > 0 {
					if lease.Release(ctx, term) == nil {
						releases.Add(1)
					}
				}
			}
		}
		testkit.UntilEnough(t, 5*time.Second, func(ctx context.Context, slower time.Duration) {
			var wg sync.WaitGroup
			for i := range workers {
				lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: fmt.Sprint("w", i), TTL: slower * ttl})
				wg.Go(func() { work(ctx, lease, rand.N(slower*5*time.Millisecond)) })
			}
			wg.Wait()
		}, func() bool {
			return terms.Load() >= 50 && steals.Load() >= 10 && renewals.Load() >= 20 && releases.Load() >= 20
		})
		t.Logf("%d terms, %d steals, %d renewals, %d releases", terms.Load(), steals.Load(), renewals.Load(), releases.Load())
	})
}

func TestManyReplicasMayMigrateAtOnce(t *testing.T) {
	testkit.Slow(t)
	for name, open := range map[string]func(t *testing.T) func() migrator{
		"postgres": func(t *testing.T) func() migrator {
			url := testkit.PostgresURL(t)
			return func() migrator {
				return testkit.OpenPostgres(t, url, tenure.PostgresConfig{Schema: `od"d`, Table: `ta"ble.x`})
			}
		},
		"sqlite": func(t *testing.T) func() migrator {
			path := t.TempDir() + "/many.db"
			return func() migrator { return testkit.OpenSQLite(t, path) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			open := open(t)
			var wg sync.WaitGroup
			for range 10 {
				store := open()
				wg.Go(func() {
					for range 2 {
						if err := store.Migrate(context.Background()); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			testkit.MustAcquire(t, testkit.NewLease(t, open(), tenure.LeaseConfig{}))
		})
	}
}

type migrator interface {
	tenure.Store
	Migrate(context.Context) error
}

func TestPostgresKeepsTheContract(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"cache_statement", "cache_describe", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			if mode != "cache_statement" { // pgx's default
				testkit.Slow(t)
			}
			url := testkit.QuickPostgresURL(t) + "&default_query_exec_mode=" + mode
			store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
			testkit.Migrate(t, store)
			pool := testkit.PostgresPool(t, url)
			storetest.Run(t, func(t *testing.T) tenure.Store {
				testkit.ExecPostgres(t, pool, `TRUNCATE objects, objects_tombstones`)
				return store
			})
		})
	}
}

func TestSQLiteKeepsTheContract(t *testing.T) {
	t.Parallel()
	t.Run("in a file", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) tenure.Store {
			store := testkit.OpenSQLite(t, t.TempDir()+"/a?b#c %41.db")
			testkit.Migrate(t, store)
			return store
		})
	})
	t.Run("in memory", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) tenure.Store {
			store := testkit.OpenSQLite(t, ":memory:")
			testkit.Migrate(t, store)
			return store
		})
	})
}

func TestAStoreIsOpenedByItsURL(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tenure.db")
	for url, want := range map[string]tenure.Database{
		testkit.PostgresURL(t): (*tenure.PostgresStore)(nil), path: (*tenure.SQLiteStore)(nil), "sqlite:" + path + "2": (*tenure.SQLiteStore)(nil),
		path + "3?shared=true": (*tenure.SQLiteStore)(nil), "sqlite:" + path + "4?shared=true": (*tenure.SQLiteStore)(nil),
	} {
		store, err := tenure.Open(t.Context(), url)
		require.NoError(t, err)
		defer store.Close()
		require.IsType(t, want, store)
		require.NoError(t, store.Migrate(t.Context()))
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		testkit.MustAcquire(t, lease)
		_, onSQLite := want.(*tenure.SQLiteStore)
		require.Equal(t, onSQLite && !strings.HasSuffix(url, "?shared=true"), store.Traits().Alone != nil, url)
	}
	for url, want := range map[string]error{"mysql://u:sEcrEt@h": tenure.ErrInvalid, "sqlite::memory:": tenure.ErrInvalid, "": tenure.ErrInvalid, "nats//h": tenure.ErrInvalid, "postgres.//h/db": tenure.ErrInvalid, filepath.Join(path, "none"): tenure.ErrSetup} {
		store, err := tenure.Open(t.Context(), url)
		require.ErrorIs(t, err, want)
		require.Nil(t, store)
		require.NotContains(t, err.Error(), "sEcrEt")
	}
}
