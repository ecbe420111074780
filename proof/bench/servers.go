package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// server is a server with its data on disk in a temporary directory. It starts when it is first
// needed.
type server struct {
	open func(ctx context.Context, dir string) (*rig.Server, error)

	mu      sync.Mutex // guards the fields below
	dir     string
	running *rig.Server
}

func newEtcd() *server {
	return &server{open: func(ctx context.Context, dir string) (*rig.Server, error) {
		etcd, err := rig.NewEtcd(ctx, dir)
		if err != nil {
			return nil, err
		}
		return &etcd.Server, nil
	}}
}

func newNATS() *server {
	return &server{open: func(ctx context.Context, dir string) (*rig.Server, error) {
		return rig.NewNATS(ctx, dir, filepath.Join(dir, "nats.log"))
	}}
}

// newMariaDB returns a server that waits for its disk at each commit, also for that of its binary log.
func newMariaDB() *server {
	return &server{open: func(_ context.Context, dir string) (*rig.Server, error) {
		mariadb, err := rig.NewMariaDB(dir, "--log-bin=binlog", "--sync-binlog=1", "--innodb-flush-log-at-trx-commit=1", "--binlog-format=ROW")
		if err != nil {
			return nil, err
		}
		return &mariadb.Server, nil
	}}
}

func (s *server) start(ctx context.Context) (url string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dir == "" {
		if s.dir, err = os.MkdirTemp("", "tenure-bench-server-"); err != nil {
			return "", err
		}
	}
	if s.running == nil {
		if s.running, err = s.open(ctx, s.dir); err != nil {
			return "", err
		}
	}
	url = s.running.URL.String()
	if s.running.Runs() {
		return url, s.running.AwaitReady(ctx)
	}
	return url, s.running.Start(ctx)
}

// pid returns the process ID of a server that has been started.
func (s *server) pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running.PID()
}

func (s *server) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	if s.running != nil {
		err = s.running.End(syscall.SIGTERM)
	}
	if s.dir != "" {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return err
}
