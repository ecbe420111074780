package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

const replicas = 5

// phase is a part of the run with one database and five replicas. It injects faults, one
// or two at a time, and after each waits until a replica holds the lease.
type phase struct {
	name     string
	open     func(context.Context) (database, error)
	share    int // of the duration of the whole run, in percent
	dir      string
	ttl      time.Duration
	task     task
	keys     int // how many keys there are to claim
	expiry   tenure.ExpiryPolicy
	rand     *rand.Rand
	only     *regexp.Regexp // matches the faults to inject
	other    string         // the program of every second replica; empty: this one
	patience int            // how many times longer than on a quiet machine recoveries may take; 0 means 1
	log      func(format string, args ...any)

	processes []*process
	began     time.Duration // time from the start of the replicas until one held the lease, and all shards ran
	episodes  int
	record    *record
	left      string   // the keys without an owner, or the unfinished rows, after the last fault; empty if they are few
	stuck     []string // rows that were held for too long after a fault
	doors     *doors   // of replicas that answer requests; nil: they don't
	kinds     []faultKind
}

// database is the database that a phase tests.
type database interface {
	// replica returns the configuration with which a replica connects.
	replica(i int, cfg replicaConfig) (replicaConfig, *rig.Proxy, error)
	kinds() []faultKind

	// texts returns what a query for one column of texts returns.
	texts(ctx context.Context, query string) ([]string, error)

	// final injects the fault that can't be undone, if there is one.
	final(ctx context.Context, p *phase) error

	// audit returns the database's content after all replicas have ended.
	audit(ctx context.Context) (*audit, error)
	close() error
}

// fault is a fault that was injected.
type fault struct {
	kind     string
	target   string
	from, to time.Duration // to is when a replica must be able to take over again
	begun    time.Duration // when it had been injected
	ending   time.Duration // when its end began
	episode  int           // faults of the same episode are injected together
	passes   bool          // it only hands the lease over or makes it expire
}

// faultKind is a kind of fault that can be injected.
type faultKind struct {
	name   string
	group  string // two simultaneous faults are never of the same group
	weight int
	longer int  // how many times longer than others it lasts; 0 means 1
	passes bool // see [fault]

	// begin injects the fault, and returns the replica that it hit and a function that ends
	// it. That function returns the time of the end if it is not the time at which it
	// returns.
	begin func(ctx context.Context, p *phase) (target string, end func() (time.Duration, error), err error)
}

func (p *phase) run(ctx context.Context, db database, duration time.Duration) (err error) {
	p.record = newRecord()
	if p.doors != nil {
		p.record.tell = p.doors.heard
		defer p.doors.close()
	}
	defer func() { err = errors.Join(err, p.end()) }()
	started := time.Now()
	for i := range replicas {
		cfg := replicaConfig{Name: fmt.Sprint("replica-", i), TTL: p.ttl, Expiry: p.expiry, Task: p.task, Keys: p.keys}
		cfg, proxy, err := db.replica(i, cfg)
		if err == nil && p.doors != nil {
			cfg, err = p.doors.configure(i, cfg)
		}
		if err != nil {
			return err
		}
		if p.task == useWitness {
			cfg.Lock = filepath.Join(p.dir, "lock")
		}
		process := &process{cfg: cfg, proxy: proxy, record: p.record, dir: p.dir}
		if i%2 == 1 && p.task != useWitness {
			process.other = p.other
		}
		p.processes = append(p.processes, process)
		if err := process.start(); err != nil {
			return err
		}
	}
	if !p.awaitHolder(ctx, time.Minute) {
		return fmt.Errorf("%s: nobody took the lease at the start\n%s", p.name, p.processes[0].LogTail())
	}
	if p.task == shareShards {
		p.awaitFuncs(ctx, time.Minute)
	}
	if p.doors != nil {
		defer p.doors.ask()()
	}
	p.began = time.Since(started)
	until := time.Now().Add(duration)
	for pause(ctx, p.ttl); (p.episodes == 0 || time.Now().Before(until)) && ctx.Err() == nil; { // every replica first sees the database in good order
		if err := p.episode(ctx, db); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	if ctx.Err() == nil {
		err = errors.Join(p.awaitClaimed(ctx, db), p.awaitEven(ctx), p.awaitDone(ctx, db))
	}
	if ctx.Err() == nil && err == nil && p.doors == nil {
		err = db.final(ctx, p)
	}
	return errors.Join(err, ctx.Err())
}

// end shuts down all running replicas at the same time.
func (p *phase) end() error {
	errs := make(chan error)
	for _, process := range p.processes {
		go func() {
			if process.Runs() {
				errs <- process.terminate()
			} else {
				errs <- nil
			}
		}()
	}
	var err error
	for range p.processes {
		err = errors.Join(err, <-errs)
	}
	for _, process := range p.processes {
		if process.proxy != nil {
			process.proxy.Close()
		}
	}
	return err
}

// episode injects one fault, or two together, ends them, and waits until a replica holds
// the lease.
func (p *phase) episode(ctx context.Context, db database) error {
	p.episodes++
	kinds := []faultKind{p.pick("")}
	group := kinds[0].group
	if p.rand.IntN(4) == 0 && slices.ContainsFunc(p.kinds, func(k faultKind) bool { return k.group != group }) {
		kinds = append(kinds, p.pick(group))
	}
	var faults []*fault
	var ends []func() (time.Duration, error)
	length := p.ttl/10 + time.Duration(p.rand.Int64N(int64(2*p.ttl)))
	for _, kind := range kinds {
		length *= time.Duration(max(1, kind.longer))
		if kind.passes {
			length /= 3
		}
		f := &fault{kind: kind.name, from: monotonic(), episode: p.episodes, passes: kind.passes}
		target, end, err := kind.begin(ctx, p)
		if err != nil {
			return fmt.Errorf("%s: %w", kind.name, err)
		}
		f.target, f.begun = target, monotonic()
		faults, ends = append(faults, f), append(ends, end)
	}
	p.note(faults)
	pause(ctx, length)
	var errs []error
	for i, end := range ends {
		faults[i].ending = monotonic()
		to, err := end()
		if to == 0 {
			to = monotonic()
		}
		faults[i].to = to
		errs = append(errs, err)
	}
	for _, f := range faults {
		p.log("%s: %s of %s for %v", p.name, f.kind, f.target, (f.to - f.from).Round(time.Millisecond))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: %w", faults[0].kind, err)
	}
	if p.task == workOnRows {
		if err := p.awaitEnded(ctx, db, faults); err != nil {
			return err
		}
	}
	p.awaitHolder(ctx, 6*p.ttl+p.allowedAfter(faults...)) // whether that was in time is checked later
	if p.task == claimKeys || p.task == shareShards {
		p.awaitFuncs(ctx, 6*p.ttl+p.allowedAfter(faults...))
	}
	pause(ctx, time.Duration(p.rand.Int64N(int64(p.ttl))))
	return nil
}

func (p *phase) note(faults []*fault) {
	p.record.mu.Lock()
	defer p.record.mu.Unlock()
	p.record.faults = append(p.record.faults, faults...)
}

// chosen returns the kinds of faults to inject.
func (p *phase) chosen(kinds []faultKind) []faultKind {
	return slices.DeleteFunc(kinds, func(k faultKind) bool { return !p.only.MatchString(p.name + ": " + k.name) })
}

// pick chooses a random kind of fault that is not of the given group.
func (p *phase) pick(not string) faultKind {
	total := 0
	for _, k := range p.kinds {
		if k.group != not {
			total += k.weight
		}
	}
	n := p.rand.IntN(total)
	for _, k := range p.kinds {
		if k.group == not {
			continue
		}
		if n -= k.weight; n < 0 {
			return k
		}
	}
	panic("bug: weights")
}

// awaitHolder waits until a job runs. It returns false if none does for that long.
func (p *phase) awaitHolder(ctx context.Context, longest time.Duration) bool {
	return p.awaitJob(ctx, longest, func(string) bool { return true })
}

// awaitJob waits until a job runs whose term is suitable. It returns false if none does for
// that long.
func (p *phase) awaitJob(ctx context.Context, longest time.Duration, willDo func(term string) bool) bool {
	return await(ctx, longest, func() (bool, <-chan struct{}) {
		terms, changed := p.record.terms()
		return slices.ContainsFunc(terms, willDo), changed
	})
}

// await waits until something is so, and looks again whenever that may have changed. It returns
// false if it is not for that long.
func await(ctx context.Context, longest time.Duration, isSo func() (bool, <-chan struct{})) bool {
	timer := time.NewTimer(longest)
	defer timer.Stop()
	for {
		so, changed := isSo()
		if so {
			return true
		}
		select {
		case <-changed:
		case <-timer.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// victims chooses n random replicas; usually the first one is the holder.
func (p *phase) victims(n int) []*process {
	all := slices.Clone(p.processes)
	p.rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	holders := p.record.holders()
	if p.rand.IntN(4) > 0 {
		slices.SortStableFunc(all, func(a, b *process) int {
			return holds(holders, b) - holds(holders, a)
		})
	}
	all = slices.DeleteFunc(all, func(q *process) bool { return !q.Runs() })
	return all[:min(n, len(all))]
}

func holds(holders []string, p *process) int {
	if slices.Contains(holders, p.name()) {
		return 1
	}
	return 0
}

func names(processes []*process) string {
	var all []string
	for _, p := range processes {
		all = append(all, p.name())
	}
	return strings.Join(all, " ")
}
