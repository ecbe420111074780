package sim

import (
	"fmt"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
)

var flags = testkit.NewSimFlags("world", "lease", 12*time.Second)

func TestSimulation(t *testing.T) {
	var sum tally
	began := time.Now()
	flags.EachSeed(t, func(t *testing.T, seed uint64) { simulate(t, seed, &sum) }, sum.leaseHours)
	t.Logf("%v in %v\n%v", t.Name(), time.Since(began).Round(time.Second), &sum)
}

func simulate(t *testing.T, seed uint64, sum *tally) {
	command := fmt.Sprintf("go -C proof test ./sim -run TestSimulation -sim.seed=%d -count=50", seed)
	testkit.Simulate(t, command, func(t *testing.T) { runWorld(t, seed, sum) })
}

func TestMain(m *testing.M) { testkit.Main(m) }
