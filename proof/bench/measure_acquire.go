package main

import (
	"context"
	"fmt"
	"time"
)

var acquireMeasure = measure{
	name:  "acquire",
	about: "acquire and release a free lease, by 1 worker and by 16 with a lease each",
	run:   measureAcquire,
}

const acquireWorkers = 16

func measureAcquire(ctx context.Context, b *bench) error {
	crews, closeAll, err := openCrews(ctx, b, "acquire", acquireWorkers, func(c *crew) error {
		err := c.together(ctx, 50*time.Millisecond) // opens connections and prepares statements
		c.together16, c.took16 = 0, 0
		return err
	})
	if err != nil {
		return err
	}
	defer closeAll()
	rounds, slice := choose(b, 10, 3), choose(b, 500*time.Millisecond, 200*time.Millisecond)
	n := b.samples(2000)
	err = inTurns(ctx, rounds, crews, func(_ int, c *crew) error { return c.alone(ctx, (n+rounds-1)/rounds) })
	if err == nil {
		err = inTurns(ctx, rounds, crews, func(_ int, c *crew) error { return c.together(ctx, slice) })
	}
	if err != nil {
		return err
	}
	for _, c := range crews {
		c.report(b.report)
	}
	return nil
}

// crew is the workers on one replica of a peer.
type crew struct {
	peer    peer
	replica *replica
	workers []contender

	pairs      []time.Duration // durations of pairs by the first worker alone
	aloneTook  time.Duration
	together16 int // number of pairs by all workers
	took16     time.Duration
}

// openCrews opens a crew for each peer, and calls begin with each. A worker that is alone has the
// peer's default number of connections.
func openCrews(ctx context.Context, b *bench, measure string, workers int, begin func(*crew) error) (crews []*crew, closeAll func(), err error) {
	s, err := b.servers(ctx, b.peers)
	if err != nil {
		return nil, nil, err
	}
	for _, p := range b.peers {
		c := &crew{peer: p}
		if err := c.open(ctx, b, s.url(p), workers); err != nil {
			b.failed(measure, p.name, err)
		} else if err := begin(c); err != nil {
			c.replica.close()
			b.failed(measure, p.name, err)
		} else {
			crews = append(crews, c)
		}
	}
	return crews, func() {
		for _, c := range crews {
			c.replica.close()
		}
	}, nil
}

func (c *crew) open(ctx context.Context, b *bench, url string, workers int) (err error) {
	o := options{url: url, name: c.peer.name, timing: endless}
	if workers > 1 {
		o.conns = workers
	}
	if c.replica, err = c.peer.open(ctx, o); err != nil {
		return err
	}
	c.workers = make([]contender, workers)
	for i := range c.workers {
		if c.workers[i], err = c.replica.contender(b.name()); err != nil {
			c.replica.close()
			return err
		}
	}
	return nil
}

func pair(ctx context.Context, worker contender) error {
	if err := worker.acquire(ctx); err != nil {
		return err
	}
	return worker.release(ctx)
}

func (c *crew) alone(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	began := time.Now()
	for range n {
		one := time.Now()
		if err := pair(ctx, c.workers[0]); err != nil {
			return fmt.Errorf("%s: %w", c.peer.name, err)
		}
		c.pairs = append(c.pairs, time.Since(one))
	}
	c.aloneTook += time.Since(began)
	return nil
}

func (c *crew) together(ctx context.Context, length time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	n, took, err := repeat(ctx, len(c.workers), length, func(ctx context.Context, worker int) error { return pair(ctx, c.workers[worker]) })
	if err != nil {
		return fmt.Errorf("%s: %w", c.peer.name, err)
	}
	c.together16 += n
	c.took16 += took
	return nil
}

func (c *crew) report(r *report) {
	name := c.peer.name
	r.addQuantiles("acquire", name, "pair", c.pairs)
	r.add("acquire", name, "1 worker", float64(len(c.pairs))/c.aloneTook.Seconds(), "pairs/s", len(c.pairs))
	r.add("acquire", name, "16 workers", float64(c.together16)/c.took16.Seconds(), "pairs/s", c.together16)
}
