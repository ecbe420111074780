package main

import (
	"context"
	"fmt"
	"time"
)

var pollMeasure = measure{
	name:  "handover-poll",
	about: "handover of tenure without LISTEN to 1 standby, for several AcquireIntervals",
	run:   measurePoll,
}

func measurePoll(ctx context.Context, b *bench) error {
	var all []*series
	for _, p := range b.peers {
		if p.name != tenurePollPeer.name {
			continue
		}
		for _, interval := range []time.Duration{time.Second / 4, time.Second / 2, time.Second} {
			p.polls = interval
			h, err := newSeries(ctx, b, p, 1, min(b.samples(60), 60))
			if err != nil {
				return err
			}
			h.interval = interval
			all = append(all, h)
		}
	}
	pollTogether(ctx, b, all, 5)
	for _, h := range all {
		h.report(b, "handover-poll", fmt.Sprintf("interval %v", h.interval))
	}
	return ctx.Err()
}
