package witness

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/tenurelib/tenure/internal/proctree"
	"github.com/tenurelib/tenure/internal/witnessed"
)

const supported = true

// run starts a program and is its witness.
func run(cfg Config, program string, args []string) (status int, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("witness: run: %w", err)
		}
	}()
	if cfg, err = cfg.withDefaults(); err != nil {
		return 0, err
	}
	path, err := exec.LookPath(program)
	if err != nil {
		return 0, err
	}
	here, there, inode, err := socketPair()
	if err != nil {
		return 0, err
	}
	defer here.Close()
	defer there.Close()
	files, socket, err := inherited(there.Fd())
	if err != nil {
		return 0, err
	}
	if err := proctree.BecomeSubreaper(); err != nil {
		return 0, err
	}
	w := &witness{cfg: cfg, name: newName(), keys: newKeys()}
	signals, keep := passOn()
	terminal := hasTerminal()
	defer func() {
		if terminal {
			takeTerminal()
		}
		if err != nil { // this process may be the program now
			keep()
			proctree.ResignAsSubreaper()
		}
	}()
	tree := proctree.New(false)
	env := slices.DeleteFunc(slices.Clone(cfg.Env), func(v string) bool { return strings.HasPrefix(v, witnessed.Env+"=") })
	env = append(env, fmt.Sprintf("%s=%s:%d:%d", witnessed.Env, w.name, socket, inode))
	if !cfg.NoDrain {
		name := cmp.Or(os.Getenv("PGAPPNAME"), filepath.Base(args[0]))
		env = append(slices.DeleteFunc(env, func(v string) bool { return strings.HasPrefix(v, "PGAPPNAME=") }), "PGAPPNAME="+w.appName(name))
	}
	pid, err := tree.Start(path, args, &syscall.ProcAttr{Env: env, Files: files, Sys: &syscall.SysProcAttr{Setpgid: true, Foreground: terminal}})
	there.Close()
	if err != nil {
		return 0, err
	}
	unprotect(pid)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		w.listen(ctx, here)
	}()
	w.attend(tree, signals)

	died := time.Now()
	code := tree.Status().ExitStatus()
	if tree.Status().Signaled() {
		code = 128 + int(tree.Status().Signal())
	}
	burying, stop := context.WithTimeout(ctx, cfg.ReleaseTimeout)
	defer stop()
	if !isGone(burying, tree) {
		cfg.Logger.Error("processes that the program has started cannot be killed; its leases have to expire", "status", code)
		return code, nil
	}
	// The kernel keeps what the dead have said; nobody can say more.
	here.CloseRead()
	<-heard
	w.release(ctx, died, code)
	return code, nil
}

// attend passes signals on to the program until it has ended.
func (w *witness) attend(tree *proctree.Tree, signals <-chan os.Signal) {
	var kill <-chan time.Time
	for {
		select {
		case <-tree.Exited():
			return
		case sig := <-signals:
			tree.Signal(sig.(syscall.Signal))
			if sig == syscall.SIGTERM && w.cfg.StopTimeout > 0 && kill == nil {
				kill = time.After(w.cfg.StopTimeout)
			}
		case <-kill:
			tree.Kill()
			kill = time.After(20 * time.Millisecond) // it may have started more meanwhile
		}
	}
}

// isGone kills what the program has left behind, and reports whether nothing of it is left. That is certain: each
// orphan becomes a child of this process, so when there is no child, there is no descendant, and none can appear.
func isGone(ctx context.Context, tree *proctree.Tree) bool {
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		select {
		case <-tree.Gone():
			return true
		case <-time.After(pause):
			tree.Kill()
		case <-ctx.Done():
			return false
		}
	}
}

// listen notes what the program tells until it is dead, and then the rest.
func (w *witness) listen(ctx context.Context, from *net.UnixConn) {
	line := make([]byte, 1<<18) // the kernel sends none that is longer
	for {
		n, err := from.Read(line)
		if n == 0 || err != nil {
			return
		}
		w.note(ctx, line[:n])
	}
}

// socketPair returns both ends of a connection that keeps lines apart, and the inode of the other one.
func socketPair() (here *net.UnixConn, there *os.File, inode uint64, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, 0, os.NewSyscallError("socketpair", err)
	}
	there = os.NewFile(uintptr(fds[1]), "program")
	own := os.NewFile(uintptr(fds[0]), "witness")
	defer own.Close()
	conn, err := net.FileConn(own)
	var stat syscall.Stat_t
	if err == nil {
		err = os.NewSyscallError("fstat", syscall.Fstat(fds[1], &stat))
	}
	if err != nil {
		there.Close()
		return nil, nil, 0, err
	}
	return conn.(*net.UnixConn), there, stat.Ino, nil
}

// newName returns a name that no other witness has. It need not be secret: a process counts as the witness's only if
// it has its socket.
func newName() string {
	var name [16]byte
	rand.Read(name[:])
	return hex.EncodeToString(name[:])
}

// passOn returns the signals that are for the program, and a func after which they are this process's own.
func passOn() (signals chan os.Signal, keep func()) {
	own := []syscall.Signal{
		syscall.SIGKILL, syscall.SIGSTOP, // nobody gets these
		syscall.SIGCHLD, syscall.SIGURG, syscall.SIGPROF, 32, 33, // for this process, and its runtime
		syscall.SIGILL, syscall.SIGTRAP, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV,
		syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGCONT, syscall.SIGPIPE,
	}
	signals = make(chan os.Signal, 64)
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		if !slices.Contains(own, sig) && !signal.Ignored(sig) { // the program inherits what is ignored
			signal.Notify(signals, sig)
		}
	}
	dropped := make(chan os.Signal, 1)
	if !signal.Ignored(syscall.SIGPIPE) {
		signal.Notify(dropped, syscall.SIGPIPE) // a closed log must not end the witness
	}
	return signals, func() {
		signal.Stop(signals)
		signal.Stop(dropped)
	}
}

// inherited returns the descriptors of the program: those that it would have without a witness, at their numbers, for
// example sockets of systemd, and the socket at the first free one.
func inherited(socket uintptr) (files []uintptr, at int, err error) {
	const closed = ^uintptr(0)
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, 0, err
	}
	files = []uintptr{0, 1, 2}
	for _, entry := range entries {
		fd, err := strconv.Atoi(entry.Name())
		if err != nil || fd < len(files) && files[fd] != closed {
			continue
		}
		flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0)
		if errno != 0 || flags&syscall.FD_CLOEXEC != 0 {
			continue
		}
		for len(files) <= fd {
			files = append(files, closed)
		}
		files[fd] = uintptr(fd)
	}
	if at = slices.Index(files, closed); at < 0 {
		at = len(files)
		files = append(files, closed)
	}
	files[at] = socket
	return files, at, nil
}

// hasTerminal reports whether this process is in the foreground of the terminal that is its input. The program, which
// gets a group of its own, is then.
func hasTerminal() bool {
	var group int32
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, 0, syscall.TIOCGPGRP, uintptr(unsafe.Pointer(&group)))
	return errno == 0 && int(group) == syscall.Getpgrp()
}

// takeTerminal puts this process into the foreground of the terminal again.
func takeTerminal() {
	signal.Ignore(syscall.SIGTTOU) // that it is in the background now does not stop it
	defer signal.Reset(syscall.SIGTTOU)
	group := int32(syscall.Getpgrp())
	syscall.Syscall(syscall.SYS_IOCTL, 0, syscall.TIOCSPGRP, uintptr(unsafe.Pointer(&group)))
}

// unprotect makes the kernel kill the program rather than its witness when memory runs out, if the witness is
// protected from that.
func unprotect(pid int) {
	const file = "/proc/%s/oom_score_adj"
	own, err := os.ReadFile(fmt.Sprintf(file, "self"))
	if err == nil && strings.HasPrefix(string(own), "-") {
		_ = os.WriteFile(fmt.Sprintf(file, strconv.Itoa(pid)), []byte("0"), 0) // raising it is always allowed, if the program still runs
	}
}
