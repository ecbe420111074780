package main

import (
	"math/rand/v2"
	"net"
	"net/url"
	"regexp"
	"sync"
	"time"
)

// weather is what a proxy does to its traffic.
type weather struct {
	refuse                     bool // existing and new connections are broken
	hangRequests, hangAnswers  bool // nothing passes until later, without an error, as in a partition
	delayRequests, delayAnswer time.Duration
	loseAnswers                float64 // the probability that the connection breaks after a write and before its answer passes
}

// proxy stands between one replica and the server.
type proxy struct {
	target   string
	listener net.Listener

	mu      sync.Mutex // guards the fields below
	now     weather
	changed chan struct{} // closed when the weather changes
	conns   map[*link]struct{}
	closed  bool
	wg      sync.WaitGroup
}

func newProxy(target string) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{target: target, listener: l, changed: make(chan struct{}), conns: map[*link]struct{}{}}
	p.wg.Go(p.accept)
	return p, nil
}

// url returns the server's URL with the proxy's address.
func (p *proxy) url(server *url.URL) *url.URL {
	through := *server
	through.Host = p.listener.Addr().String()
	return &through
}

func (p *proxy) set(w weather) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now = w
	close(p.changed)
	p.changed = make(chan struct{})
	if w.refuse {
		p.breakAll()
	}
}

// cut breaks the existing connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.breakAll()
}

func (p *proxy) breakAll() {
	for l := range p.conns {
		l.reset()
	}
}

func (p *proxy) weather() (weather, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.now, p.changed
}

// close closes the proxy and returns when no connection and no goroutine is left.
func (p *proxy) close() {
	p.listener.Close()
	p.mu.Lock()
	p.closed = true
	p.breakAll()
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(client.(*net.TCPConn)) })
	}
}

// link is one connection through the proxy.
type link struct {
	client, server *net.TCPConn
	once           sync.Once
	broken         chan struct{}
}

func (l *link) reset() {
	l.once.Do(func() {
		close(l.broken)
		for _, c := range []*net.TCPConn{l.client, l.server} {
			c.SetLinger(0) // close with a reset instead of an orderly shutdown
			c.Close()
		}
	})
}

func (p *proxy) serve(client *net.TCPConn) {
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		client.SetLinger(0)
		client.Close()
		return
	}
	l := &link{client: client, server: server.(*net.TCPConn), broken: make(chan struct{})}
	defer l.reset()
	p.mu.Lock()
	refuse := p.closed || p.now.refuse
	if !refuse {
		p.conns[l] = struct{}{}
	}
	p.mu.Unlock()
	if refuse {
		return
	}
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.conns, l)
	}()
	p.wg.Go(func() {
		defer l.reset()
		p.forward(l, l.server, l.client, func(w weather) (bool, time.Duration) { return w.hangRequests, w.delayRequests }, nil)
	})
	p.forward(l, l.client, l.server, func(w weather) (bool, time.Duration) { return w.hangAnswers, w.delayAnswer }, lost)
}

// written matches the end of Postgres' answer to a statement that changed something, and the
// acknowledgement of a message by NATS.
var written = regexp.MustCompile(`(INSERT 0 1|UPDATE 1|DELETE 1|COMMIT)\x00|\{"stream": ?"` + natsStreamName + `", ?"seq":`)

// maybeWritten also matches Postgres' answer to a delete, which counts the rows that it deletes,
// and etcd's answer to a transaction whose conditions were met, which may have read only: the
// header with its four numbers, and "succeeded".
var maybeWritten = regexp.MustCompile(`SELECT 1\x00|(?s)\x0a.\x08.{4,10}\x10.{4,10}\x18.{1,5}\x20.\x10\x01`)

func lost(w weather, piece []byte) bool {
	switch {
	case w.loseAnswers == 0:
		return false
	case written.Match(piece):
		return rand.Float64() < w.loseAnswers
	case maybeWritten.Match(piece):
		return rand.Float64() < w.loseAnswers/4
	}
	return false
}

type piece struct {
	at   time.Time
	data []byte
}

// forward passes on what comes from one end, each piece as soon as the weather allows it,
// until one end is closed.
func (p *proxy) forward(l *link, to, from *net.TCPConn, rule func(weather) (bool, time.Duration), lost func(weather, []byte) bool) {
	pieces := make(chan piece, 1000)
	p.wg.Go(func() {
		defer close(pieces)
		for {
			buf := make([]byte, 16<<10)
			n, err := from.Read(buf)
			if n > 0 {
				select {
				case pieces <- piece{time.Now(), buf[:n]}:
				case <-l.broken:
					return
				}
			}
			if err != nil {
				return
			}
		}
	})
	for piece := range pieces {
		w, ok := p.await(l, piece.at, rule)
		if !ok || lost != nil && lost(w, piece.data) {
			return
		}
		if _, err := to.Write(piece.data); err != nil {
			return
		}
	}
}

// await returns true when what came at that time may pass, or false when the connection is
// broken.
func (p *proxy) await(l *link, came time.Time, rule func(weather) (bool, time.Duration)) (weather, bool) {
	for {
		w, changed := p.weather()
		hang, delay := rule(w)
		left := time.Until(came.Add(delay))
		if !hang && left <= 0 {
			return w, true
		}
		if hang {
			left = time.Hour
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-changed:
		case <-l.broken:
			timer.Stop()
			return w, false
		}
		timer.Stop()
	}
}
