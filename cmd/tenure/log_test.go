//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

func TestTheLogOfTenureAndOfItsGuardIsJSONIfAskedFor(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	started, stops := filepath.Join(dir, "started"), filepath.Join(dir, "stops")
	cmd := exec.Command(os.Args[0], "run", "--store", filepath.Join(dir, "t.db"), "--key", "k", "--log", "json",
		"--start", "touch "+started, "--stop", "echo >>"+stops+"; test $(wc -l <"+stops+") -ne 2") // the guard's first one fails, and it says so
	cmd.Env = slices.Concat(environ(), []string{asTenure + "=1", "GORACE=atexit_sleep_ms=0"})
	var log strings.Builder
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "the service has started", func() bool {
		_, err := os.Stat(started)
		return err == nil
	})
	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	messages := map[string]bool{}
	for lines := bufio.NewScanner(strings.NewReader(log.String())); lines.Scan(); {
		var line struct {
			Msg   string
			Guard int
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatalf("%v: %s", err, lines.Text())
		}
		if line.Guard != 0 {
			line.Msg = "guard: " + line.Msg
		}
		messages[line.Msg] = true
	}
	for _, want := range []string{"lease acquired", "lease released", "guard: --stop command failed; retrying"} {
		if !messages[want] {
			t.Errorf("no line says %q:\n%s", want, log.String())
		}
	}
}

func TestAFormatOfTheLogThatIsNotKnownIsReported(t *testing.T) {
	status, _, stderr := tenureCommand(t, "run", "--store", filepath.Join(t.TempDir(), "t.db"), "--key", "k", "--log", "xml", "--", "true")
	if status != 2 || !strings.Contains(stderr, "want json or text") {
		t.Errorf("exit status %d: %s", status, stderr)
	}
}
