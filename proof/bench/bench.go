package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync/atomic"
	"time"
)

// bench is one run of the program.
type bench struct {
	peers    []peer
	n        int // samples per figure; 0 means the measure's default
	quick    bool
	duration time.Duration // of rows-sustained and short-ttl
	postgres *postgres
	etcd     *server
	nats     *server
	mysql    *server
	files    string        // a directory
	trials   chan struct{} // limits how many run at the same time
	report   *report
	progress io.Writer

	named atomic.Int64 // number of names given out
}

// samples returns how many samples to take, given the measure's default.
func (b *bench) samples(usual int) int {
	switch {
	case b.n > 0:
		return b.n
	case b.quick:
		return max(2, usual/50)
	default:
		return usual
	}
}

// name returns a name that no lease of this run has used.
func (b *bench) name() string {
	return fmt.Sprintf("bench-%d", b.named.Add(1))
}

func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.progress, format+"\n", args...)
}

// failed notes that some or all of a peer's figures are missing. The other peers' figures
// are still useful.
func (b *bench) failed(measure, peer string, err error) {
	if errors.Is(err, context.Canceled) {
		return // an interrupt, which is reported at the end of the run
	}
	b.report.note(measure, peer, "failed: "+err.Error())
	b.say("%s: %s: %v", measure, peer, err)
}

// servers are the URLs of the servers for the peers of one measure. The databases are such as
// no other measure has used.
type servers map[place]string

func (s servers) url(p peer) string { return s[p.on] }

// servers creates a new database with the tables of the given peers.
func (b *bench) servers(ctx context.Context, peers []peer) (s servers, err error) {
	s = servers{}
	if s[onPostgres], err = b.postgres.database(ctx); err != nil {
		return s, err
	}
	for _, p := range peers {
		switch p.on {
		case onSQLite:
			s[onSQLite] = filepath.Join(b.files, b.name()+".db")
		case onEtcd:
			s[onEtcd], err = b.etcd.start(ctx)
		case onNATS:
			s[onNATS], err = b.nats.start(ctx)
		case onMySQL:
			s[onMySQL], err = b.mysql.start(ctx)
		}
		if err != nil {
			return s, err
		}
		if p.prepare != nil {
			if err := p.prepare(ctx, s.url(p)); err != nil {
				return s, fmt.Errorf("tables of %s: %w", p.name, err)
			}
		}
	}
	return s, nil
}

// pause waits until the time has passed or ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// choose returns a value for a run of full length, or for a quick one.
func choose[T any](b *bench, full, quick T) T {
	if b.quick {
		return quick
	}
	return full
}

// await waits until a channel is closed or ctx ends.
func await(ctx context.Context, closed <-chan struct{}) error {
	select {
	case <-closed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// awaitBegun waits until so many have begun, but no longer than a minute.
func awaitBegun(ctx context.Context, begun <-chan struct{}, all int) error {
	late := time.After(time.Minute)
	for n := range all {
		select {
		case <-begun:
		case <-late:
			return fmt.Errorf("%d of %d hold their leases after a minute", n, all)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// interrupted distinguishes an interrupt from a failure of the peer.
func interrupted(ctx context.Context) bool { return errors.Is(ctx.Err(), context.Canceled) }
