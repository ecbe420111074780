package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
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

// size is the number of rows that a worker takes at once.
func (m manner) size() int {
	if m == batched {
		return batchSize
	}
	return 1
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

// workAll calls some on a goroutine per worker until the workers have finished n rows. Some returns
// the number of rows that it has finished. Its context ends when no row is left to take.
func workAll(ctx context.Context, n int, some func(ctx context.Context) (int, error)) (time.Duration, error) {
	workers, ctx := errgroup.WithContext(ctx)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var left atomic.Int64
	left.Store(int64(n))
	began := time.Now()
	for range queueWorkers {
		workers.Go(func() error {
			for left.Load() > 0 {
				finished, err := some(ctx)
				if err != nil && left.Load() > 0 {
					return err
				}
				if left.Add(-int64(finished)) <= 0 {
					stop()
				}
			}
			return nil
		})
	}
	err := workers.Wait()
	return time.Since(began), err
}

// queuePool opens a pool that is large enough for all workers.
func queuePool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	return openPool(ctx, options{url: url, conns: queueWorkers + 4})
}
