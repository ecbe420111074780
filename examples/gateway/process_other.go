//go:build unix && !linux

package main

import (
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
)

// inspectProcess returns a birth mark, which distinguishes a process from all others that
// have had its PID, as precisely as ps allows; and whether it is alive, which a zombie is
// not. If there is no such process it returns no error.
func inspectProcess(pid int) (birth string, alive bool, err error) {
	cmd := exec.Command("ps", "-o", "lstart=,stat=", "-p", strconv.Itoa(pid))
	cmd.Env = []string{"LC_ALL=C", "TZ=UTC"} // so that the output doesn't depend on the user's settings
	out, err := cmd.Output()
	fields := strings.Fields(string(out))
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && len(fields) == 0 && len(exit.Stderr) == 0 {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("ps of process %d: %w", pid, err)
	}
	if len(fields) < 2 {
		return "", false, fmt.Errorf("ps of process %d: cannot read %q", pid, out)
	}
	last := len(fields) - 1
	return strings.Join(fields[:last], " "), fields[last][0] != 'Z', nil
}
