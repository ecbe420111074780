//go:build unix

package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
)

// newTestDriver returns a driver on a directory. Its processes end with the test.
func newTestDriver(t *testing.T, dir string) *processDriver {
	t.Helper()
	d, err := newProcessDriver(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		deleteAll(t, d)
		d.Close()
	})
	d.killAfter = 50 * time.Millisecond
	return d
}

func deleteAll(t *testing.T, d *processDriver) {
	instances, err := d.List(context.Background())
	if err != nil {
		t.Error(err)
	}
	for _, inst := range instances {
		if err := d.Delete(context.Background(), inst.ID); err != nil {
			t.Error(err)
		}
	}
}

func create(t *testing.T, d *processDriver, command ...string) Instance {
	t.Helper()
	inst, err := d.Create(t.Context(), uuid.NewString(), "box", command)
	if err != nil {
		t.Fatal(err)
	}
	return inst
}

// soon is how long to wait for something that takes milliseconds on an idle machine.
const soon = time.Minute

// eventually waits until cond is true, and fails the test if that takes too long.
func eventually(t *testing.T, within time.Duration, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(within); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// exists reports whether there is a process with that ID, which may be a zombie.
func exists(pid int) bool { return syscall.Kill(pid, 0) == nil }

func TestAnInstanceRunsUntilItIsDeletedByAnyDriverOfItsDirectory(t *testing.T) {
	dir := t.TempDir()
	d, other := newTestDriver(t, dir), newTestDriver(t, dir)
	inst := create(t, d, "sleep", "1000")

	got, err := other.Get(t.Context(), inst.ID)
	if err != nil {
		t.Fatal(err)
	}
	if !got.Alive || got.PID != inst.PID || got.Name != "box" || !slices.Equal(got.Command, inst.Command) {
		t.Errorf("the other driver got %+v, want %+v", got, inst)
	}

	if err := other.Delete(t.Context(), inst.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Get(t.Context(), inst.ID); !errors.Is(err, errNoInstance) {
		t.Errorf("after the deletion got %v, want %v", err, errNoInstance)
	}
	eventually(t, soon, "its process is reaped", func() bool { return !exists(inst.PID) })
	if err := d.Delete(t.Context(), inst.ID); err != nil {
		t.Errorf("the second deletion got %v", err)
	}
	for _, path := range []string{d.live(inst.ID), d.deleted(inst.ID)} {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
}

func TestTheCommandGetsItsArgumentsButNotTheGatewaysEnvironment(t *testing.T) {
	t.Setenv("PGPASSWORD", "s3cret")
	d := newTestDriver(t, t.TempDir())
	inst := create(t, d, "sh", "-c", `printf '%s|' "$@"; env; cat`, "--", "a b", "-x", "")
	eventually(t, soon, "the process exits at the end of its empty input", func() bool {
		got, err := d.Get(t.Context(), inst.ID)
		return err == nil && !got.Alive
	})
	out, err := os.ReadFile(d.output(inst.ID))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(out), "a b|-x||"; !strings.HasPrefix(got, want) {
		t.Errorf("the process printed %q, want it to begin with %q", got, want)
	}
	if strings.Contains(string(out), "s3cret") {
		t.Error("the process got the gateway's environment")
	}
	if !strings.Contains(string(out), "SANDBOX=box") {
		t.Errorf("the process doesn't know its sandbox: %q", out)
	}
}

func TestACommandThatDoesNotExistLeavesNoInstance(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	_, err := d.Create(t.Context(), uuid.NewString(), "box", []string{"no-such-command"})
	if !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("got %v, want %v", err, exec.ErrNotFound)
	}
	if got, err := d.List(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("the driver lists %v, %v", got, err)
	}
}

func TestAnInstanceThatExitsIsSeenByAnyDriver(t *testing.T) {
	dir := t.TempDir()
	d, other := newTestDriver(t, dir), newTestDriver(t, dir)
	inst := create(t, d, "sleep", "1000")

	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	var got []EventKind
	for event, err := range other.Watch(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		if event.Instance.ID != inst.ID || event.Instance.Name != "box" {
			t.Errorf("an event of instance %+v, want %+v", event.Instance, inst)
		}
		got = append(got, event.Kind)
		if event.Kind == Exited {
			break
		}
		if err := syscall.Kill(inst.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	if want := []EventKind{Started, Exited}; !slices.Equal(got, want) {
		t.Errorf("got events %v, want %v", got, want)
	}
}

func TestALateWatcherGetsAnEarlierExit(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	inst := create(t, d, "true")
	eventually(t, soon, "the process exits", func() bool {
		got, err := d.Get(t.Context(), inst.ID)
		return err == nil && !got.Alive
	})
	for event, err := range d.Watch(t.Context()) {
		if err != nil || event.Kind != Exited || event.Instance.ID != inst.ID {
			t.Errorf("got %+v, %v", event, err)
		}
		break
	}
}

func TestAWatcherEndsWithItsContext(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	create(t, d, "sleep", "1000")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range d.Watch(ctx) {
		cancel()
	}
}

func TestEachChangeOfAnInstanceIsOneEvent(t *testing.T) {
	alive, dead := Instance{ID: "a", PID: 7, Alive: true}, Instance{ID: "a", PID: 7}
	for _, tt := range []struct {
		name  string
		looks [][]Instance
		want  []EventKind
	}{
		{"started and exited", [][]Instance{{alive}, {alive}, {dead}, {dead}}, []EventKind{Started, Exited}},
		{"dead when first seen", [][]Instance{{dead}, {dead}}, []EventKind{Exited}},
		{"deleted while alive", [][]Instance{{alive}, {}, {}}, []EventKind{Started, Exited}},
		{"deleted after its exit", [][]Instance{{alive}, {dead}, {}}, []EventKind{Started, Exited}},
		{"not started yet", [][]Instance{{{ID: "a"}}, {alive}}, []EventKind{Started}},
		{"never started", [][]Instance{{{ID: "a"}}, {}}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			known := make(map[string]Instance)
			var got []EventKind
			for _, instances := range tt.looks {
				for _, event := range compare(known, instances) {
					got = append(got, event.Kind)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestADeletionEndsAProcessAndItsChildrenEvenIfTheyIgnoreSIGTERM(t *testing.T) {
	for _, tt := range []struct{ name, script string }{
		{"all do", `trap "" TERM; sleep 1000 & echo $!; while :; do sleep 0.01; done`},
		{"the child does", `(trap "" TERM; exec sleep 1000) & sleep 0.1; echo $!; wait`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newTestDriver(t, t.TempDir())
			inst := create(t, d, "sh", "-c", tt.script)
			var child int
			eventually(t, soon, "the process has started its child", func() bool {
				out, err := os.ReadFile(d.output(inst.ID))
				child, _ = strconv.Atoi(strings.TrimSpace(string(out)))
				return err == nil && child != 0
			})
			if err := d.Delete(t.Context(), inst.ID); err != nil {
				t.Fatal(err)
			}
			if _, alive, err := inspectProcess(inst.PID); alive || err != nil {
				t.Errorf("its process is alive: %v, %v", alive, err)
			}
			eventually(t, soon, "its child is gone", func() bool {
				_, alive, err := inspectProcess(child)
				return err == nil && !alive
			})
		})
	}
}

func TestAnInterruptedDeletionIsFinishedByTheNext(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	d.killAfter = time.Hour
	inst := create(t, d, "sh", "-c", `trap "" TERM; echo ready; while :; do sleep 0.01; done`)
	eventually(t, soon, "the process ignores SIGTERM", func() bool {
		out, err := os.ReadFile(d.output(inst.ID))
		return err == nil && len(out) > 0
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := d.Delete(ctx, inst.ID); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the interrupted deletion got %v, want %v", err, context.DeadlineExceeded)
	}
	if got, err := d.List(t.Context()); err != nil || len(got) != 1 || got[0].ID != inst.ID || !got[0].Alive {
		t.Errorf("the driver lists %+v, %v, want the instance whose deletion isn't finished", got, err)
	}
	d.killAfter = time.Millisecond
	if err := d.Delete(t.Context(), inst.ID); err != nil {
		t.Fatal(err)
	}
	if got, err := d.List(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("the driver lists %+v, %v", got, err)
	}
}

func TestAProcessCannotBeStartedForAnInstanceThatWasDeletedMeanwhile(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	inst := Instance{ID: uuid.NewString(), Name: "box", Command: []string{"sleep", "1000"}, CreatedAt: time.Now()}
	if err := os.Mkdir(d.live(inst.ID), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.record(inst); err != nil {
		t.Fatal(err)
	}
	if err := d.Delete(t.Context(), inst.ID); err != nil {
		t.Fatal(err)
	}
	if err := d.record(inst); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its process was recorded: %v", err)
	}
	if err := d.start(&inst, "/bin/sleep"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its process was started: %v", err)
	}
}

func TestACommandDoesNotRunWhenItsProcessCannotBeRecorded(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	inst := Instance{ID: uuid.NewString(), Name: "box", Command: []string{"sleep", "1000"}, CreatedAt: time.Now()}
	if err := os.MkdirAll(filepath.Join(d.live(inst.ID), "instance.json.new"), 0o700); err != nil { // in place of the file, so that it can't be written
		t.Fatal(err)
	}
	if err := d.start(&inst, "/bin/sleep"); err == nil {
		t.Error("the command was started")
	}
	if exists(inst.PID) {
		t.Error("its process exists")
	}
}

func TestACommandDoesNotRunWhenItsGatewayDiesBeforeRecordingTheProcess(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "ran")
	cmd := exec.Command("/bin/sh", "-c", gate, "sh", "/usr/bin/touch", mark)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stdin.Close() // as happens when the gateway dies
	if err := ignoreExit(cmd.Wait()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(mark); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the command ran: %v", err)
	}
}

func TestAProcessThatReusesThePIDIsNotTheInstances(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	stranger := create(t, d, "sleep", "1000")

	inst := stranger
	inst.ID, inst.Birth = uuid.NewString(), "another boot/1"
	if err := os.Mkdir(d.live(inst.ID), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.record(inst); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Get(t.Context(), inst.ID); err != nil || got.Alive {
		t.Errorf("got %+v, %v, want an instance that is not alive", got, err)
	}
	if err := d.Delete(t.Context(), inst.ID); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Get(t.Context(), stranger.ID); err != nil || !got.Alive {
		t.Errorf("the stranger is %+v, %v, want it alive", got, err)
	}
}

func TestAnIDThatIsNotAUUIDIsRefused(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	for _, id := range []string{"", "..", "../../etc"} {
		if _, err := d.Create(t.Context(), id, "box", []string{"true"}); err == nil {
			t.Errorf("Create accepted the ID %q", id)
		}
		if err := d.Delete(t.Context(), id); err == nil {
			t.Errorf("Delete accepted the ID %q", id)
		}
	}
}

func TestADirectoryWithoutItsFileIsAnInstanceThatCanBeDeleted(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	id := uuid.NewString()
	if err := os.Mkdir(d.live(id), 0o700); err != nil {
		t.Fatal(err)
	}
	got, err := d.List(t.Context())
	if err != nil || len(got) != 1 || got[0].ID != id || got[0].CreatedAt.IsZero() {
		t.Fatalf("the driver lists %+v, %v", got, err)
	}
	if err := d.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if got, err := d.List(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("the driver lists %+v, %v", got, err)
	}
}
