package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

var handoverMeasure = measure{
	name:  "handover",
	about: "from the call that gives up a lease until the next holder's job runs",
	run:   measureHandover,
}

func measureHandover(ctx context.Context, b *bench) error {
	var eager, pollers []*series
	for _, p := range b.peers {
		one, err := newSeries(ctx, b, p, 1, b.samples(200))
		if err != nil {
			return err
		}
		ten, err := newSeries(ctx, b, p, 10, b.samples(100))
		if err != nil {
			return err
		}
		if p.polls > 0 {
			one.n, ten.n = min(one.n, 21), min(ten.n, 21)
			pollers = append(pollers, one, ten)
		} else {
			eager = append(eager, one, ten)
		}
	}

	// A row of handovers of each peer in turn. The first ones of a row do not count: code that has
	// not run for a while must be fetched from memory first, which says nothing about the peer.
	const row, first = 12, 2
	rows := 0
	for _, h := range eager {
		l, err := h.open(ctx, b.name())
		if err != nil {
			h.fail(err)
			continue
		}
		defer l.close()
		h.lane = l
		rows = max(rows, (h.warm()+h.n+row-first-1)/(row-first))
	}
	err := inTurns(ctx, rows, eager, func(_ int, h *series) error {
		for i := 0; i < row && h.lane != nil && len(h.took) < h.warm()+h.n; i++ {
			took, err := h.lane.handover(ctx)
			if err != nil {
				h.fail(err)
				h.lane = nil
			} else if i >= first {
				h.took = append(h.took, took)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, h := range eager {
		h.took = h.took[min(h.warm(), len(h.took)):]
	}
	if err := notify(ctx, b); err != nil {
		return err
	}
	pollTogether(ctx, b, pollers)
	for _, h := range append(eager, pollers...) {
		h.report(b, "handover", standbys(h.standbys))
	}
	return ctx.Err()
}

func standbys(n int) string {
	if n == 1 {
		return "1 standby"
	}
	return fmt.Sprintf("%d standbys", n)
}

// pollTogether runs the series of polling peers at the same time, each in several lanes,
// because they mostly sleep.
func pollTogether(ctx context.Context, b *bench, all []*series) {
	const lanes = 3
	var wg sync.WaitGroup
	for _, h := range all {
		for range lanes {
			wg.Go(func() { h.fail(h.poll(ctx, b.name(), (h.n+lanes-1)/lanes)) })
		}
	}
	wg.Wait()
}

// series is many handovers of one peer.
type series struct {
	peer     peer
	url      string
	standbys int
	n        int   // how many handovers to measure
	lane     *lane // of a peer that is notified

	mu   sync.Mutex // guards the fields below
	took []time.Duration
	err  error
}

// newSeries creates a database for each series, because a notification disturbs every
// connection that listens in the same database.
func newSeries(ctx context.Context, b *bench, p peer, standbys, n int) (*series, error) {
	s, err := b.servers(ctx, []peer{p})
	return &series{peer: p, url: s.url(p), standbys: standbys, n: n}, err
}

// warm is the number of handovers that don't count, because they open connections and
// prepare statements, until roughly every replica has been the holder once.
func (h *series) warm() int { return h.standbys + 1 }

func (h *series) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = cmp.Or(h.err, err)
}

// poll does n handovers in an election of its own.
func (h *series) poll(ctx context.Context, name string, n int) error {
	const budget = time.Minute
	l, err := h.open(ctx, name)
	if err != nil {
		return err
	}
	defer l.close()
	began := time.Now()
	for range n {
		if time.Since(began) > budget {
			return nil
		}
		took, err := l.handover(ctx)
		if err != nil {
			return err
		}
		h.mu.Lock()
		h.took = append(h.took, took)
		h.mu.Unlock()
	}
	return nil
}

// lane is an election between two handovers.
type lane struct {
	*election
	work   *work
	holder int
	since  time.Time // when the last standby began to compete
}

func (h *series) open(ctx context.Context, name string) (*lane, error) {
	opts := make([]options, h.standbys+1)
	for i := range opts {
		opts[i] = options{url: h.url, timing: fast}
	}
	work, err := startWork(ctx, h.peer, h.url)
	if err != nil {
		return nil, err
	}
	e, err := newElection(ctx, h.peer, name, opts...)
	if err != nil {
		work.close()
		return nil, err
	}
	l := &lane{election: e, work: work}
	if l.holder, err = e.open(); err != nil {
		l.close()
		return nil, err
	}
	l.since = time.Now()
	return l, nil
}

func (l *lane) close() {
	l.work.close()
	l.election.close()
}

// handover first waits until all standbys are ready, and then for a random part of their
// sleep, so that the time of the release is independent of a standby's last read. The
// service works in the meantime.
func (l *lane) handover(ctx context.Context) (time.Duration, error) {
	const settles, works = 25 * time.Millisecond, 2 * time.Millisecond
	ready := l.since.Add(max(settles, l.peer.settles) + l.anyPhase())
	for left := settles; left > 0; left = time.Until(ready) {
		if err := l.work.write(ctx); err != nil {
			return 0, err
		}
		if err := pause(ctx, works); err != nil {
			return 0, err
		}
	}
	next, took, err := l.election.handover(l.holder)
	l.holder, l.since = next, time.Now()
	return took, err
}

func (h *series) report(b *bench, measure, metric string) {
	if h.err != nil {
		b.failed(measure, h.peer.name, fmt.Errorf("%s: %w", metric, h.err))
	}
	b.report.addQuantiles(measure, h.peer.name, metric, h.took)
}

// notify measures how long a notification takes from one connection to another.
func notify(ctx context.Context, b *bench) error {
	if !slices.ContainsFunc(b.peers, func(p peer) bool { return p.name == floorPeer.name }) {
		return nil
	}
	s, err := b.servers(ctx, nil)
	if err != nil {
		return err
	}
	listener, err := pgx.Connect(ctx, s[onPostgres])
	if err != nil {
		return err
	}
	defer listener.Close(ctx)
	sender, err := pgx.Connect(ctx, s[onPostgres])
	if err != nil {
		return err
	}
	defer sender.Close(ctx)
	if _, err := listener.Exec(ctx, `LISTEN bench`); err != nil {
		return err
	}
	var took []time.Duration
	for i := range 10 + b.samples(200) {
		heard := make(chan time.Time, 1)
		go func() {
			if _, err := listener.WaitForNotification(ctx); err == nil {
				heard <- time.Now()
			}
			close(heard)
		}()
		if err := pause(ctx, 2*time.Millisecond); err != nil {
			return err
		}
		began := time.Now()
		if _, err := sender.Exec(ctx, `NOTIFY bench`); err != nil {
			return err
		}
		if at, ok := <-heard; ok && i >= 10 {
			took = append(took, at.Sub(began))
		}
	}
	b.report.addQuantiles("handover", "floor", "NOTIFY alone", took)
	return nil
}
