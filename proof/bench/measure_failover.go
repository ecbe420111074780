package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

var (
	failoverMeasure = measure{
		name:  "failover",
		about: "the holder's process is killed: from its last renewal until the next job runs, minus the TTL",
		waits: true,
		run: func(ctx context.Context, b *bench) error {
			return measureLoss(ctx, b, "failover", (*rig.Proxy).Close)
		},
	}
	partitionMeasure = measure{
		name:  "partition",
		about: "the holder is cut off: has its job ended before the next one's begins?",
		waits: true,
		run: func(ctx context.Context, b *bench) error {
			return measureLoss(ctx, b, "partition", func(p *rig.Proxy) { p.Set(rig.Weather{Drop: true}) })
		},
	}
)

// measureLoss cuts holders off from their server many times.
func measureLoss(ctx context.Context, b *bench, measure string, cut func(*rig.Proxy)) error {
	s, err := b.servers(ctx, b.peers)
	if err != nil {
		return err
	}
	var all []*losses
	var trials []*losses // each once per trial
	for _, p := range b.peers {
		if !p.expires {
			continue
		}
		l := &losses{peer: p, url: s.url(p), cut: cut}
		all = append(all, l)
		n := b.samples(100)
		if !strings.HasPrefix(p.name, tenurePeer.name) {
			n = min(n, 20)
		}
		for range n {
			trials = append(trials, l)
		}
	}
	// Shuffled, so that changes of the machine's speed affect all peers.
	rand.Shuffle(len(trials), func(i, j int) { trials[i], trials[j] = trials[j], trials[i] })
	var wg sync.WaitGroup
	if measure == "failover" {
		wg.Go(func() { b.failoverFloor(ctx, s[onPostgres]) })
	}
	for _, l := range trials {
		select {
		case b.trials <- struct{}{}:
		case <-ctx.Done():
			continue
		}
		name := b.name()
		wg.Go(func() {
			defer func() { <-b.trials }()
			l.try(ctx, name)
		})
	}
	wg.Wait()
	for _, l := range all {
		l.report(b, measure)
	}
	return ctx.Err()
}

// losses are the trials of one peer.
type losses struct {
	peer peer
	url  string
	cut  func(*rig.Proxy)

	mu        sync.Mutex      // guards the fields below
	overshoot []time.Duration // from the last renewal to the next job, minus the TTL
	overlaps  []time.Duration // for the jobs that had not ended when the next one began
	untold    int             // how many of these had not ended 3 s later
	repeated  int
	failed    int
	err       error // the last error
}

// errMidCall means that the holder was cut off during a call. If that call was a renewal
// that landed, neither the holder nor the proxy knows the time of the last renewal.
var errMidCall = errors.New("repeatedly cut off in the middle of a call")

func (l *losses) try(ctx context.Context, name string) {
	var loss loss
	var err error
	repeated := 0
	for ; repeated < 4; repeated++ {
		if loss, err = l.trial(ctx, fmt.Sprintf("%s-%d", name, repeated)); !errors.Is(err, errMidCall) {
			break
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.repeated += repeated
	if err != nil {
		l.failed++
		l.err = err
		return
	}
	l.overshoot = append(l.overshoot, loss.overshoot)
	if loss.overlap > 0 {
		l.overlaps = append(l.overlaps, loss.overlap)
	}
	if loss.untold {
		l.untold++
	}
}

type loss struct {
	overshoot time.Duration
	overlap   time.Duration
	untold    bool
}

func (l *losses) trial(ctx context.Context, name string) (found loss, err error) {
	var calls calls
	proxy, through, err := newProxy(l.url, calls.tap)
	if err != nil {
		return found, err
	}
	defer proxy.Close()
	e, err := newElection(ctx, l.peer, name,
		options{url: through, timing: fast}, options{url: l.url, timing: fast})
	if err != nil {
		return found, err
	}
	// The connections are broken before the campaigns end, which would wait for them.
	defer e.close()
	defer proxy.Close()
	if _, err := e.open(); err != nil {
		return found, err
	}
	// By then the standby has seen the lease and the holder has renewed it, and the random
	// delay makes the time independent of the next renewal.
	if err := pause(ctx, l.peer.polls+time.Second+rand.N(time.Second)); err != nil {
		return found, err
	}
	l.cut(proxy)
	if calls.unanswered() {
		return found, errMidCall
	}
	next, err := e.next(20 * time.Second)
	if err != nil {
		return found, err
	}
	if next.who != 1 {
		return found, errors.New("the holder that was cut off began another term")
	}
	renewed := calls.lastSuccess()
	if told, ok := e.candidates[0].contender.(interface{ renewed() time.Time }); ok {
		renewed = told.renewed()
	}
	found.overshoot = next.at.Sub(renewed) - fastTTL
	found.overlap, found.untold = e.overlap(next)
	return found, nil
}

// overlap returns for how long the first holder's job kept running after the next term
// began. untold means that it ran for longer than it was watched.
func (e *election) overlap(next begin) (d time.Duration, untold bool) {
	const watch = 3 * time.Second
	timer := time.NewTimer(time.Until(next.at.Add(watch)))
	defer timer.Stop()
	select {
	case ended := <-e.ended:
		return max(0, ended.at.Sub(next.at)), false
	case <-timer.C:
		return watch, true
	case <-e.ctx.Done():
		return 0, false
	}
}

func (l *losses) report(b *bench, measure string) {
	name, n := l.peer.name, len(l.overshoot)
	if l.failed > 0 {
		b.failed(measure, name, fmt.Errorf("%d trials: %w", l.failed, l.err))
	}
	if n == 0 {
		return
	}
	if l.repeated > 0 {
		b.report.note(measure, name, fmt.Sprintf("%d trials were repeated: the holder was cut off in the middle of a call", l.repeated))
	}
	b.report.add(measure, name, "trials", float64(n), "", n)
	b.report.addQuantiles(measure, name, "beyond the TTL", l.overshoot)
	if measure != "partition" {
		return
	}
	b.report.add(measure, name, "both at once", float64(len(l.overlaps)), "trials", n)
	b.report.add(measure, name, "worst overlap", milliseconds(percentile(l.overlaps, 100)), "ms", len(l.overlaps))
	if l.untold > 0 {
		b.report.note(measure, name, fmt.Sprintf("in %d of %d trials the old job had not been told to end 3 s after the next began", l.untold, n))
	}
}
