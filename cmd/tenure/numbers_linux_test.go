package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/proctree"
)

// asInit is an environment variable that makes the test binary, as the first process of a
// PID namespace, run the test of that name as its child.
const asInit = "TENURE_TEST_AS_INIT"

func init() {
	switch {
	case os.Getenv(asInit) != "" && os.Getpid() == 1:
		os.Exit(initialProcess())
	case os.Getenv(asTenure) != "" && len(os.Args) == 2 && os.Args[1] == "headless":
		// The main thread ends, and the process ignores SIGTERM.
		go func() {
			signal.Ignore(syscall.SIGTERM)
			select {}
		}()
		go time.Sleep(time.Hour) // so that the runtime doesn't detect a deadlock
		syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0)
	}
}

// inNamespace reports whether this process may choose PIDs. If not, it runs the test again
// in a PID namespace of its own, where it may.
func inNamespace(t *testing.T) bool {
	t.Helper()
	if os.Getenv(asInit) != "" {
		return true
	}
	cmd := exec.Command(testBinary(t), "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), asInit+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	var failed *exec.ExitError
	switch {
	case err != nil && !errors.As(err, &failed), strings.Contains(string(out), noNamespace):
		t.Skipf("cannot create a PID namespace: %v: %s", err, out)
	case err != nil, !strings.Contains(string(out), "--- PASS: "+t.Name()):
		t.Errorf("in a PID namespace: %v\n%s", err, out)
	}
	return false
}

const noNamespace = "the namespace cannot be used"

// initialProcess is the first process of a namespace. Like any init it collects orphans.
// It returns the exit status of the test.
func initialProcess() int {
	err := errors.Join(
		syscall.Mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""),
		syscall.Mount("proc", "/proc", "proc", 0, ""),
		setNextNumber(100),
	)
	if err != nil {
		fmt.Println(noNamespace, err)
		return 1
	}
	test, err := syscall.ForkExec("/proc/self/exe", os.Args, &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		if pid == test {
			return status.ExitStatus()
		}
		if err != nil && !errors.Is(err, syscall.EINTR) {
			fmt.Println(err)
			return 1
		}
	}
}

// setNextNumber sets the PID of the next process; if it is taken, the next free one is used.
func setNextNumber(pid int) error {
	return os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0)
}

// stranger is a process that has nothing to do with tenure, and leads its own group.
type stranger struct {
	in  io.Writer
	out *bufio.Reader
}

// newStranger starts a stranger with the given PID, or returns nil if that PID cannot be
// had.
func newStranger(t *testing.T, pid int) *stranger {
	t.Helper()
	for range 50 { // threads use up numbers, too
		if err := setNextNumber(pid); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("cat")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			in.Close()
			cmd.Wait()
		})
		if cmd.Process.Pid == pid {
			return &stranger{in, bufio.NewReader(out)}
		}
	}
	return nil
}

// unharmed fails the test if the stranger no longer answers.
func (s *stranger) unharmed(t *testing.T) {
	t.Helper()
	if s == nil {
		return
	}
	fmt.Fprintln(s.in, "hello")
	if line, err := s.out.ReadString('\n'); line != "hello\n" {
		t.Errorf("a stranger was killed: %v", err)
	}
}

// over reports whether a process has ended.
func over(pid int) bool {
	p, ok := proctree.Read(pid)
	return !ok || p.Ended
}

func TestAProcessThatReusesThePIDOfAnEndedProgramIsLeftAlone(t *testing.T) {
	t.Parallel()
	if !inNamespace(t) {
		return
	}
	s := sqliteSite(t)
	daemon := filepath.Join(t.TempDir(), "daemon")
	script := fmt.Sprintf(`setsid sh -c 'trap "" TERM; exec 9>%s; flock 9; echo $$ >%s; sleep 1000' & while ! test -s %[2]s; do sleep 0.01; done`,
		filepath.Join(s.dir, "lock"), daemon)
	r := s.start(t, "a", "--ttl", "9s", "--once", "--", "sh", "-c", script)
	program := r.pid(t, "program")
	eventually(t, soon, "the program ends", func() bool { return over(program) })
	if s.idle() {
		t.Fatal("its daemon has ended too; the test would prove nothing")
	}
	other := newStranger(t, program)
	r.awaitExit(t)
	if !s.idle() {
		t.Error("its daemon is still running")
	}
	other.unharmed(t)
}

func TestAProcessThatReusesThePIDOfAProgramWhoseGuardWasKilledIsLeftAlone(t *testing.T) {
	t.Parallel()
	if !inNamespace(t) {
		return
	}
	s := sqliteSite(t)
	r := s.start(t, "a", s.service(t)...)
	s.awaitStart(t, 0)
	guard, program := r.pid(t, "guard"), r.pid(t, "program")
	r.signal(t, syscall.SIGSTOP)
	if err := syscall.Kill(guard, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "the program is collected", func() bool {
		_, ok := proctree.Read(program)
		return !ok
	})
	other := newStranger(t, program)
	if other == nil {
		t.Fatal("the program's PID cannot be had; the test would prove nothing")
	}
	r.signal(t, syscall.SIGCONT)
	s.awaitStart(t, 1)
	other.unharmed(t)
}

func TestAProcessThatReusesThePIDOfADescendantIsLeftAlone(t *testing.T) {
	t.Parallel()
	if !inNamespace(t) {
		return
	}
	for range 10 { // a thread of this process may have taken the number for good
		if strangerOfADescendant(t) {
			return
		}
	}
	t.Fatal("the child's PID cannot be had; the test would prove nothing")
}

// strangerOfADescendant signals a descendant that has ended, whose PID is a stranger's by
// then. It reports whether the stranger could be given that PID.
func strangerOfADescendant(t *testing.T) bool {
	t.Helper()
	parent := exec.Command("sh", "-c", "sleep 1000 & wait; read forever")
	in, err := parent.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	defer parent.Wait()
	defer parent.Process.Kill()
	var found []proctree.Process
	eventually(t, soon, "it has a child", func() bool {
		found = proctree.Descendants(parent.Process.Pid)
		return len(found) == 1
	})
	child := found[0]
	child.Signal(os.Getpid(), syscall.SIGTERM) // it descends from this process, too
	eventually(t, soon, "it is collected", func() bool {
		_, ok := proctree.Read(child.PID)
		return !ok
	})
	other := newStranger(t, child.PID)
	if other == nil {
		return false
	}
	child.Signal(parent.Process.Pid, syscall.SIGKILL)
	other.unharmed(t)
	return true
}

// This is how a group is told from a stranger's if the kernel cannot signal groups by a
// pidfd.
func TestAGroupOfAnotherSessionIsLeftAlone(t *testing.T) {
	t.Parallel()
	for _, leaves := range []bool{true, false} {
		cmd := exec.Command("sleep", "1000")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: leaves, Setpgid: !leaves}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		err := knownGroup{id: cmd.Process.Pid}.signal(syscall.SIGTERM)
		if errors.Is(err, syscall.ESRCH) != leaves {
			t.Errorf("of another session (%v): %v", leaves, err)
		}
		if leaves {
			cmd.Process.Kill()
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || (exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGTERM) == leaves {
			t.Errorf("of another session (%v): it ended with %v", leaves, err)
		}
	}
}

func TestAProgramThatForksTooFastToBeFoundIsKilledWithItsGroup(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	script := filepath.Join(t.TempDir(), "fork")
	// Each process lives only until it has started the next. After 500 calls a new shell
	// takes over, because no shell nests calls forever.
	const fork = `trap "" TERM; fork() { n=$((n + 1)); if [ $n -gt 500 ]; then exec sh "$0"; fi; fork & }; fork`
	if err := os.WriteFile(script, []byte(fork), 0o600); err != nil {
		t.Fatal(err)
	}
	// The program ends by itself. The processes it leaves behind would have half a minute to
	// end after SIGTERM.
	r := s.start(t, "a", "--ttl", "2m", "--once", "--", "sh", "-c", fmt.Sprintf("exec 9>%s; flock 9; exec sh %s", filepath.Join(s.dir, "lock"), script))
	r.pid(t, "program")
	ended := time.Now()
	r.awaitExit(t)
	if took := time.Since(ended); took > 20*time.Second || !s.idle() {
		t.Errorf("it went on forking, and tenure ended after %v", took)
	}
}

func TestAProcessWhoseMainThreadHasEndedIsAlive(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	r := s.start(t, "a", s.service(t, "headless")...)
	s.awaitStart(t, 0)
	program := r.pid(t, "program")
	eventually(t, soon, "its child's main thread has ended", func() bool {
		return slices.ContainsFunc(proctree.Descendants(program), func(p proctree.Process) bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID))
			return err == nil && strings.Contains(string(stat), ") Z ")
		})
	})
	r.signal(t, syscall.SIGTERM)
	r.awaitExit(t)
	if !s.idle() {
		t.Error("the child is still running")
	}
}
