package claims_test

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
)

// The simulation runs several processes with real sessions, in virtual time and under faults
// that are derived from a seed, over a database in memory.
//
// An arena is one bubble of testing/synctest: two to four hosts, whose processes claim a few
// keys with TryClaim, Claim and Move, run funcs for them with Do, release them, and make fenced writes;
// a schedule of faults; and a judge that sees each write of a row and of a session's record as
// it lands, and each start and end of a func. It checks:
//
//   - S1: when a row changes its owner, no other process holds a claim of it.
//
//   - S2: no fenced write commits after the next claim of its key.
//
//   - S3: the tokens of a key increase.
//
//   - S4: no session is removed that was renewed less than a TTL ago, or that its process trusts; one that has
//     expired is removed within 20 ms, if a process that is well waits.
//
//   - S5: no process frees a row while its func runs, and none runs two funcs for one key.
//     Funcs of two processes overlap only if the older one has overstayed.
//
//   - S6: rows of a session that is gone are free, or another's, a TTL later. None ends while
//     it claims, and none claims after its end.
//
//   - S7: when nothing happens, processes send renewals and looks, however many keys they hold.
//
//   - N: no more slots of a name are held than the greatest limit of a process, and none has a greater number.
//
//   - D: a process that is drained is given no claims, and soon holds only those whose funcs have not returned.
//
//   - Move: a claim is moved only if it is the one that was seen. Its former owner may believe in it until
//     it hears of that: within the time of liveness.
//
//   - Attach: a key goes to the process that attaches to it only once the func of its owner has returned, and to no other
//     while it is offered, unless that process is dead or too late.
//
//   - Liveness: a call that waits gets a key that is free. No row names a session that does not know of it for
//     longer than two TTLs, and no claim that its row contradicts is held for longer.
//
//   - Cause: a func is told to return for a reason that exists.
//
//   - Failover: a claim may end because a failover has lost it. One whose row stands goes on, if its process was well.
//     S1 and S2 hold over it.
//
//   - K: of the rows with one key, no more are claimed than there may be, even while sessions are gone or
//     answers lost.
//
//   - R, for a queue whose rows servers take for workers that cannot reach the database: no two workers that
//     trust their sessions work on one row (R1); no row is finished twice, and a Finish is accepted if and
//     only if its claim stood (R2); tokens increase (R3); no session of a worker is removed that was renewed
//     less than a TTL ago or that its worker trusts (R4); the rows of a session that has ended are free in
//     time, and no others are freed (R6); a call of TakeFor that waits gets a row that is ready.
//
// What is excused: where the tables are restored to an earlier state, claims from before may be
// valid beside later ones; where the database's clock is set ahead, sessions look expired,
// unless Expiry is ExpiryObserved; and a func may overlap with the next if it has not returned in
// the time that it was given. The limits are those of package proof/sim: timers fire
// while a process is paused, although nothing that they do is visible.
//
// A seed determines the faults, but neither the order of goroutines that are woken at one
// instant nor the library's jitter. Repeat one that failed, as in
//
//	go test ./claims -run TestSimulation -sim.seed=123 -count=50
func TestSimulation(t *testing.T) {
	var sum tally
	began := time.Now()
	flags.EachSeed(t, func(t *testing.T, seed uint64) { simulate(t, seed, &sum) }, sum.sessionHours)
	t.Logf("%v in %v\n%v", t.Name(), time.Since(began).Round(time.Second), &sum)
}

func simulate(t *testing.T, seed uint64, sum *tally) {
	command := fmt.Sprintf("go test ./claims -run TestSimulation -sim.seed=%d -count=50", seed)
	testkit.Simulate(t, command, func(t *testing.T) { runArena(t, seed, sum) })
}

func TestMain(m *testing.M) { testkit.Main(m) }

var (
	flags     = testkit.NewSimFlags("arena", "session", 10*time.Second)
	slotsFlag = flag.Bool("sim.slots", false, "processes do little else than take slots and give them back")
)
