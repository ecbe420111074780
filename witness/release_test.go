package witness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/witnessed"
	"github.com/tenurelib/tenure/storetest"
)

// wakeable is a store that says when it was woken, whose calls take a while, and which may lose an answer.
type wakeable struct {
	tenure.Store
	latency time.Duration
	woken   chan time.Time
	losing  *sync.Once
}

func (s wakeable) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	select {
	case <-time.After(s.latency):
		return s.Store.Get(ctx, key)
	case <-ctx.Done():
		return tenure.Object{}, ctx.Err()
	}
}

func (s wakeable) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	err := s.Store.DeleteIf(ctx, key, cond)
	if s.losing != nil {
		s.losing.Do(func() { err = errors.New("the answer was lost") })
	}
	return err
}

func (s wakeable) Wake(ctx context.Context, key tenure.Key) error {
	if ctx.Err() == nil {
		select {
		case s.woken <- time.Now():
		default:
		}
	}
	return ctx.Err()
}

// dead is a program that has died: its keys, and the log of its witness.
type dead struct {
	*testing.T
	*witness
	wakeable
	log strings.Builder
}

func newDead(t *testing.T) *dead {
	d := &dead{T: t, wakeable: wakeable{Store: storetest.NewMem(), woken: make(chan time.Time, 1)}}
	cfg, err := Config{
		Open: func(context.Context) (tenure.Store, error) { return nil, nil }, Young: -1,
		Logger: slog.New(slog.NewTextHandler(&d.log, nil)),
	}.withDefaults()
	require.NoError(t, err)
	d.witness = &witness{cfg: cfg, name: "w", keys: newKeys(), opened: make(chan tenure.Store, 1)}
	d.keys.wakes[tenure.Key{Type: "tenure.claims", ID: "kind tenant"}] = true
	return d
}

// acquired is what the program says of an acquire that was answered.
func (d *dead) acquired(key tenure.Key) {
	d.keys.acquires(key, true)
	d.keys.answered(key)
}

// holds makes the program the holder of a key.
func (d *dead) holds(kind, id string) {
	key := tenure.Key{Type: kind, ID: id}
	d.acquired(key)
	_, err := d.Store.PutIf(d.Context(), tenure.Object{
		Key: key, Payload: []byte(`{"holder":"a","acquired_at_ms":1,"term":"0b9c2f6e-7c39-4f3e-9d4e-2f1f4a5b6c7d","ttl_ms":30000,"witness":"w"}`),
	}, tenure.IfAbsent())
	require.NoError(d, err)
}

// dies releases what the program held, and returns how long that took.
func (d *dead) dies() time.Duration {
	died := time.Now()
	d.opened <- d.wakeable
	d.release(d.Context(), died, 137)
	return time.Since(died)
}

func (d *dead) left(kind, id string) bool {
	_, err := d.Store.Get(d.Context(), tenure.Key{Type: kind, ID: id})
	return err == nil
}

func TestWhoWaitsForTheKeysOfASessionIsWokenWhenThatIsReleased(t *testing.T) {
	for name, prepare := range map[string]func(*dead){
		"other keys are looked for again":  func(d *dead) { d.keys.acquires(tenure.Key{Type: "lease", ID: "under way"}, true) },
		"the answer of the delete is lost": func(d *dead) { d.losing = new(sync.Once) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDead(t)
				d.holds(objects.SessionType, "s")
				prepare(d)
				died := time.Now()
				d.dies()
				require.False(t, d.left(objects.SessionType, "s"))
				select {
				case at := <-d.woken:
					require.Less(t, at.Sub(died), longestFlight/2, "after the last look")
				default:
					require.Fail(t, "nobody was woken")
				}
			})
		})
	}
}

// Wakes are sent although the time for releases is up.
func TestAWakeIsNotGivenUpWhenTheTimeForReleasesIsUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDead(t)
		d.holds(objects.SessionType, "s")
		ctx, cancel := context.WithCancel(t.Context())
		d.opened <- cancelling{d.wakeable, cancel}
		d.release(ctx, time.Now(), 137)
		require.Len(t, d.woken, 1)
	})
}

// cancelling is a store with which a context ends when something is deleted.
type cancelling struct {
	wakeable
	cancel context.CancelFunc
}

func (s cancelling) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	defer s.cancel()
	return s.wakeable.DeleteAndWake(ctx, key, cond)
}

func TestTheTimeForReleasesBeginsWhenTheProgramHasSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDead(t)
		d.holds("lease", "web")
		d.cfg.Settle = 2 * defaultReleaseTimeout
		require.GreaterOrEqual(t, d.dies(), d.cfg.Settle)
		require.False(t, d.left("lease", "web"), d.log.String())
	})
}

// Of a program with more keys than can be looked at in time, sessions and what it has named last come first.
func TestManyKeysOfThePastDoNotHoldUpTheRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDead(t)
		d.latency = 50 * time.Millisecond
		d.holds(objects.SessionType, "s")
		for i := range 6_000 {
			d.acquired(tenure.Key{Type: "lease", ID: fmt.Sprint("old", i)})
		}
		for i := range 20 {
			d.holds("lease", fmt.Sprint(i))
		}
		require.LessOrEqual(t, d.dies(), defaultReleaseTimeout+time.Second)
		require.False(t, d.left(objects.SessionType, "s"))
		for i := range 20 {
			require.False(t, d.left("lease", fmt.Sprint(i)))
		}
		require.LessOrEqual(t, strings.Count(d.log.String(), "\n"), 2, "lines")
		require.Contains(t, d.log.String(), "released=21")
	})
}

func TestAnOpenThatReturnsNothingIsRetriedAsAnErrorIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDead(t)
		opens := 0
		d.cfg.Open = func(context.Context) (tenure.Store, error) {
			if opens++; opens < 3 {
				return nil, nil
			}
			return d.wakeable, nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		began := time.Now()
		d.note(ctx, []byte(`{"key":["lease","web"]}`))
		d.opened <- <-d.opened
		require.Positive(t, time.Since(began), "it spins")
		synctest.Wait()
		require.Contains(t, d.log.String(), "neither a store nor an error")
		cancel()
		synctest.Wait()
	})
}

func TestALogThatBlocksDelaysNoRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		defer close(release)
		d := newDead(t)
		opened := 0
		cfg, err := Config{Young: -1, Logger: slog.New(testkit.BlockedLog(release)), Open: func(context.Context) (tenure.Store, error) {
			if opened++; opened == 1 {
				return nil, errors.New("the database is starting")
			}
			return d.Store, nil
		}}.withDefaults()
		require.NoError(t, err)
		d.cfg = cfg
		d.holds("lease", "web")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go d.openStore(ctx)
		time.Sleep(time.Minute)
		ended := make(chan bool)
		go func() { d.release(t.Context(), time.Now(), 137); close(ended) }()
		time.Sleep(defaultReleaseTimeout)
		require.False(t, d.left("lease", "web"))
		select {
		case <-ended:
		case <-time.After(2 * time.Second):
			t.Fatal("the witness does not end")
		}
	})
}

// acquire has the program send an acquire, which the store completes later, and waits until it is sent.
func (d *dead) acquire(key tenure.Key, later time.Duration) {
	sent := make(chan struct{})
	store := storetest.Faulty(d.Store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		if call.Op == "put" {
			close(sent)
			time.Sleep(later)
		}
		return do(context.WithoutCancel(ctx))
	})
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Holder: "dead"})
	require.NoError(d, err)
	d.keys.acquires(key, true)
	go lease.TryAcquire(witnessed.Own(witnessed.With(d.Context(), "w")))
	<-sent
}

// No job of it has begun that could have crashed the program, however young its term is.
func TestAnAcquireThatIsCompletedAfterTheDeathIsFound(t *testing.T) {
	for _, later := range []time.Duration{0, 50 * time.Millisecond, time.Second, 3 * time.Second / 2} {
		synctest.Test(t, func(t *testing.T) {
			d := newDead(t)
			d.cfg.Young = defaultYoung
			d.acquire(tenure.Key{Type: "lease", ID: "web"}, later)
			require.Less(t, d.dies(), defaultReleaseTimeout)
			time.Sleep(later)
			require.False(t, d.left("lease", "web"), "completed after %v: %s", later, d.log.String())
		})
	}
}

// overtaking is a store that can refuse what was sent before.
type overtaking struct {
	wakeable
	overtaken map[tenure.Key]bool
}

func (s overtaking) Overtake(_ context.Context, key tenure.Key) error {
	if _, err := s.Store.Get(context.Background(), key); err == nil {
		return tenure.ErrExists
	}
	s.overtaken[key] = true
	return nil
}

// A store that can refuse a late acquire does so, and the restart of the program does not wait for it.
func TestAnAcquireThatMayBeCompletedLateIsOvertaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDead(t)
		store := overtaking{d.wakeable, make(map[tenure.Key]bool)}
		free, held := tenure.Key{Type: "lease", ID: "free"}, tenure.Key{Type: "lease", ID: "held"}
		d.keys.acquires(free, true)
		d.acquire(held, 0) // whose answer the program did not hear
		synctest.Wait()
		d.opened <- store
		died := time.Now()
		d.release(t.Context(), died, 137)
		require.Zero(t, time.Since(died))
		require.Equal(t, map[tenure.Key]bool{free: true}, store.overtaken)
		require.False(t, d.left("lease", "held"))
	})
}

func TestARestartWaitsOnlyForAnAcquireThatMayBeUnderWay(t *testing.T) {
	key := tenure.Key{Type: "lease", ID: "another's"}
	for name, says := range map[string]func(*dead){
		"it was answered": func(d *dead) { d.acquired(key) },
		"a later one was answered": func(d *dead) {
			d.keys.acquires(key, true)
			d.acquired(key)
		},
		"the program has given it up": func(d *dead) {
			d.keys.acquires(key, true)
			time.Sleep(longestCall)
		},
		"the program's version does not say what was answered": func(d *dead) {
			d.opening.Do(func() {})
			d.note(d.Context(), []byte(`{"key":["lease","another's"]}`))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDead(t)
				says(d)
				require.Zero(t, d.dies())
			})
		})
	}
}

// onPostgres is a store whose sessions the witness ends.
type onPostgres struct {
	wakeable
	pool *pgxpool.Pool
}

func (s onPostgres) Pool() *pgxpool.Pool { return s.pool }

func TestARestartDoesNotWaitForAnAcquireWhoseSessionWasEnded(t *testing.T) {
	testkit.Slow(t)
	d := newDead(t)
	d.name = "of a dead program"
	url := testkit.PostgresURL(t)
	program, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { program.Close(context.Background()) })
	testkit.ExecPostgres(t, program, `SELECT set_config('application_name', $1, false)`, d.appName("program"))
	d.keys.acquires(tenure.Key{Type: "lease", ID: "web"}, true)
	d.opened <- onPostgres{d.wakeable, testkit.PostgresPool(t, url)}
	died := time.Now()
	d.release(t.Context(), died, 137)
	require.Less(t, time.Since(died), longestFlight, d.log.String())
}

// It may be the job that has crashed the program.
func TestAYoungTermIsLeftToExpireIfItsAcquireWasAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, key := newDead(t), tenure.Key{Type: "lease", ID: "web"}
		d.cfg.Young = defaultYoung
		d.keys.acquires(key, true) // whose answer was lost
		d.acquire(key, 0)
		synctest.Wait()
		d.keys.answered(key)
		require.Zero(t, d.dies())
		require.True(t, d.left("lease", "web"))
	})
}

func TestTheKeysThatAProgramHasNamedLastAreKept(t *testing.T) {
	testkit.Slow(t)
	k, named := newKeys(), 0
	for ; named < 2*mostKeys+1; named++ {
		k.acquires(tenure.Key{Type: "lease", ID: fmt.Sprint(named)}, true)
	}
	k.answered(tenure.Key{Type: "lease", ID: fmt.Sprint(mostKeys)})
	all := k.all()
	require.Len(t, all, mostKeys+1)
	for i, n := range all {
		require.Equal(t, fmt.Sprint(named-1-i), n.key.ID)
	}
	require.Zero(t, all[mostKeys].unanswered)
}
