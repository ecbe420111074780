package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// processes are those of a Postgres server on this machine.
type processes struct{ postmaster int }

func (p *postgres) server(ctx context.Context) (processes, error) {
	conn, err := pgx.Connect(ctx, p.url)
	if err != nil {
		return processes{}, err
	}
	defer conn.Close(ctx)
	var backend int
	if err := conn.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&backend); err != nil {
		return processes{}, err
	}
	stat, err := readStat(backend)
	return processes{stat.parent}, err
}

// cpu returns the CPU time that the server's processes have used, those that have ended too.
func (p processes) cpu() (sum time.Duration) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		stat, err := readStat(pid)
		switch {
		case err != nil: // it has ended meanwhile
		case pid == p.postmaster:
			sum += stat.own + stat.children
		case stat.parent == p.postmaster:
			sum += stat.own
		}
	}
	return sum
}

type stat struct {
	parent        int
	own, children time.Duration
}

// readStat reads what Linux says of a process.
func readStat(pid int) (s stat, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return s, err
	}
	// The name in parentheses may contain anything. The state follows it, then the parent.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) < 15 {
		return s, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	ticks := func(i int) time.Duration {
		n, _ := strconv.Atoi(fields[i])
		return time.Duration(n) * time.Second / 100
	}
	s.parent, err = strconv.Atoi(fields[1])
	s.own, s.children = ticks(11)+ticks(12), ticks(13)+ticks(14)
	return s, err
}

// ownCPU returns the CPU time that this process has used.
func ownCPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
