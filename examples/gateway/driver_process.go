//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
)

const (
	watchInterval = 250 * time.Millisecond // how often Watch looks at the processes
	stopInterval  = 10 * time.Millisecond  // how often Delete checks whether the process is gone
	killAfter     = 2 * time.Second        // from SIGTERM to SIGKILL
)

// gate is what an instance's process runs first: it waits for a line on its standard input
// and then becomes the command. The driver writes the line only when the PID has been
// recorded. If the gateway dies before that, the read fails and the process ends, so every
// command that runs has a record. The command itself sees an empty input.
const gate = `read go && exec "$@"`

// processDriver is a [Driver] whose instances are processes on this host. It keeps its
// state in a directory that all gateways on the host share:
//
//	instances/<id>/instance.json   the Instance; written before its process is started and again after
//	instances/<id>/output          the output of the process
//	deleted/<id>/                  the same directory while the instance is being deleted
//
// The move to deleted/ decides between a creation and a deletion that run at the same
// time: after the move, the creator can't record its process, because the directory is
// gone; a process recorded before the move is found by the deletion.
//
// An instance's process leads its own session and outlives the gateway. Processes that it
// leaves behind when it exits by itself are not tracked.
type processDriver struct {
	dir       string
	killAfter time.Duration

	reaper sync.WaitGroup
	sigs   chan os.Signal // SIGCHLD; closed by Close

	mu       sync.Mutex
	children map[int]struct{} // the processes that this gateway has to reap
}

// newProcessDriver returns a driver that uses a state directory, which it creates if it is
// missing. The caller must Close it.
func newProcessDriver(dir string) (*processDriver, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	d := &processDriver{
		dir:       dir,
		killAfter: killAfter,
		sigs:      make(chan os.Signal, 1),
		children:  make(map[int]struct{}),
	}
	for _, path := range []string{d.live(""), d.deleted("")} {
		if err := os.MkdirAll(path, 0o700); err != nil {
			return nil, fmt.Errorf("state directory: %w", err)
		}
	}
	signal.Notify(d.sigs, syscall.SIGCHLD)
	d.reaper.Go(func() {
		for range d.sigs {
			d.reap()
		}
	})
	return d, nil
}

// Close stops the driver, and leaves the processes running.
func (d *processDriver) Close() {
	signal.Stop(d.sigs)
	close(d.sigs)
	d.reaper.Wait()
}

func (d *processDriver) live(id string) string    { return filepath.Join(d.dir, "instances", id) }
func (d *processDriver) deleted(id string) string { return filepath.Join(d.dir, "deleted", id) }

// output returns the path of the file that an instance's process writes to.
func (d *processDriver) output(id string) string { return filepath.Join(d.live(id), "output") }

func (d *processDriver) Create(ctx context.Context, id, name string, command []string) (Instance, error) {
	if err := ctx.Err(); err != nil {
		return Instance{}, fmt.Errorf("create instance %s: %w", id, err)
	}
	inst := Instance{ID: id, Name: name, Command: command, CreatedAt: time.Now()}
	if err := d.create(&inst); err != nil {
		return Instance{}, fmt.Errorf("create instance %s: %w", id, err)
	}
	return inst, nil
}

func (d *processDriver) create(inst *Instance) error {
	if _, err := uuid.Parse(inst.ID); err != nil {
		return err
	}
	path, err := exec.LookPath(inst.Command[0])
	if err != nil {
		return err
	}
	// Make the path absolute, so that the shell can't take it for an option or a builtin.
	if path, err = filepath.Abs(path); err != nil {
		return err
	}
	if err := os.Mkdir(d.live(inst.ID), 0o700); err != nil {
		return err
	}
	err = d.record(*inst)
	if err == nil {
		err = d.start(inst, path)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(d.live(inst.ID)))
	}
	return nil
}

// start runs the instance's command and sets its PID, Birth and Alive.
func (d *processDriver) start(inst *Instance, path string) error {
	output, err := os.OpenFile(d.output(inst.ID), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer output.Close()
	wait, open, err := os.Pipe()
	if err != nil {
		return err
	}
	defer wait.Close()
	defer open.Close()

	cmd := exec.Command("/bin/sh", append([]string{"-c", gate, "sh", path}, inst.Command[1:]...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = wait, output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// Don't pass on the gateway's environment, which may have the store's password.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "SANDBOX=" + inst.Name}
	if err := cmd.Start(); err != nil {
		return err
	}
	abandon := func(err error) error {
		open.Close()
		return errors.Join(err, ignoreExit(cmd.Wait()))
	}

	inst.PID, inst.Alive = cmd.Process.Pid, true
	if inst.Birth, _, err = inspectProcess(inst.PID); err != nil {
		return abandon(err)
	}
	if err := d.record(*inst); err != nil {
		return abandon(err) // fs.ErrNotExist means that the instance has been deleted meanwhile
	}
	if _, err := open.WriteString("\n"); err != nil {
		return abandon(err)
	}
	d.adopt(cmd.Process)
	return nil
}

// ignoreExit drops the error of a process that has ended unsuccessfully.
func ignoreExit(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	return err
}

// record writes the instance's file atomically. It doesn't sync the file: a machine crash
// that loses the file also ends the process.
func (d *processDriver) record(inst Instance) error {
	data, err := json.Marshal(inst)
	if err != nil {
		return err
	}
	path := filepath.Join(d.live(inst.ID), "instance.json")
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// adopt takes over the reaping of a process from package os. os.Process.Wait would need a
// goroutine that runs as long as the sandbox does, beyond Close.
func (d *processDriver) adopt(p *os.Process) {
	pid := p.Pid
	p.Release()
	d.mu.Lock()
	d.children[pid] = struct{}{}
	d.mu.Unlock()
	d.reap() // the process's SIGCHLD may have come before it was added
}

// reap collects the adopted processes that have ended, so that they don't stay zombies. It
// waits for each by its PID, because this process has other children that somebody else
// waits for.
func (d *processDriver) reap() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for pid := range d.children {
		got, err := syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		if got == pid || errors.Is(err, syscall.ECHILD) {
			delete(d.children, pid)
		}
	}
}

func (d *processDriver) Delete(ctx context.Context, id string) error {
	if err := d.delete(ctx, id); err != nil {
		return fmt.Errorf("delete instance %s: %w", id, err)
	}
	return nil
}

func (d *processDriver) delete(ctx context.Context, id string) error {
	if _, err := uuid.Parse(id); err != nil {
		return err
	}
	if err := os.Rename(d.live(id), d.deleted(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	switch inst, err := load(d.deleted(id), id); {
	case errors.Is(err, errNoInstance):
		return nil
	case err != nil:
		return err
	case inst.Alive:
		if err := d.stop(ctx, inst); err != nil {
			return err
		}
	}
	return os.RemoveAll(d.deleted(id))
}

// stop ends a running process and its group, and returns when it is gone.
func (d *processDriver) stop(ctx context.Context, inst Instance) error {
	if err := signalGroup(inst.PID, syscall.SIGTERM); err != nil {
		return err
	}
	kill := time.NewTimer(d.killAfter)
	defer kill.Stop()
	look := time.NewTicker(stopInterval)
	defer look.Stop()
	for {
		// Read ctx.Err before isAlive, so that the process is checked once more after ctx is
		// done, however long it took to get here. Don't use context.Cause: it may be
		// tenure.ErrLost, which callers take for a refused write.
		ended := ctx.Err()
		alive, err := isAlive(inst)
		if err != nil {
			return err
		}
		if !alive {
			// Kill what is left of its group. The group's ID can't be reused while one of its
			// processes is left.
			return signalGroup(inst.PID, syscall.SIGKILL)
		}
		if ended != nil {
			return ended
		}
		select {
		case <-ctx.Done():
		case <-kill.C:
			if err := signalGroup(inst.PID, syscall.SIGKILL); err != nil {
				return err
			}
		case <-look.C:
		}
	}
}

// signalGroup signals a process and its group. It is not an error if there is no process
// to signal.
func signalGroup(pid int, sig syscall.Signal) error {
	err := syscall.Kill(-pid, sig)
	// Some systems return EPERM for a group of zombies.
	if err != nil && !errors.Is(err, syscall.ESRCH) && !errors.Is(err, syscall.EPERM) {
		return fmt.Errorf("signal process group %d: %w", pid, err)
	}
	return nil
}

func (d *processDriver) Get(ctx context.Context, id string) (Instance, error) {
	inst, err := load(d.live(id), id)
	if errors.Is(err, errNoInstance) {
		inst, err = load(d.deleted(id), id)
	}
	if err != nil {
		return Instance{}, fmt.Errorf("get instance %s: %w", id, err)
	}
	return inst, nil
}

// List includes instances whose deletion has begun but is not finished.
func (d *processDriver) List(ctx context.Context) ([]Instance, error) {
	var instances []Instance
	seen := make(map[string]bool)
	// The order matters: an instance that is moved to deleted/ meanwhile isn't missed.
	for _, path := range []func(string) string{d.live, d.deleted} {
		entries, err := os.ReadDir(path(""))
		if err != nil {
			return nil, fmt.Errorf("list instances: %w", err)
		}
		for _, entry := range entries {
			id := entry.Name()
			if _, err := uuid.Parse(id); err != nil || seen[id] {
				continue
			}
			switch inst, err := load(path(id), id); {
			case errors.Is(err, errNoInstance): // deleted or moved meanwhile
			case err != nil:
				return nil, fmt.Errorf("list instances: %s: %w", id, err)
			default:
				seen[id] = true
				instances = append(instances, inst)
			}
		}
	}
	return instances, nil
}

// load reads an instance from its directory, and checks whether its process is alive.
func load(dir, id string) (Instance, error) {
	data, err := os.ReadFile(filepath.Join(dir, "instance.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return loadEmpty(dir, id)
	}
	if err != nil {
		return Instance{}, err
	}
	var inst Instance
	if err := json.Unmarshal(data, &inst); err != nil {
		return Instance{}, err
	}
	inst.Alive, err = isAlive(inst)
	return inst, err
}

// loadEmpty returns the instance of a directory without a file: the gateway died just after
// it created the directory, or just before it would have removed it.
func loadEmpty(dir, id string) (Instance, error) {
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return Instance{}, errNoInstance
	}
	if err != nil {
		return Instance{}, err
	}
	return Instance{ID: id, CreatedAt: info.ModTime()}, nil
}

// isAlive reports whether the process that was started for the instance is alive.
func isAlive(inst Instance) (bool, error) {
	if inst.PID <= 1 { // as groups, 0 would mean this process's own, and 1 all processes
		return false, nil
	}
	birth, alive, err := inspectProcess(inst.PID)
	return alive && birth == inst.Birth, err
}

// Watch polls the processes every watchInterval, because this gateway isn't notified when
// a process that another gateway started exits.
func (d *processDriver) Watch(ctx context.Context) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		tick := time.NewTicker(watchInterval)
		defer tick.Stop()
		known := make(map[string]Instance)
		for {
			instances, err := d.List(ctx)
			if err != nil {
				yield(Event{}, err)
				return
			}
			for _, event := range compare(known, instances) {
				if !yield(event, nil) {
					return
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}
}

// compare returns the events that lead from known to instances, and updates known.
func compare(known map[string]Instance, instances []Instance) []Event {
	var events []Event
	present := make(map[string]bool, len(instances))
	for _, inst := range instances {
		present[inst.ID] = true
		before, isKnown := known[inst.ID]
		switch {
		case inst.PID == 0: // not started yet
			continue
		case inst.Alive && !isKnown:
			events = append(events, Event{Started, inst})
		case !inst.Alive && (before.Alive || !isKnown):
			events = append(events, Event{Exited, inst})
		}
		known[inst.ID] = inst
	}
	for id, inst := range known {
		if present[id] {
			continue
		}
		if inst.Alive {
			inst.Alive = false
			events = append(events, Event{Exited, inst})
		}
		delete(known, id)
	}
	return events
}
