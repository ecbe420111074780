package witness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/tenurelib/tenure/internal/report"
)

const soPeerPIDFD = 77

// Listen is the witness of all processes that connect to the socket with this path, until ctx is done; then it returns
// nil. A process connects, at its next acquire at the latest, if its environment variable TENURE_WITNESS is the path, and if it is the first process of a
// container (PID 1): when that is dead, the kernel has killed the whole container. Listen is for a sidecar, which survives
// when the program's container runs out of memory, and shares only the socket's directory with it. It needs Linux 6.5.
// Only processes of this user may connect.
func Listen(ctx context.Context, cfg Config, path string) error {
	cfg, err := cfg.withDefaults()
	if err == nil {
		err = canListen()
	}
	if err != nil {
		return fmt.Errorf("witness: listen: %w", err)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		os.Remove(path) // of an earlier run
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("witness: listen: %w", err)
	}
	defer context.AfterFunc(ctx, func() { listener.Close() })()
	defer report.Flush(cfg.Logger)
	var serving sync.WaitGroup
	defer serving.Wait()
	for {
		conn, err := listener.AcceptUnix()
		if err != nil {
			listener.Close()
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("witness: listen: %w", err)
		}
		serving.Go(func() {
			defer conn.Close()
			if err := serve(ctx, cfg, conn); err != nil {
				cfg.Logger.Error("a process has no witness", "error", err)
			}
		})
	}
}

// canListen returns an error if the kernel cannot identify the process that connects.
func canListen() error {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	defer syscall.Close(fds[0])
	defer syscall.Close(fds[1])
	peer, err := peerOf(fds[0])
	if err != nil {
		return fmt.Errorf("this kernel is too old for a sidecar, which needs Linux 6.5 (%w): run the witness as the parent of the program", err)
	}
	return peer.Close()
}

// peerOf returns a pidfd of the process that has connected, which may be in another namespace.
func peerOf(fd int) (*os.File, error) {
	pidfd, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, soPeerPIDFD)
	if err != nil {
		return nil, os.NewSyscallError("getsockopt", err)
	}
	return os.NewFile(uintptr(pidfd), "process"), nil
}

// serve is the witness of the process that has connected.
func serve(ctx context.Context, cfg Config, conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var peer *os.File
	var user *syscall.Ucred
	err2 := raw.Control(func(fd uintptr) {
		if user, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED); err == nil {
			peer, err = peerOf(int(fd))
		}
	})
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	defer peer.Close()
	if int(user.Uid) != os.Getuid() {
		return fmt.Errorf("a process of user %d has connected, and this one is of user %d", user.Uid, os.Getuid())
	}
	cfg.NoDrain = true // the process has its environment, and so its PGAPPNAME, from another parent
	w := &witness{cfg: cfg, name: newName(), keys: newKeys()}
	defer w.open.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if _, err := conn.Write([]byte(w.name)); err != nil {
		return err
	}
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		w.listen(ctx, conn)
	}()
	awaitDeath(ctx, peer)
	if ctx.Err() != nil {
		return nil
	}
	died := time.Now()
	conn.CloseRead() // the lines that were sent can still be read
	<-heard
	w.release(ctx, died, -1)
	return nil
}

// awaitDeath returns when a process is dead, or ctx is done. The first process of a container dies last.
func awaitDeath(ctx context.Context, process *os.File) {
	poll := struct {
		fd              int32
		events, revents int16
	}{fd: int32(process.Fd()), events: 1} // POLLIN
	for ctx.Err() == nil {
		limit := syscall.NsecToTimespec(int64(time.Second))
		n, _, _ := syscall.Syscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&poll)), 1, uintptr(unsafe.Pointer(&limit)), 0, 0, 0)
		if int(n) == 1 && poll.revents&1 != 0 {
			return
		}
	}
}
