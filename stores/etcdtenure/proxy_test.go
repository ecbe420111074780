//go:build unix

package etcdtenure_test

import (
	"bytes"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// proxy forwards connections to a server, so that they can be cut.
type proxy struct {
	url string
	to  string

	mu      sync.Mutex
	refuses func(from string) bool // from: the ID of the member that connects, if it is one
	conns   map[net.Conn]string
}

func newProxy(t testing.TB, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{url: "http://" + l.Addr().String(), to: strings.TrimPrefix(to, "http://"), conns: make(map[net.Conn]string)}
	p.restore()
	var all sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); p.cut(); all.Wait() })
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { p.serve(conn) })
		}
	})
	return p
}

func (p *proxy) cut() { p.refuse(func(string) bool { return true }) }

func (p *proxy) restore() { p.refuse(func(string) bool { return false }) }

// refuse ends the connections of those members, and refuses new ones.
func (p *proxy) refuse(which func(from string) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuses = which
	for conn, from := range p.conns {
		if which(from) {
			_ = conn.Close()
		}
	}
}

func (p *proxy) serve(conn net.Conn) {
	defer conn.Close()
	first := make([]byte, 16<<10)
	n, err := conn.Read(first)
	if err != nil {
		return
	}
	_, from, _ := bytes.Cut(first[:n], []byte("X-Server-From: "))
	from, _, _ = bytes.Cut(from, []byte("\r"))
	p.mu.Lock()
	refused := p.refuses(string(from))
	if !refused {
		p.conns[conn] = string(from)
	}
	p.mu.Unlock()
	if refused {
		return
	}
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.conns, conn)
	}()
	server, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer server.Close()
	if _, err := server.Write(first[:n]); err != nil {
		return
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(conn, server)
		_ = conn.Close()
	}()
	_, _ = io.Copy(server, conn)
	_ = server.Close()
	<-ended
}
