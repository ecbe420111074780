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

// inspectProcess returns what tells a process from every other that has or had
// its ID, and whether it runs; a zombie does not. No process is no error.
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
	// The second field is the program's name in parentheses, which may hold
	// anything. After it come the state, field 3, and 19 on the start time, in
	// ticks since the boot.
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
