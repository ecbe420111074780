package virtual

import (
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
)

// failed has the commands that repeat the simulations that have failed.
var failed struct {
	mu       sync.Mutex
	commands []string
}

// Simulate runs a simulation in a bubble, under [Repeat].
func Simulate(t *testing.T, command string, run func(t *testing.T)) {
	defer Repeat(t, command) // of a panic because goroutines are left behind
	synctest.Test(t, func(t *testing.T) {
		defer Repeat(t, command)
		run(t)
	})
}

// Repeat is deferred around a simulation. If that has failed, [Main] prints the command that
// repeats it. A panic counts as a failure, because it would end the process before Main can
// print; one in another goroutine still does.
func Repeat(t testing.TB, command string) {
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

// Main is the *testing.M of a package that has simulations. The last lines of its output are
// the commands that repeat those that have failed: where only the end of a long output is kept,
// the seed must be in it.
type Main struct{ *testing.M }

// Run runs the tests and returns the exit code.
func (m Main) Run() int {
	code := m.M.Run()
	failed.mu.Lock()
	defer failed.mu.Unlock()
	for _, command := range failed.commands {
		fmt.Fprintln(os.Stdout, "repeat it by", command)
	}
	return code
}
