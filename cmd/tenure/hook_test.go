//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestNoCommandBeginsForATermThatIsOver(t *testing.T) {
	t.Parallel()
	lease, err := tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: tenure.Key{Type: defaultType, ID: "svc"}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	began := filepath.Join(t.TempDir(), "began")
	calls := func(ctx context.Context) map[string]error {
		r := &runner{log: slog.New(slog.DiscardHandler), opts: &runOptions{replica: "a", peers: "b", ttl: time.Minute}}
		r.opts.fence = "touch " + began + "-fence-$TENURE_PREDECESSOR"
		errs := map[string]error{"fence-c": r.fence(ctx, tenure.Holding{Holder: "c"}), "fence-b": func() error { _, err := r.fenceAll(ctx, []string{"b"}); return err }()}
		r.opts.unfence = "touch " + began + "-unfence"
		errs["unfence"] = r.unfenceAgain(ctx)
		r.opts.unfence = "touch " + began + "-unfence-first"
		errs["unfence-first"] = r.fence(ctx, tenure.Holding{Holder: "c"})
		return errs
	}
	var paused context.Context // as after a pause: it is not done although its term is over
	if err := tenure.Do(t.Context(), lease, func(ctx context.Context) error {
		paused = context.WithoutCancel(ctx)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for name, err := range calls(paused) {
		if _, none := os.Stat(began + "-" + name); none == nil || !errors.Is(err, errTermOver) {
			t.Errorf("%s: it began: %v; %v", name, none == nil, err)
		}
	}
	if err := tenure.Do(t.Context(), lease, func(ctx context.Context) error {
		for name, err := range calls(ctx) {
			if _, none := os.Stat(began + "-" + name); none != nil || err != nil {
				t.Errorf("in a term %s has not run: %v, %v", name, none, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func TestACheckThatLeavesAProcessWithItsOutputCountsAtAnyTTL(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	s.start(t, "a", append([]string{"--ttl", "1s", "--check", leaver(t)}, s.service(t)...)...)
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

func TestASlowCheckIsReportedOnce(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	r := &runner{log: slog.New(slog.NewTextHandler(&log, nil)), opts: &runOptions{}}
	const limit = 6 * time.Second
	for _, test := range []struct {
		check string
		times int
	}{{"true", 0}, {"sleep 3.2", 1}, {"sleep 3.2", 1}} {
		r.opts.check = test.check + " && :"
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		if err := r.check(ctx, tenure.RoleStandby); err != nil {
			t.Errorf("%s: %v", test.check, err)
		}
		cancel()
		if n := strings.Count(log.String(), "--check has used more than half of its time"); n != test.times {
			t.Errorf("after %q it was reported %d times, want %d: %s", test.check, n, test.times, &log)
		}
	}
}

func TestTheCheckOfAStandbyGivesWayToOneBeforeATakeover(t *testing.T) {
	t.Parallel()
	began := filepath.Join(t.TempDir(), "began")
	r := &runner{log: slog.New(slog.DiscardHandler), opts: &runOptions{
		check: fmt.Sprintf("test -e %s || { touch %[1]s; sleep 1000; } && :", began), // only the first one hangs
	}}
	lease, err := tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: tenure.Key{Type: defaultType, ID: "svc"}, TTL: time.Hour, Logger: r.log})
	if err != nil {
		t.Fatal(err)
	}
	r.coordinator, err = tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Check: r.check, Logger: r.log})
	if err != nil {
		t.Fatal(err)
	}
	gaveWay := make(chan error, 1)
	go func() { gaveWay <- r.checkStandby(t.Context()) }()
	eventually(t, soon, "it runs", func() bool { _, err := os.Stat(began); return err == nil })
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := r.check(ctx, tenure.RoleStandby); err != nil {
		t.Error(err)
	}
	if err := <-gaveWay; err != nil {
		t.Errorf("the one that gave way: %v", err)
	}
}

func TestWhileOthersAreFencedTheCheckIsThatOfAStandby(t *testing.T) {
	t.Parallel()
	r := &runner{log: slog.New(slog.DiscardHandler), opts: &runOptions{check: "test standby ="}}
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if r.check(ctx, tenure.RoleHolder) == nil {
		t.Error("the check of a holder has another argument")
	}
	r.fencing.Store(true)
	if err := r.check(ctx, tenure.RoleHolder); err != nil {
		t.Errorf("there is no program yet: %v", err)
	}
}
