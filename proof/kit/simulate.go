package kit

import (
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
)

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
