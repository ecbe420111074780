package rig

import (
	"net"
	"slices"
	"sync"
	"time"
)

// Weather is what a proxy does to its traffic. The zero value passes everything on at once.
type Weather struct {
	Refuse                      bool // breaks existing and new connections
	Drop                        bool // drops each piece without an error
	HangRequests, HangAnswers   bool // keeps each piece until the weather changes, as in a partition
	DelayRequests, DelayAnswers time.Duration

	// Lose, if not nil, reports whether the connection breaks before this piece of an answer passes.
	Lose func(piece []byte) bool
}

// Tap sees what passes through one connection of a proxy. Any of its funcs may be nil.
type Tap struct {
	Sent, Answered func(piece []byte) // called before the piece is passed on
	Closed         func()
}

// Proxy stands between clients and a server, and simulates faults of the network between them and
// the end of a client's process.
type Proxy struct {
	tap  func() Tap
	addr string

	mu       sync.Mutex   // guards the fields below
	listener net.Listener // nil: it is shut
	target   string
	now      Weather
	changed  chan struct{} // closed when the weather changes
	conns    map[*conn]struct{}
	closed   bool
	wg       sync.WaitGroup
}

// NewProxy listens for connections and passes them on to a server at a host and port. It asks tap,
// unless that is nil, for the tap of each connection.
func NewProxy(server string, tap func() Tap) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{target: server, tap: tap, listener: l, addr: l.Addr().String(), changed: make(chan struct{}), conns: map[*conn]struct{}{}}
	p.wg.Go(func() { p.accept(l) })
	return p, nil
}

// Addr returns the host and port that clients connect to.
func (p *Proxy) Addr() string { return p.addr }

// Shut makes the proxy listen no longer. New connections are refused, as by a process that has ended.
func (p *Proxy) Shut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		p.listener.Close()
		p.listener = nil
	}
}

// Open makes the proxy listen again.
func (p *Proxy) Open() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil || p.closed {
		return nil
	}
	l, err := net.Listen("tcp", p.addr)
	if err == nil {
		p.listener = l
		p.wg.Go(func() { p.accept(l) })
	}
	return err
}

// Set changes the weather.
func (p *Proxy) Set(w Weather) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now = w
	close(p.changed)
	p.changed = make(chan struct{})
	if w.Refuse {
		p.breakAll()
	}
}

// Redirect makes the proxy pass new connections on to another server, and breaks the existing ones.
func (p *Proxy) Redirect(server string) {
	p.Divert(server)
	p.Cut()
}

// Divert makes the proxy pass new connections on to another server.
func (p *Proxy) Divert(server string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = server
}

// Cut breaks the existing connections.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.breakAll()
}

func (p *Proxy) breakAll() {
	for c := range p.conns {
		c.reset()
	}
}

func (p *Proxy) weather() (Weather, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.now, p.changed
}

// Close breaks all connections and accepts no new ones. It returns when no goroutine is left.
func (p *Proxy) Close() {
	p.Shut()
	p.mu.Lock()
	p.closed = true
	p.breakAll()
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *Proxy) accept(l net.Listener) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(client.(*net.TCPConn)) })
	}
}

// conn is one connection through the proxy.
type conn struct {
	client, server *net.TCPConn
	once           sync.Once
	broken         chan struct{}
}

// reset closes both ends by a reset instead of an orderly shutdown.
func (c *conn) reset() {
	c.once.Do(func() {
		close(c.broken)
		for _, end := range []*net.TCPConn{c.client, c.server} {
			end.SetLinger(0)
			end.Close()
		}
	})
}

func (p *Proxy) serve(client *net.TCPConn) {
	if w, _ := p.weather(); w.Refuse { // without a word to the server, which would start a process for it
		client.SetLinger(0)
		client.Close()
		return
	}
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	server, err := net.Dial("tcp", target)
	if err != nil {
		client.SetLinger(0)
		client.Close()
		return
	}
	c := &conn{client: client, server: server.(*net.TCPConn), broken: make(chan struct{})}
	defer c.reset()
	if !p.keep(c) {
		return
	}
	defer p.forget(c)
	var tap Tap
	if p.tap != nil {
		tap = p.tap()
	}
	var both sync.WaitGroup
	if tap.Closed != nil {
		defer tap.Closed()
	}
	defer both.Wait()
	defer c.reset()
	both.Go(func() {
		defer c.reset()
		p.forward(c, c.server, c.client, tap.Sent, func(w Weather) rule { return rule{w.HangRequests, w.Drop, w.DelayRequests, nil} })
	})
	p.forward(c, c.client, c.server, tap.Answered, func(w Weather) rule { return rule{w.HangAnswers, w.Drop, w.DelayAnswers, w.Lose} })
}

// keep registers a connection, unless new ones are refused.
func (p *Proxy) keep(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.now.Refuse {
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *Proxy) forget(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// rule is the weather in one direction.
type rule struct {
	hang, drop bool
	delay      time.Duration
	lose       func(piece []byte) bool
}

type piece struct {
	at   time.Time
	data []byte
}

// forward passes on what comes from one end, each piece as soon as the weather allows it, until
// one end is closed.
func (p *Proxy) forward(c *conn, to, from *net.TCPConn, tap func([]byte), in func(Weather) rule) {
	pieces := make(chan piece, 1000)
	p.wg.Go(func() {
		defer close(pieces)
		for buf := make([]byte, 16<<10); ; {
			n, err := from.Read(buf)
			if n > 0 {
				select {
				case pieces <- piece{time.Now(), slices.Clone(buf[:n])}:
				case <-c.broken:
					return
				}
			}
			if err != nil {
				return
			}
		}
	})
	for piece := range pieces {
		r, ok := p.await(c, piece.at, in)
		switch {
		case !ok:
			return
		case r.drop:
			continue
		case r.lose != nil && r.lose(piece.data):
			return
		}
		if tap != nil {
			tap(piece.data)
		}
		if _, err := to.Write(piece.data); err != nil {
			return
		}
	}
}

// await returns the rule by which a piece that came at that time may pass, or false when the
// connection is broken.
func (p *Proxy) await(c *conn, came time.Time, in func(Weather) rule) (rule, bool) {
	for {
		w, changed := p.weather()
		r := in(w)
		left := time.Until(came.Add(r.delay))
		if !r.hang && left <= 0 {
			return r, true
		}
		if r.hang {
			left = time.Hour
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-changed:
		case <-c.broken:
			timer.Stop()
			return r, false
		}
		timer.Stop()
	}
}
