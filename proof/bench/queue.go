package main

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// queueWorkers is how many workers a queue has.
const queueWorkers = 16

// batchSize is how many rows a worker takes at once if it takes them in batches.
const batchSize = 100

// queue is a process whose workers take rows of a table and finish them.
type queue interface {
	// fill adds rows that are ready.
	fill(ctx context.Context, n int) error

	// work returns when the workers have finished n rows, all that are ready, and how long they took.
	work(ctx context.Context, n int, how manner) (time.Duration, error)

	close()
}

// manner is how a worker takes and finishes rows.
type manner int

const (
	batched  manner = iota // batchSize at once, with nothing to write but that they are done
	singly                 // one at a time, likewise
	singlyTx               // one at a time, and finished in a transaction that also inserts a row elsewhere
	manners
)

func (m manner) String() string {
	return [manners]string{"batches of 100", "singly", "singly, in a transaction with an INSERT"}[m]
}

// queueing is a way to work on the rows of a table.
type queueing struct {
	name string
	open func(ctx context.Context, url string) (queue, error) // also creates its table
}

var queueings = []queueing{claimsQueueing, handQueueing, riverQueueing}

// effectsSchema is what work in the manner of singlyTx writes to. Nothing but the workers keeps an
// ID from being in it twice.
const effectsSchema = `CREATE TABLE IF NOT EXISTS effects (id bigint, worker text)`

const insertEffect = `INSERT INTO effects VALUES ($1, $2)`

// workAll calls some, on as many goroutines as there are workers, until they have finished n rows. some
// returns how many it has finished. Its context ends when there is nothing left to take.
func workAll(ctx context.Context, n int, some func(ctx context.Context) (int, error)) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var left atomic.Int64
	left.Store(int64(n))
	errs := make([]error, queueWorkers)
	var wg sync.WaitGroup
	began := time.Now()
	for w := range queueWorkers {
		wg.Go(func() {
			for ctx.Err() == nil {
				finished, err := some(ctx)
				if left.Add(-int64(finished)) <= 0 {
					cancel()
				}
				if err != nil && ctx.Err() == nil {
					errs[w] = err
					cancel()
				}
			}
		})
	}
	wg.Wait()
	err := errors.Join(errs...)
	if err == nil && left.Load() > 0 {
		err = context.Cause(ctx)
	}
	return time.Since(began), err
}

// queuePool opens a pool that is large enough for all workers.
func queuePool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	return openPool(ctx, options{url: url, conns: queueWorkers + 4})
}
