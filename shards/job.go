package shards

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

const (
	// The pause before Work is called again for a shard, after it has returned too early.
	firstPause   = 100 * time.Millisecond
	longestPause = 30 * time.Second

	// tooLong is how long a func may take to return before this is logged.
	tooLong = 10 * time.Second
)

// shard is a shard that this process has claimed.
type shard struct {
	id    string
	claim claims.Claim
	nth   int // the newest shard has the greatest
	begun time.Time

	// The mu of Member guards the fields below.
	failures int
	err      error     // of the last call of Work that returned too early
	failed   time.Time // when it returned
	cancel   context.CancelCauseFunc
	cause    error     // why the shard was told to stop; nil: it was not
	stopped  time.Time // when it was told
}

// start begins to work for shards that were claimed.
func (m *Member) start(ctx context.Context, got []claims.Claim) {
	ctx = context.WithoutCancel(ctx) // each func is told separately, with a cause
	m.mu.Lock()
	defer m.mu.Unlock()
	slices.SortFunc(got, func(a, b claims.Claim) int { return cmp.Compare(a.Key.ID, b.Key.ID) })
	for _, c := range got {
		m.claimed++
		s := &shard{id: c.Key.ID, claim: c, nth: m.claimed, begun: time.Now()}
		m.shards[s.id] = s
		m.funcs.Go(func() {
			defer m.ended(s)
			// An error means that the session was lost, which the func has been told.
			_ = m.keys.Do(ctx, c, func(ctx context.Context) error { m.serve(ctx, s); return nil })
		})
	}
}

// serve calls Work for a shard until the shard's claim has ended or is given up.
func (m *Member) serve(ctx context.Context, s *shard) {
	// The shard also stops when its session is lost, or when another process asks for it.
	defer context.AfterFunc(ctx, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.stop(s, context.Cause(ctx))
	})()
	var pause pace.Doubling
	for m.call(ctx, s, &pause) && ctx.Err() == nil && m.keepRunning(s) {
	}
}

// call calls Work once. It reports whether it did: if the shard was told to stop before, it does not.
func (m *Member) call(ctx context.Context, s *shard, pause *pace.Doubling) bool {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m.mu.Lock()
	s.cancel = cancel
	stops := s.cause != nil || m.over != nil
	m.mu.Unlock()
	if stops {
		return false
	}
	began := time.Now()
	err := m.work(ctx, s.id)
	if ctx.Err() != nil {
		return true
	}
	err = cmp.Or(err, errors.New("Work returned although it was not told to"))
	m.mu.Lock()
	s.failures++
	s.err, s.failed = err, time.Now()
	failures := s.failures
	m.mu.Unlock()
	wait := pace.Jitter(pause.Next(time.Since(began), firstPause, longestPause))
	m.cfg.Logger.Warn("shard has failed and will be run again", "kind", m.cfg.Kind, "shard", s.id,
		"error", err, "failures", failures, "pause", wait.Round(time.Millisecond))
	pace.Sleep(ctx, wait)
	return true
}

// work calls Work in a goroutine of its own, because Work may end by runtime.Goexit. It would end the goroutine that
// holds the claim, and the shard would be claimed again at once. A panic is passed on to that goroutine, which frees the
// shard before the process ends.
func (m *Member) work(ctx context.Context, id string) error {
	p, err := report.Call(func() error { return logtext.Sound(m.cfg.Work(ctx, id)) })
	if p != nil {
		panic(p)
	}
	return err
}

// keepRunning decides whether Work is called again for a shard. If the shard was told to stop because this
// process had too many, and it no longer has, the shard keeps running here.
func (m *Member) keepRunning(s *shard) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	v := m.current()
	switch {
	case m.over != nil:
		return false
	case s.cause == nil:
		return true
	case s.claim.Session != m.me.Session || !v.counts() || v.running >= v.share:
		return false
	}
	s.cause = nil
	return true
}

// ended notes that a shard is free or that its session is lost.
func (m *Member) ended(s *shard) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.shards, s.id)
	if errors.Is(s.cause, tenure.ErrResigned) || errors.Is(s.cause, tenure.ErrUnhealthy) {
		m.givenUp++
	}
	if m.over != nil {
		return
	}
	if s.claim.Session != m.me.Session { // mustWait may have waited for it
		m.wake()
	}
	if _, room := m.current().room(); room > 0 {
		m.wake()
	}
}

// stop tells a shard's func to return. The caller holds mu.
func (m *Member) stop(s *shard, cause error) {
	if s.cause != nil {
		return
	}
	s.cause, s.stopped = cause, time.Now()
	if s.cancel != nil {
		s.cancel(cause)
	}
	began := s.stopped
	time.AfterFunc(tooLong, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.shards[s.id] == s && s.cause != nil && s.stopped.Equal(began) {
			m.cfg.Logger.Warn("shard was told to stop and has not returned yet", "kind", m.cfg.Kind, "shard", s.id, "since", tooLong)
		}
	})
}

// stopAll tells all funcs to return, and lets no more begin.
func (m *Member) stopAll(cause error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over == nil || errors.Is(m.over, tenure.ErrUnhealthy) {
		m.over = cause
	}
	for _, s := range m.shards {
		m.stop(s, cause)
	}
}

// stopSurplus tells the newest funcs to return if this process has too many shards. It returns how many it
// told.
func (m *Member) stopSurplus() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	surplus := m.current().surplus()
	if surplus == 0 {
		return 0
	}
	var running []*shard
	for _, s := range m.shards {
		if s.cause == nil && s.claim.Session == m.me.Session {
			running = append(running, s)
		}
	}
	slices.SortFunc(running, func(a, b *shard) int { return cmp.Compare(b.nth, a.nth) })
	for _, s := range running[:surplus] {
		m.stop(s, tenure.ErrResigned)
	}
	return surplus
}

// update notes what a look has found, and returns the current view.
func (m *Member) update(v view) view {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.view = v
	return m.current()
}

// current returns the view of the last look, with the shards that this process has now. The caller holds
// mu.
func (m *Member) current() view {
	v := m.view
	for _, s := range m.shards {
		if s.claim.Session != m.me.Session {
			continue
		}
		v.mine++
		if s.cause == nil {
			v.running++
		}
	}
	return v
}

// wants reports whether this process has fewer shards than it should have.
func (m *Member) wants() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, room := m.current().room()
	return room > 0
}

// former returns the lost sessions whose funcs have not all returned.
func (m *Member) former() map[string]bool {
	current := m.session.ID()
	m.mu.Lock()
	defer m.mu.Unlock()
	former := make(map[string]bool)
	for _, s := range m.shards {
		if s.claim.Session != current {
			former[s.claim.Session] = true
		}
	}
	return former
}

// running returns the shards for which a goroutine runs, also those of lost sessions.
func (m *Member) running() map[string]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	running := make(map[string]bool, len(m.shards))
	for id := range m.shards {
		running[id] = true
	}
	return running
}
