package main

import (
	"errors"
	"os"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// nats is one server in this process, which syncs each write to the disk. It starts when it is
// first needed.
type nats struct {
	mu     sync.Mutex // guards the fields below
	dir    string
	server *server.Server
}

func (n *nats) start() (string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server != nil {
		return n.server.ClientURL(), nil
	}
	var err error
	if n.dir, err = os.MkdirTemp("", "tenure-bench-nats-"); err != nil {
		return "", err
	}
	n.server, err = server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, NoLog: true, NoSigs: true,
		JetStream: true, StoreDir: n.dir, SyncAlways: true,
	})
	if err != nil {
		return "", err
	}
	n.server.Start()
	if !n.server.ReadyForConnections(30 * time.Second) {
		return "", errors.New("nats: not ready after 30 s")
	}
	return n.server.ClientURL(), nil
}

func (n *nats) close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server != nil {
		n.server.Shutdown()
		n.server.WaitForShutdown()
		n.server = nil
	}
	if n.dir == "" {
		return nil
	}
	return os.RemoveAll(n.dir)
}
