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
	"github.com/tenurelib/tenure/internal/report"
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
		if err != nil { // this process may become the program
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

	died, code := time.Now(), proctree.Code(tree.Status())
	killing, stop := context.WithTimeout(ctx, cfg.ReleaseTimeout)
	defer stop()
	if !killAll(killing, tree) {
		cfg.Logger.Error("failed to kill processes that the program has started; its leases will expire", "status", code)
		report.Flush(cfg.Logger)
		return code, nil
	}
	here.CloseRead() // the lines that were sent can still be read, and no process is left to send more
	<-heard
	w.release(ctx, died, code)
	return code, nil
}

// attend passes signals on to the program until the program has ended.
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
			kill = time.After(20 * time.Millisecond) // it may have started more processes meanwhile
		}
	}
}

// killAll kills the processes that the program has left behind, and reports whether all of them are gone. Then none can
// appear again: each orphan becomes a child of this process, so without a child there is no descendant.
func killAll(ctx context.Context, tree *proctree.Tree) bool {
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

// listen notes the lines of the program until its end of the socket is closed.
func (w *witness) listen(ctx context.Context, from *net.UnixConn) {
	line := make([]byte, 1<<18) // the longest that the kernel sends
	for {
		n, err := from.Read(line)
		if n == 0 || err != nil {
			return
		}
		w.note(ctx, line[:n])
	}
}

// socketPair returns the two ends of a connection that keeps lines apart, and the inode of the second.
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

// newName returns a name that no other witness has. It need not be secret: the name is useless without the socket.
func newName() string {
	var name [16]byte
	rand.Read(name[:])
	return hex.EncodeToString(name[:])
}

// passOn returns the signals to pass on to the program, and a func that makes this process handle them as before.
func passOn() (signals chan os.Signal, keep func()) {
	own := []syscall.Signal{
		syscall.SIGKILL, syscall.SIGSTOP, // which cannot be caught
		syscall.SIGCHLD, syscall.SIGURG, syscall.SIGPROF, 32, 33, // for this process and its runtime
		syscall.SIGILL, syscall.SIGTRAP, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV,
		syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGCONT, syscall.SIGPIPE,
	}
	signals = make(chan os.Signal, 64)
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		if !slices.Contains(own, sig) && !signal.Ignored(sig) { // the program ignores it, too
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

// inherited returns the descriptors of the program: all that it would have without a witness, such as the sockets of
// systemd, at the same numbers, and the witness's socket at the first free number.
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

// hasTerminal reports whether this process is in the foreground of the terminal that is its standard input. Then the
// program, which has a process group of its own, has to be put there.
func hasTerminal() bool {
	var group int32
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, 0, syscall.TIOCGPGRP, uintptr(unsafe.Pointer(&group)))
	return errno == 0 && int(group) == syscall.Getpgrp()
}

// takeTerminal puts this process into the foreground of the terminal again.
func takeTerminal() {
	signal.Ignore(syscall.SIGTTOU) // which would stop this process, because it is in the background
	defer signal.Reset(syscall.SIGTTOU)
	group := int32(syscall.Getpgrp())
	syscall.Syscall(syscall.SYS_IOCTL, 0, syscall.TIOCSPGRP, uintptr(unsafe.Pointer(&group)))
}

// unprotect makes the kernel kill the program and not the witness when memory runs out, if the witness is protected: the
// program has inherited the protection.
func unprotect(pid int) {
	const file = "/proc/%s/oom_score_adj"
	own, err := os.ReadFile(fmt.Sprintf(file, "self"))
	if err == nil && strings.HasPrefix(string(own), "-") {
		_ = os.WriteFile(fmt.Sprintf(file, strconv.Itoa(pid)), []byte("0"), 0) // it fails only if the program has ended
	}
}
