package pgtest

import (
	"io"
	"net"
	neturl "net/url"
	"sync"
	"sync/atomic"
	"testing"
)

// CountRoundTrips returns the URL of a proxy to that server, and a count of how often a
// client's message followed an answer of the server.
func CountRoundTrips(t testing.TB, url string) (proxied string, trips func() int) {
	t.Helper()
	u, err := neturl.Parse(url)
	if err != nil {
		t.Fatal(err)
	}
	server := u.Host
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u.Host = listener.Addr().String()

	var count atomic.Int64
	var all sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	t.Cleanup(func() {
		listener.Close()
		mu.Lock()
		for _, conn := range conns {
			conn.Close()
		}
		mu.Unlock()
		all.Wait()
	})
	all.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			backend, err := net.Dial("tcp", server)
			if err != nil {
				client.Close()
				return
			}
			mu.Lock()
			conns = append(conns, client, backend)
			mu.Unlock()
			var answered atomic.Bool
			answered.Store(true)
			all.Go(func() {
				defer backend.Close()
				io.Copy(backend, onRead(client, func() {
					if answered.Swap(false) {
						count.Add(1)
					}
				}))
			})
			all.Go(func() {
				defer client.Close()
				io.Copy(client, onRead(backend, func() { answered.Store(true) }))
			})
		}
	})
	return u.String(), func() int { return int(count.Load()) }
}

type readHook struct {
	io.Reader
	read func()
}

// onRead calls a func after each read. It hides ReadFrom and WriteTo, which would bypass it.
func onRead(r io.Reader, read func()) io.Reader { return &readHook{r, read} }

func (r *readHook) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if n > 0 {
		r.read()
	}
	return n, err
}
