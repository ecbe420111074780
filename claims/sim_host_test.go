package claims_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// host outlives the processes that run on it.
type host struct {
	a      *arena
	name   string
	ttl    time.Duration
	dice   *testkit.Dice
	clocks testkit.MachineClocks

	blocking *testkit.Dice // of its log

	// Guarded by the database's mutex.
	life      *life // the process that runs; nil if none does
	lives     int
	link      testkit.Weather
	only      string        // the one operation that the weather is for; empty: all
	links     int           // how often the link has changed
	paused    chan struct{} // closed when it is resumed; nil if it is not paused
	drained   time.Time     // until when its last mark stands
	good      bool
	goodSince time.Time
	resumedAt time.Time
}

func newHost(a *arena, i int) *host {
	h := &host{a: a, name: fmt.Sprint("p", i), ttl: a.ttl, good: true, goodSince: time.Now(), dice: testkit.NewDice(a.seed, 1+i), blocking: testkit.NewDice(a.seed, 300+i)}
	if a.unlikeTTLs {
		h.ttl = []time.Duration{a.ttl / 2, a.ttl, a.ttl * 2}[a.rng.IntN(3)]
	}
	return h
}

// limit is how long a statement of claims may take, with the default configuration.
func (h *host) limit() time.Duration { return min(h.ttl/6, 10*time.Second) }

// life is one process on a host.
type life struct {
	h                     *host
	name                  string
	session               *claims.Session
	keys                  *claims.Keys
	slots                 *claims.Slots
	drain                 *tenure.Drain
	drained               atomic.Int64 // since when it is drained, in nanoseconds; 0: it is not
	wasDrained, undrained time.Time    // as the judge has seen it
	store                 tenure.Store
	queue                 *claims.Queue // nil: there is none
	shutdown              context.CancelFunc
	gone                  chan struct{} // closed at its crash
	ended                 chan struct{} // closed when Run has returned
	started               time.Time
	db                    *knowing
	stopping              bool           // guarded by the database's mutex, like looked
	looked                time.Time      // when it last sent a statement that reads rows
	taking                map[string]int // statements that take rows and have no answer, by their sessions
}

// hintless is a store without hints.
type hintless struct {
	tenure.Store
	tenure.Lister
	backend
}

// knowing is the database as a process knows it: it looks at the lineage again only when an answer has shown that the
// server is another one.
type knowing struct {
	*memDB
	mu    sync.Mutex // guards the fields below; never held across I/O
	on    *tenure.Lineage
	at    time.Time            // of on
	first map[string]time.Time // when a mark was first seen
}

func (k *knowing) Lineage(ctx context.Context) (tenure.Lineage, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.on == nil {
		on, err := k.memDB.Lineage(ctx)
		if err != nil {
			return on, err
		}
		if _, known := k.first[on.Mark]; !known {
			k.first[on.Mark] = time.Now()
		}
		k.on, k.at = &on, time.Now()
	}
	on := *k.on
	on.Age += time.Since(k.at)
	if on.Seen = time.Since(k.first[on.Mark]); k.on.Age == objects.SettledAge {
		on.Seen = on.Age
	}
	return on, nil
}

// answered notes an answer, of the server that is up.
func (k *knowing) answered(op string, err error) {
	if moved := errors.Is(err, tenure.ErrMoved); !moved && (err != nil || op != "get" && op != "put") {
		return
	}
	on, _ := k.memDB.Lineage(context.Background())
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.on != nil && k.on.Server != on.Server {
		k.on = nil
	}
}

// start starts a process unless one is running.
func (h *host) start() {
	h.a.db.mu.Lock()
	defer h.a.db.mu.Unlock()
	if h.life != nil {
		return
	}
	h.lives++
	l := &life{h: h, name: fmt.Sprintf("%s.%d", h.name, h.lives), gone: make(chan struct{}), ended: make(chan struct{}), started: time.Now(), taking: map[string]int{}}
	l.db = &knowing{memDB: h.a.db, first: make(map[string]time.Time)}
	faulty := storetest.Faulty(l.db, l.call)
	var store tenure.Store = faulty
	if !h.a.wakes {
		store = hintless{faulty, faulty, faulty}
	}
	cfg := claims.SessionConfig{TTL: h.ttl, Holder: l.name, Expiry: h.a.expiry, Logger: h.a.line.Logger(l.name)}
	if h.a.drains {
		l.drain = testkit.Must(tenure.NewDrain(storetest.Faulty(h.a.marks, l.call), h.name, cfg.Logger))
		l.drain.Follow(l.setDrained)
		cfg.Drain = l.drain
	}
	if h.a.blocks {
		b := testkit.Blocker{Dice: h.blocking, TTL: h.ttl, Gone: l.gone, End: l.ended, Say: func(format string, args ...any) {
			h.a.line.Say(l.name, format, args...)
		}}
		cfg.Logger = b.Logger(cfg.Logger)
	}
	if !h.a.pollsOften {
		cfg.PollInterval = h.ttl / 6
	}
	var err error
	if l.session, err = claims.NewSession(store, cfg); err != nil {
		panic(err)
	}
	if l.keys, err = claims.NewKeys(l.session, kind); err != nil {
		panic(err)
	}
	if h.a.slots > 0 {
		if l.slots, err = claims.NewSlots(l.session, slotName, 1+h.dice.N(h.a.slots)); err != nil {
			panic(err)
		}
	}
	if l.store = store; h.a.workers > 0 {
		queue := claims.QueueConfig{Table: jobTable, NotBefore: "not_before", Done: "done = true", PollInterval: h.a.ttl / 60, Logger: cfg.Logger}
		if h.a.perKey > 0 {
			queue.PerKey = claims.PerKey{Column: "key", Limit: h.a.perKey}
		}
		l.queue, err = claims.NewQueue(store, queue)
		if err == nil {
			_, err = claims.NewWorker(l.session, l.queue) // so that its session frees the rows of workers that are gone
		}
		if err != nil {
			panic(err)
		}
	}
	ctx, cancel := context.WithCancel(clock.With(context.Background(), h.clocks.Now))
	l.shutdown = cancel
	h.life = l
	h.a.line.Say(l.name, "process starts")
	h.a.running.Go(func() {
		defer close(l.ended)
		_ = l.session.Run(ctx)
	})
	if l.drain != nil {
		h.a.running.Go(func() { _ = l.drain.Run(ctx) })
	}
	for range 3 {
		h.a.running.Go(func() { l.work(context.WithValue(ctx, workerKey{}, true)) })
	}
}

// setDrained notes that the process is drained, before its session knows, or that it takes part again.
func (l *life) setDrained(drained bool) (givenBack func(context.Context) error) {
	since := int64(0)
	if drained {
		since = time.Now().UnixNano()
	}
	l.drained.Store(since)
	l.h.a.line.Say(l.name, "is drained: %v", drained)
	return func(context.Context) error { return nil }
}

// isDrained reports since when the process is drained.
func (l *life) isDrained() (since time.Time, drained bool) {
	at := l.drained.Load()
	return time.Unix(0, at), at != 0
}

// drainFor marks a host as drained, in all its lives.
func (h *host) drainFor(d time.Duration) {
	h.a.line.Say(h.name, "is to be drained for %v", d)
	h.a.locked(func() { h.drained = time.Now().Add(d) })
	if err := tenure.SetDrain(context.Background(), h.a.marks, tenure.Drained{Replica: h.name, Left: d}); err != nil {
		panic(err)
	}
}

// crash ends the process, if one is running, like kill -9: nothing that it does afterwards has
// an effect, but what it has sent lands. What remains of it in the bubble is told to end.
func (h *host) crash() {
	var l *life
	h.a.locked(func() { l = h.crashes() })
	if l != nil {
		l.shutdown()
	}
}

// crashes is crash, except that the caller holds the mutex and calls shutdown later.
func (h *host) crashes() *life {
	l := h.life
	if h.life = nil; l != nil {
		h.a.line.Say(l.name, "CRASHES")
		close(l.gone)
		h.a.judge.crashed(l)
	}
	return l
}

// stop shuts the process down and starts another one a while later.
func (h *host) stop(patience, downFor time.Duration) {
	var l *life
	h.a.locked(func() {
		if l = h.life; l == nil || l.stopping {
			l = nil
			return
		}
		l.stopping = true
		h.a.line.Say(l.name, "is told to shut down")
	})
	if l == nil {
		return
	}
	l.shutdown()
	h.a.running.Go(func() {
		select {
		case <-l.ended:
			h.a.line.Say(l.name, "process ends")
			h.a.locked(func() {
				if h.life == l {
					h.life = nil
				}
			})
		case <-l.gone:
		case <-time.After(patience):
			h.crash()
		}
		h.a.later(downFor, h.start)
	})
}

// halt returns true once the process is not paused, or false if it is gone.
func (l *life) halt() bool {
	for {
		var paused chan struct{}
		l.h.a.locked(func() { paused = l.h.paused })
		if paused == nil {
			return !l.dead()
		}
		select {
		case <-paused:
		case <-l.gone:
			return false
		}
	}
}

func (l *life) dead() bool {
	select {
	case <-l.gone:
		return true
	default:
		return false
	}
}

// wait waits like a process that may be paused or crash. It returns false if the process is
// gone.
func (l *life) wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-l.gone:
		return false
	}
	return l.halt()
}

// isWell reports whether nothing is wrong with the process, and since when.
func (l *life) isWell() (since time.Time, ok bool) {
	if l == nil || l.dead() || l.stopping || !l.h.good {
		return time.Time{}, false
	}
	return later(l.started, l.h.goodSince), true
}

// allowed is the time that a func has to return with the library's defaults.
func (l *life) allowed() time.Duration { return l.h.ttl - l.h.ttl/30 - l.h.ttl*2/3 }

// change changes what is wrong with a host.
func (h *host) change(do func()) {
	h.a.db.mu.Lock()
	defer h.a.db.mu.Unlock()
	do()
	good := h.link == testkit.WeatherClear && h.paused == nil
	if good && !h.good {
		h.goodSince = time.Now()
	}
	h.good = good
}

// pause stops the process like SIGSTOP, or suspends its machine.
func (h *host) pause(d time.Duration, suspends bool) {
	resumed, paused := make(chan struct{}), false
	h.change(func() {
		if h.paused == nil {
			h.paused, paused = resumed, true
		}
	})
	if !paused {
		return
	}
	how := "PAUSED"
	if suspends {
		how = "SUSPENDED"
		h.clocks.Suspend()
	}
	h.a.line.Say(h.name, "is %s for %v", how, d)
	h.a.running.Go(func() {
		h.a.sleep(d)
		if suspends {
			h.clocks.Resume()
		}
		h.change(func() { h.paused, h.resumedAt = nil, time.Now() })
		h.a.line.Say(h.name, "is resumed")
		close(resumed)
	})
}

// setWall sets the machine's wall clock ahead or back. The only permitted effect is that a
// session ends early or is renewed early.
func (h *host) setWall() {
	by := h.a.upTo(h.a.ttl)
	if h.a.rng.IntN(4) == 0 {
		by = h.a.upTo(100 * time.Hour)
	}
	if h.a.rng.IntN(2) == 0 {
		by = -by
	}
	h.a.line.Say(h.name, "its wall clock is set by %v", by)
	h.clocks.SetWall(by)
	h.change(func() { h.goodSince = time.Now() })
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
