package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

var requestsMeasure = measure{
	name:  "requests",
	about: "package route: what a hop costs, how long requests wait in a handover, and what becomes of them when owners are killed",
	named: true,
	run:   measureRequests,
}

func measureRequests(ctx context.Context, b *bench) error {
	postgres, err := b.postgres.database(ctx)
	if err != nil {
		return err
	}
	for _, on := range [][2]string{{"Postgres", postgres}, {"SQLite", filepath.Join(b.files, b.name()+".db?shared=true")}} {
		store, err := tenure.Open(ctx, on[1])
		if err != nil {
			return err
		}
		err = errors.Join(store.Migrate(ctx), claims.Migrate(ctx, store), store.Close())
		for _, step := range []func(context.Context, *bench, *fleet) error{hop, countCalls, handOver, killOwners} {
			if err == nil {
				f := &fleet{name: on[0], url: on[1], ledger: filepath.Join(b.files, b.name()+".ledger"), processes: map[string]*player{}}
				err = step(ctx, b, f)
				f.end()
			}
		}
		if err != nil {
			b.failed("requests", on[0], err)
		}
		b.report.note("requests", on[0], "load average "+load()+" at the end")
	}
	return ctx.Err()
}

// hop measures what a route adds to a request that its process answers, and what a hop adds to that.
func hop(ctx context.Context, b *bench, f *fleet) error {
	for _, scheme := range []string{"http", "h2c"} {
		all, err := f.start(ctx, 2, longTTL, scheme)
		client := clientOf(scheme)
		if err = cmp.Or(err, client.ask(ctx, all[0], "/"+scheme, "").err); err != nil { // which claims the key
			return err
		}
		ways := []struct{ addr, path string }{{all[0], "/bare"}, {all[0], "/" + scheme}, {all[1], "/" + scheme}}
		var took [3][]time.Duration
		for n := range b.samples(10_000) + 10 {
			for _, i := range rand.Perm(len(ways)) {
				q := client.ask(ctx, ways[i].addr, ways[i].path, "")
				if q.err != nil {
					return q.err
				}
				if n >= 10 { // the first ones open connections
					took[i] = append(took[i], q.to.Sub(q.from))
				}
			}
		}
		f.end()
		for _, p := range []int{50, 99} {
			bare, local, forwarded := percentile(took[0], p), percentile(took[1], p), percentile(took[2], p)
			b.report.add("requests", f.name, fmt.Sprintf("%s: a hop adds p%d", scheme, p), milliseconds(forwarded-local), "ms", len(took[0]))
			b.report.add("requests", f.name, fmt.Sprintf("%s: the route adds p%d", scheme, p), 1000*milliseconds(local-bare), "µs", len(took[0]))
		}
	}
	return nil
}

// countCalls counts the calls of the store that a process makes for requests. TTLs are so long that it makes no others.
func countCalls(ctx context.Context, b *bench, f *fleet) error {
	all, err := f.start(ctx, 3, longTTL, "http")
	if err != nil {
		return err
	}
	client := clientOf("http")
	for _, step := range []struct {
		what    string
		process int // that gets the requests, and whose calls count
		n       int
		first   string // what the process is asked before
	}{
		{"calls: first use, and it claims the key", 0, 1, "/calls"},
		{"calls: first use of another's key", 1, 1, "/calls"},
		{"calls: at rest, 1000 requests", 1, 1000, "/calls"},
		{"calls: (a third process claims it)", 2, 1, "/release"},
		{"calls: after the key has moved", 1, 1, "/calls"},
	} {
		err := client.ask(ctx, all[step.process], step.first, "").err
		err = cmp.Or(err, pause(ctx, 500*time.Millisecond)) // what follows by itself
		before := client.ask(ctx, all[step.process], "/calls", "")
		for range step.n {
			err = cmp.Or(err, client.ask(ctx, all[step.process], "/x", "").err)
		}
		after := client.ask(ctx, all[step.process], "/calls", "")
		if err = cmp.Or(err, before.err, after.err); err != nil {
			return err
		}
		b.report.add("requests", f.name, step.what, float64(after.token-before.token), "", step.n)
	}
	return nil
}

// handOver has the owner of a key asked for it while clients send requests for the key.
func handOver(ctx context.Context, b *bench, f *fleet) error {
	all, at, err := f.load(ctx, b, choose(b, 100, 10), longTTL, func(string) error {
		return clientOf("http").ask(ctx, f.any(), "/release", "").err
	})
	if err != nil {
		return err
	}
	const span = 100 * time.Millisecond
	longest := func(shift time.Duration) (times []time.Duration) {
		for _, t := range at {
			var most time.Duration
			for _, q := range all {
				if from := t.Add(shift); q.from.Before(from.Add(span)) && q.to.After(from) {
					most = max(most, q.to.Sub(q.from))
				}
			}
			times = append(times, most)
		}
		return times
	}
	b.report.addQuantiles("requests", f.name, "handover: longest wait", longest(0))
	b.report.addQuantiles("requests", f.name, "as long without one", longest(-span))
	return f.check(b, "handovers", all, nil)
}

// killOwners kills the owner of a key while clients send requests for it, and starts another process.
func killOwners(ctx context.Context, b *bench, f *fleet) error {
	var kills [][2]time.Time // between which the process has been killed
	all, _, err := f.load(ctx, b, choose(b, 20, 2), fastTTL, func(owner string) error {
		if p := f.take(owner); p != nil {
			before := time.Now()
			_ = p.Process.Kill()
			p.end()
			kills = append(kills, [2]time.Time{before, time.Now()})
		}
		_, err := f.start(ctx, 1, fastTTL, "http")
		return err
	})
	if err != nil {
		return err
	}
	return f.check(b, "kills", all, kills)
}

// load has 32 clients send requests for a key to any of three processes. Meanwhile disturb is called so many times.
func (f *fleet) load(ctx context.Context, b *bench, times int, ttl time.Duration, disturb func(owner string) error) (all []asked, at []time.Time, err error) {
	if _, err := f.start(ctx, 3, ttl, "http"); err != nil {
		return nil, nil, err
	}
	client, n := clientOf("http"), int64(b.samples(100_000))
	var mu sync.Mutex
	var owner string
	var sent atomic.Int64
	var clients sync.WaitGroup
	for range 32 {
		clients.Go(func() {
			for i := sent.Add(1); i <= n && pause(ctx, rand.N(40*time.Millisecond)) == nil; i = sent.Add(1) {
				q := client.ask(ctx, f.any(), "/x", fmt.Sprint(i))
				mu.Lock()
				all, owner = append(all, q), cmp.Or(q.by, owner)
				mu.Unlock()
			}
		})
	}
	for err == nil && len(at) < times {
		err = pause(ctx, 10*time.Millisecond)
		if due := n * int64(len(at)+1) / int64(times+1); err == nil && sent.Load() > due {
			mu.Lock()
			from := owner
			mu.Unlock()
			at = append(at, time.Now())
			err = disturb(from)
		}
	}
	clients.Wait()
	return all, at, err
}

// check compares what clients were told with what has run.
func (f *fleet) check(b *bench, during string, all []asked, kills [][2]time.Time) error {
	ledger, err := os.ReadFile(f.ledger)
	if err != nil {
		return err
	}
	runs := map[string][]string{} // the tokens, by request
	for line := range strings.Lines(string(ledger)) {
		id, token, _ := strings.Cut(strings.TrimSpace(line), " ")
		runs[id] = append(runs[id], token)
	}
	counts := map[string]int{}
	for _, q := range all {
		counts[q.outcome]++
		isUnknown := q.outcome == "unknown" || q.outcome == "broken"
		for what, is := range map[string]bool{
			"run twice":            len(runs[q.id]) > 1,
			"answered and not run": q.outcome == "answered" && !slices.Contains(runs[q.id], fmt.Sprint(q.token)),
			"refused and run":      q.outcome == "refused" && len(runs[q.id]) > 0,
			"unknown, and not in flight at a kill": isUnknown && !slices.ContainsFunc(kills, func(kill [2]time.Time) bool {
				return q.from.Before(kill[1]) && q.to.After(kill[0])
			}),
		} {
			if is {
				if counts[what]++; counts[what] == 1 {
					b.report.note("requests", f.name, fmt.Sprintf("%s, %s: from %v to %v: %v", during, what, q.from, q.to, q.err))
				}
			}
		}
	}
	for _, what := range []string{"answered", "refused", "unknown", "broken", "unknown, and not in flight at a kill",
		"run twice", "answered and not run", "refused and run"} {
		b.report.add("requests", f.name, during+": "+what, float64(counts[what]), "", len(all))
	}
	return nil
}
