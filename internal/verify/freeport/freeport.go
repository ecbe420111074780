// Package freeport finds ports for servers that can't choose one themselves, or have to come
// back on the one they had.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

var given sync.Map

// Find returns a port of 127.0.0.1 on which nothing listens, and which this process has not been
// given before. It lies below the range from which systems assign ports: one of those could be
// somebody else's by the time the server starts, or starts again.
func Find() (int, error) {
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
