package testkit

import (
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// SimFlags are the flags of a package whose simulation runs one seed after another.
type SimFlags struct {
	Seed  *uint64
	First *uint64
	Hours *float64
	For   *time.Duration
}

// NewSimFlags defines the flags, given what one seed simulates, whose hours are counted, and for how long the
// simulation runs by default.
func NewSimFlags(one, whose string, length time.Duration) SimFlags {
	return SimFlags{
		Seed:  flag.Uint64("sim.seed", 0, "run only the "+one+" with this seed, and print its timeline"),
		First: flag.Uint64("sim.first", 1, "the first seed"),
		Hours: flag.Float64("sim.hours", 0, "run until this many "+whose+"-hours have been simulated"),
		For:   flag.Duration("sim.for", length, "run for this long, unless -sim.hours or -sim.seed is given"),
	}
}

// EachSeed simulates one seed after another on each processor, until one fails or the flags say that it is
// enough. With -sim.seed it simulates only that one.
func (f SimFlags) EachSeed(t *testing.T, simulate func(t *testing.T, seed uint64), hours func() float64) {
	if *f.Seed != 0 {
		simulate(t, *f.Seed)
		return
	}
	length := *f.For
	if testing.Short() {
		length = time.Second // and what the last seeds take
	}
	began := time.Now()
	enough := func() bool {
		if *f.Hours > 0 {
			return hours() >= *f.Hours
		}
		return time.Since(began) > length
	}
	var next atomic.Uint64
	next.Store(*f.First)
	t.Run("seeds", func(t *testing.T) {
		for i := range runtime.GOMAXPROCS(0) {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				for !enough() && !t.Failed() {
					simulate(t, next.Add(1)-1)
				}
			})
		}
	})
}

// failed holds the commands that repeat the failed simulations.
var failed struct {
	mu       sync.Mutex
	commands []string
}

// Simulate runs a simulation in a bubble, under [NoteFailure].
func Simulate(t *testing.T, command string, run func(t *testing.T)) {
	defer NoteFailure(t, command) // also notes a panic because goroutines are left behind
	synctest.Test(t, func(t *testing.T) {
		defer NoteFailure(t, command)
		run(t)
	})
}

// NoteFailure is deferred by a simulation. If the simulation has failed, [Main] prints the command
// that repeats it. A panic counts as a failure, because it would end the process before Main can
// print. A panic in another goroutine still does.
func NoteFailure(t testing.TB, command string) {
	if v := recover(); v != nil {
		t.Errorf("panic: %v\n%s", v, debug.Stack())
	}
	if !t.Failed() {
		return
	}
	failed.mu.Lock()
	defer failed.mu.Unlock()
	if !slices.Contains(failed.commands, command) {
		failed.commands = append(failed.commands, command)
	}
}

// printFailed prints the commands that repeat the failed simulations.
func printFailed() {
	failed.mu.Lock()
	defer failed.mu.Unlock()
	for _, command := range failed.commands {
		fmt.Println("repeat it with", command)
	}
}
