package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

var scaleMeasure = measure{
	name:  "scale",
	about: "pairs of acquire and release by 1 to 64 workers, and claims by 1,000 to 1,000,000 keys; only if it is named",
	named: true,
	run: func(ctx context.Context, b *bench) error {
		return errors.Join(scaleWorkers(ctx, b), scaleKeys(ctx, b))
	},
}

// scaleWorkers has a new crew for each peer, number of workers and round, because its connections are its own.
func scaleWorkers(ctx context.Context, b *bench) error {
	s, err := b.servers(ctx, b.peers)
	if err != nil {
		return err
	}
	type size struct {
		peer    peer
		workers int
		pairs   int
		took    time.Duration
	}
	var sizes []*size
	for _, p := range b.peers {
		for workers := 1; workers <= choose(b, 64, 4); workers *= 2 {
			sizes = append(sizes, &size{peer: p, workers: workers})
		}
	}
	err = inTurns(ctx, choose(b, 3, 1), sizes, func(_ int, of *size) error {
		c := &crew{peer: of.peer}
		if err := c.open(ctx, b, s.url(of.peer), of.workers); err != nil {
			return err
		}
		defer c.replica.close()
		if err := c.together(ctx, 100*time.Millisecond); err != nil { // opens connections and prepares statements
			return err
		}
		c.together16, c.took16 = 0, 0
		err := c.together(ctx, choose(b, 700*time.Millisecond, 50*time.Millisecond))
		of.pairs, of.took = of.pairs+c.together16, of.took+c.took16
		return err
	})
	for _, of := range sizes {
		if of.took > 0 {
			b.report.add("scale", of.peer.name, fmt.Sprintf("%d workers", of.workers), float64(of.pairs)/of.took.Seconds(), "pairs/s", of.pairs)
		}
	}
	return err
}

// scaleKeys claims and releases more and more keys of one process.
func scaleKeys(ctx context.Context, b *bench) error {
	s, err := b.servers(ctx, []peer{tenurePeer})
	if err != nil {
		return err
	}
	for n := 1000; n <= choose(b, 1_000_000, 10_000); n *= 10 {
		owner, err := claimsOwnership.open(ctx, s[onPostgres], 30*time.Second)
		if err != nil {
			return err
		}
		if err := owner.claim(ctx, keyNames("first", 1000)); err != nil {
			return errors.Join(err, owner.release(ctx))
		}
		began := time.Now()
		err = owner.claim(ctx, keyNames(fmt.Sprint(n), n))
		claimed := time.Since(began)
		began = time.Now()
		if err = errors.Join(err, owner.release(ctx)); err != nil {
			return err
		}
		b.report.add("scale", claimsOwnership.name, fmt.Sprintf("claim %d keys", n), float64(n)/claimed.Seconds(), "keys/s", n)
		b.report.add("scale", claimsOwnership.name, fmt.Sprintf("release %d keys", n), float64(n+1000)/time.Since(began).Seconds(), "keys/s", n)
		owner.close()
	}
	return nil
}
