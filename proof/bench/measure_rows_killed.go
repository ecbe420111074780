package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"golang.org/x/sync/errgroup"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// rowsKilled measures when the rows of a process that is killed are free, at a TTL of 3 s. Two
// others take and finish them: at work, from the first one on; otherwise, once all are free. Then
// results of the killed one are sent too.
func rowsKilled(ctx context.Context, b *bench, atWork bool) error {
	n, latest, what := choose(b, 100_000, 5000), choose(b, 1000, 100), "killed: "
	if atWork {
		latest, what = 0, "killed, others at work: "
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	url, err := b.postgres.database(ctx)
	if err != nil {
		return err
	}
	proxy, through, err := newProxy(url, nil)
	if err != nil {
		return err
	}
	defer proxy.Close()
	victim, err := openClaimsQueue(ctx, through, fastTTL)
	if err != nil {
		return err
	}
	defer victim.close()
	defer proxy.Close() // otherwise it would release its rows
	var heirs [2]*claimsQueue
	for i := range heirs {
		if heirs[i], err = openClaimsQueue(ctx, url, fastTTL); err != nil {
			return err
		}
		defer heirs[i].close()
	}
	if err := victim.fill(ctx, n); err != nil {
		return err
	}
	had := map[string]claims.Claim{}
	for len(had) < n {
		got, err := victim.worker.Take(ctx, 1000)
		if err != nil {
			return err
		}
		for _, c := range got {
			had[c.Key.ID] = c
		}
	}
	session := victim.session.ID()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)

	var first atomic.Pointer[time.Time]
	var finished, late, accepted atomic.Int64
	free := make(chan struct{})
	working, working1 := errgroup.WithContext(ctx)
	taking, done := context.WithCancel(working1)
	defer done()
	work := func(i int) {
		q, name := heirs[i%len(heirs)], fmt.Sprint("heir ", i%len(heirs))
		working.Go(func() error {
			for {
				got, err := q.worker.Take(taking, 1000)
				if err != nil {
					if finished.Load() == int64(n) {
						return nil
					}
					return err
				}
				now := time.Now()
				first.CompareAndSwap(nil, &now)
				if !atWork {
					<-free
				}
				for _, c := range got {
					if late.Add(1) > int64(latest) {
						break
					}
					err := q.finish(ctx, []claims.Claim{had[c.Key.ID]}, "the killed one")
					if !errors.Is(err, tenure.ErrLost) {
						accepted.Add(1)
					}
				}
				if err := q.finish(ctx, got, name); err != nil {
					return err
				}
				if finished.Add(int64(len(got))) == int64(n) {
					done()
				}
			}
		})
	}
	work(0)
	if atWork {
		work(1)
	}
	watched := func() error {
		if err := pause(ctx, time.Second); err != nil {
			return err
		}
		proxy.Close()
		killed := time.Now()
		renewed, err := lastRenewed(ctx, conn, session)
		if err != nil {
			return err
		}
		for owns := true; owns; {
			err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM tasks WHERE session = $1)`, session).Scan(&owns)
			if err == nil && owns {
				err = pause(ctx, 10*time.Millisecond)
			}
			if err != nil {
				return err
			}
		}
		all, expired := time.Now(), renewed.Add(fastTTL)
		for first.Load() == nil {
			if err := pause(ctx, time.Millisecond); err != nil {
				return err
			}
		}
		b.report.add("rows", claimsQueueing.name, what+"first is taken, beyond the TTL", milliseconds(first.Load().Sub(expired)), "ms", 1)
		b.report.add("rows", claimsQueueing.name, what+"all are free, beyond the TTL", all.Sub(expired).Seconds(), "s", n)
		b.report.add("rows", claimsQueueing.name, what+"first works again", first.Load().Sub(killed).Seconds(), "s", 1)
		return nil
	}
	err = watched()
	close(free)
	if err != nil {
		cancel()
	} else if !atWork {
		work(1)
	}
	if err := errors.Join(err, working.Wait()); err != nil {
		return err
	}
	if !atWork {
		b.report.add("rows", claimsQueueing.name, "late results accepted", float64(accepted.Load()), "", latest)
	}
	var once, more int
	err = conn.QueryRow(ctx, `SELECT count(*), count(*) FILTER (WHERE attempts > 2) FROM tasks WHERE status = 'done' AND session IS NULL AND attempts >= 2`).Scan(&once, &more)
	if err == nil && once != n {
		err = fmt.Errorf("%d rows of %d were taken by others and finished", once, n)
	}
	if err == nil && more > 0 { // an answer was late, or a session was lost, on a busy machine
		b.report.note("rows", "machine", fmt.Sprintf("%s%d rows were taken more than twice", what, more))
	}
	if err == nil {
		err = onceEach(ctx, url, `(SELECT id, '' AS worker FROM effects WHERE worker LIKE 'heir%' UNION ALL SELECT 0, worker FROM effects WHERE worker NOT LIKE 'heir%') e`, n)
	}
	if err == nil {
		b.report.add("rows", claimsQueueing.name, what+"finished once by others", float64(once), "rows", n)
	}
	return err
}

// lastRenewed reads the time in a session's record. The database's clock is that of this machine.
func lastRenewed(ctx context.Context, conn *pgx.Conn, session string) (time.Time, error) {
	var at int64
	err := conn.QueryRow(ctx, `SELECT updated_at_ms FROM objects WHERE object_type = 'tenure.session' AND id = $1`, session).Scan(&at)
	return time.UnixMilli(at), err
}

// riverRescue measures when the jobs of a client that is killed run again, at the shortest setting
// that River accepts without cutting off jobs that run for a second.
func riverRescue(ctx context.Context, b *bench) error {
	const n, longest = 1000, time.Second
	if b.quick {
		return nil // it takes up to a minute
	}
	rescues := func(cfg *river.Config) {
		cfg.JobTimeout, cfg.RescueStuckJobsAfter, cfg.RetryPolicy = longest, longest, riverAtOnce{}
	}
	var firsts, alls []time.Duration
	for range b.samples(3) {
		first, all, err := oneRescue(ctx, b, n, rescues)
		if err != nil {
			return err
		}
		firsts, alls = append(firsts, first), append(alls, all)
	}
	b.report.add("rows", riverQueueing.name, "killed: first works again", percentile(firsts, 50).Seconds(), "s", len(firsts))
	b.report.add("rows", riverQueueing.name, "killed: all work again", percentile(alls, 50).Seconds(), "s", len(alls))
	return nil
}

func oneRescue(ctx context.Context, b *bench, n int, rescues func(*river.Config)) (first, all time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	url, err := b.postgres.database(ctx)
	if err != nil {
		return 0, 0, err
	}
	heirs, err := openRiverQueue(ctx, url)
	if err != nil {
		return 0, 0, err
	}
	defer heirs.close()
	proxy, through, err := newProxy(url, nil)
	if err != nil {
		return 0, 0, err
	}
	defer proxy.Close()
	victims, err := openRiverQueue(ctx, through)
	if err != nil {
		return 0, 0, err
	}
	defer victims.close()

	var began atomic.Int64
	running := make(chan struct{})
	victim, err := victims.client(n, func(ctx context.Context, job *river.Job[riverArgs]) error {
		if began.Add(1) == int64(n) {
			close(running)
		}
		<-ctx.Done()
		return ctx.Err()
	}, rescues)
	if err != nil {
		return 0, 0, err
	}
	var again atomic.Int64
	one, everyone := make(chan struct{}), make(chan struct{})
	heir, err := heirs.client(n, func(ctx context.Context, job *river.Job[riverArgs]) error {
		switch again.Add(1) {
		case 1:
			close(one)
		case int64(n):
			close(everyone)
		}
		return nil
	}, func(cfg *river.Config) {
		rescues(cfg)
		cfg.Queues = map[string]river.QueueConfig{"other": {MaxWorkers: 1}} // until the victim has all jobs
	})
	if err != nil {
		return 0, 0, err
	}

	// The heir is elected first, so that no job waits for an election too.
	if err := heir.Start(ctx); err != nil {
		return 0, 0, err
	}
	defer heir.Stop(context.WithoutCancel(ctx))
	for elected := false; !elected; {
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return 0, 0, err
		}
		if err := heirs.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM river_leader)`).Scan(&elected); err != nil {
			return 0, 0, err
		}
	}
	if err := heirs.fill(ctx, n); err != nil {
		return 0, 0, err
	}
	if err := victim.Start(ctx); err != nil {
		return 0, 0, err
	}
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		_ = victim.StopAndCancel(ending)
	}()
	if err := await(ctx, running); err != nil {
		return 0, 0, err
	}
	proxy.Close()
	killed := time.Now()
	if err := heir.Queues().Add(river.QueueDefault, river.QueueConfig{MaxWorkers: n}); err != nil {
		return 0, 0, err
	}
	if err := await(ctx, one); err != nil {
		return 0, 0, err
	}
	first = time.Since(killed)
	err = await(ctx, everyone)
	return first, time.Since(killed), err
}
