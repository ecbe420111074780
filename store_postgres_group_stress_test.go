package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
)

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
	url := kit.PostgresURL(t)
	admin := kit.PostgresPool(t, url)
	stores := []*tenure.PostgresStore{kit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: kit.Quiet}), kit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: kit.Quiet})}
	kit.Migrate(t, stores[0])

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

	kit.UntilEnough(t, 3*time.Second, func(ctx context.Context, slower time.Duration) {
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
	reader := kit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: kit.Quiet})
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
		kit.ExecPostgres(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'tenure' ORDER BY random() LIMIT 1`)
		return
	}
	tx, err := admin.Begin(ctx)
	kit.WantErr(t, err, nil)
	kit.ExecPostgres(t, tx, `SELECT FROM objects WHERE object_type = $1 AND id = $2 FOR UPDATE`, key.Type, key.ID)
	kit.ExecPostgres(t, tx, `SELECT pg_sleep(0.02 * random())`)
	kit.WantErr(t, tx.Rollback(ctx), nil)
}
