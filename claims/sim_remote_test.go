package claims_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The processes of an arena are also servers of a queue, for workers that cannot reach the database: a
// server takes rows for the session of a worker, which it keeps by Resume at each heartbeat, and finishes
// them by value. This file has the servers and the workers.

const jobTable = "jobs" // the table of the queue

var errNoServer = errors.New("connection refused")

// handling returns the context of a request that a server handles.
func (l *life) handling(limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(clock.With(context.Background(), l.h.clocks.Now), limit)
}

// remoteSession is what a worker knows of its session.
type remoteSession struct {
	id, term string
	token    int64
}

func (l *life) remoteLease(id string) *tenure.Lease {
	lease, err := tenure.NewLease(l.store, tenure.LeaseConfig{Key: claims.SessionKey(id), Holder: l.name, TTL: l.h.a.ttl, Expiry: l.h.a.expiry, Logger: testkit.Quiet})
	if err != nil {
		panic(err)
	}
	return lease
}

func (l *life) begin(ctx context.Context, id string) (remoteSession, error) {
	term, err := l.remoteLease(id).TryAcquire(ctx)
	if err != nil {
		return remoteSession{}, err
	}
	return remoteSession{id, term.ID(), term.Token()}, nil
}

func (l *life) heartbeat(ctx context.Context, s remoteSession) (*tenure.Term, error) {
	return l.remoteLease(s.id).Resume(ctx, s.term, s.token)
}

// goodbye ends a session whose worker has stopped.
func (l *life) goodbye(ctx context.Context, s remoteSession) (none struct{}, err error) {
	term, err := l.heartbeat(ctx, s)
	if err != nil {
		return none, err
	}
	left, err := l.queue.OwnedBy(ctx, s.id)
	if err == nil && len(left) > 0 {
		err = l.queue.Release(ctx, left...)
	}
	return none, errors.Join(err, l.remoteLease(s.id).Release(ctx, term))
}

// takeFor takes rows for a worker that knows of the claims in have. Rows that the worker owns beside these
// were taken by a request whose answer was lost.
func (l *life) takeFor(ctx context.Context, s remoteSession, n int, have []claims.Claim) ([]claims.Claim, error) {
	got, err := l.queue.OwnedBy(ctx, s.id)
	got = slices.DeleteFunc(got, func(c claims.Claim) bool { return slices.Contains(have, c) })
	if err != nil || len(got) > 0 {
		return got, err
	}
	if l.h.dice.One(4) {
		return l.queue.TryTakeFor(ctx, s.id, claims.TakeOptions{N: n})
	}
	a := l.h.a
	w := &serving{l, time.Now()}
	a.locked(func() { a.judge.servings[w] = true })
	defer a.locked(func() { delete(a.judge.servings, w) })
	waiting, cancel := context.WithTimeout(ctx, a.patience())
	defer cancel()
	return takeFor(waiting, l.queue, s.id, claims.TakeOptions{N: n})
}

// finish finishes rows by value.
func (l *life) finish(ctx context.Context, done []claims.Claim) (none struct{}, err error) {
	err = l.queue.Finish(ctx, done...)
	l.h.a.locked(func() { l.h.a.judge.finishAnswered(l, done, err) })
	return none, err
}

// patience is how long a request for rows waits.
func (a *arena) patience() time.Duration { return a.ttl / 10 }

// remoteHost runs the processes of a worker, one after another. Its link leads to the servers.
type remoteHost struct {
	*host
	process *remote // guarded by the database's mutex; nil if none runs
}

// remote is one process of a worker.
type remote struct {
	h    *remoteHost
	a    *arena
	name string
	gone chan struct{}

	session remoteSession           // guarded by the database's mutex, as is all below
	trusted time.Time               // until when it trusts its session
	have    map[claims.Claim]bool   // true while it works on the row
	dropped chan struct{}           // receives when a claim was dropped
	lost    context.CancelCauseFunc // ends all work under the session
}

func newRemoteHost(a *arena, i int) *remoteHost {
	return &remoteHost{host: &host{a: a, name: fmt.Sprint("w", i), ttl: a.ttl, good: true, dice: testkit.NewDice(a.seed, 500+i)}}
}

// run runs processes until nothing happens any more.
func (h *remoteHost) run() {
	for n := 1; !h.a.isCalm(); n++ {
		p := &remote{h: h, a: h.a, name: fmt.Sprintf("%s.%d", h.name, n), gone: make(chan struct{}), have: map[claims.Claim]bool{}, dropped: make(chan struct{}, 1)}
		h.a.locked(func() { h.process = p; h.a.judge.remotes = append(h.a.judge.remotes, p) })
		p.run()
		h.a.locked(func() {
			h.process = nil
			h.a.judge.remotes = slices.DeleteFunc(h.a.judge.remotes, func(o *remote) bool { return o == p })
		})
		h.a.sleep(h.dice.UpTo(h.ttl))
	}
}

// crash ends the process, if one runs. What it has sent lands.
func (h *remoteHost) crash() {
	h.a.locked(func() {
		if p := h.process; p != nil && !p.dead() {
			h.a.line.Say(p.name, "CRASHES")
			close(p.gone)
		}
	})
}

func (p *remote) dead() bool {
	select {
	case <-p.gone:
		return true
	default:
		return false
	}
}

// halt returns true once the process is not paused, or false if it is gone.
func (p *remote) halt() bool {
	for {
		var paused chan struct{}
		p.a.locked(func() { paused = p.h.paused })
		if paused == nil {
			return !p.dead()
		}
		select {
		case <-paused:
		case <-p.gone:
			return false
		}
	}
}

func (p *remote) wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	case <-p.gone:
		return false
	}
	return p.halt()
}

// send sends a request to any server that runs.
func send[T any](p *remote, handle func(context.Context, *life) (T, error)) (answer T, err error) {
	if !p.halt() {
		return answer, errCrashed
	}
	d, limit := p.h.dice, 2*p.a.patience()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	f := testkit.Fate{Request: time.Microsecond + d.UpTo(p.a.latency+1), Answer: d.UpTo(p.a.latency + 1)}
	var weather testkit.Weather
	p.a.locked(func() { weather = p.h.link })
	f.In(weather, d, limit)
	if f.Request == 0 { // else a server that is paused would hold up the caller beyond its limit
		f.Request = time.Microsecond
	}
	if weather != testkit.WeatherClear && d.One(4) { // the network delivers it very late
		f.Request += d.UpTo(3 * p.a.ttl)
	}
	var got atomic.Pointer[T]
	err = f.Carry(ctx, d, &p.a.running, func(context.Context) error {
		l := p.a.anyServer(d)
		if l == nil || !l.halt() {
			return errNoServer
		}
		ctx, cancel := l.handling(limit)
		defer cancel()
		out, err := handle(ctx, l)
		if !l.halt() {
			return errCrashed
		}
		got.Store(&out)
		return err
	})
	if !p.halt() {
		return answer, errCrashed
	}
	if out := got.Load(); out != nil && err == nil {
		answer = *out
	}
	return answer, err
}

func (a *arena) anyServer(d *testkit.Dice) (l *life) {
	i := d.N(len(a.hosts))
	a.locked(func() { l = a.hosts[i].life })
	return l
}

// run begins a session, and works until it is lost or nothing happens any more.
func (p *remote) run() {
	id, sent := uuid.NewString(), time.Now()
	p.a.locked(func() { p.a.judge.remoteSessions[id] = &remoteRecord{worker: p} })
	s, err := send(p, func(ctx context.Context, l *life) (remoteSession, error) { return l.begin(ctx, id) })
	if err != nil {
		return
	}
	ctx, lose := context.WithCancelCause(context.Background())
	defer lose(nil)
	p.a.locked(func() { p.session, p.trusted, p.lost = s, sent.Add(p.trust()), lose })
	p.a.line.Say(p.name, "has session %s", s.id[:4])
	var all sync.WaitGroup
	all.Go(func() { p.renew(ctx, s, lose) })
	for ctx.Err() == nil && !p.a.isCalm() && p.halt() {
		p.take(ctx, &all)
	}
	if p.dead() || p.a.isCalm() {
		lose(errCrashed)
	}
	all.Wait()
	if p.dead() {
		return
	}
	p.a.locked(func() { p.a.judge.remoteSessions[s.id].leaves, p.trusted = true, time.Time{} })
	for range 3 {
		if _, err := send(p, func(ctx context.Context, l *life) (struct{}, error) { return l.goodbye(ctx, s) }); err == nil || errors.Is(err, tenure.ErrLost) {
			return
		}
	}
}

// trust is for how long a heartbeat that was answered lets the worker trust its session.
func (p *remote) trust() time.Duration { return p.a.ttl - p.a.ttl/30 }

// renew sends heartbeats, some of them late, until the session is lost.
func (p *remote) renew(ctx context.Context, s remoteSession, lose context.CancelCauseFunc) {
	pause := p.a.ttl / 3
	for {
		var left time.Duration
		p.a.locked(func() { left = time.Until(p.trusted) })
		if left <= 0 {
			lose(tenure.ErrDeadline)
			return
		}
		if !p.wait(ctx, min(left, pause)) || ctx.Err() != nil {
			return
		}
		if pause = p.a.ttl / 3; p.h.dice.One(20) {
			pause = p.h.dice.UpTo(2 * p.a.ttl) // late
			continue
		}
		sent := time.Now()
		_, err := send(p, func(ctx context.Context, l *life) (*tenure.Term, error) { return l.heartbeat(ctx, s) })
		switch {
		case errors.Is(err, tenure.ErrLost):
			lose(tenure.ErrLost)
			return
		case err == nil:
			p.a.locked(func() {
				if p.trusted.After(time.Now()) {
					p.trusted = sent.Add(p.trust())
				}
			})
		default:
			pause = p.a.ttl / 30
		}
	}
}

// take asks for rows and begins to work on them.
func (p *remote) take(ctx context.Context, all *sync.WaitGroup) {
	const atOnce = 3
	var have []claims.Claim
	p.a.locked(func() { have = slices.Collect(maps.Keys(p.have)) })
	if len(have) >= atOnce {
		select {
		case <-p.dropped:
		case <-ctx.Done():
		case <-p.a.calm:
		case <-p.gone:
		}
		return
	}
	s := p.session
	got, err := send(p, func(ctx context.Context, l *life) ([]claims.Claim, error) {
		return l.takeFor(ctx, s, atOnce-len(have), have)
	})
	if err != nil {
		p.wait(ctx, p.a.patience()/4)
		return
	}
	for _, c := range got {
		p.a.locked(func() {
			p.have[c] = true
			p.a.judge.workBegins(p, c)
		})
		all.Go(func() { p.work(ctx, c) })
	}
}

// work works on a row, and then finishes it, gives it back, or forgets it.
func (p *remote) work(ctx context.Context, c claims.Claim) {
	d, a := p.h.dice, p.a
	defer func() {
		a.locked(func() { delete(p.have, c) })
		select {
		case p.dropped <- struct{}{}:
		default:
		}
	}()
	if !p.wait(ctx, d.UpTo(a.ttl)) {
		return
	}
	a.locked(func() { p.have[c] = false })
	// A request that was not answered may land at any time. Until it is, the worker keeps the claim, so that
	// the server does not hand it out again.
	var handle func(context.Context, *life) (struct{}, error)
	switch n := d.N(10); {
	case n < 7: // also if the session is lost: the database decides whether it is too late
		handle = func(ctx context.Context, l *life) (struct{}, error) { return l.finish(ctx, []claims.Claim{c}) }
	case n < 8:
		handle = func(ctx context.Context, l *life) (struct{}, error) {
			return struct{}{}, l.queue.ReleaseAfter(ctx, d.UpTo(a.ttl), c)
		}
	case n < 9:
		handle = func(ctx context.Context, l *life) (struct{}, error) { return struct{}{}, l.queue.Release(ctx, c) }
	default: // forgotten
		return
	}
	for tries := 0; tries < 4 || ctx.Err() == nil && !a.isCalm(); tries++ {
		if _, err := send(p, handle); err == nil || errors.Is(err, tenure.ErrLost) || p.dead() {
			return
		}
		if !p.wait(ctx, a.patience()/4) {
			return
		}
	}
}

// addJobs adds rows until nothing happens any more.
func (a *arena) addJobs() {
	rng := testkit.RNG(a.seed, 600)
	for n := 0; !a.isCalm(); n++ {
		id := fmt.Sprintf("j%05d", n)
		a.locked(func() {
			a.rows.jobs[id] = &memJob{Claim: rowOf(claims.Claim{Key: tenure.Key{Type: jobTable, ID: id}}), key: strconv.Itoa(n % 2), since: time.Now()}
		})
		if !a.sleep(time.Duration(rng.Int64N(int64(a.ttl / 2)))) {
			return
		}
	}
}
