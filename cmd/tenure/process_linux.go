package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// self returns a path of this program that works even if its file has been replaced.
func self() string { return "/proc/self/exe" }

// ownGroup makes a child the leader of its own process group, and has it killed when the
// thread that started it ends.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// becomeSubreaper makes this process the parent of all orphaned descendants, so that it can find
// them.
func becomeSubreaper() error {
	const setChildSubreaper = 36
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, setChildSubreaper, 1, 0); errno != 0 {
		return fmt.Errorf("become subreaper: %w", errno)
	}
	return nil
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
		this, _ := readProcess(os.Getpid())
		for _, p := range processes() {
			if p.parent == this.pid && p.ended && (p.pid != p.group || p.session != this.session) {
				syscall.Wait4(p.pid, nil, syscall.WNOHANG, nil)
			}
		}
		time.Sleep(time.Second) // it has read all of /proc
	}
}

// The first argument of waitid.
const (
	anyChild = 0 // P_ALL
	oneChild = 1 // P_PID
)

// awaitEnd waits until a child has ended, without collecting it: until it is collected,
// its pid is not reused, nor is the number of the process group that it leads.
func awaitEnd(which, pid int) (int, error) {
	var info struct {
		_   [3 + ^uint(0)>>63]int32 // the fields common to all signals
		pid int32
		_   [112]byte
	}
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, uintptr(which), uintptr(pid), uintptr(unsafe.Pointer(&info)),
			syscall.WEXITED|syscall.WNOWAIT, 0, 0)
		switch errno {
		case 0:
			return int(info.pid), nil
		case syscall.EINTR:
		default:
			return 0, errno
		}
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
		awaitEnd(oneChild, cmd.Process.Pid)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // before Wait, so that the pid has not been reused
	}
	tell(report{Returned: true})
	return cmd.Wait()
}

// reap collects all children until there are none, and returns how the program ended. It
// collects the program itself last: until then its number is not reused for another
// process or group, so its group can be signalled as long as anything else is left.
func (p *program) reap() (end ending) {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	for {
		pid, err := awaitEnd(anyChild, 0)
		if err != nil {
			panic(fmt.Sprintf("bug: wait for the program: %v", err))
		}
		if pid == p.pid {
			break
		}
		p.collect(pid, nil)
	}
	close(p.exited)
	for p.collectOthers() {
		<-ended
	}
	// A process that was forked during the search was not seen, and after the program is
	// collected it could no longer be signalled with its group.
	p.signal(-p.pid, syscall.SIGKILL)
	var status syscall.WaitStatus
	p.collect(p.pid, &status)
	for {
		pid, err := awaitEnd(anyChild, 0)
		if err != nil { // no children
			return endingOf(status)
		}
		p.collect(pid, nil)
	}
}

// collectOthers collects the children other than the program that have ended, and
// reports whether any is left.
func (p *program) collectOthers() (left bool) {
	for _, c := range processes() {
		if c.parent == os.Getpid() && c.pid != p.pid && !p.collect(c.pid, nil) {
			left = true
		}
	}
	return left
}

// collect collects a child, and reports whether it had ended.
func (p *program) collect(pid int, status *syscall.WaitStatus) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		got, err := syscall.Wait4(pid, status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if got == pid && pid == p.pid {
			p.free = true
		}
		return got == pid || err != nil
	}
}

// process is a process in /proc.
type process struct {
	pid, parent, group, session int
	ended                       bool // a zombie: its parent has not collected it
}

func readProcess(pid int) (p process, ok bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return p, false // it has ended and was collected
	}
	// The second field is the program's name in parentheses, which may contain anything.
	// It is followed by the state, the parent, the group and the session, and later the
	// number of threads.
	const threads = 17
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= threads {
		return p, false
	}
	number := func(i int) int {
		n, _ := strconv.Atoi(string(fields[i]))
		return n
	}
	// A process whose main thread has ended looks like a zombie, but its other threads run on.
	ended := fields[0][0] == 'Z' && number(threads) <= 1
	return process{pid: pid, parent: number(1), group: number(2), session: number(3), ended: ended}, true
}

func processes() (all []process) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			if p, ok := readProcess(pid); ok {
				all = append(all, p)
			}
		}
	}
	return all
}

// descendants returns the processes that a process has started, directly or indirectly,
// and that have not ended.
func descendants(of int) (found []process) {
	children := make(map[int][]process) // by parent
	for _, p := range processes() {
		if !p.ended {
			children[p.parent] = append(children[p.parent], p)
		}
	}
	for next := children[of]; len(next) > 0; {
		found = append(found, next...)
		var below []process
		for _, p := range next {
			below = append(below, children[p.pid]...)
		}
		next = below
	}
	return found
}

// signal signals a process that was seen among the descendants of descendantOf. It may
// have ended since, and its pid may have been reused. Signal therefore opens a handle first, and
// then checks the pid again: if it still belongs to a descendant, the handle is for that
// process, or for a process that has ended.
func (p process) signal(descendantOf int, sig syscall.Signal) {
	handle, err := os.FindProcess(p.pid)
	if err != nil {
		return
	}
	defer handle.Release()
	if descends(p.pid, descendantOf) {
		handle.Signal(sig)
	}
}

func descends(pid, from int) bool {
	for pid > 1 {
		p, ok := readProcess(pid)
		if !ok {
			return false
		}
		if pid = p.parent; pid == from {
			return true
		}
	}
	return false
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
	if p, ok := readProcess(id); !ok || p.parent != parent { // it has ended
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
	this, ok := readProcess(os.Getpid())
	for _, p := range processes() {
		if ok && p.group == g.id {
			return p.session == this.session
		}
	}
	return false
}

// onlyZombies reports whether the group has only zombies left, whose parent doesn't collect
// them: PID 1 in some containers never does.
func (g knownGroup) onlyZombies() bool {
	some := false
	for _, p := range processes() {
		if p.group == g.id {
			if !p.ended {
				return false
			}
			some = true
		}
	}
	return some
}

func (g knownGroup) close() { g.leader.Close() } // Close accepts a nil file
