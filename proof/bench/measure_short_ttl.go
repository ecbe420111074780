package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
)

var shortTTLMeasure = measure{
	name:  "short-ttl",
	about: "TTLs from 0.3 to 30 s: how many terms are lost although nothing fails, and how long a failover takes",
	named: true,
	run: func(ctx context.Context, b *bench) error {
		for _, p := range b.peers {
			if !p.expires || p.polls > 0 || !strings.HasPrefix(p.name, tenurePeer.name) {
				continue
			}
			for _, loops := range []int{0, 2 * runtime.NumCPU()} {
				if err := measureTTLs(ctx, b, p, loops); err != nil {
					b.failed("short-ttl", p.name, err)
				}
			}
		}
		return ctx.Err()
	},
}

// ofTTL is what is seen with one TTL. Its replicas hold some leases for as long as the measure lasts. Others
// are held through a proxy, which is closed; then their standbys take them.
type ofTTL struct {
	ttl            time.Duration
	renewed, lost  atomic.Int64
	holder, victim *replica

	mu      sync.Mutex
	beyond  []time.Duration // from the last renewal to the next job, less the TTL
	omitted int             // victims that were cut off when a renewal was due, which may have landed, or had lost their lease before
}

// measureTTLs tries all TTLs at once, beside busy loops in processes of their own.
func measureTTLs(ctx context.Context, b *bench, p peer, loops int) error {
	s, err := b.servers(ctx, []peer{p})
	if err != nil {
		return err
	}
	proxy, through, err := newProxy(s.url(p), nil)
	if err != nil {
		return err
	}
	var all sync.WaitGroup
	var tried []*ofTTL
	defer func() {
		for _, t := range tried {
			t.holder.close()
			t.victim.close()
		}
	}()
	defer all.Wait()
	defer proxy.Close() // or the victims' campaigns would wait for their server
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cut, longest, begun, victims := make(chan struct{}), time.Duration(0), make(chan struct{}), 0
	for _, ttl := range choose(b, []time.Duration{300 * time.Millisecond, 500 * time.Millisecond, time.Second, 3 * time.Second, 10 * time.Second, 30 * time.Second}, []time.Duration{300 * time.Millisecond, time.Second}) {
		t := &ofTTL{ttl: ttl}
		if t.holder, err = p.open(ctx, options{url: s.url(p), name: "holder", ttl: ttl, renewed: &t.renewed}); err != nil {
			return err
		}
		if t.victim, err = p.open(ctx, options{url: through, name: "victim", ttl: ttl}); err != nil {
			t.holder.close()
			return err
		}
		tried, longest = append(tried, t), ttl
		perSecond := 100.0  // renewals, three of which come in each TTL
		if p.on == onNATS { // which writes to the disk once for each
			perSecond = 30
		}
		for range max(1, int(perSecond*ttl.Seconds()/3)) {
			all.Go(func() { t.hold(ctx, b, b.name()) })
		}
		for range b.samples(20) {
			victims++
			all.Go(func() { t.fail(ctx, b.name(), begun, cut) })
		}
	}
	if err := awaitBegun(ctx, begun, victims); err != nil {
		return err
	}
	if err := pause(ctx, 3*time.Second); err != nil {
		return err
	}
	for range loops {
		loop := exec.CommandContext(ctx, "sh", "-c", "while :; do :; done")
		if err := loop.Start(); err != nil {
			return err
		}
		all.Go(func() { _ = loop.Wait() })
	}
	proxy.Close()
	close(cut)
	if err := pause(ctx, max(longest+2*time.Second, choose(b, b.duration/10, 0))); err != nil {
		return err
	}
	for _, t := range tried {
		name := fmt.Sprintf("%s, TTL %v, %d busy loops", p.name, t.ttl, loops)
		t.mu.Lock()
		lost, renewed := t.lost.Load(), t.renewed.Load()
		b.report.add("short-ttl", name, "renewals", float64(renewed), "", int(renewed))
		b.report.add("short-ttl", name, "terms lost", float64(lost), "", int(renewed))
		b.report.add("short-ttl", name, "failovers", float64(len(t.beyond)), "", len(t.beyond))
		b.report.addQuantiles("short-ttl", name, "beyond the TTL", t.beyond)
		b.report.add("short-ttl", name, "not counted", float64(t.omitted), "", t.omitted)
		t.mu.Unlock()
	}
	return nil
}

// hold holds a lease until ctx is done, and counts the terms that are lost.
func (t *ofTTL) hold(ctx context.Context, b *bench, name string) {
	for pause(ctx, rand.N(t.ttl/3)) == nil {
		c, err := t.holder.contender(name)
		if err == nil {
			err = c.campaign(ctx, func(job context.Context) {
				<-job.Done()
				if cause := context.Cause(job); errors.Is(cause, tenure.ErrLost) || errors.Is(cause, tenure.ErrDeadline) {
					t.lost.Add(1)
				}
			})
		}
		if err != nil {
			b.failed("short-ttl", name, err)
			return
		}
	}
}

// fail has one replica hold a lease until it is cut off, while another stands by.
func (t *ofTTL) fail(ctx context.Context, name string, begun chan<- struct{}, cut <-chan struct{}) {
	var both sync.WaitGroup
	defer both.Wait()
	victim, err1 := t.victim.contender(name)
	standby, err2 := t.holder.contender(name)
	if errors.Join(err1, err2) != nil {
		return
	}
	terms := make(chan *tenure.Term, 1)
	if pause(ctx, rand.N(t.ttl/3)) != nil { // so that they are not all cut off when their renewals are due
		return
	}
	both.Go(func() {
		_ = victim.campaign(ctx, func(job context.Context) { terms <- tenure.TermFromContext(job); <-job.Done() })
	})
	var term *tenure.Term
	select {
	case term = <-terms:
	case <-ctx.Done():
		return
	}
	renewed := func() time.Time { return term.Deadline().Add(t.ttl/30 - t.ttl) } // by the default Margin
	var midway atomic.Bool
	both.Go(func() {
		_ = standby.campaign(ctx, func(context.Context) {
			at := time.Now()
			t.mu.Lock()
			defer t.mu.Unlock()
			select {
			case <-cut:
				if !midway.Load() {
					t.beyond = append(t.beyond, at.Sub(renewed())-t.ttl)
					return
				}
			default: // the victim has lost its lease before
			}
			t.omitted++
		})
	})
	select {
	case begun <- struct{}{}:
	case <-ctx.Done():
	}
	if await(ctx, cut) == nil {
		midway.Store(time.Since(renewed()) > t.ttl/3-5*time.Millisecond)
	}
}
