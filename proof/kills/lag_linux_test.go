package kills_test

import (
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// lag returns the address of a proxy of a server that seems overloaded: what a process has sent in the last moments
// before its death reaches the server up to three seconds later.
func lag(t *testing.T, server string) (address string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go relay(client, server)
		}
	}()
	return listener.Addr().String()
}

func relay(client net.Conn, address string) {
	defer client.Close()
	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer server.Close()
	go func() {
		defer client.Close()
		_, _ = io.Copy(client, server)
	}()
	dead, sent := make(chan struct{}), make(chan []byte, 1000)
	go func() {
		defer close(sent)
		defer close(dead)
		for {
			some := make([]byte, 4096)
			n, err := client.Read(some)
			if n > 0 {
				sent <- some[:n]
			}
			if err != nil {
				return
			}
		}
	}()
	late := rand.N(3 * time.Second)
	for some := range sent {
		select {
		case <-time.After(2 * time.Millisecond):
		case <-dead:
			time.Sleep(late)
			late = 0
		}
		if _, err := server.Write(some); err != nil {
			return
		}
	}
	time.Sleep(time.Second) // the server completes no write of a client that has gone before the write is read
}
