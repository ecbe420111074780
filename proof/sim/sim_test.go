package sim

import (
	"flag"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tenurelib/tenure/proof/kit"
)

var (
	seedFlag  = flag.Uint64("sim.seed", 0, "run only the world with this seed, and print its timeline")
	firstFlag = flag.Uint64("sim.first", 1, "the first seed")
	hoursFlag = flag.Float64("sim.hours", 0, "run until this many lease-hours have been simulated")
	forFlag   = flag.Duration("sim.for", 12*time.Second, "run for this long, unless -sim.hours or -sim.seed is given")
)

func TestSimulation(t *testing.T) {
	var sum tally
	if *seedFlag != 0 {
		simulate(t, *seedFlag, &sum)
		return
	}
	length := *forFlag
	if testing.Short() {
		length = 2 * time.Second
	}
	began := time.Now()
	enough := func() bool {
		if *hoursFlag > 0 {
			return sum.leaseHours() >= *hoursFlag
		}
		return time.Since(began) > length
	}
	var next atomic.Uint64
	next.Store(*firstFlag)
	t.Run("worlds", func(t *testing.T) {
		for i := range runtime.GOMAXPROCS(0) {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				for !enough() && !t.Failed() {
					simulate(t, next.Add(1)-1, &sum)
				}
			})
		}
	})
	t.Logf("%v in %v\n%v", t.Name(), time.Since(began).Round(time.Second), &sum)
}

func simulate(t *testing.T, seed uint64, sum *tally) {
	command := fmt.Sprintf("go test ./proof/sim -run TestSimulation -sim.seed=%d -count=50", seed)
	kit.Simulate(t, command, func(t *testing.T) { runWorld(t, seed, sum) })
}

func TestMain(m *testing.M) { kit.Main(m) }
