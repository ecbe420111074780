package testkit_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/tenurelib/tenure/internal/testkit"
)

// Where a wrapper keeps only a few lines of output, they are the last ones.
func TestTheLastLineSaysHowToRepeatASimulationThatHasFailed(t *testing.T) {
	for _, how := range []string{"fails", "panics", "leaves a goroutine behind"} {
		run := exec.Command(os.Args[0], "-test.run=^TestASimulation$", "-test.v")
		run.Env = append(os.Environ(), "SIMULATION="+how)
		out, err := run.CombinedOutput()
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		if last := lines[len(lines)-1]; err == nil || last != "repeat it with go test . -seed=2" {
			t.Errorf("the last line of one that %s: %s\n%s", how, last, out)
		}
	}
}

func TestASimulation(t *testing.T) {
	how := os.Getenv("SIMULATION")
	t.Run("in parallel", func(t *testing.T) {
		t.Parallel()
		for seed := 1; seed <= 3 && !t.Failed(); seed++ {
			simulate(t, seed, how)
		}
	})
	t.Log("the sum of all")
}

func simulate(t *testing.T, seed int, how string) {
	testkit.Simulate(t, fmt.Sprint("go test . -seed=", seed), func(t *testing.T) {
		switch {
		case seed != 2:
		case how == "fails":
			t.Error("a promise was broken")
		case how == "panics":
			panic("a bug")
		case how == "leaves a goroutine behind":
			go func() { <-make(chan int) }()
		}
	})
}
