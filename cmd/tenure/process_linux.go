package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/tenurelib/tenure/internal/proctree"
)

// self returns a path of this program that works even if its file has been replaced.
func self() string { return "/proc/self/exe" }

// ownGroup makes a child the leader of its own process group, and has it killed when the
// thread that started it ends.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// holdName keeps a name from all other processes in this host's network namespace until the file
// and its copies in other processes are closed. The error is EADDRINUSE if another one holds it.
func holdName(name string) (*os.File, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: "@" + name}); err != nil { // @: not in the file system
		syscall.Close(fd)
		return nil, os.NewSyscallError("bind", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// nameScope identifies where a name that is held is kept from others: this network namespace,
// until the machine is started again.
func nameScope() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	namespace, err := os.Readlink("/proc/self/ns/net")
	return string(bytes.TrimSpace(boot)) + " " + namespace, err
}

// collectOrphans collects the orphans that this process has adopted, when they have ended. It
// leaves the commands alone that runGroup collects: they lead a group in this session.
func collectOrphans() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	for range ended {
		this, _ := proctree.Read(os.Getpid())
		for _, p := range proctree.All() {
			if p.Parent == this.PID && p.Ended && (p.PID != p.Group || p.Session != this.Session) {
				syscall.Wait4(p.PID, nil, syscall.WNOHANG, nil)
			}
		}
		time.Sleep(time.Second) // it has read all of /proc
	}
}

// runGroup runs a command that leads a process group, and reports the group. When ctx is
// done it kills the group. It reports the command's end before it collects the command, so
// that the group's number is not reused as long as it counts as the command's.
func runGroup(ctx context.Context, cmd *exec.Cmd, tell func(report)) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	tell(report{Group: cmd.Process.Pid})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		proctree.AwaitEnd(proctree.OneChild, cmd.Process.Pid)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // before Wait, so that the pid has not been reused
	}
	tell(report{Returned: true})
	return cmd.Wait()
}

// knownGroup is a process group whose leader is not a child of this process, so that its
// number may be reused at any time.
type knownGroup struct {
	id     int      // 0 if there is no group
	leader *os.File // a pidfd of the leader, which identifies the group even after the leader has ended; may be nil
}

// knowGroup returns the group whose leader is id, a child of parent.
func knowGroup(id, parent int) knownGroup {
	const pidfdOpen = 434
	g := knownGroup{id: id}
	if fd, _, errno := syscall.Syscall(pidfdOpen, uintptr(id), 0, 0); errno == 0 {
		g.leader = os.NewFile(fd, "pidfd")
	}
	if p, ok := proctree.Read(id); !ok || p.Parent != parent { // it has ended
		g.close()
		g.leader = nil
	}
	return g
}

// signal returns ESRCH if there is no process to signal.
func (g knownGroup) signal(sig syscall.Signal) error {
	const (
		pidfdSendSignal = 424
		toGroup         = 1 << 2 // PIDFD_SIGNAL_PROCESS_GROUP
	)
	if g.id == 0 {
		return syscall.ESRCH
	}
	if g.leader != nil {
		_, _, errno := syscall.Syscall6(pidfdSendSignal, g.leader.Fd(), uintptr(sig), 0, toGroup, 0, 0)
		if errno == 0 {
			return nil
		}
		if errno != syscall.EINVAL {
			return errno
		}
	}
	// Before Linux 6.9 only the number can be used. A group never leaves its session, and
	// the program's group was created in tenure's: a group in another session is not it.
	if !g.inThisSession() {
		return syscall.ESRCH
	}
	return syscall.Kill(-g.id, sig)
}

func (g knownGroup) inThisSession() bool {
	this, ok := proctree.Read(os.Getpid())
	for _, p := range proctree.All() {
		if ok && p.Group == g.id {
			return p.Session == this.Session
		}
	}
	return false
}

// onlyZombies reports whether the group has only zombies left, whose parent doesn't collect
// them: PID 1 in some containers never does.
func (g knownGroup) onlyZombies() bool {
	some := false
	for _, p := range proctree.All() {
		if p.Group == g.id {
			if !p.Ended {
				return false
			}
			some = true
		}
	}
	return some
}

func (g knownGroup) close() { g.leader.Close() } // Close accepts a nil file
