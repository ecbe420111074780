package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

var (
	statementsMeasure = measure{
		name:  "statements",
		about: "statements and round trips of one acquire, renewal, release and steal",
		run:   measureStatements,
	}
	idleMeasure = measure{
		name:  "idle",
		about: "statements per second of a holder and of a standby, at default timings",
		waits: true,
		run:   measureIdle,
	}
)

// counted is a replica whose statements are counted by a proxy.
type counted struct {
	*replica
	proxy      *rig.Proxy
	statements statements
}

func openCounted(ctx context.Context, p peer, o options) (*counted, error) {
	c := &counted{}
	var err error
	if c.proxy, o.url, err = newProxy(o.url, c.statements.tap); err != nil {
		return nil, err
	}
	if c.replica, err = p.open(ctx, o); err != nil {
		c.proxy.Close()
		return nil, err
	}
	return c, nil
}

func (c *counted) close() {
	c.replica.close()
	c.proxy.Close()
}

func measureStatements(ctx context.Context, b *bench) error {
	s, err := b.servers(ctx, b.peers)
	if err != nil {
		return err
	}
	for _, p := range b.peers {
		if p.on != onPostgres {
			continue // it sends no SQL statements
		}
		if err := countSteps(ctx, b, p, s.url(p)); err != nil {
			b.failed("statements", p.name, err)
		}
	}
	return ctx.Err()
}

func countSteps(ctx context.Context, b *bench, p peer, url string) error {
	c, err := openCounted(ctx, p, options{url: url, name: "replica-0", timing: endless})
	if err != nil {
		return err
	}
	defer c.close()
	worker, err := c.contender(b.name())
	if err != nil {
		return err
	}
	type step struct {
		name string
		do   func(context.Context) error
	}
	steps := []step{{"acquire", worker.acquire}, {"release", worker.release}}
	if r, ok := worker.(renewer); ok {
		steps = []step{{"acquire", worker.acquire}, {"renew", r.renew}, {"release", worker.release}}
	}
	const warm, n = 2, 5
	executed, trips := map[string]int64{}, map[string]int64{}
	for i := range warm + n {
		for _, step := range steps {
			executedBefore, tripsBefore := c.statements.executed.Load(), c.statements.trips.Load()
			if err := step.do(ctx); err != nil {
				return fmt.Errorf("%s: %w", step.name, err)
			}
			// Wait for statements that the peer sends on its own right afterwards.
			if err := pause(ctx, 20*time.Millisecond); err != nil {
				return err
			}
			if i >= warm {
				executed[step.name] += c.statements.executed.Load() - executedBefore
				trips[step.name] += c.statements.trips.Load() - tripsBefore
			}
		}
	}
	add := func(name string, executed, trips int64, n int) {
		b.report.add("statements", p.name, name, float64(executed)/float64(n), "statements", n)
		b.report.add("statements", p.name, name, float64(trips)/float64(n), "trips", n)
	}
	for _, step := range steps {
		add(step.name, executed[step.name], trips[step.name], n)
	}
	if _, ok := worker.(stealer); !ok {
		return nil
	}
	stolen, stolenTrips, err := countSteal(ctx, b, p, url)
	if err != nil {
		return fmt.Errorf("steal: %w", err)
	}
	add("steal", stolen, stolenTrips, 1)
	return nil
}

// countSteal counts the steal of a standby that has watched the lease expire.
func countSteal(ctx context.Context, b *bench, p peer, url string) (executed, trips int64, err error) {
	holder, err := p.open(ctx, options{url: url, name: "replica-1", timing: brief})
	if err != nil {
		return 0, 0, err
	}
	defer holder.close()
	standby, err := openCounted(ctx, p, options{url: url, name: "replica-2", timing: brief})
	if err != nil {
		return 0, 0, err
	}
	defer standby.close()
	// Twice, because the first one prepares statements.
	for range 2 {
		name := b.name()
		old, err := holder.contender(name)
		if err != nil {
			return 0, 0, err
		}
		if err := old.acquire(ctx); err != nil {
			return 0, 0, err
		}
		next, err := standby.contender(name)
		if err != nil {
			return 0, 0, err
		}
		if next.acquire(ctx) == nil {
			return 0, 0, fmt.Errorf("%s was not held", name)
		}
		if err := pause(ctx, briefTTL+50*time.Millisecond); err != nil {
			return 0, 0, err
		}
		executed, trips = standby.statements.executed.Load(), standby.statements.trips.Load()
		if err := next.(stealer).steal(ctx); err != nil {
			return 0, 0, err
		}
		executed, trips = standby.statements.executed.Load()-executed, standby.statements.trips.Load()-trips
	}
	return executed, trips, nil
}

func measureIdle(ctx context.Context, b *bench) error {
	s, err := b.servers(ctx, b.peers)
	if err != nil {
		return err
	}
	watch := choose(b, 2*time.Minute, 10*time.Second)
	var wg sync.WaitGroup
	for _, p := range b.peers {
		if p.on != onPostgres || !p.expires {
			continue
		}
		wg.Go(func() {
			if err := countIdle(ctx, b, p, s.url(p), watch); err != nil {
				b.failed("idle", p.name, err)
			}
		})
	}
	wg.Wait()
	return ctx.Err()
}

func countIdle(ctx context.Context, b *bench, p peer, url string, watch time.Duration) error {
	var counts [2]statements
	opts := make([]options, 2)
	for i := range opts {
		proxy, through, err := newProxy(url, counts[i].tap)
		if err != nil {
			return err
		}
		defer proxy.Close()
		opts[i].url = through
	}
	e, err := newElection(ctx, p, b.name(), opts...)
	if err != nil {
		return err
	}
	defer e.close()
	if _, err := e.open(); err != nil {
		return err
	}
	const start = 5 * time.Second
	if err := pause(ctx, start); err != nil {
		return err
	}
	before := [2]int64{counts[0].executed.Load(), counts[1].executed.Load()}
	if err := pause(ctx, watch); err != nil {
		return err
	}
	for i, role := range []string{"holder", "standby"} {
		n := counts[i].executed.Load() - before[i]
		b.report.add("idle", p.name, role, float64(n)/watch.Seconds(), "statements/s", int(n))
	}
	return nil
}
