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

// patience is how long a line waits for room in the socket: the kernel keeps few of them, and the
// witness may not have the CPU. An acquire waits that long if the witness is stopped.
const patience = 20 * time.Millisecond

// attach connects to the witness that the environment names.
func attach() (socket, string, error) {
	value := os.Getenv(Env)
	os.Unsetenv(Env)
	if value == "" || value == "off" {
		return nil, "", nil
	}
	return inherited(value)
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

// open makes a socket of a descriptor.
func open(fd int, name string) (socket, string, error) {
	if err := syscall.SetNonblock(fd, true); err != nil {
		return nil, "", os.NewSyscallError("fcntl", err)
	}
	return hurried{os.NewFile(uintptr(fd), "witness")}, name, nil
}

type hurried struct{ *os.File }

func (h hurried) Write(line []byte) (int, error) {
	if err := h.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return 0, err
	}
	return h.File.Write(line)
}
