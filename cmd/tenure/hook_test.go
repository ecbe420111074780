//go:build unix

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestACheckThatLeavesAProcessWithItsOutputCountsAtAnyTTL(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	s.start(t, "a", append([]string{"-ttl", "1s", "-check", leaver(t)}, s.service(t)...)...)
	s.awaitStart(t, 0)
}

func TestTheLastLineOfACommandIsKeptAlthoughItsOutputStaysOpen(t *testing.T) {
	t.Parallel()
	leaves := leaver(t)
	for range 20 { // more than a pipe has room for
		err := runHook(t.Context(), leaves+"; head -c 200000 /dev/zero; echo; echo the reason; exit 3", nil, environ(), nil)
		if err == nil || err.Error() != "exit status 3: the reason" {
			t.Fatalf("got %v", err)
		}
	}
}

// leaver returns a shell command that succeeds at once and leaves a process behind, which
// holds its output open until the end of the test.
func leaver(t *testing.T) string {
	t.Helper()
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if both, err := os.OpenFile(pipe, os.O_RDWR, 0); err == nil {
			both.Close()
		}
	})
	return fmt.Sprintf("cat %s & :", pipe)
}
