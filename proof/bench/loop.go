package main

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// inTurns calls do for each element in every round. The order is random, so that changes in the
// machine's speed, and writes that a peer leaves to the disk, affect all elements alike.
func inTurns[T any](ctx context.Context, rounds int, all []T, do func(round int, one T) error) error {
	for round := range rounds {
		for _, i := range rand.Perm(len(all)) {
			if err := do(round, all[i]); err != nil {
				return err
			}
			if err := ctx.Err(); err != nil {
				return err
			}
		}
	}
	return nil
}

// repeat lets workers repeat an operation until the time has passed or one of them fails. It
// returns the number of operations and how long they took.
func repeat(ctx context.Context, workers int, length time.Duration, do func(ctx context.Context, worker int) error) (n int, took time.Duration, err error) {
	var done atomic.Int64
	began := time.Now()
	all, ctx := errgroup.WithContext(ctx)
	for worker := range workers {
		all.Go(func() error {
			for time.Since(began) < length {
				if err := do(ctx, worker); err != nil {
					return err
				}
				done.Add(1)
			}
			return nil
		})
	}
	err = all.Wait()
	return int(done.Load()), time.Since(began), err
}
