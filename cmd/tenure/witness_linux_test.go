package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/proctree"
)

func TestUnderAWitnessAlsoTheEndOfTenureRunCostsNothing(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	const ttl = "10m" // longer than the test
	args := append([]string{"witness", "--store", s.store, "--young", "0", "--pass-store", "--", testBinary(t), "run", "--key", "svc", "--ttl", ttl, "--replica", "a"}, s.service(t)...)
	witness := exec.Command(testBinary(t), args...)
	witness.Env = append(environ(), asTenure+"=1")
	witness.Stderr = os.Stderr
	if err := witness.Start(); err != nil {
		t.Fatal(err)
	}
	defer witness.Process.Kill()
	s.awaitStart(t, 0)
	var run int
	for _, p := range proctree.Descendants(witness.Process.Pid) {
		if p.Parent == witness.Process.Pid {
			run = p.PID
		}
	}
	s.start(t, "b", append([]string{"--ttl", ttl}, s.service(t)...)...)
	killed := time.Now()
	syscall.Kill(run, syscall.SIGKILL)
	if next := s.awaitStart(t, 1); next.holder != "b" {
		t.Errorf("%s has started the service", next.holder)
	}
	if err := witness.Wait(); err == nil || witness.ProcessState.ExitCode() != 137 {
		t.Errorf("the witness has ended with %v, after %v", err, time.Since(killed))
	}
}

// The witness would end the guard of a service before that has stopped it, and release the lease.
func TestAServiceRefusesAWitness(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	cmd := exec.Command(testBinary(t), "witness", "--store", s.store, "--pass-store", "--", testBinary(t), "run", "--key", "svc", "--start", "true", "--stop", "true")
	cmd.Env = append(environ(), asTenure+"=1")
	out, _ := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != 2 || !strings.Contains(string(out), "--start and --stop do not work under a witness") {
		t.Errorf("%v: %s", cmd.ProcessState, out)
	}
}

func TestSocketsOfSystemdReachTheProgramOfAWitness(t *testing.T) {
	t.Parallel()
	script := `export LISTEN_PID=$$ LISTEN_FDS=1 WATCHDOG_PID=1; exec 3<"$0"; exec "$@"`
	program := `test $LISTEN_PID = $$ && test $WATCHDOG_PID = 1 && test -z "$TENURE_STORE" && read line <&3 && echo $line`
	file := filepath.Join(t.TempDir(), "socket")
	if err := os.WriteFile(file, []byte("hello\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", script, file, testBinary(t), "witness", "--", "sh", "-c", program)
	cmd.Env = append(environ(), asTenure+"=1", storeEnv+"=/nowhere/store.db")
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "hello\n" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestAWitnessRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--store", "x.db"}, {"--", "true"}, {"--store", "x.db", "--young", "-1s", "--", "true"}, {"--store", "x.db", "--release-timeout", "0s", "--", "true"},
		{"--store", "x.db", "--", "no-such-program"},
	} {
		if status, _, stderr := tenureCommand(t, append([]string{"witness"}, args...)...); status != 2 || !strings.HasPrefix(stderr, "tenure witness: ") {
			t.Errorf("%q: exit status %d and %q", args, status, stderr)
		}
	}
}
