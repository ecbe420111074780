package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
)

const ttl = 1500 * time.Millisecond

// options are the flags of the command.
type options struct {
	duration time.Duration
	seed     uint64
	only     *regexp.Regexp
	other    string
	patience int
}

// run runs all phases one after the other and prints a report. It returns an error if a
// promise was broken or the run itself failed.
func run(ctx context.Context, out io.Writer, o options) (err error) {
	fmt.Fprintf(out, "seed %d, %v, TTL %v\n", o.seed, o.duration, ttl)
	dir, err := os.MkdirTemp("", "tenure-chaos-")
	if err != nil {
		return err
	}
	defer func() {
		if err == nil {
			err = os.RemoveAll(dir)
			return
		}
		err = fmt.Errorf("%w\nseed %d; the histories and logs are in %s", err, o.seed, dir)
	}()
	phases := []struct {
		name   string
		ttl    time.Duration
		expiry tenure.ExpiryPolicy
		share  int // of the duration
		task   task
		keys   int
		open   func(context.Context) (database, error)
	}{
		{"postgres", ttl, tenure.StoreClock, 7, useObjects, 0, func(ctx context.Context) (database, error) { return newPostgres(ctx, movesClock) }},
		{"postgres, observed", ttl, tenure.Observed, 7, useObjects, 0, func(ctx context.Context) (database, error) { return newPostgres(ctx, movesClock) }},
		{"postgres, steady clock", ttl, tenure.StoreClock, 6, useObjects, 0, func(ctx context.Context) (database, error) { return newPostgres(ctx, spoilsTombstones) }},
		{"sqlite", ttl, tenure.StoreClock, 6, useObjects, 0, func(ctx context.Context) (database, error) { return newSQLite(ctx) }},
		{"postgres, claims", ttl, tenure.StoreClock, 7, claimKeys, 100_000, func(ctx context.Context) (database, error) { return newPostgres(ctx, movesClock) }},
		{"sqlite, claims", ttl, tenure.StoreClock, 7, claimKeys, 3000, func(ctx context.Context) (database, error) { return newSQLite(ctx) }},
		{"postgres, shards", ttl, tenure.StoreClock, 7, shareShards, 0, func(ctx context.Context) (database, error) { return newPostgres(ctx, movesClock) }},
		{"postgres, rows", ttl, tenure.StoreClock, 6, workOnRows, 0, func(ctx context.Context) (database, error) { return newPostgres(ctx, movesClock) }},
		{"sqlite, rows", ttl, tenure.StoreClock, 6, workOnRows, 0, func(ctx context.Context) (database, error) { return newSQLite(ctx) }},
		{"postgres, requests", ttl, tenure.StoreClock, 7, getRequests, 0, func(ctx context.Context) (database, error) { return newPostgres(ctx, spoilsTombstones) }},
		{"postgres, witness", 3 * ttl, tenure.StoreClock, 6, useWitness, 0, func(ctx context.Context) (database, error) { return newPostgres(ctx, spoilsTombstones) }},
		{"sqlite, requests", ttl, tenure.StoreClock, 6, getRequests, 0, func(ctx context.Context) (database, error) { return newSQLite(ctx) }},
		{"nats", ttl, tenure.Observed, 8, useObjects, 0, func(ctx context.Context) (database, error) { return newNATS(ctx, filepath.Join(dir, "nats.log")) }},
		{"etcd", ttl, tenure.Observed, 8, useObjects, 0, func(ctx context.Context) (database, error) { return newEtcd(ctx, filepath.Join(dir, "etcd")) }},
		{"failovers", failoverTTL, tenure.StoreClock, 7, createOnly, 0, func(ctx context.Context) (database, error) { return newFailovers(ctx) }},
	}
	var results []*result
	var broken []error
	for i, kind := range phases {
		p := &phase{
			name:     kind.name,
			dir:      filepath.Join(dir, fmt.Sprint(i)),
			ttl:      kind.ttl,
			task:     kind.task,
			keys:     kind.keys,
			expiry:   kind.expiry,
			rand:     rand.New(rand.NewPCG(o.seed, uint64(i))),
			only:     o.only,
			other:    o.other,
			patience: o.patience,
			log:      func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) },
		}
		r, err := runPhase(ctx, p, kind.open, o.duration*time.Duration(kind.share)/100)
		if err != nil { // it hides nothing of what the other phases have found
			broken = append(broken, fmt.Errorf("%s: %w", kind.name, err))
		}
		if r != nil {
			results = append(results, r)
		}
		if ctx.Err() != nil {
			break
		}
	}
	if len(results) == 0 && len(broken) == 0 {
		return fmt.Errorf("no fault of any phase matches %q, as in -run 'postgres, claims: network'", o.only)
	}
	fmt.Fprintln(out)
	if err := writeReport(out, results); err != nil {
		return err
	}
	for _, r := range results {
		for _, v := range r.violations {
			broken = append(broken, errors.New(v))
		}
	}
	return errors.Join(broken...)
}

func runPhase(ctx context.Context, p *phase, open func(context.Context) (database, error), duration time.Duration) (r *result, err error) {
	db, err := open(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.close()) }()
	if err := os.MkdirAll(p.dir, 0o755); err != nil {
		return nil, err
	}
	if p.task == getRequests {
		if p.doors, err = newDoors(p.dir); err != nil {
			return nil, err
		}
	}
	if p.kinds = p.chosen(slices.Concat(processFaults, db.kinds(), p.doors.kinds(), p.witnessKinds())); len(p.kinds) == 0 {
		return nil, nil
	}
	if err := p.run(ctx, db, duration); err != nil {
		return nil, err
	}
	a, err := db.audit(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: audit: %w", p.name, err)
	}
	return check(p, a), nil
}
