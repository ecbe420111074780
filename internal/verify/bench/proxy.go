package main

import (
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// proxy sits between one replica and its server, and simulates faults of the network and
// the end of a process.
type proxy struct {
	target   string
	listener net.Listener
	dark     atomic.Bool // all traffic is dropped silently
	calls    calls

	watch func() func(piece []byte)

	mu     sync.Mutex // guards the fields below
	conns  map[net.Conn]struct{}
	closed bool
	wg     sync.WaitGroup
}

// newProxy listens for connections to the server at a URL. For each connection, watch
// returns a func that is called with every piece that is sent to the server; watch may be
// nil.
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

// url returns the server's URL with the proxy's address.
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

// forward copies until one end is closed. While traffic is dropped it keeps reading, so
// that neither end blocks.
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

// keep registers open connections. If the proxy is closed, it closes them and returns
// false.
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

// close breaks all connections and accepts no new ones, like the death of the client's
// process. It returns when no goroutine is left.
func (p *proxy) close() {
	p.listener.Close()
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		c.(*net.TCPConn).SetLinger(0) // close with a reset instead of an orderly shutdown
		c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// calls records when a client's last call began, and the last one that was answered.
// Pieces that follow each other closely, in either direction, are one call.
type calls struct {
	mu      sync.Mutex // guards the fields below
	began   time.Time  // start of the current or last call
	active  time.Time  // when a piece last passed
	success time.Time  // start of the last call that was answered
}

// quiet is the pause that separates calls. Peers renew every half second or less often.
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

// unanswered reports whether the last call got no answer. In that case it is unknown
// whether the server did what it was asked for.
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
