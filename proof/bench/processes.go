package main

import (
	"context"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/procfs"
)

// pid returns the process ID of the server, which is on this machine.
func (p *postgres) pid(ctx context.Context) (int, error) {
	conn, err := pgx.Connect(ctx, p.url)
	if err != nil {
		return 0, err
	}
	defer conn.Close(ctx)
	var backend int
	if err := conn.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&backend); err != nil {
		return 0, err
	}
	process, err := procfs.NewProc(backend)
	if err != nil {
		return 0, err
	}
	stat, err := process.Stat()
	return stat.PPID, err
}

// cpu returns the CPU time that a process and its children have used, including children that have
// ended.
func cpu(pid int) (sum time.Duration) {
	const tick = time.Second / 100
	all, _ := procfs.AllProcs()
	for _, p := range all {
		stat, err := p.Stat()
		switch {
		case err != nil: // it has ended meanwhile
		case p.PID == pid:
			sum += time.Duration(int(stat.UTime+stat.STime)+stat.CUTime+stat.CSTime) * tick
		case stat.PPID == pid:
			sum += time.Duration(stat.UTime+stat.STime) * tick
		}
	}
	return sum
}

// ownCPU returns the CPU time that this process has used.
func ownCPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
