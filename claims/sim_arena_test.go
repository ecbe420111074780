package claims_test

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

const (
	arenaTTLs = 100 // how long an arena lasts
	calmTTLs  = 4   // how long nothing happens at its end
	kind      = "tenant"
	slotName  = "gpu"
	slotKind  = "slots/" + slotName
)

// arena is a database, the hosts whose processes claim keys in it, and what happens to them.
type arena struct {
	traits
	t       *testing.T
	rng     *rand.Rand // used only by the schedule's goroutine
	line    *testkit.Timeline
	clock   *testkit.ExpiryStoreClock
	db      *memDB // its mutex guards the state of the judge and the hosts, too; never held across a wait
	judge   *judge
	hosts   []*host
	rows    *memRows       // of the queue
	remotes []*remoteHost  // workers of the queue; none: there is no queue
	saved   backup         // may be restored later
	marks   *storetest.Mem // of drained hosts
	calm    chan struct{}  // closed when nothing happens any more
	over    chan struct{}  // closed at the end
	running sync.WaitGroup

	busyUntil time.Time // statements are slow; guarded by the database's mutex
}

// traits stay the same throughout an arena.
type traits struct {
	seed          uint64
	ttl           time.Duration
	hostCount     int
	keys          []string
	wakes         bool // the store is a Watcher
	expiry        tenure.ExpiryPolicy
	unlikeTTLs    bool // hosts have different TTLs
	clockJumps    bool // the database's clock is set
	setsWalls     bool // the wall clocks of hosts are set; otherwise their machines are suspended
	pollsOften    bool // the PollInterval is the default, which makes arenas with a long TTL slow
	restores      bool // the tables are restored to an earlier state
	removersCrash bool // a process crashes when it has removed a session
	pausesClaims  bool // a process is paused before it sees the answer to a claim
	blocks        bool // the logs of processes block occasionally
	workers       int  // that cannot reach the database
	drains        bool // processes are drained
	perKey        int  // so many rows of a key are claimed at once; 0: any number
	slots         int  // at most so many are held; 0: there are none
	hurries       bool // processes do little else than take slots and give them back soon
	moves         bool // processes move the claims of others to themselves
	attaches      bool // processes attach to the keys of others
	latency       time.Duration
}

func newTraits(seed uint64, rng *rand.Rand) traits {
	one := func(in int) bool { return rng.IntN(in) == 0 }
	a := traits{
		seed: seed,
		// An arena lasts a number of TTLs, and costs the same however long they are.
		ttl:           []time.Duration{30 * time.Second, 5 * time.Minute, 30 * time.Minute, time.Hour}[rng.IntN(4)],
		hostCount:     2 + rng.IntN(3),
		wakes:         !one(3),
		unlikeTTLs:    one(4),
		clockJumps:    one(5),
		setsWalls:     one(3),
		pollsOften:    one(8),
		removersCrash: one(3),
		pausesClaims:  one(4),
	}
	a.restores = !a.clockJumps && one(5) // tokens from before the backup come back if the clock is set back, too
	n := 2 + rng.IntN(8)
	if one(6) {
		n = 60
	}
	a.keys = names(n)
	if one(3) {
		a.expiry = tenure.ExpiryObserved
	}
	if !one(3) {
		a.latency = a.ttl / 6000 // at most this each way: 5 ms for a TTL of 30 s
	}
	a.blocks = testkit.RNG(seed, 201).IntN(2) == 0
	if rng := testkit.RNG(seed, 203); !a.restores && rng.IntN(2) == 0 {
		a.workers = 1 + rng.IntN(3)
	}
	if rng := testkit.RNG(seed, 206); rng.IntN(2) == 0 {
		a.perKey = 1 + rng.IntN(2)
	}
	a.moves = testkit.RNG(seed, 202).IntN(2) == 0
	a.attaches = testkit.RNG(seed, 207).IntN(2) == 0
	a.drains = testkit.RNG(seed, 205).IntN(3) == 0
	if rng := testkit.RNG(seed, 204); rng.IntN(2) == 0 {
		a.slots = 1 + rng.IntN(4)
		a.hurries = rng.IntN(8) == 0
	}
	if *slotsFlag {
		a.slots, a.hurries, a.workers = max(a.slots, 1), true, 0
	}
	return a
}

func (a *arena) String() string {
	t := a.traits
	t.keys = nil
	return fmt.Sprintf("seed %d, %d keys: %+v", a.seed, len(a.keys), t)
}

// runArena must be called in a bubble.
func runArena(t *testing.T, seed uint64, sum *tally) {
	rng := testkit.RNG(seed, 0)
	a := &arena{
		traits: newTraits(seed, rng), t: t, rng: rng,
		line: testkit.NewTimeline(), clock: testkit.NewStoreClock(1),
		calm: make(chan struct{}), over: make(chan struct{}), marks: storetest.NewMem(),
	}
	a.db = newMemDB(a.clock.Now)
	if a.restores {
		a.db.lineages, a.db.records.Lineages = true, true
	}
	a.judge = newJudge(a)
	a.db.watcher, a.db.opens = a.judge, a.opens
	if a.workers > 0 {
		a.rows = &memRows{d: a.db, watcher: a.judge, perKey: a.perKey, jobs: make(map[string]*memJob)}
		a.db.table = a.rows
	}
	for i := range a.hostCount {
		a.hosts = append(a.hosts, newHost(a, i))
	}
	for i := range a.workers {
		a.remotes = append(a.remotes, newRemoteHost(a, i))
	}
	a.line.Say("arena", "%v", a)
	for _, h := range a.hosts {
		h.start()
	}
	for _, h := range a.remotes {
		a.running.Go(h.run)
	}
	if a.workers > 0 {
		a.running.Go(a.addJobs)
	}
	a.running.Go(a.watchLiveness)

	a.schedule()
	a.calmDown()

	close(a.over)
	for _, h := range a.hosts {
		h.crash()
	}
	for _, h := range a.remotes {
		h.crash()
	}
	a.running.Wait()
	if t.Failed() {
		t.Logf("%v\n\n%v", a, a.judge.until)
	} else if *flags.Seed != 0 {
		t.Logf("%v\n\n%v\n%v", a, a.line, &a.judge.tally)
	}
	sum.add(&a.judge.tally)
}

// calmDown ends all faults and lets all activity stop, except for the funcs that run. Then the judge counts
// statements.
func (a *arena) calmDown() {
	a.line.Say("arena", "nothing happens any more")
	close(a.calm)
	for _, h := range a.hosts {
		h.turn(testkit.WeatherClear, "", 0)
		h.start()
		_ = tenure.ClearDrain(context.Background(), a.marks, h.name)
	}
	for _, h := range a.remotes {
		h.turn(testkit.WeatherClear, "", 0)
	}
	time.Sleep(4 * a.longestTTL()) // until no statement whose answer was lost can land
	a.locked(a.judge.calmBegins)
	time.Sleep(calmTTLs * a.ttl)
	a.locked(a.judge.calmEnds)
}

// opens returns how long a statement that writes is open.
func (a *arena) opens(ctx context.Context) time.Duration {
	l := lifeOf(ctx)
	if l == nil {
		return 0
	}
	var busy bool
	a.locked(func() { busy = time.Now().Before(a.busyUntil) })
	if !busy {
		return 0
	}
	return l.h.dice.UpTo(l.h.limit() * 5 / 4)
}

func (a *arena) longestTTL() (longest time.Duration) {
	for _, h := range a.hosts {
		longest = max(longest, h.ttl)
	}
	return longest
}

// sleep waits, and returns false once the arena is over.
func (a *arena) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-a.over:
		return false
	case <-timer.C:
		return true
	}
}

// later calls do after a while, unless the arena is over by then.
func (a *arena) later(d time.Duration, do func()) {
	a.running.Go(func() {
		if a.sleep(d) {
			do()
		}
	})
}

func (a *arena) locked(do func()) { a.db.locked(do) }

func (a *arena) isCalm() bool {
	select {
	case <-a.calm:
		return true
	default:
		return false
	}
}
