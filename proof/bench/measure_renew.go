package main

import (
	"context"
	"fmt"
	"time"
)

var renewMeasure = measure{
	name:  "renew",
	about: "renew a lease, compared with a bare UPDATE of one row",
	run:   measureRenew,
}

func measureRenew(ctx context.Context, b *bench) error {
	s, err := b.servers(ctx, b.peers)
	if err != nil {
		return err
	}
	type holder struct {
		peer  peer
		lease renewer
		took  []time.Duration
	}
	var holders []*holder
	for _, p := range b.peers {
		r, err := p.open(ctx, options{url: s.url(p), name: p.name, timing: endless})
		if err != nil {
			b.failed("renew", p.name, err)
			continue
		}
		defer r.close()
		c, err := r.contender(b.name())
		if err != nil {
			return err
		}
		lease, ok := c.(renewer)
		if !ok {
			continue
		}
		if err := lease.acquire(ctx); err != nil {
			b.failed("renew", p.name, err)
			continue
		}
		holders = append(holders, &holder{peer: p, lease: lease})
	}

	// The first renewals open connections and prepare statements.
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	warm, n := 20, b.samples(2000)
	err = inTurns(ctx, warm+n, holders, func(i int, h *holder) error {
		began := time.Now()
		if err := h.lease.renew(ctx); err != nil {
			return fmt.Errorf("%s: %w", h.peer.name, err)
		}
		if i >= warm {
			h.took = append(h.took, time.Since(began))
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, h := range holders {
		b.report.addQuantiles("renew", h.peer.name, "renew", h.took)
	}
	return nil
}
