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
	"github.com/tenurelib/tenure/internal/testkit/rig"
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
	defer rig.RemoveMariaDB()
	moving := func(ctx context.Context) (database, error) { return newPostgres(ctx, movesClock) }
	steady := func(ctx context.Context) (database, error) { return newPostgres(ctx, spoilsTombstones) }
	lite := func(ctx context.Context) (database, error) { return newSQLite(ctx) }
	nats := func(ctx context.Context) (database, error) { return newNATS(ctx, filepath.Join(dir, "nats.log")) }
	etcd := func(ctx context.Context) (database, error) { return newEtcd(ctx, filepath.Join(dir, "etcd")) }
	maria := func(ctx context.Context) (database, error) { return newMySQL(ctx, 1) }
	galera := func(ctx context.Context) (database, error) { return newMySQL(ctx, 3) }
	replicated := func(ctx context.Context) (database, error) { return newFailovers(ctx) }
	phases := []*phase{
		{name: "postgres", open: moving, share: 6, ttl: ttl},
		{name: "postgres, observed", open: moving, share: 6, ttl: ttl, expiry: tenure.ExpiryObserved},
		{name: "postgres, steady clock", open: steady, share: 6, ttl: ttl},
		{name: "sqlite", open: lite, share: 5, ttl: ttl},
		{name: "postgres, claims", open: moving, share: 6, ttl: ttl, task: claimKeys, keys: 100_000},
		{name: "sqlite, claims", open: lite, share: 6, ttl: ttl, task: claimKeys, keys: 3000},
		{name: "postgres, shards", open: moving, share: 6, ttl: ttl, task: shareShards},
		{name: "postgres, rows", open: moving, share: 6, ttl: ttl, task: workOnRows},
		{name: "sqlite, rows", open: lite, share: 5, ttl: ttl, task: workOnRows},
		{name: "postgres, requests", open: steady, share: 6, ttl: ttl, task: getRequests},
		{name: "postgres, witness", open: steady, share: 6, ttl: 3 * ttl, task: useWitness},
		{name: "sqlite, requests", open: lite, share: 5, ttl: ttl, task: getRequests},
		{name: "nats", open: nats, share: 7, ttl: ttl, expiry: tenure.ExpiryObserved},
		{name: "etcd", open: etcd, share: 7, ttl: ttl, expiry: tenure.ExpiryObserved},
		{name: "mariadb", open: maria, share: 6, ttl: ttl},
		{name: "galera", open: galera, share: 5, ttl: 3 * ttl, expiry: tenure.ExpiryObserved},
		{name: "failovers", open: replicated, share: 6, ttl: failoverTTL, task: createOnly},
	}
	var results []*result
	var broken []error
	for i, p := range phases {
		p.dir = filepath.Join(dir, fmt.Sprint(i))
		p.rand = rand.New(rand.NewPCG(o.seed, uint64(i)))
		p.only, p.other, p.patience = o.only, o.other, o.patience
		p.log = func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
		r, err := runPhase(ctx, p, o.duration*time.Duration(p.share)/100)
		if err != nil { // it hides nothing of what the other phases have found
			broken = append(broken, fmt.Errorf("%s: %w", p.name, err))
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

func runPhase(ctx context.Context, p *phase, duration time.Duration) (r *result, err error) {
	db, err := p.open(ctx)
	if errors.Is(err, errNoMariaDB) {
		p.log("%s: left out: %v", p.name, err)
		return nil, nil
	}
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
