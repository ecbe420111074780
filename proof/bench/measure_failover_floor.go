package main

import (
	"context"
	"slices"
	"time"
)

// failoverFloor measures what any failover on this machine takes beyond the TTL: a
// standby that has slept for a TTL reads the row and writes it. If other processes have
// used the machine's caches in the meantime, that takes much longer than two consecutive
// statements.
func (b *bench) failoverFloor(ctx context.Context, url string) {
	if !slices.ContainsFunc(b.peers, func(p peer) bool { return p.name == floorPeer.name }) {
		return
	}
	took, err := idleThenTake(ctx, url, b.name(), b.samples(30))
	if err != nil {
		b.failed("failover", floorPeer.name, err)
	}
	b.report.addQuantiles("failover", floorPeer.name, "beyond the TTL", took)
}

func idleThenTake(ctx context.Context, url, name string, n int) (took []time.Duration, err error) {
	if err := prepareFloor(ctx, url); err != nil {
		return nil, err
	}
	replica, err := floorPeer.open(ctx, options{url: url, conns: 1})
	if err != nil {
		return nil, err
	}
	defer replica.close()
	contender, err := replica.contender(name)
	if err != nil {
		return nil, err
	}
	floor := contender.(*floorContender)
	if err := floor.acquire(ctx); err != nil {
		return nil, err
	}
	const warm = 2 // rounds that prepare statements
	for i := range warm + n {
		if i >= warm {
			if err := pause(ctx, fastTTL); err != nil {
				return took, err
			}
		}
		began := time.Now()
		if err := floor.read(ctx); err != nil {
			return took, err
		}
		if err := floor.renew(ctx); err != nil {
			return took, err
		}
		if i >= warm {
			took = append(took, time.Since(began))
		}
	}
	return took, nil
}
