// Command gotest runs go test with its arguments. It prints a line for each package and what failed, and in the end
// which tests were skipped and why: go test itself shows that only among the output of all tests.
//
//	go run ./internal/testkit/gotest [arguments of go test]
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"
)

func main() {
	began := time.Now()
	goTest := exec.Command("go", append([]string{"test", "-json"}, os.Args[1:]...)...)
	goTest.Stderr = os.Stderr
	events, err := goTest.StdoutPipe()
	if err == nil {
		err = goTest.Start()
	}
	s := newSummary(os.Stdout)
	if err == nil {
		err = errors.Join(s.read(events), goTest.Wait())
	}
	s.print()
	if err != nil {
		fmt.Println("go test:", err)
		os.Exit(1)
	}
	used := goTest.ProcessState.UserTime() + goTest.ProcessState.SystemTime()
	fmt.Printf("%d tests passed in %s, with %s of CPU.\n", s.passed, time.Since(began).Round(time.Second), used.Round(time.Second))
}

// event is a line that go test -json prints; see go doc test2json.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// summary is what the events so far come to.
type summary struct {
	out     io.Writer
	passed  int
	skipped map[string]int     // tests, by the reason
	running map[string][]event // the output of each package that has not ended
	failed  []string
	repeat  []string // commands that repeat failed simulations
}

func newSummary(out io.Writer) *summary {
	return &summary{out: out, skipped: map[string]int{}, running: map[string][]event{}}
}

func (s *summary) read(events io.Reader) error {
	for lines := json.NewDecoder(events); ; {
		var e event
		switch err := lines.Decode(&e); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			rest, _ := io.ReadAll(io.MultiReader(lines.Buffered(), events))
			return fmt.Errorf("%w\n%s", err, bytes.TrimSpace(rest))
		}
		s.add(e)
	}
}

func (s *summary) add(e event) {
	switch {
	case e.Action == "build-output":
		fmt.Fprint(s.out, e.Output)
	case e.Action == "output":
		s.running[e.Package] = append(s.running[e.Package], e)
	case e.Test != "":
		s.testEnded(e)
	case e.Action == "pass":
		fmt.Fprintf(s.out, "ok    %s %.1fs\n", e.Package, e.Elapsed)
		delete(s.running, e.Package)
	case e.Action == "fail":
		s.packageFailed(e)
	}
}

// position begins a line that a test has logged.
var position = regexp.MustCompile(`^\s+\S+\.go:\d+: `)

// testEnded drops the output of a test that has not failed.
func (s *summary) testEnded(e event) {
	if e.Action != "pass" && e.Action != "skip" {
		return
	}
	reason := "no reason given"
	s.running[e.Package] = slices.DeleteFunc(s.running[e.Package], func(line event) bool {
		if line.Test == e.Test && position.MatchString(line.Output) {
			reason = strings.TrimSpace(position.ReplaceAllString(line.Output, ""))
		}
		return line.Test == e.Test
	})
	if e.Action == "pass" {
		s.passed++
	} else {
		s.skipped[reason]++
	}
}

func (s *summary) packageFailed(e event) {
	fmt.Fprintf(s.out, "FAIL  %s %.1fs\n", e.Package, e.Elapsed)
	var tests []string
	for _, line := range s.running[e.Package] {
		fmt.Fprint(s.out, "      ", line.Output)
		if line.Test != "" && !slices.Contains(tests, line.Test) {
			tests = append(tests, line.Test)
		}
		if command := strings.TrimSpace(line.Output); strings.HasPrefix(command, "repeat it with ") {
			s.repeat = append(s.repeat, command)
		}
	}
	s.failed = append(s.failed, strings.Join(append([]string{e.Package}, tests...), " "))
	delete(s.running, e.Package)
}

func (s *summary) print() {
	byCount := func(a, b string) int { return cmp.Or(s.skipped[b]-s.skipped[a], strings.Compare(a, b)) }
	for i, reason := range slices.SortedFunc(maps.Keys(s.skipped), byCount) {
		if i == 0 {
			fmt.Fprintln(s.out, "\nSkipped:")
		}
		fmt.Fprintf(s.out, "%5d  %s\n", s.skipped[reason], reason)
	}
	for _, failed := range s.failed {
		fmt.Fprintln(s.out, "failed:", failed)
	}
	for _, command := range s.repeat {
		fmt.Fprintln(s.out, command)
	}
}
