package tenure_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// Leases.

// putRecord replaces the record of the lease, without a hint.
func putRecord(t testing.TB, store tenure.Store, payload string) {
	t.Helper()
	testkit.Put(t, store, tenure.Object{Key: testkit.LeaseKey, Name: "reconciler-lease", Payload: []byte(payload)})
}

// acquires are the calls that begin a term without waiting for another to expire.
var acquires = map[string]func(*tenure.Lease, context.Context) (*tenure.Term, error){
	"TryAcquire": (*tenure.Lease).TryAcquire, "AcquireOrSteal": (*tenure.Lease).AcquireOrSteal,
}

const robbersRecord = `{"holder":"robber","term":"another","ttl_ms":30000}`

// renewAsCopy renews the record as a copy of the holder's process would.
func renewAsCopy(t testing.TB, store tenure.Store) {
	t.Helper()
	obj := testkit.Get(t, store, testkit.LeaseKey)
	_, err := store.PutIf(context.Background(), obj, tenure.IfVersion(obj.Version))
	require.NoError(t, err)
}

// Faults of a store.

// Virtual time.

// scene is a test in virtual time, of replicas that compete for one lease.
type scene struct {
	*testing.T
	store tenure.Store
	polls bool            // because there are no hints
	run   context.Context // of each coordinator, to be cancelled
	jobs  *testkit.JobLog
	script

	replicas []*replica
}

func newScene(t *testing.T, store tenure.Store) *scene {
	return &scene{T: t, store: store, run: context.Background(), jobs: testkit.NewJobLog(t)}
}

// inBubble runs a test in virtual time, on storetest.Mem.
func inBubble(t *testing.T, test func(t *scene)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		test(newScene(t, storetest.NewMem()))
	})
}

// inBubbles runs a test in virtual time on each store in memory: on Mem, whose hints are
// live; on SQLite, which hints at what happens through the same handle; on a Mem with Events, on which
// each change is a hint; and on a store without optional capabilities, on which standbys poll.
func inBubbles(t *testing.T, test func(t *scene)) {
	t.Helper()
	for name, open := range map[string]func(t *testing.T) tenure.Store{
		"Mem": func(*testing.T) tenure.Store { return storetest.NewMem() },
		"SQLite": func(t *testing.T) tenure.Store {
			store := testkit.OpenSQLite(t, ":memory:")
			testkit.Migrate(t, store)
			return store
		},
		"events": func(*testing.T) tenure.Store { return newEvents() },
		"bare":   func(*testing.T) tenure.Store { return testkit.Bare(storetest.NewMem()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t, open(t))
				s.polls = name == "bare"
				test(s)
			})
		})
	}
}

// start runs a replica until the test ends, and returns once the replica is idle. Its job
// writes to the ledger, unless cfg brings one of its own.
func (t *scene) start(name string, cfg ...tenure.CoordinatorConfig) *replica {
	t.Helper()
	return t.startWith(tenure.LeaseConfig{Holder: name}, append(cfg, tenure.CoordinatorConfig{})[0])
}

func (t *scene) startWith(leaseConfig tenure.LeaseConfig, cfg tenure.CoordinatorConfig) *replica {
	t.Helper()
	if cfg.Watch == nil && cfg.Reconcile == nil {
		cfg.Reconcile = func(ctx context.Context) error { t.jobs.Run(ctx, leaseConfig.Holder); return nil }
	}
	r := t.begin(leaseConfig, cfg)
	synctest.Wait()
	return r
}

// begin runs a replica until the test ends.
func (t *scene) begin(leaseConfig tenure.LeaseConfig, cfg tenure.CoordinatorConfig) *replica {
	t.Helper()
	store := storetest.Faulty(t.store, nil)
	lease := testkit.NewLease(t, store, leaseConfig)
	c, err := tenure.NewCoordinator(lease, cfg)
	require.NoError(t, err)
	r := &replica{c, lease, store, testkit.RunCoordinator(t.T, t.run, c)}
	t.replicas = append(t.replicas, r)
	return r
}

// three starts three replicas, of which the first holds, and returns a second after a
// renewal.
func (t *scene) three() (a, b, c *replica) {
	t.Helper()
	a, b, c = t.start("a"), t.start("b"), t.start("c")
	time.Sleep(time.Minute + time.Second)
	return a, b, c
}

// takeover makes b steal the lease of a, which has vanished a second after its renewal,
// and returns when b has it.
func (t *scene) takeover(cfg tenure.CoordinatorConfig) (a, b *replica) {
	t.Helper()
	a, b = t.start("a"), t.start("b", cfg)
	time.Sleep(time.Minute + time.Second)
	a.store.SetHook(testkit.Hang)
	time.Sleep(29*time.Second + 10*time.Millisecond)
	require.Equal(t, "b", b.Status().Holder)
	return a, b
}

// request asks, through a replica's lease, for a handover to another.
func (t *scene) request(through, next *replica) {
	t.Helper()
	require.NoError(t, through.lease.RequestHandover(t.Context(), next.Status().Replica))
}

// wantHeld fails unless another holds the lease.
func (t *scene) wantHeld(lease *tenure.Lease) {
	t.Helper()
	_, err := lease.AcquireOrSteal(t.Context())
	require.ErrorIs(t, err, tenure.ErrHeld)
}

// wantTakeoverAfter fails unless the lease can be taken over after that time and not before.
func (t *scene) wantTakeoverAfter(d time.Duration, lease *tenure.Lease) {
	t.Helper()
	time.Sleep(d - time.Millisecond)
	t.wantHeld(lease)
	time.Sleep(time.Millisecond)
	testkit.MustAcquire(t, lease)
}

// settle returns when a released lease has been taken: at once where a standby is woken,
// otherwise within its AcquireInterval.
func (t *scene) settle() {
	if t.polls {
		time.Sleep(5 * time.Second)
	}
	synctest.Wait()
}

// wantHolder fails unless that replica of all that were started holds the lease; nil is none.
func (t *scene) wantHolder(want *replica) {
	t.Helper()
	for _, r := range t.replicas {
		require.Equal(t, r == want, r.IsHolder(), "whether %s holds; %+v\n%v", r.Status().Replica, r.Status(), t.jobs)
	}
}

// Coordinators.

// replica is a coordinator that runs, with a store that can be made to fail for it alone.
type replica struct {
	*tenure.Coordinator
	lease *tenure.Lease
	store *storetest.FaultyStore
	stop  func() // and wait until Run has returned
}

// returnsAfter is a job that takes its time to return.
func returnsAfter(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		<-ctx.Done()
		time.Sleep(d)
		return nil
	}
}

// script records what happens, in order.
type script struct {
	mu    sync.Mutex
	lines []string
}

func (s *script) say(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, line)
}

func (s *script) said() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.lines)
}

// fencing is a config whose calls of FencePredecessor and whose job are in the script.
func (s *script) fencing(fence func(ctx context.Context) error) tenure.CoordinatorConfig {
	return tenure.CoordinatorConfig{
		Reconcile: func(ctx context.Context) error {
			s.say(tenure.TermFromContext(ctx).Holder() + " works")
			<-ctx.Done()
			return nil
		},
		FencePredecessor: func(ctx context.Context, prev tenure.Holding) error {
			s.say(tenure.TermFromContext(ctx).Holder() + " fences " + prev.Holder + " at " + prev.Labels["addr"])
			return fence(ctx)
		},
	}
}

func TestMain(m *testing.M) { testkit.Main(m) }
