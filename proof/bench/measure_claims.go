package main

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"time"
)

var claimsMeasure = measure{
	name:  "claims",
	about: "one process owns a million keys: what they cost, and how soon another has them once it is killed",
	run:   measureClaims,
}

// owner stands for one process that owns many keys under one session.
type owner interface {
	// claim returns when the owner has all of the keys. It waits for the keys that another owner has.
	claim(ctx context.Context, ids []string) error

	// renewed returns when the session was last renewed. The owner may be cut off from its
	// server, which is at url.
	renewed(ctx context.Context, url string) (time.Time, error)

	release(ctx context.Context) error // frees all keys, and ends the session
	close()
}

// ownership is a way to own many keys.
type ownership struct {
	name string
	etcd bool
	open func(ctx context.Context, url string, ttl time.Duration) (owner, error)

	// settle is how long it takes after a start until a session only renews itself.
	settle time.Duration
}

var ownerships = []ownership{claimsOwnership, etcdOwnership}

func measureClaims(ctx context.Context, b *bench) error {
	n, watch := choose(b, 1_000_000, 10_000), choose(b, 2*time.Minute, 5*time.Second)
	s, err := b.servers(ctx, []peer{tenurePeer})
	if err != nil {
		return err
	}
	postgres, err := b.postgres.pid(ctx)
	if err != nil {
		return err
	}
	if rate, err := floorClaims(ctx, s[onPostgres], keyNames("floor", n)); err != nil {
		b.failed("claims", floorPeer.name, err)
	} else {
		b.report.add("claims", floorPeer.name, "claim", rate, "keys/s", n)
	}
	for _, o := range ownerships {
		url, server := s[onPostgres], postgres
		if o.etcd {
			if s[onEtcd], err = b.etcd.start(ctx); err != nil {
				return err
			}
			url, server = s[onEtcd], b.etcd.pid()
		}
		if err := own(ctx, b, o, url, server, n, watch); err != nil {
			b.failed("claims", o.name, err)
		}
		if err := inherit(ctx, b, o, url, n); err != nil {
			b.failed("claims", o.name, err)
		}
	}
	if err := etcdRevocations(ctx, b, s[onEtcd]); err != nil {
		b.failed("claims", etcdPeer.name, err)
	}
	return ctx.Err()
}

func keyNames(prefix string, n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s-%07d", prefix, i)
	}
	return ids
}

// heapOfCopies returns how much heap the bytes of the keys take. The owner has them from the
// database's answer, and they are not a cost of the claim.
func heapOfCopies(ids []string) float64 {
	copies := make([]string, len(ids))
	before := inUse()
	for i, id := range ids {
		copies[i] = strings.Clone(id)
	}
	after := inUse()
	runtime.KeepAlive(copies)
	return after.heap - before.heap
}

// own measures what it costs to claim, to own and to release keys, at a TTL of 30 s.
func own(ctx context.Context, b *bench, o ownership, url string, server, n int, watch time.Duration) error {
	var counts statements
	tap := counts.tap
	if o.etcd { // it sends no SQL statements
		tap = nil
	}
	proxy, through, err := newProxy(url, tap)
	if err != nil {
		return err
	}
	defer proxy.Close()
	if !o.etcd {
		alone, took, err := usedCPU(ctx, server, watch/2)
		if err != nil {
			return err
		}
		b.report.add("claims", o.name, "CPU alone", 100*alone.Seconds()/took.Seconds(), "% of a core", 1)
	}
	owner, err := o.open(ctx, through, 30*time.Second)
	if err != nil {
		return err
	}
	defer owner.close()
	// What exists once, such as connections, is not a cost of a key.
	if err := owner.claim(ctx, keyNames("first", 1000)); err != nil {
		return err
	}
	ids := keyNames("own", n)
	bytes := heapOfCopies(ids)
	before, began := inUse(), time.Now()
	if err := owner.claim(ctx, ids); err != nil {
		return err
	}
	took, after := time.Since(began), inUse()
	b.report.add("claims", o.name, "claim", float64(n)/took.Seconds(), "keys/s", n)
	if !o.etcd { // its client keeps nothing of a key
		b.report.add("claims", o.name, "heap beside the key", (after.heap-before.heap-bytes)/float64(n), "B/key", n)
		b.report.add("claims", o.name, "goroutines", after.goroutines-before.goroutines, "", n)
	}

	if err := pause(ctx, o.settle); err != nil {
		return err
	}
	executed := counts.executed.Load()
	cpu, took, err := usedCPU(ctx, server, watch)
	if err != nil {
		return err
	}
	if !o.etcd {
		b.report.add("claims", o.name, "at rest", float64(counts.executed.Load()-executed)/took.Seconds(), "statements/s", n)
	}
	b.report.add("claims", o.name, "CPU at rest", 100*cpu.Seconds()/took.Seconds(), "% of a core", n)
	runtime.KeepAlive(ids)

	began = time.Now()
	if err := owner.release(ctx); err != nil {
		return err
	}
	b.report.add("claims", o.name, "release", float64(n)/time.Since(began).Seconds(), "keys/s", n)
	return nil
}

// usedCPU returns how much CPU the server and this process use within a time, and how long it was.
func usedCPU(ctx context.Context, server int, length time.Duration) (used, took time.Duration, err error) {
	before, began := cpu(server)+ownCPU(), time.Now()
	if err := pause(ctx, length); err != nil {
		return 0, 0, err
	}
	return cpu(server) + ownCPU() - before, time.Since(began), nil
}

// inherit measures how soon another process has the keys of one that is killed, at a TTL of 3 s.
func inherit(ctx context.Context, b *bench, o ownership, url string, n int) error {
	proxy, through, err := newProxy(url, nil)
	if err != nil {
		return err
	}
	defer proxy.Close()
	victim, err := o.open(ctx, through, fastTTL)
	if err != nil {
		return err
	}
	defer victim.close()
	defer proxy.Close() // otherwise it would release its keys
	heir, err := o.open(ctx, url, fastTTL)
	if err != nil {
		return err
	}
	defer heir.close()
	ids := keyNames("inherit", n)
	if err := victim.claim(ctx, ids); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	has := make(chan error, 1)
	var first time.Time
	go func() {
		err := heir.claim(ctx, ids[:1])
		first = time.Now()
		if err == nil {
			err = heir.claim(ctx, ids[1:])
		}
		has <- err
	}()
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	proxy.Close()
	renewed, err := victim.renewed(ctx, url)
	if err != nil {
		return err
	}
	if err := <-has; err != nil {
		return err
	}
	expired := renewed.Add(fastTTL)
	b.report.add("claims", o.name, "killed: the first is claimed, beyond the TTL", milliseconds(first.Sub(expired)), "ms", 1)
	b.report.add("claims", o.name, "all are", time.Since(expired).Seconds(), "s", n)
	return nil
}
