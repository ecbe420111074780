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
	s, err := b.servers(ctx, b.peers)
	if err != nil {
		return err
	}
	var crews []*crew
	for _, p := range b.peers {
		c, err := openCrew(ctx, b, p, s.url(p))
		if err != nil {
			b.failed("acquire", p.name, err)
			continue
		}
		if c == nil {
			continue
		}
		defer c.replica.close()
		crews = append(crews, c)
	}

	rounds, slice := 10, 500*time.Millisecond
	if b.quick {
		rounds, slice = 3, 200*time.Millisecond
	}
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

// crew is sixteen workers on one replica of a peer.
type crew struct {
	peer    peer
	replica *replica
	workers []stepper

	pairs      []time.Duration // durations of pairs by the first worker alone
	aloneTook  time.Duration
	together16 int // number of pairs by all workers
	took16     time.Duration
}

// openCrew opens a crew whose workers have all done a pair before they are
// measured. It returns nil for a peer that can't be controlled step by step.
func openCrew(ctx context.Context, b *bench, p peer, url string) (*crew, error) {
	r, err := p.open(ctx, options{url: url, name: p.name, timing: endless, conns: acquireWorkers})
	if err != nil {
		return nil, err
	}
	c := &crew{peer: p, replica: r}
	for range acquireWorkers {
		contender, err := r.contender(b.name())
		if err != nil {
			r.close()
			return nil, err
		}
		worker, ok := contender.(stepper)
		if !ok {
			r.close()
			return nil, nil
		}
		c.workers = append(c.workers, worker)
	}
	if err := c.together(ctx, 50*time.Millisecond); err != nil {
		r.close()
		return nil, err
	}
	c.together16, c.took16 = 0, 0
	return c, nil
}

func pair(ctx context.Context, worker stepper) error {
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
