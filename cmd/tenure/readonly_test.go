//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

func TestAUserWhoMayOnlyReadASQLiteFileSeesWhoHolds(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "tenure-readonly")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Chmod(dir, 0o700); os.RemoveAll(dir) })
	program, path := filepath.Join(dir, "tenure"), filepath.Join(dir, "store.db")
	copyFile(t, testBinary(t), program)
	// readers runs a command as somebody who may neither write to the file nor beside it.
	readers := func(args ...string) (status int, out string) {
		t.Helper()
		for name, mode := range map[string]os.FileMode{path: 0o444, path + "-wal": 0o444, path + "-shm": 0o444, dir: 0o555} {
			if err := os.Chmod(name, mode); err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
		}
		defer os.Chmod(dir, 0o755)
		cmd := exec.Command(program, append(args, "--store", path)...)
		cmd.Env = append(environ(), asTenure+"=1")
		cmd.SysProcAttr = unprivileged(t)
		text, _ := cmd.CombinedOutput()
		return cmd.ProcessState.ExitCode(), string(text)
	}
	open := func() database {
		t.Helper()
		for _, name := range []string{path, path + "-wal", path + "-shm"} {
			os.Chmod(name, 0o644)
		}
		store, err := (&storeFlag{flag: path}).open(t.Context(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return store
	}
	wants := func(want int, says string) {
		t.Helper()
		if status, out := readers("status", "--key", "svc"); status != want || !strings.Contains(out, says) {
			t.Errorf("status: exit status %d: %s", status, out)
		}
		if status, out := readers("list"); status != 0 || strings.Contains(out, "somebody") != (want == 0) {
			t.Errorf("list: exit status %d: %s", status, out)
		}
		if status, out := readers("owner", "--key", "kind/1"); status != exitUnused {
			t.Errorf("owner: exit status %d: %s", status, out)
		}
	}
	store := open()
	if err := errors.Join(store.Migrate(t.Context()), claims.Migrate(t.Context(), store)); err != nil {
		t.Fatal(err)
	}
	store.Close()
	wants(exitUnused, "unused")

	store = open()
	release := hold(t, store, "svc")
	wants(0, "held")
	store.Close()
	wants(0, "held") // nobody has the file open
	store = open()
	release(store)
	wants(exitFree, "free")
	store.Close()
	wants(exitFree, "free")
	for _, log := range []string{"-wal", "-shm"} {
		if _, err := os.Stat(path + log); !os.IsNotExist(err) {
			t.Errorf("a log is left: %v", err)
		}
	}
}

func TestAUserWhoMayOnlyReadFromNATSSeesWhoHolds(t *testing.T) {
	t.Parallel()
	reads := []string{"$JS.API.STREAM.INFO.TENURE", "$JS.API.STREAM.MSG.GET.TENURE"}
	url := startNATS(t, func(opts *server.Options) {
		opts.Users = []*server.User{
			{Username: "app", Password: "app"},
			{Username: "reader", Password: "reader", Permissions: &server.Permissions{
				Publish:   &server.SubjectPermission{Allow: reads},
				Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}},
			}},
		}
	})
	as := func(user string) string { return strings.Replace(url, "//", "//"+user+":"+user+"@", 1) }
	store, err := (&storeFlag{flag: as("app")}).open(t.Context(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	wants := func(want int, says string) {
		t.Helper()
		if status, stdout, stderr := tenureCommand(t, "status", "--key", "svc", "--store", as("reader")); status != want || !strings.Contains(stdout, says) {
			t.Errorf("status: exit status %d: %s%s", status, stdout, stderr)
		}
		if status, stdout, stderr := tenureCommand(t, "list", "--store", as("reader")); status != 0 {
			t.Errorf("list: exit status %d: %s%s", status, stdout, stderr)
		}
	}
	wants(exitUnused, "unused")
	release := hold(t, store, "svc")
	wants(0, "held")
	release(store)
	wants(exitFree, "free")
}

func TestAUserWhoMayNotReadFromNATSIsToldWhichPermissionIsMissing(t *testing.T) {
	t.Parallel()
	url := startNATS(t, func(opts *server.Options) {
		opts.Users = []*server.User{{Username: "stranger", Password: "stranger", Permissions: &server.Permissions{
			Publish:   &server.SubjectPermission{Allow: []string{"nothing"}},
			Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}},
		}}}
	})
	store := strings.Replace(url, "//", "//stranger:stranger@", 1)
	for _, command := range [][]string{{"status", "--key", "svc"}, {"watch", "--key", "svc"}, {"list"}} {
		t.Run(command[0], func(t *testing.T) {
			t.Parallel()
			status, _, stderr := tenureCommand(t, append(command, "--store", store)...)
			if status != 1 || !strings.Contains(stderr, `Permissions Violation for Publish to "$JS.API.STREAM.INFO.TENURE"`) {
				t.Errorf("exit status %d: %s", status, stderr)
			}
		})
	}
}

func TestACommandReadsAgainWhatSomebodyHasWrittenMeanwhile(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	store := s.open(t)
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	store.Close()
	var stdout, stderr bytes.Buffer
	reads := 0
	err := (&storeFlag{flag: s.store}).reading(t.Context(), &output{stdout: &stdout, stderr: &stderr}, func(_ context.Context, _ database, out *output) error {
		if reads++; reads == 1 {
			hold(t, s.open(t), "svc")
		}
		fmt.Fprint(out.stdout, reads)
		fmt.Fprint(out.stderr, reads)
		return nil
	})
	if err != nil || stdout.String() != "2" || stderr.String() != "2" {
		t.Errorf("it has shown %q and %q: %v", &stdout, &stderr, err)
	}
}

// hold acquires a lease, and returns a func that releases it.
func hold(t *testing.T, store tenure.Store, id string) (release func(tenure.Store)) {
	t.Helper()
	cfg := tenure.LeaseConfig{Key: tenure.Key{Type: defaultType, ID: id}, Holder: "somebody", TTL: 10 * soon}
	lease, err := tenure.NewLease(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	term, err := lease.TryAcquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return func(store tenure.Store) {
		t.Helper()
		lease, err := tenure.NewLease(store, cfg)
		if err == nil {
			err = lease.Release(t.Context(), term)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// unprivileged makes a program of root run as nobody: root may write to anything.
func unprivileged(t *testing.T) *syscall.SysProcAttr {
	t.Helper()
	if os.Geteuid() != 0 {
		return nil
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Skip(err)
	}
	uid, err := strconv.ParseUint(nobody.Uid, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}
