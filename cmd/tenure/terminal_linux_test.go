package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// newTerminal returns both ends of a new terminal.
func newTerminal(t *testing.T) (user, terminal *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { user.Close() })
	ask := func(request uintptr, n *int32) {
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, user.Fd(), request, uintptr(unsafe.Pointer(n))); errno != 0 {
			t.Skip(errno)
		}
	}
	var number, locked int32
	ask(syscall.TIOCGPTN, &number)
	ask(syscall.TIOCSPTLCK, &locked)
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { terminal.Close() })
	return user, terminal
}

func TestClosingTheTerminalEndsTenure(t *testing.T) {
	t.Parallel()
	if signal.Ignored(syscall.SIGHUP) {
		t.Skip("SIGHUP is ignored, as under nohup")
	}
	s := sqliteSite(t)
	user, terminal := newTerminal(t)
	cmd := exec.Command(testBinary(t), append([]string{"run", "--key", "svc", "--store", s.store}, s.service(t)...)...)
	cmd.Env = slices.Concat(environ(), []string{asTenure + "=1"})
	cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, terminal, terminal
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	terminal.Close()
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		cmd.Wait()
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-exited
	})
	s.awaitStart(t, 0)
	if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "a SIGHUP from another process is passed to the program", func() bool { return s.has(t, "signal-1") })
	user.Close()
	select {
	case <-exited:
	case <-time.After(soon):
		t.Error("tenure still runs without its terminal")
	}
	if _, held := holding(t, s.open(t)); held {
		t.Error("the lease was not released")
	}
}
