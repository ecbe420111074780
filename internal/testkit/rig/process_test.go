//go:build unix

package rig_test

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

func script(t *testing.T, sh string, answers func(context.Context) error) *rig.Server {
	t.Helper()
	s := &rig.Server{
		Process: rig.Process{
			Command: func() *exec.Cmd { return exec.Command("sh", "-c", sh) },
			Log:     filepath.Join(t.TempDir(), "log"),
		},
		Answers: answers,
	}
	t.Cleanup(func() { s.End(syscall.SIGKILL) })
	return s
}

func TestAServerThatIgnoresASignalIsKilledAndStartsAgain(t *testing.T) {
	testkit.Slow(t)
	s := script(t, `trap "" TERM; echo ready; while :; do sleep 0.1; done`, nil)
	starts := 0
	s.Answers = func(context.Context) error {
		if strings.Count(s.LogTail(), "ready") < starts {
			return errors.New("it does not run yet")
		}
		return nil
	}
	for starts < 2 {
		starts++
		if err := s.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.End(syscall.SIGTERM); err != nil || s.Runs() {
			t.Fatalf("runs: %v, error %v", s.Runs(), err)
		}
	}
	if got, want := s.LogTail(), "ready\nready"; got != want {
		t.Errorf("the log is %q, want %q", got, want)
	}
}

func TestAServerThatNeverAnswersIsReportedWithItsLog(t *testing.T) {
	s := script(t, `echo "no disk" >&2; while :; do sleep 0.1; done`, func(context.Context) error { return errors.New("silence") })
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err := s.Start(ctx)
	if err == nil || !strings.Contains(err.Error(), "silence") || !strings.Contains(err.Error(), "no disk") {
		t.Errorf("got error %v", err)
	}
}
