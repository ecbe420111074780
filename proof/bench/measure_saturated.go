package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

var saturatedMeasure = measure{
	name:  "saturated",
	about: "how late renewals are while the application keeps its pool busy for 10 s",
	run:   measureSaturated,
}

const (
	saturatedConns   = 8
	saturatedCallers = 64
	saturatedLeases  = 3 // per peer, each on its own pool
)

func measureSaturated(ctx context.Context, b *bench) error {
	s, err := b.servers(ctx, b.peers)
	if err != nil {
		return err
	}
	load := choose(b, 10*time.Second, 5*time.Second)
	var all []*lateness
	for _, p := range b.peers {
		if p.versionSQL == "" {
			continue
		}
		all = append(all, &lateness{peer: p, url: s.url(p), pool: "the application's pool"})
		if p.ownPool {
			all = append(all, &lateness{peer: p, url: s.url(p), pool: "a pool of its own"})
		}
	}
	var wg sync.WaitGroup
	for _, l := range all {
		for range saturatedLeases {
			wg.Go(func() {
				if err := l.observe(ctx, b.name(), load); err != nil {
					b.failed("saturated", l.peer.name, fmt.Errorf("on %s: %w", l.pool, err))
				}
			})
		}
	}
	wg.Wait()
	for _, l := range all {
		if n := len(l.late); n > 0 {
			b.report.add("saturated", l.peer.name, "on "+l.pool+", worst", milliseconds(percentile(l.late, 100)), "ms late", n)
			b.report.add("saturated", l.peer.name, "on "+l.pool+", lost", float64(l.lost), fmt.Sprintf("of %d terms", saturatedLeases), saturatedLeases)
		}
	}
	return ctx.Err()
}

// lateness measures how late one peer's renewals are.
type lateness struct {
	peer peer
	url  string
	pool string

	mu   sync.Mutex // guards the fields below
	late []time.Duration
	lost int // number of lost terms
}

// observe watches one term while the application keeps its pool busy.
func (l *lateness) observe(ctx context.Context, name string, load time.Duration) error {
	shared := l.pool == "the application's pool"
	e, err := newElection(ctx, l.peer, name, options{url: l.url, timing: fast, conns: saturatedConns, shared: shared})
	if err != nil {
		return err
	}
	defer e.close()
	application := e.candidates[0].replica
	if !shared {
		if application, err = floorPeer.open(ctx, options{url: l.url, conns: saturatedConns}); err != nil {
			return err
		}
		defer application.close()
	}
	if _, err := e.open(); err != nil {
		return err
	}
	if err := pause(ctx, time.Second); err != nil {
		return err
	}

	ctx, cancel := context.WithTimeout(ctx, load)
	defer cancel()
	var callers sync.WaitGroup
	defer callers.Wait()
	for range saturatedCallers {
		callers.Go(func() {
			for ctx.Err() == nil {
				application.exec(ctx, `SELECT pg_sleep(0.5)`)
			}
		})
	}
	renewed, over, err := l.renewals(ctx, e, name)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if over {
		l.lost++
	}
	for i := range renewed[1:] {
		l.late = append(l.late, max(0, renewed[i+1].Sub(renewed[i])-l.peer.renews))
	}
	return nil
}

// renewals returns the times at which the lease was renewed, as another connection sees
// it, until ctx or the term ends. They include the start and the end of the observation,
// because a renewal that is missing at the end is late too.
func (l *lateness) renewals(ctx context.Context, e *election, name string) (renewed []time.Time, over bool, err error) {
	conn, err := pgx.Connect(e.ctx, l.url)
	if err != nil {
		return nil, false, err
	}
	defer conn.Close(context.Background())
	const look = 5 * time.Millisecond
	renewed = []time.Time{time.Now()}
	for last := int64(0); ; {
		var version int64
		err := conn.QueryRow(e.ctx, l.peer.versionSQL, name).Scan(&version)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return nil, false, err
		}
		if version != last {
			last = version
			renewed = append(renewed, time.Now())
		}
		select {
		case ended := <-e.ended:
			return append(renewed, ended.at), true, nil
		case <-ctx.Done():
			return append(renewed, time.Now()), false, e.ctx.Err()
		case <-time.After(look):
		}
	}
}
