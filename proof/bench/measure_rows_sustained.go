package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

var sustainedMeasure = measure{
	name:  "rows-sustained",
	about: "work on the rows of a large table at half the greatest rate for -duration; only if it is named",
	named: true,
	run:   measureSustained,
}

// measureSustained lets the workers of one process work at half the rate that they reach without a
// pause. All the time, and also when that greatest rate is measured, as many rows are added as are
// finished, and as many old ones deleted.
func measureSustained(ctx context.Context, b *bench) error {
	size, burst := choose(b, 1_000_000, 20_000), choose(b, 40_000, 2000)
	length, portion := b.duration, min(time.Minute, b.duration/4)
	const measure = "rows-sustained"
	url, err := b.postgres.database(ctx)
	if err != nil {
		return err
	}
	opened, err := claimsQueueing.open(ctx, url)
	if err != nil {
		return err
	}
	defer opened.close()
	q := opened.(*claimsQueue)
	if err := q.fill(ctx, size); err != nil {
		return err
	}
	// Nine of ten are done, as in a table that keeps its history.
	if _, err := q.pool.Exec(ctx, `UPDATE tasks SET status = 'done' WHERE id <= $1`, size/10*9); err != nil {
		return err
	}
	if _, err := q.pool.Exec(ctx, `VACUUM ANALYZE tasks`); err != nil {
		return err
	}
	s := &sustained{q: q, ready: 5 * burst}
	if err := s.refill(ctx); err != nil {
		return err
	}
	before := load()
	greatest, err := s.atMost(ctx, b, measure, "before", burst, portion)
	if err != nil {
		return err
	}
	for i := 1; ctx.Err() == nil && length > 0; i++ {
		part := min(portion, length)
		if length -= part; length < portion/2 {
			part, length = part+length, 0
		}
		rate, took, err := s.paced(ctx, greatest/2, part)
		if err != nil {
			return err
		}
		name := fmt.Sprintf("%s %d", part.Round(time.Second), i)
		b.report.add(measure, name, "finished", rate, "rows/s", int(rate*part.Seconds()))
		b.report.addQuantiles(measure, name, "take and finish of 100", took)
		if err := s.tell(ctx, b, measure, name); err != nil {
			return err
		}
		records, _ := b.report.of(measure)
		b.say("%s: %.0f rows/s; %s", name, rate, sizes(records, name))
	}
	if _, err := s.atMost(ctx, b, measure, "after", burst, portion); err != nil {
		return err
	}
	b.report.note(measure, "machine", "load average "+before+" before, "+load()+" after")
	return ctx.Err()
}

func sizes(records []record, name string) (text string) {
	for _, r := range records {
		if r.Peer == name {
			text += fmt.Sprintf("%s %s %s  ", r.Metric, figure(r.Value), r.Unit)
		}
	}
	return text
}

type sustained struct {
	q       *claimsQueue
	ready   int   // the number of ready rows while no worker works
	deleted int64 // the ID of the last row that was deleted
}

// atMost reports how many rows the workers finish per second without a pause, first of a full table
// and then while other rows are added and deleted. It returns the second rate.
func (s *sustained) atMost(ctx context.Context, b *bench, measure, when string, n int, length time.Duration) (rate float64, err error) {
	alone, err := s.burst(ctx, n)
	if err != nil {
		return 0, err
	}
	rate, took, err := s.paced(ctx, math.Inf(1), length)
	if err != nil {
		return 0, err
	}
	name := "at most, " + when
	b.report.add(measure, name, "finished without others being added", alone, "rows/s", n)
	b.report.add(measure, name, "finished", rate, "rows/s", int(rate*length.Seconds()))
	b.report.addQuantiles(measure, name, "take and finish of 100", took)
	b.say("%s: %.0f rows/s; %.0f without others being added", name, rate, alone)
	return rate, s.tell(ctx, b, measure, name)
}

// burst returns how many rows the workers finish per second.
func (s *sustained) burst(ctx context.Context, n int) (rate float64, err error) {
	if _, err := s.q.work(ctx, n/4, batched); err != nil {
		return 0, err
	}
	took, err := s.q.work(ctx, n, batched)
	if err != nil {
		return 0, err
	}
	return float64(n) / took.Seconds(), s.refill(ctx)
}

// refill makes as many rows ready as there were at first.
func (s *sustained) refill(ctx context.Context) error {
	var ready int
	if err := s.q.pool.QueryRow(ctx, `SELECT count(*) FROM tasks WHERE status = 'queued' AND session IS NULL`).Scan(&ready); err != nil {
		return err
	}
	return s.replace(ctx, max(s.ready-ready, 0))
}

// replace adds rows, and deletes as many of the oldest that are done.
func (s *sustained) replace(ctx context.Context, n int) error {
	if err := s.q.fill(ctx, n); err != nil {
		return err
	}
	// It begins after the last deleted row, so that it does not scan deleted rows again.
	return s.q.pool.QueryRow(ctx, `
		WITH gone AS (DELETE FROM tasks WHERE id = ANY(ARRAY(SELECT id FROM tasks WHERE status = 'done' AND id > $1 ORDER BY id LIMIT $2)) RETURNING id)
		SELECT coalesce(max(id), $1) FROM gone`, s.deleted, n).Scan(&s.deleted)
}

// paced works at a given rate. It returns the rate that it reached and the duration of each batch.
func (s *sustained) paced(ctx context.Context, rate float64, length time.Duration) (reached float64, took []time.Duration, err error) {
	workers, working := errgroup.WithContext(ctx)
	var (
		turn     atomic.Int64
		finished atomic.Int64
		mu       sync.Mutex // guards took
	)
	began := time.Now()
	due := func() (time.Time, bool) {
		at := time.Duration(float64(turn.Add(1)*batchSize) / rate * float64(time.Second))
		return began.Add(at), at < length
	}
	taking, stop := context.WithTimeout(working, length) // nothing fills the table after that
	defer stop()
	for range queueWorkers {
		workers.Go(func() error {
			for {
				at, in := due()
				if !in || pause(taking, time.Until(at)) != nil {
					return nil
				}
				from := time.Now()
				got, err := s.q.worker.Take(taking, batchSize)
				if taking.Err() != nil && len(got) == 0 {
					return nil
				}
				if err == nil {
					err = s.q.queue.Finish(working, got...)
				}
				if err != nil {
					return err
				}
				finished.Add(int64(len(got)))
				mu.Lock()
				took = append(took, time.Since(from))
				mu.Unlock()
			}
		})
	}
	over := make(chan struct{})
	workers.Go(func() error {
		for replaced := 0; ; {
			last := false
			select {
			case <-over:
				last = true
			case <-time.After(200 * time.Millisecond):
			}
			n := int(finished.Load()) - replaced
			if err := s.replace(working, n); last || err != nil {
				return err
			}
			replaced += n
		}
	})
	if err := pause(working, length); err == nil {
		reached = float64(finished.Load()) / time.Since(began).Seconds()
	}
	close(over)
	return reached, took, errors.Join(workers.Wait(), s.refill(ctx))
}

// tell reports dead tuples and sizes.
func (s *sustained) tell(ctx context.Context, b *bench, measure, name string) error {
	var dead, vacuums, live int64
	err := s.q.pool.QueryRow(ctx, `SELECT n_dead_tup, autovacuum_count, n_live_tup FROM pg_stat_user_tables WHERE relname = 'tasks'`).Scan(&dead, &vacuums, &live)
	if err != nil {
		return err
	}
	b.report.add(measure, name, "dead tuples", float64(dead), "", 1)
	b.report.add(measure, name, "autovacuums", float64(vacuums), "", 1)
	rows, err := s.q.pool.Query(ctx, `SELECT relname, pg_relation_size(oid) / 1e6::float8 FROM pg_class
		WHERE oid = 'tasks'::regclass OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'tasks'::regclass) ORDER BY relkind DESC, relname`)
	if err != nil {
		return err
	}
	var relation string
	var size float64
	_, err = pgx.ForEachRow(rows, []any{&relation, &size}, func() error {
		b.report.add(measure, name, relation, size, "MB", 1)
		return nil
	})
	return err
}
