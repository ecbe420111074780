package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

var leaseKey = tenure.Key{Type: "reconciler_lease", ID: "singleton"}

// length of a world, in TTLs.
const worldTTLs = 200

// world is one lease, the replicas that compete for it, and what happens to them.
type world struct {
	traits
	t        *testing.T
	rng      *rand.Rand // used only by the schedule's goroutine
	line     *testkit.Timeline
	began    time.Time
	judge    *judge
	journal  *journal
	marks    *storetest.Mem // of drained replicas
	replicas []*replica
	backup   backup        // may be restored later
	trace    *trace        // of the run, if it is recorded
	over     chan struct{} // closed at the end
	running  sync.WaitGroup

	mu sync.Mutex // guards the state shared by the judge and the replicas; never held across a wait
}

// traits stay the same throughout a world.
type traits struct {
	seed          uint64
	ttl           time.Duration
	replicaCount  int
	wakes         bool // the store is a Watcher
	tellsChanges  bool // it has no clock, and every change is an event
	expiry        tenure.ExpiryPolicy
	checks        bool // replicas have a Check, which fails occasionally
	confirmations int
	fences        bool // replicas have a FencePredecessor
	reclaims      bool
	rates         bool // clocks run up to 1 % too fast or slow
	unlikeTTLs    bool // replicas have different TTLs
	clockJumps    bool // the database's clock jumps
	gateway       bool // a replica of another program competes
	operator      bool // an operator overwrites and deletes the record by hand
	slow          bool // some replicas are slow, or too slow to hold
	setsWalls     bool // the wall clocks of replicas are set; otherwise their machines are suspended
	pollsOften    bool // the AcquireInterval is the default, which makes worlds with a long TTL slow
	restores      bool // the table is restored from a backup, sometimes with a clock that is behind
	latency       time.Duration
	twoFuncs      bool // the job has both Watch and Reconcile
	blocks        bool // the replicas' logs and traces block occasionally
	outranks      bool // some replicas outrank others, and some each other
	drains        bool // replicas are drained
	witnesses     bool // each process has a witness, which releases the lease when it has crashed
	copies        bool // the holder's machine is copied
}

func newTraits(seed uint64, rng *rand.Rand) traits {
	one := func(in int) bool { return rng.IntN(in) == 0 }
	w := traits{
		seed: seed,
		// A world lasts a number of TTLs, and costs the same however long they are: most
		// lease-hours come from long TTLs.
		ttl:          []time.Duration{30 * time.Second, 5 * time.Minute, 30 * time.Minute, time.Hour, time.Hour}[rng.IntN(5)],
		replicaCount: 2 + rng.IntN(4),
		wakes:        !one(3),
		checks:       one(3),
		fences:       one(4),
		reclaims:     one(4),
		rates:        one(3),
		clockJumps:   one(4),
		gateway:      one(6),
		operator:     one(6),
		twoFuncs:     one(3),
		copies:       true,
	}
	w.slow, w.restores, w.pollsOften, w.setsWalls = one(4), one(5), one(8), one(3)
	if one(3) {
		w.expiry = tenure.ExpiryObserved
	}
	if one(3) {
		w.confirmations = 1 + rng.IntN(3)
	}
	if !one(3) {
		w.latency = w.ttl / 3000 // at most this each way: 10 ms for a TTL of 30 s
	}
	if w.wakes && !w.rates && testkit.RNG(seed, 200).IntN(3) == 0 {
		w.tellsChanges, w.expiry = true, tenure.ExpiryObserved
	}
	w.blocks = testkit.RNG(seed, 201).IntN(2) == 0
	w.outranks = testkit.RNG(seed, 202).IntN(3) == 0
	w.drains = testkit.RNG(seed, 203).IntN(2) == 0 && w.ttl <= 5*time.Minute // a mark is read twice a minute
	w.witnesses = testkit.RNG(seed, 204).IntN(2) == 0
	// The other program's records don't contain their TTL, so all replicas must agree on it.
	w.unlikeTTLs = !w.gateway && one(3)
	return w
}

func (w *world) String() string { return fmt.Sprintf("seed %d: %+v", w.seed, w.traits) }

// runWorld must be called in a bubble.
func runWorld(t *testing.T, seed uint64, sum *tally) {
	rng := testkit.RNG(seed, 0)
	runIn(t, newWorld(t, newTraits(seed, rng), rng), sum)
}

func runIn(t *testing.T, w *world, sum *tally) {
	w.judge.tally.worlds, w.judge.tally.hours = 1, map[time.Duration]float64{w.ttl: (worldTTLs * w.ttl).Hours()}
	w.run(func() {
		for _, r := range w.replicas {
			r.start()
		}
		if w.gateway {
			w.running.Go(newGateway(w).run)
		}
		w.schedule()
	})
	sum.add(&w.judge.tally)
}

func newWorld(t *testing.T, traits traits, rng *rand.Rand) *world {
	w := &world{
		traits: traits,
		t:      t,
		rng:    rng,
		line:   testkit.NewTimeline(),
		began:  time.Now(),
		marks:  storetest.NewMem(),
		over:   make(chan struct{}),
	}
	w.judge = &judge{w: w, terms: make(map[string]*term)}
	w.journal = newJournal(w)
	for i := range w.replicaCount {
		w.replicas = append(w.replicas, newReplica(w, i))
	}
	return w
}

// run lets things happen, and then ends the world.
func (w *world) run(things func()) {
	w.line.Say("world", "%v", w)
	w.running.Go(w.watchLiveness)

	things()

	close(w.over)
	for _, r := range w.replicas {
		r.crash()
	}
	w.running.Wait()
	if w.t.Failed() {
		w.t.Logf("%v\n\n%v", w, w.judge.until)
	} else if *flags.Seed != 0 {
		w.t.Logf("%v\n\n%v\n%v", w, w.line, &w.judge.tally)
	}
}

// sleep waits, and returns false once the world is over.
func (w *world) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-w.over:
		return false
	case <-timer.C:
		return true
	}
}

// later calls do after a while, unless the world is over by then.
func (w *world) later(d time.Duration, do func()) {
	w.running.Go(func() {
		if w.sleep(d) {
			do()
		}
	})
}

// locked calls do under the world's lock.
func (w *world) locked(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
}

// timed returns a context for a call that belongs to no replica's life.
func timed(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}
