package natstenure_test

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/natstenure"
	"github.com/tenurelib/tenure/proof/kills"
	"github.com/tenurelib/tenure/proof/kit"
)

// asVictim turns this process into one of the test below, if it is to be one.
func asVictim() {
	kills.Play(func(ctx context.Context, url string) (kit.FencingStore, error) {
		return natstenure.Open(ctx, url, natstenure.Config{SyncAlways: true, Logger: kit.Quiet})
	})
}

func TestKillsAtRandomInstantsNeitherOverlapNorLeaveALease(t *testing.T) {
	url := startChild(t).url
	kills.Run(t, open(t, url), "nats://"+lag(t, strings.TrimPrefix(url, "nats://")))
}

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
