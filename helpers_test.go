package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

var (
	leaseKey = tenure.Key{Type: "reconciler_lease", ID: "singleton"}

	errLost = errors.New("connection reset") // an answer that never came

	quiet = slog.New(slog.DiscardHandler) // for tests that don't read the log
)

// Leases.

func newLease(t testing.TB, store tenure.Store, cfg tenure.LeaseConfig) *tenure.Lease {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = quiet
	}
	lease, err := tenure.NewLease(store, cfg)
	require.NoError(t, err)
	return lease
}

func mustAcquire(t testing.TB, lease *tenure.Lease) *tenure.Term {
	t.Helper()
	term, err := lease.AcquireOrSteal(context.Background())
	require.NoError(t, err)
	return term
}

// acquires are the calls that begin a term without waiting for another to expire.
var acquires = map[string]func(*tenure.Lease, context.Context) (*tenure.Term, error){
	"TryAcquire": (*tenure.Lease).TryAcquire, "AcquireOrSteal": (*tenure.Lease).AcquireOrSteal,
}

// put writes an object, whatever is there.
func put(t testing.TB, store tenure.Store, obj tenure.Object) tenure.Object {
	t.Helper()
	obj, err := store.PutIf(context.Background(), obj, tenure.Unconditional())
	require.NoError(t, err)
	return obj
}

func get(t testing.TB, store tenure.Store, key tenure.Key) tenure.Object {
	t.Helper()
	obj, err := store.Get(context.Background(), key)
	require.NoError(t, err)
	return obj
}

// putRecord replaces the record of the lease, without a hint.
func putRecord(t testing.TB, store tenure.Store, payload string) {
	t.Helper()
	put(t, store, tenure.Object{Key: leaseKey, Name: "reconciler-lease", Payload: []byte(payload)})
}

const robbersRecord = `{"holder":"robber","term":"another","ttl_ms":30000}`

// removeRecord deletes the record of the lease, without a hint, as an operator might.
func removeRecord(t testing.TB, store tenure.Store) {
	t.Helper()
	require.NoError(t, store.DeleteIf(context.Background(), leaseKey, get(t, store, leaseKey).Version))
}

// renewAsCopy renews the record as a copy of the holder's process would.
func renewAsCopy(t testing.TB, store tenure.Store) {
	t.Helper()
	obj := get(t, store, leaseKey)
	_, err := store.PutIf(context.Background(), obj, tenure.MatchVersion(obj.Version))
	require.NoError(t, err)
}

// wantLost fails unless the term is over, and lost to that holder; empty: to nobody.
func wantLost(t testing.TB, err error, term *tenure.Term, to string) {
	t.Helper()
	var lost *tenure.LostError
	require.ErrorAs(t, err, &lost)
	require.ErrorIs(t, err, tenure.ErrLost)
	got := ""
	if lost.To != nil {
		got = lost.To.Holder
	}
	require.Equal(t, to, got, err)
	require.False(t, term.Valid(), "a term that is lost is valid")
}

// wantErr fails unless err is want; nil wants none.
func wantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

// Faults of a store.

// hang makes a call wait until its context ends: the store is unreachable.
func hang(ctx context.Context, _ storetest.Call, _ func(context.Context) error) error {
	<-ctx.Done()
	return ctx.Err()
}

func refuse(context.Context, storetest.Call, func(context.Context) error) error {
	return errors.New("connection refused")
}

// loseAnswer lets a call land, and its caller sees that the connection was reset.
func loseAnswer(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
	_ = do(ctx)
	return errLost
}

// slowly delays the request.
func slowly(d time.Duration) storetest.Hook {
	return func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		time.Sleep(d)
		return do(ctx)
	}
}

// answerAfter delays the answer.
func answerAfter(d time.Duration) storetest.Hook {
	return func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		err := do(ctx)
		time.Sleep(d)
		return err
	}
}

// only applies a hook to calls of one kind.
func only(op string, hook storetest.Hook) storetest.Hook {
	return func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		if call.Op != op {
			return do(ctx)
		}
		return hook(ctx, call, do)
	}
}

// once applies a hook to the first call.
func once(hook storetest.Hook) storetest.Hook {
	var done atomic.Bool
	return func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		if done.Swap(true) {
			return do(ctx)
		}
		return hook(ctx, call, do)
	}
}

// calls counts calls by what it is told of them.
type calls struct {
	mu     sync.Mutex
	counts map[string]int
}

// count counts each call by its kind, after a prefix, and lets next decide what becomes of
// it; nil is no fault.
func (c *calls) count(prefix string, next storetest.Hook) storetest.Hook {
	return func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		c.mu.Lock()
		if c.counts == nil {
			c.counts = map[string]int{}
		}
		c.counts[prefix+call.Op]++
		c.mu.Unlock()
		if next == nil {
			return do(ctx)
		}
		return next(ctx, call, do)
	}
}

// take returns the counts since the last call.
func (c *calls) take() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	counts := c.counts
	c.counts = nil
	return counts
}

// Virtual time.

// scene is a test in virtual time, of replicas that compete for one lease.
type scene struct {
	*testing.T
	store tenure.Store
	polls bool            // for want of hints
	run   context.Context // of each coordinator, to be cancelled
	jobs  *ledger
	script

	replicas []*replica
}

func newScene(t *testing.T, store tenure.Store) *scene {
	return &scene{T: t, store: store, run: context.Background(), jobs: newLedger(t)}
}

// inBubble runs a test in virtual time, on storetest.Mem.
func inBubble(t *testing.T, test func(t *scene)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		test(newScene(t, storetest.NewMem()))
	})
}

// inBubbles runs a test in virtual time on each store in memory: on Mem, whose hints are
// live; on SQLite, which hints at what happens through the same handle; and on one without
// any optional capability, on which standbys poll.
func inBubbles(t *testing.T, test func(t *scene)) {
	t.Helper()
	for name, open := range map[string]func(t *testing.T) tenure.Store{
		"Mem": func(*testing.T) tenure.Store { return storetest.NewMem() },
		"SQLite": func(t *testing.T) tenure.Store {
			store := openSQLite(t, ":memory:")
			migrate(t, store)
			return store
		},
		"bare": func(*testing.T) tenure.Store { return bare(storetest.NewMem()) },
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

// bare hides all optional capabilities of a store.
func bare(store tenure.Store) tenure.Store { return struct{ tenure.Store }{store} }

// start runs a replica until the test ends, and returns when it has nothing to do for now.
// Its job writes to the ledger, unless cfg brings one of its own.
func (t *scene) start(name string, cfg ...tenure.CoordinatorConfig) *replica {
	t.Helper()
	return t.startWith(tenure.LeaseConfig{Holder: name}, append(cfg, tenure.CoordinatorConfig{})[0])
}

func (t *scene) startWith(leaseConfig tenure.LeaseConfig, cfg tenure.CoordinatorConfig) *replica {
	t.Helper()
	if cfg.Watch == nil && cfg.Reconcile == nil {
		cfg.Reconcile = func(ctx context.Context) error { t.jobs.run(ctx, leaseConfig.Holder); return nil }
	}
	r := t.begin(leaseConfig, cfg)
	synctest.Wait()
	return r
}

// begin runs a replica until the test ends.
func (t *scene) begin(leaseConfig tenure.LeaseConfig, cfg tenure.CoordinatorConfig) *replica {
	t.Helper()
	store := storetest.Faulty(t.store, nil)
	lease := newLease(t, store, leaseConfig)
	c, err := tenure.NewCoordinator(lease, cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.run)
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		if err := c.Run(ctx); err != nil {
			t.Errorf("Run of %s: %v", leaseConfig.Holder, err)
		}
	}()
	stop := func() { cancel(); <-returned }
	t.Cleanup(stop)
	r := &replica{c, lease, store, stop}
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
	a.store.SetHook(hang)
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
	mustAcquire(t, lease)
}

// settle returns when a lease that was given back has been taken: at once where a standby
// is woken, else within its AcquireInterval.
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

// ledger records when jobs begin and end, and fails the test if two overlap.
type ledger struct {
	t     *testing.T
	began time.Time

	mu      sync.Mutex
	running string
	lines   []string
}

func newLedger(t *testing.T) *ledger { return &ledger{t: t, began: time.Now()} }

func (l *ledger) say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%v ", time.Since(l.began).Round(time.Millisecond))+fmt.Sprintf(format, args...))
}

// run is a job that ends when it is told to.
func (l *ledger) run(ctx context.Context, name string) {
	l.begin(name)
	<-ctx.Done()
	l.end(name, context.Cause(ctx))
}

func (l *ledger) begin(name string) {
	l.say("%s begins", name)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running != "" {
		l.t.Errorf("%s's job began while %s's was running", name, l.running)
	}
	l.running = name
}

func (l *ledger) end(name string, why error) {
	l.mu.Lock()
	l.running = ""
	l.mu.Unlock()
	l.say("%s ends: %v", name, why)
}

// holder returns whose job runs.
func (l *ledger) holder() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running
}

func (l *ledger) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// replica is a coordinator that runs, with a store that can be made to fail for it alone.
type replica struct {
	*tenure.Coordinator
	lease *tenure.Lease
	store *storetest.FaultyStore
	stop  func() // and wait until Run has returned
}

// start runs a replica in real time.
func start(t *testing.T, l *ledger, store tenure.Store, name string, cfg tenure.CoordinatorConfig) *replica {
	t.Helper()
	s := newScene(t, store)
	s.jobs = l
	if cfg.Watch == nil && cfg.Reconcile == nil {
		cfg.Reconcile = func(ctx context.Context) error { l.run(ctx, name); return nil }
	}
	return s.begin(tenure.LeaseConfig{Holder: name}, cfg)
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

func succeeds(context.Context) error { return nil }

func untilDone(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
