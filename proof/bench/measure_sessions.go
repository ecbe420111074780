package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

var sessionsMeasure = measure{
	name:  "sessions",
	about: "how many processes with a lease each, at the default TTL of 30 s, one Postgres bears before renewals are late",
	named: true,
	run:   measureSessions,
}

// renewals are those of many leases, each of which is renewed by hand as often as a coordinator does. The due times are fixed, so that
// one late renewal does not make the next one less late.
type renewals struct {
	ctx context.Context
	all sync.WaitGroup

	mu     sync.Mutex
	late   []time.Duration // from when a renewal was due until it was answered, since the last take
	failed int
	err    error // of the last one that failed
}

const (
	manyTTL   = 30 * time.Second
	manyEvery = manyTTL / 3
)

// keep renews a lease, at first at a random moment, until the context is done.
func (r *renewals) keep(lease renewer) {
	due := time.Now().Add(rand.N(manyEvery))
	var timer *time.Timer
	renew := func() {
		defer r.all.Done()
		err := lease.renew(r.ctx)
		late := time.Since(due)
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.ctx.Err() != nil {
			return
		}
		if r.late = append(r.late, late); err != nil {
			r.failed, r.err = r.failed+1, err
		}
		due = due.Add(manyEvery)
		r.all.Add(1)
		timer.Reset(time.Until(due))
	}
	r.all.Add(1)
	r.mu.Lock() // the timer is set before it fires
	defer r.mu.Unlock()
	timer = time.AfterFunc(time.Until(due), renew)
}

func (r *renewals) take() (late []time.Duration, failed int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	late, failed, err = r.late, r.failed, r.err
	r.late, r.failed, r.err = nil, 0, nil
	return late, failed, err
}

func measureSessions(ctx context.Context, b *bench) error {
	s, err := b.servers(ctx, []peer{tenurePeer})
	if err != nil {
		return err
	}
	server, err := b.postgres.pid(ctx)
	if err != nil {
		return err
	}
	var stores [9]*replica
	for i := range stores {
		if stores[i], err = tenurePeer.open(ctx, options{url: s[onPostgres], name: fmt.Sprintf("replica-%d", i), conns: 4, ttl: manyTTL}); err != nil {
			return err
		}
		defer stores[i].close()
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &renewals{ctx: ctx}
	defer r.all.Wait()
	defer cancel()
	held := 0
	for _, n := range choose(b, []int{30_240, 60_480, 90_720, 120_960}, []int{720, 1440}) {
		var acquires errgroup.Group
		for _, store := range stores {
			for range 8 {
				acquires.Go(func() error { return r.hold(ctx, b, store, (n-held)/len(stores)/8) })
			}
		}
		if err := acquires.Wait(); err != nil {
			return err
		}
		held = n
		if err := pause(ctx, choose(b, manyEvery, time.Second)); err != nil {
			return err
		}
		r.take()
		before, own, began := cpu(server), ownCPU(), time.Now()
		if err := pause(ctx, choose(b, 2*manyEvery, manyEvery)); err != nil {
			return err
		}
		seconds := time.Since(began).Seconds()
		late, failed, err := r.take()
		name := fmt.Sprintf("%d leases", n)
		if err != nil {
			b.failed("sessions", name, err)
		}
		b.report.add("sessions", name, "renewals", float64(len(late))/seconds, "/s", len(late))
		b.report.addQuantiles("sessions", name, "late", late)
		b.report.add("sessions", name, "latest", milliseconds(percentile(late, 100)), "ms", len(late))
		b.report.add("sessions", name, "failed", float64(failed), "", len(late))
		b.report.add("sessions", name, "CPU of the server", 100*(cpu(server)-before).Seconds()/seconds, "% of a core", 1)
		b.report.add("sessions", name, "of the client", 100*(ownCPU()-own).Seconds()/seconds, "% of a core", 1)
	}
	return nil
}

// hold acquires so many leases, one after another, and keeps them.
func (r *renewals) hold(ctx context.Context, b *bench, store *replica, n int) error {
	for range n {
		c, err := store.contender(b.name())
		if err != nil {
			return err
		}
		if err := c.acquire(ctx); err != nil {
			return err
		}
		r.keep(c.(renewer))
	}
	return nil
}
