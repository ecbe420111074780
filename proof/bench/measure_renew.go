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
	type holder struct {
		*crew
		lease renewer
		took  []time.Duration
	}
	var holders []*holder
	_, closeAll, err := openCrews(ctx, b, "renew", 1, func(c *crew) error {
		lease, ok := c.workers[0].(renewer)
		if !ok {
			return nil
		}
		err := lease.acquire(ctx)
		if err == nil {
			holders = append(holders, &holder{crew: c, lease: lease})
		}
		return err
	})
	if err != nil {
		return err
	}
	defer closeAll()

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
