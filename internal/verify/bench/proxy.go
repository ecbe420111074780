package main

import (
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// proxy stands between one replica and its server, and does to their
// connections what a network or the end of a process does.
type proxy struct {
	target   string
	listener net.Listener
	dark     atomic.Bool // all traffic is dropped, and nobody is told
	calls    calls

	watch func() func(piece []byte)

	mu     sync.Mutex // guards the fields below
	conns  map[net.Conn]struct{}
	closed bool
	wg     sync.WaitGroup
}

// newProxy listens for connections to the server at a URL. For each of them,
// watch makes what is called with every piece that it sends to the server; nil:
// nobody watches.
func newProxy(server string, watch func() func(piece []byte)) (*proxy, error) {
	u, err := url.Parse(server)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{target: u.Host, listener: l, watch: watch, conns: map[net.Conn]struct{}{}}
	p.wg.Go(p.accept)
	return p, nil
}

// url returns the server's URL, by way of the proxy.
func (p *proxy) url(server string) string {
	u, err := url.Parse(server)
	if err != nil {
		return server
	}
	u.Host = p.listener.Addr().String()
	return u.String()
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

func (p *proxy) serve(client net.Conn) {
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		client.Close()
		return
	}
	if !p.keep(client, server) {
		return
	}
	defer p.drop(client, server)
	watch := func([]byte) {}
	if p.watch != nil {
		watch = p.watch()
	}
	// When one direction ends, the other does too.
	p.wg.Go(func() {
		defer p.drop(client, server)
		p.forward(client, server, func([]byte) { p.calls.answered() })
	})
	p.forward(server, client, func(piece []byte) {
		p.calls.sent(time.Now())
		watch(piece)
	})
}

// forward copies until an end is closed. In the dark it goes on to read, so that
// neither end finds its peer slow.
func (p *proxy) forward(to io.Writer, from io.Reader, pass func([]byte)) {
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && !p.dark.Load() {
			pass(buf[:n])
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// keep notes connections that are open. It returns false, and closes them, where
// the proxy is closed.
func (p *proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		if p.closed {
			c.Close()
			continue
		}
		p.conns[c] = struct{}{}
	}
	return !p.closed
}

func (p *proxy) drop(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		c.Close()
		delete(p.conns, c)
	}
}

// blackhole drops all traffic from now on, silently.
func (p *proxy) blackhole() { p.dark.Store(true) }

// close breaks all connections and takes no new ones: what a server sees when
// its client's process is killed. It returns when no goroutine is left.
func (p *proxy) close() {
	p.listener.Close()
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		c.(*net.TCPConn).SetLinger(0) // a reset, not a farewell
		c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// calls notes when a client last began to talk to its server and was answered.
// Pieces that follow each other closely, in either direction, are one call.
type calls struct {
	mu      sync.Mutex // guards the fields below
	began   time.Time  // of the call that goes on, or of the last
	active  time.Time  // when a piece last passed
	success time.Time  // when the last call began that was answered
}

// quiet is what separates calls. Peers renew every half second or less often.
const quiet = 50 * time.Millisecond

func (c *calls) sent(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.active) > quiet {
		c.began = now
	}
	c.active = now
}

func (c *calls) answered() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.active = time.Now()
	c.success = c.began
}

// unanswered reports whether the last call has had no answer. Whether the server
// did what it asked for, nobody can tell from here.
func (c *calls) unanswered() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.began.Equal(c.success)
}

func (c *calls) lastSuccess() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.success
}
