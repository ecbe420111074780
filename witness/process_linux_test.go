package witness_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

func TestAProgramThatCannotStartItsChildRunsAsWithoutAWitness(t *testing.T) {
	a := newSite(t, "").start(nil, "too long")
	require.Equal(t, []string{"alone", "0"}, a.hears("alone"), "it adopts no orphans")
	kill(t, a.Process.Pid, syscall.SIGTERM)
	a.exits()
	require.Equal(t, syscall.SIGTERM, a.ProcessState.Sys().(syscall.WaitStatus).Signal())
}

// Descriptors of a supervisor, of make, or of a shell: each has its number, and the socket of the witness is none of them.
func TestAProgramInheritsEachDescriptorAtItsNumber(t *testing.T) {
	for _, first := range []int{3, 4} {
		a := exec.Command("/proc/self/exe", fmt.Sprintf("read a <&%d; read b <&7; echo $a $b $TENURE_WITNESS", first))
		a.Env = append(os.Environ(), roleEnv+"=witness", "WITNESS_TEST_PROGRAM=sh")
		a.Stderr = os.Stderr
		a.ExtraFiles = make([]*os.File, 5)
		for fd, text := range map[int]string{first: "one", 7: "two"} {
			out, in, err := os.Pipe()
			require.NoError(t, err)
			_, err = io.WriteString(in, text+"\n")
			require.NoError(t, err)
			in.Close()
			defer out.Close()
			a.ExtraFiles[fd-3] = out
		}
		out, err := a.Output()
		require.NoError(t, err)
		free := map[int]int{3: 4, 4: 3}[first]
		require.Regexp(t, fmt.Sprintf(`^one two [0-9a-f]+:%d:\d+\n$`, free), string(out))
	}
}

func TestATerminalIsGivenBackWhenTheProgramHasEnded(t *testing.T) {
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	defer keyboard.Close()
	var number, unlocked int32
	ioctl := func(request uintptr, arg *int32) {
		_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, keyboard.Fd(), request, uintptr(unsafe.Pointer(arg)))
		require.Zero(t, errno)
	}
	ioctl(syscall.TIOCSPTLCK, &unlocked)
	ioctl(syscall.TIOCGPTN, &number)
	terminal, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	defer terminal.Close()
	_, err = io.WriteString(keyboard, "one\ntwo\n")
	require.NoError(t, err)
	shell := exec.Command("/proc/self/exe")
	shell.Env = append(os.Environ(), roleEnv+"=terminal")
	shell.Stdin = terminal
	shell.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	out, _ := shell.Output()
	require.Equal(t, "one\nended <nil>\ntwo <nil>\n", string(out))
}
