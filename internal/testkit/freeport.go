package testkit

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

var given sync.Map

// FreePort returns a port of 127.0.0.1 on which nothing listens, for a server that can't choose
// one itself or has to return to the same one. It never returns a port twice. The port lies below
// the range from which systems assign ports, because another program could get one of those by
// the time the server starts, or starts again.
func FreePort() (int, error) {
	var err error
	for range 100 {
		port := 10_000 + rand.IntN(20_000)
		if _, again := given.LoadOrStore(port, true); again {
			continue
		}
		var l net.Listener
		if l, err = net.Listen("tcp", fmt.Sprint("127.0.0.1:", port)); err == nil {
			return port, l.Close()
		}
	}
	return 0, fmt.Errorf("found no free port: %w", err)
}
