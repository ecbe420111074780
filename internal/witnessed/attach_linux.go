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

// patience is how long a write waits for room in the socket: the kernel keeps few lines, and the witness may have to
// wait for the CPU. If the witness is stopped, one write in each interval waits that long, and the others do not.
const (
	patience = 20 * time.Millisecond
	interval = time.Second
)

// attach connects to the witness that the environment names. If that is a sidecar, which may begin or be restarted later
// than this process, again connects to it once more.
func attach() (_ socket, name string, again attacher, err error) {
	value := os.Getenv(Env)
	os.Unsetenv(Env)
	switch {
	case value == "" || value == "off":
		return nil, "", nil, nil
	case strings.HasPrefix(value, "/") && os.Getpid() != 1:
		return nil, "", nil, errors.New("this process is not the first of its container (PID 1), so its death would not prove that nothing of it is left")
	case strings.HasPrefix(value, "/"):
		return sidecar(value, time.Second)() // an acquire waits for the answer, once
	}
	s, name, err := inherited(value)
	return s, name, nil, err
}

// sidecar returns a func that connects to a sidecar, and waits for its answer no longer than the limit. Later attempts
// are shorter: each holds up an acquire.
func sidecar(path string, limit time.Duration) attacher {
	return func() (socket, string, attacher, error) {
		s, name, err := dial(path, limit)
		again := sidecar(path, limit)
		if err != nil {
			again = sidecar(path, 5*patience)
		}
		if errors.Is(err, errRefused) {
			again = nil
		}
		return s, name, again, err
	}
}

var errRefused = errors.New("it has refused: its log says why")

// dial connects to a sidecar, which answers with its name.
func dial(path string, within time.Duration) (socket, string, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, "", os.NewSyscallError("socket", err)
	}
	var name [64]byte
	n, limit := 0, syscall.NsecToTimeval(int64(within))
	err = errors.Join(
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &limit),
		syscall.Connect(fd, &syscall.SockaddrUnix{Name: path}),
	)
	if err == nil {
		n, err = syscall.Read(fd, name[:])
	}
	if err == nil && n == 0 {
		err = errRefused
	}
	if err != nil {
		syscall.Close(fd)
		return nil, "", fmt.Errorf("connect to %s: %w", path, err)
	}
	return open(fd, string(name[:n]))
}

// inherited takes over the socket of a witness that is the parent of this process, or its parent's.
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
	// The kernel says who has made the socket, by a number of this process's own namespace.
	witness, err := syscall.GetsockoptUcred(fd, syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	if err != nil {
		return nil, "", os.NewSyscallError("getsockopt", err)
	}
	for range 3 { // an ancestor may end while it is looked for
		if witness.Pid > 0 && proctree.Descends(os.Getpid(), int(witness.Pid)) {
			return open(fd, name)
		}
	}
	return nil, "", errors.New("this process is not one of its descendants, so it could not prove that this process is dead")
}

// open returns the socket with a descriptor.
func open(fd int, name string) (socket, string, error) {
	limit := syscall.NsecToTimeval(int64(patience))
	if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit); err != nil {
		return nil, "", os.NewSyscallError("setsockopt", err)
	}
	return &sender{fd: fd}, name, nil
}

// sender sends lines on a socket that blocks for patience at most.
type sender struct {
	fd    int
	after time.Time // a line before then does not block
}

// Write sends a line. If the socket is full, the error is [os.ErrDeadlineExceeded].
func (s *sender) Write(line []byte) (n int, err error) {
	flags := syscall.MSG_NOSIGNAL
	if time.Now().Before(s.after) {
		flags |= syscall.MSG_DONTWAIT
	}
	for {
		n, err = syscall.SendmsgN(s.fd, line, nil, nil, flags)
		switch err {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			if flags&syscall.MSG_DONTWAIT == 0 {
				s.after = time.Now().Add(interval)
			}
			return 0, os.ErrDeadlineExceeded
		}
		return n, err
	}
}
