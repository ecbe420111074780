package witnessed

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/tenurelib/tenure/internal/proctree"
)

// patience is how long a line waits for room in the socket: the kernel buffers few lines, and the witness may not
// be scheduled. An acquire waits that long if the witness is stopped, but only one acquire does so in each
// interval.
const (
	patience = 20 * time.Millisecond
	interval = time.Second
)

// attach connects to the witness that the environment names.
func attach() (socket, string, error) {
	value := os.Getenv(Env)
	os.Unsetenv(Env)
	switch {
	case value == "" || value == "off":
		return nil, "", nil
	case strings.HasPrefix(value, "/"):
		return dial(value)
	}
	return inherited(value)
}

// dial connects to a sidecar, and asks for a name.
func dial(path string) (socket, string, error) {
	if os.Getpid() != 1 {
		return nil, "", errors.New("this process is not the first of its container (PID 1), so its death would not prove that nothing it has started is left")
	}
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, "", os.NewSyscallError("socket", err)
	}
	var name [64]byte
	n, limit := 0, syscall.Timeval{Sec: 1} // an acquire waits for the answer, once
	err = errors.Join(
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &limit),
		syscall.Connect(fd, &syscall.SockaddrUnix{Name: path}),
	)
	if err == nil {
		n, err = syscall.Read(fd, name[:])
	}
	if err == nil && n == 0 {
		err = errors.New("it has refused: its log says why")
	}
	if err != nil {
		syscall.Close(fd)
		return nil, "", fmt.Errorf("connect to %s: %w", path, err)
	}
	return open(fd, string(name[:n]))
}

// inherited takes over the socket of a witness that is an ancestor of this process.
func inherited(value string) (socket, string, error) {
	var name string
	var fd int
	var inode uint64
	if _, err := fmt.Sscanf(strings.ReplaceAll(value, ":", " "), "%s %d %d", &name, &fd, &inode); err != nil {
		return nil, "", fmt.Errorf("%s is %q: %w", Env, value, err)
	}
	var stat syscall.Stat_t
	if err := syscall.Fstat(fd, &stat); err != nil || stat.Ino != inode || stat.Mode&syscall.S_IFMT != syscall.S_IFSOCK {
		return nil, "", fmt.Errorf("its socket, descriptor %d, was closed before the program began", fd)
	}
	syscall.CloseOnExec(fd)
	// The kernel says which process has made the socket, by its number in this process's namespace.
	witness, err := syscall.GetsockoptUcred(fd, syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	if err != nil {
		return nil, "", os.NewSyscallError("getsockopt", err)
	}
	for range 3 { // an ancestor may end during the search
		if witness.Pid > 0 && proctree.Descends(os.Getpid(), int(witness.Pid)) {
			return open(fd, name)
		}
	}
	return nil, "", errors.New("this process is not one of its descendants, so it could not prove that this process is dead")
}

// open makes a socket from a descriptor.
func open(fd int, name string) (socket, string, error) {
	if err := syscall.SetNonblock(fd, true); err != nil {
		return nil, "", os.NewSyscallError("fcntl", err)
	}
	file := os.NewFile(uintptr(fd), "witness")
	raw, err := file.SyscallConn()
	return &hurried{File: file, raw: raw, patience: patience}, name, err
}

type hurried struct {
	*os.File
	raw      syscall.RawConn
	patience time.Duration
	now      time.Time // a line before then does not wait
}

func (h *hurried) Write(line []byte) (n int, err error) {
	try := func(fd uintptr) (done bool) {
		for {
			if n, err = syscall.Write(int(fd), line); err != syscall.EINTR {
				return err != syscall.EAGAIN
			}
		}
	}
	began := time.Now()
	waits := !began.Before(h.now)
	if waits {
		if err := h.SetWriteDeadline(began.Add(h.patience)); err != nil {
			return 0, err
		}
	}
	if !waits || h.raw.Write(try) != nil {
		// If this process was not scheduled, it may have tried nothing before the deadline.
		if err := h.raw.Control(func(fd uintptr) { try(fd) }); err != nil {
			return 0, err
		}
	}
	if err == syscall.EAGAIN {
		if waits {
			h.now = began.Add(interval)
		}
		return 0, os.ErrDeadlineExceeded
	}
	return n, err
}
