//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	watchInterval = 250 * time.Millisecond // between two looks of Watch
	stopInterval  = 10 * time.Millisecond  // between two looks of Delete
	killAfter     = 2 * time.Second        // from SIGTERM to SIGKILL
)

// processDriver is a [Driver] whose instances are processes on this host. It keeps two files
// for each in a directory that all gateways on the host share:
//
//	<instance>.pid   the process's ID; locked for as long as the process runs
//	<instance>.out   its output
//
// The process inherits the open file from the gateway, and its children inherit it in turn,
// so the kernel drops the lock when the last of them has ended. The lock does not depend on
// the gateway, and no later process with the same PID can be mistaken for the instance. But
// a process that closes the file looks dead, and Delete cannot end one that has left its
// process group.
type processDriver struct {
	dir       string
	killAfter time.Duration
}

func newProcessDriver(dir string) (*processDriver, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	return &processDriver{dir: dir, killAfter: killAfter}, nil
}

// path returns the path of an instance's file, which is in the directory whatever the ID is.
func (d *processDriver) path(id, suffix string) string {
	return filepath.Join(d.dir, filepath.Base(id)+suffix)
}

func (d *processDriver) Create(ctx context.Context, id string, command []string) (pid int, err error) {
	program, err := exec.LookPath(command[0])
	if err == nil {
		program, err = filepath.Abs(program) // the shell could take another path for an option or a builtin
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return 0, err
	}
	// The process itself writes its PID, before it becomes the command. A gateway that is killed
	// here leaves no process that cannot be found.
	const script = `echo $$ >&3 && exec "$@"`
	cmd := exec.Command("/bin/sh", append([]string{"-c", script, "sh", program}, command[1:]...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}                         // it outlives the gateway
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")} // the rest may hold the store's password
	if err := d.start(id, cmd); err != nil {
		return 0, errors.Join(err, d.remove(id))
	}
	go cmd.Wait() // otherwise it would stay a zombie
	return cmd.Process.Pid, nil
}

// start starts the command with the instance's files.
func (d *processDriver) start(id string, cmd *exec.Cmd) error {
	output, err := os.OpenFile(d.path(id, ".out"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer output.Close()
	// The file gets its name once it is locked, so the instance never looks dead before its
	// process has started.
	lock, err := os.CreateTemp(d.dir, ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(lock.Name()) // if it was not renamed
	defer lock.Close()           // the process keeps it open
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	if err := os.Rename(lock.Name(), d.path(id, ".pid")); err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = output, output, []*os.File{lock}
	return cmd.Start()
}

func (d *processDriver) remove(id string) error {
	return errors.Join(os.RemoveAll(d.path(id, ".out")), os.RemoveAll(d.path(id, ".pid")))
}

// load reads an instance. The error is [fs.ErrNotExist] if the instance does not exist.
func (d *processDriver) load(id string) (Instance, error) {
	file, err := os.Open(d.path(id, ".pid"))
	if err != nil {
		return Instance{}, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return Instance{}, err
	}
	pid, err := io.ReadAll(file)
	if err != nil {
		return Instance{}, err
	}
	inst := Instance{ID: id, CreatedAt: info.ModTime()}
	inst.Sandbox, _, _ = strings.Cut(id, ".")
	inst.PID, _ = strconv.Atoi(strings.TrimSpace(string(pid))) // 0 until it is written
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_SH|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		inst.Alive, err = true, nil
	}
	return inst, err
}

func (d *processDriver) Delete(ctx context.Context, id string) error {
	kill := time.After(d.killAfter)
	next := syscall.SIGTERM // the signal to send, or 0
	for {
		// Ask ctx first, so that the process is looked at once more after ctx is done, however
		// long this process was paused in between.
		stop := ctx.Err()
		inst, err := d.load(id)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case !inst.Alive:
			return d.remove(id)
		case stop != nil:
			return fmt.Errorf("instance %s still runs: %w", id, stop)
		case inst.PID > 1 && next != 0:
			_ = syscall.Kill(-inst.PID, next) // the whole group; if that fails, the next look shows why
			next = 0
		}
		select {
		case <-ctx.Done():
		case <-kill:
			next = syscall.SIGKILL
		case <-time.After(stopInterval):
		}
	}
}

func (d *processDriver) List(ctx context.Context) ([]Instance, error) {
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return nil, err
	}
	var instances []Instance
	for _, entry := range entries {
		id, ok := strings.CutSuffix(entry.Name(), ".pid")
		if !ok {
			continue
		}
		inst, err := d.load(id)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has just been deleted
		}
		if err != nil {
			return nil, err
		}
		instances = append(instances, inst)
	}
	return instances, nil
}

// Watch keeps looking at the processes, because no process is told when another's child exits.
func (d *processDriver) Watch(ctx context.Context) iter.Seq2[Instance, error] {
	return func(yield func(Instance, error) bool) {
		known := make(map[string]bool) // which have exited
		for ctx.Err() == nil {
			instances, err := d.List(ctx)
			if err != nil {
				yield(Instance{}, err)
				return
			}
			exited := make(map[string]bool)
			for _, inst := range instances {
				if inst.Alive {
					continue
				}
				exited[inst.ID] = true
				if !known[inst.ID] && !yield(inst, nil) {
					return
				}
			}
			known = exited
			select {
			case <-ctx.Done():
			case <-time.After(watchInterval):
			}
		}
	}
}
