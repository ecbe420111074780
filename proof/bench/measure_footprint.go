package main

import (
	"context"
	"runtime"
	"sync"
	"time"
)

var footprintMeasure = measure{
	name:  "footprint",
	about: "memory and goroutines per lease of a replica that holds many, and the CPU time of all, at default timings",
	run:   measureFootprint,
}

func measureFootprint(ctx context.Context, b *bench) error {
	n := choose(b, 1000, 200)
	for _, p := range b.peers {
		if !p.expires {
			continue
		}
		s, err := b.servers(ctx, []peer{p})
		if err != nil {
			return err
		}
		f, err := footprint(ctx, b, p, s.url(p), n)
		if err == nil {
			// The memory that the runtime keeps varies, so the minimum is what the leases
			// need.
			var again memory
			again, err = footprint(ctx, b, p, s.url(p), n)
			f = memory{min(f.heap, again.heap), min(f.stacks, again.stacks), min(f.goroutines, again.goroutines), min(f.cpu, again.cpu)}
		}
		if err != nil {
			b.failed("footprint", p.name, err)
			continue
		}
		b.report.add("footprint", p.name, "heap", f.heap/1024, "KB/lease", n)
		b.report.add("footprint", p.name, "stacks", f.stacks/1024, "KB/lease", n)
		b.report.add("footprint", p.name, "goroutines", f.goroutines, "/lease", n)
		b.report.add("footprint", p.name, "CPU", 100*f.cpu, "% of a core", n)
	}
	return ctx.Err()
}

// footprint returns what each of n leases uses on average.
func footprint(ctx context.Context, b *bench, p peer, url string, n int) (per memory, err error) {
	r, err := p.open(ctx, options{url: url, name: "replica-0", conns: 16})
	if err != nil {
		return per, err
	}
	defer r.close()
	ctx, cancel := context.WithCancel(ctx)
	var campaigns sync.WaitGroup
	defer campaigns.Wait()
	defer cancel()
	hold := func(leases int) error {
		begun := make(chan struct{}, leases)
		for range leases {
			c, err := r.contender(b.name())
			if err != nil {
				return err
			}
			campaigns.Go(func() {
				c.campaign(ctx, func(ctx context.Context) { begun <- struct{}{}; <-ctx.Done() })
			})
		}
		if err := awaitBegun(ctx, begun, leases); err != nil {
			return err
		}
		return pause(ctx, time.Second)
	}
	// Allocate what exists only once, such as connections, before the measurement.
	if err := hold(100); err != nil {
		return per, err
	}
	before := inUse()
	if err := hold(n); err != nil {
		return per, err
	}
	after := inUse()
	idle, began := ownCPU(), time.Now()
	if err := pause(ctx, choose(b, 20*time.Second, time.Second)); err != nil {
		return per, err
	}
	return memory{
		heap:       (after.heap - before.heap) / float64(n),
		stacks:     (after.stacks - before.stacks) / float64(n),
		goroutines: (after.goroutines - before.goroutines) / float64(n),
		cpu:        (ownCPU() - idle).Seconds() / time.Since(began).Seconds(),
	}, nil
}

type memory struct{ heap, stacks, goroutines, cpu float64 } // bytes, bytes, count, and the share of a core that all take

func inUse() memory {
	runtime.GC() // twice, because memory released by finalizers is freed by the second collection
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return memory{heap: float64(m.HeapAlloc), stacks: float64(m.StackInuse), goroutines: float64(runtime.NumGoroutine())}
}
