package sim

import (
	"context"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/witnessed"
	"github.com/tenurelib/tenure/storetest"
)

// replica is a host: it outlives the processes that run on it.
type replica struct {
	w          *world
	name       string
	ttl        time.Duration // by the bubble's clock; its own clock may differ
	rate       float64
	wallOffset time.Duration
	slow       time.Duration // additional time for each answer
	dice       *testkit.Dice
	blocking   *testkit.Dice // of its log and trace
	burials    *testkit.Dice // of the witnesses of its processes
	clocks     testkit.MachineClocks

	// Guarded by the world's lock.
	life      *life // nil while no process is running
	lives     int
	link      testkit.Weather
	links     int           // how often the link has changed
	paused    chan struct{} // closed when it is resumed; nil if it is not paused
	unfit     string        // how its checks fail: one "fails", "hangs" until its context ends, or is "deaf" to that for a while; empty if they pass
	ailments  int
	marked    marked
	good      bool
	goodSince time.Time
	wallSetAt time.Time
	resigned  bool // in this term
}

func newReplica(w *world, i int) *replica {
	r := &replica{w: w, name: fmt.Sprint("r", i), ttl: w.ttl, rate: 1, good: true, goodSince: time.Now(),
		dice: testkit.NewDice(w.seed, 1+i), blocking: testkit.NewDice(w.seed, 300+i), burials: testkit.NewDice(w.seed, 400+i)}
	if w.unlikeTTLs {
		r.ttl = []time.Duration{w.ttl / 2, w.ttl, w.ttl * 2}[w.rng.IntN(3)]
	}
	if w.rates {
		r.rate = 0.99 + 0.02*w.rng.Float64()
		r.ttl = testkit.Scale(r.ttl, 1/r.rate).Round(time.Millisecond)
	}
	if w.slow && w.rng.IntN(2) == 0 {
		// A read and a steal together take longer than the timeout of a call. Some single
		// answers do, and a replica that gets these can't hold the lease.
		r.slow = testkit.Scale(min(r.ttl/6, 10*time.Second), 0.4+0.8*w.rng.Float64())
		r.good = false
	}
	r.wallOffset = time.Duration(w.rng.IntN(21)-10) * 24 * time.Hour
	return r
}

// start starts a process unless one is running.
func (r *replica) start() {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	if r.life != nil {
		return
	}
	l := &life{r: r, gone: make(chan struct{}), ended: make(chan struct{}), started: time.Now(), unchecked: true}
	l.store = r.view(storetest.Faulty(r.w.journal.handle(r.name, l, true), l.call))
	record.Restart() // each life of a replica is a process of its own
	var err error
	l.lease, err = tenure.NewLease(l.store, tenure.LeaseConfig{Key: leaseKey, Holder: r.name, TTL: r.ttl, Expiry: r.w.expiry,
		AssumeUniqueHolder: r.w.reclaims, Logger: l.blocker().Logger(r.w.line.Logger(r.name))})
	if err != nil {
		panic(err)
	}
	cfg := tenure.CoordinatorConfig{
		Reconcile:     l.reconcile,
		Confirmations: r.w.confirmations,
		Trace:         l.trace(),
	}
	if !r.w.pollsOften {
		cfg.AcquireInterval = r.ttl / 6
	}
	if r.w.twoFuncs {
		cfg.Watch = l.watch
	}
	if r.w.checks {
		cfg.Check = l.check
	}
	if r.w.outranks {
		cfg.Outranks, cfg.Settle = r.outranks, r.ttl
	}
	if r.w.drains {
		l.drain = l.newDrain()
		cfg.Drain = l.drain
	}
	if r.w.fences {
		cfg.FencePredecessor = l.fencePredecessor
	}
	l.coordinator, err = tenure.NewCoordinator(l.lease, cfg)
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(clock.With(context.Background(), r.clocks.Now))
	if r.w.witnesses {
		r.lives++
		l.witness = fmt.Sprint(r.name, " life ", r.lives)
		ctx = witnessed.With(ctx, l.witness)
	}
	l.shutdown = cancel
	r.life = l
	r.w.line.Say(r.name, "process starts")
	r.w.running.Go(func() { l.run(ctx) })
}

// view returns the store as the replica sees it.
func (r *replica) view(store *storetest.FaultyStore) tenure.Store {
	s := skewed{store, r, &translation{}}
	switch {
	case !r.w.rates && r.w.wakes:
		return store
	case r.w.wakes:
		return skewedWatcher{s, store, store, store}
	default:
		return skewedPoller{s, store}
	}
}

// ended is called when a process is gone.
func (r *replica) ended(l *life, downFor time.Duration) {
	r.w.locked(func() {
		if r.life == l {
			r.life = nil
		}
	})
	r.w.later(downFor, r.start)
}

// crash ends the process, if one is running, like kill -9: nothing that it does
// afterwards has an effect. What remains of it in the bubble is told to end.
func (r *replica) crash() {
	r.w.mu.Lock()
	l := r.life
	r.life = nil
	if l != nil {
		r.w.line.Say(r.name, "CRASHES")
		close(l.gone)
		r.w.judge.crashed(l)
	}
	r.w.mu.Unlock()
	if l != nil {
		l.shutdown()
		l.bury()
	}
}

// stop shuts the process down and starts another one a while later.
func (r *replica) stop(patience, downFor time.Duration) {
	r.w.mu.Lock()
	l := r.life
	if l == nil || l.stopping {
		r.w.mu.Unlock()
		return
	}
	l.stopping = true
	r.w.mu.Unlock()
	r.w.line.Say(r.name, "is told to shut down")
	l.shutdown()
	r.w.running.Go(func() {
		select {
		case <-l.ended:
			r.w.line.Say(r.name, "process ends")
			r.ended(l, downFor)
		case <-l.gone:
		case <-time.After(patience):
			r.crash()
			r.w.later(downFor, r.start)
		}
	})
}

func (r *replica) resign() {
	r.w.mu.Lock()
	l := r.life
	if l == nil || r.paused != nil {
		r.w.mu.Unlock()
		return
	}
	r.resigned = true
	r.w.mu.Unlock()
	r.w.line.Say(r.name, "is asked to resign")
	r.w.running.Go(func() {
		ctx, cancel := timed(r.w.ttl)
		defer cancel()
		_ = l.coordinator.Resign(ctx)
	})
}

// ask asks the holder, through the store, to hand over to the named replica, or to any.
func (r *replica) ask(to string) {
	r.w.mu.Lock()
	l := r.life
	if r.paused != nil {
		l = nil
	}
	r.w.mu.Unlock()
	if l == nil {
		return
	}
	r.w.line.Say(r.name, "asks for a handover to %q", to)
	r.w.running.Go(func() {
		ctx, cancel := timed(r.w.ttl / 6)
		defer cancel()
		_ = l.lease.RequestHandover(ctx, to)
	})
}

// change changes what is wrong with a replica.
func (r *replica) change(do func()) {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	do()
	good := r.link == testkit.WeatherClear && r.paused == nil && r.unfit == "" && r.slow == 0
	if good && !r.good {
		r.goodSince = time.Now()
	}
	r.good = good
}

// pause stops the process like SIGSTOP, or suspends its machine; see the package
// documentation.
func (r *replica) pause(d time.Duration, suspends bool) {
	resumed := make(chan struct{})
	paused := false
	r.change(func() {
		if r.paused == nil {
			r.paused, paused = resumed, true
		}
	})
	if !paused {
		return
	}
	how := "PAUSED"
	if suspends {
		how = "SUSPENDED"
		r.clocks.Suspend()
	}
	r.w.line.Say(r.name, "is %s for %v", how, d)
	r.w.running.Go(func() {
		r.w.sleep(d)
		if suspends {
			r.clocks.Resume()
		}
		r.change(func() {
			r.paused = nil
			if l := r.life; l != nil && l.held > 0 { // a release that was under way counts towards its term
				l.held += d
			}
		})
		r.w.line.Say(r.name, "is resumed")
		close(resumed)
	})
}

// setWall sets the machine's wall clock ahead or back: usually by as little as a time
// server does, sometimes by hours. The only permitted effect is that a term ends early
// or is renewed early.
func (r *replica) setWall() {
	by := r.w.upTo(r.w.ttl)
	if r.w.rng.IntN(4) == 0 {
		by = r.w.upTo(100 * time.Hour)
	}
	if r.w.rng.IntN(2) == 0 {
		by = -by
	}
	r.w.line.Say(r.name, "its wall clock is set by %v", by)
	r.clocks.SetWall(by)
	r.change(func() { r.goodSince, r.wallSetAt = time.Now(), time.Now() })
}
