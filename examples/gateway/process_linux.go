package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"syscall"
)

// inspectProcess returns a birth mark, which distinguishes a process from all others that
// have had its PID; and whether it is alive, which a zombie is not. If there is no such
// process it returns no error.
func inspectProcess(pid int) (birth string, alive bool, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}
	boot, err := bootID()
	if err != nil {
		return "", false, err
	}
	// The second field is the program's name in parentheses, which may contain anything. It
	// is followed by the state, which is field 3, and, 19 fields later, the start time in
	// ticks since boot.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return "", false, fmt.Errorf("process %d: cannot read its stat %q", pid, stat)
	}
	state := fields[0][0]
	return boot + "/" + string(fields[19]), state != 'Z' && state != 'X', nil
}

var bootID = sync.OnceValues(func() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id)), err
})
