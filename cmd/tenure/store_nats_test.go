//go:build unix

package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// startNATS starts a server in this process until the test ends, and returns its URL, whose store
// is synced as far as tenure knows.
func startNATS(t *testing.T, change func(*server.Options)) string {
	t.Helper()
	const memory = "/dev/shm" // a slow disk would be most of what a test does
	where := ""
	if _, err := os.Stat(memory); err == nil {
		where = memory
	}
	dir, err := os.MkdirTemp(where, "tenure-nats")
	if err != nil {
		t.Fatal(err)
	}
	opts := &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true}
	if change != nil {
		change(opts)
	}
	s, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
		eventually(t, soon, dir+" is removed", func() bool { return os.RemoveAll(dir) == nil }) // a server still removes what is left of batches
	})
	if !s.ReadyForConnections(soon) {
		t.Fatal("the server is not ready")
	}
	return fmt.Sprintf("nats://%s/?sync=always", strings.TrimPrefix(s.Addr().String(), "tcp://"))
}

func natsSite(t *testing.T) *site {
	t.Helper()
	return newSite(t, startNATS(t, nil))
}
