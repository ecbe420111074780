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
)

const (
	// The pauses between two calls of Run for a shard, after one that has returned by itself.
	firstPause   = 100 * time.Millisecond
	longestPause = 30 * time.Second

	// tooLong is how long a func may take to return until that is logged.
	tooLong = 10 * time.Second
)

// shard is one that this process has claimed. The mu of Shards guards the fields without a
// comment.
type shard struct {
	id    string       // never changes
	claim claims.Claim // never changes
	nth   int          // never changes; the newest has the greatest

	begun    time.Time
	failures int
	err      error     // of the last call of Run that has returned by itself
	failed   time.Time // when that was
	cancel   context.CancelCauseFunc
	cause    error     // why it was told to stop; nil: it was not
	stopped  time.Time // when
}

type claimKey struct{}

// ClaimFromContext returns the claim for which [Config.Run] was called, or a zero one if ctx is
// not derived from the context of such a call. Package claims fences writes by it.
func ClaimFromContext(ctx context.Context) claims.Claim {
	c, _ := ctx.Value(claimKey{}).(claims.Claim)
	return c
}

// start works for shards that were claimed.
func (sh *Shards) start(ctx context.Context, got []claims.Claim) {
	ctx = context.WithoutCancel(ctx) // each func is told by itself, with a cause
	sh.mu.Lock()
	defer sh.mu.Unlock()
	slices.SortFunc(got, func(a, b claims.Claim) int { return cmp.Compare(a.Key.ID, b.Key.ID) })
	for _, c := range got {
		sh.claimed++
		s := &shard{id: c.Key.ID, claim: c, nth: sh.claimed, begun: time.Now()}
		sh.shards[s.id] = s
		sh.funcs.Go(func() {
			defer sh.ended(s)
			// It fails if the session was lost, of which the func was told.
			_ = sh.keys.Do(ctx, c, func(ctx context.Context) error { sh.serve(ctx, s); return nil })
		})
	}
}

// serve calls Run for a shard until the shard's claim is over, or is given up.
func (sh *Shards) serve(ctx context.Context, s *shard) {
	ctx = context.WithValue(ctx, claimKey{}, s.claim)
	// Its session was lost, or somebody asks for the shard: then it has to stop as well.
	defer context.AfterFunc(ctx, func() {
		sh.mu.Lock()
		defer sh.mu.Unlock()
		sh.stop(s, context.Cause(ctx))
	})()
	var pause pace.Doubling
	for sh.call(ctx, s, &pause) && ctx.Err() == nil && sh.goesOn(s) {
	}
}

// call calls Run once. It reports whether it did, and not if the shard was told to stop before.
func (sh *Shards) call(ctx context.Context, s *shard, pause *pace.Doubling) bool {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	sh.mu.Lock()
	s.cancel = cancel
	stops := s.cause != nil || sh.over != nil
	sh.mu.Unlock()
	if stops {
		return false
	}
	began := time.Now()
	err := logtext.Sound(sh.cfg.Run(ctx, s.id))
	if ctx.Err() != nil {
		return true
	}
	err = cmp.Or(err, errors.New("Run has returned, although nobody told it to"))
	sh.mu.Lock()
	s.failures++
	s.err, s.failed = err, time.Now()
	failures := s.failures
	sh.mu.Unlock()
	wait := pace.Jitter(pause.Next(time.Since(began), firstPause, longestPause))
	sh.cfg.Logger.Warn("shard has failed and will be run again", "kind", sh.cfg.Kind, "shard", s.id,
		"error", err, "failures", failures, "pause", wait.Round(time.Millisecond))
	pace.Sleep(ctx, wait)
	return true
}

// goesOn decides what becomes of a shard whose func has returned: if it was told to stop because
// this process had too many, and now has not, it goes on here.
func (sh *Shards) goesOn(s *shard) bool {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	v := sh.current()
	switch {
	case sh.over != nil:
		return false
	case s.cause == nil:
		return true
	case s.claim.Session != sh.me.Session || !v.counts() || v.running >= v.share:
		return false
	}
	s.cause = nil
	return true
}

// ended notes that a shard is free, or its session lost.
func (sh *Shards) ended(s *shard) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	delete(sh.shards, s.id)
	if errors.Is(s.cause, tenure.ErrResigned) || errors.Is(s.cause, tenure.ErrUnhealthy) {
		sh.givenUp++
	}
	if sh.over != nil {
		return
	}
	if s.claim.Session != sh.me.Session { // it may have kept this process away
		sh.wake()
	}
	if _, room := sh.current().room(); room > 0 {
		sh.wake()
	}
}

// stop tells a shard's func to return. The caller holds the mutex.
func (sh *Shards) stop(s *shard, cause error) {
	if s.cause != nil {
		return
	}
	s.cause, s.stopped = cause, time.Now()
	if s.cancel != nil {
		s.cancel(cause)
	}
	began := s.stopped
	time.AfterFunc(tooLong, func() {
		sh.mu.Lock()
		defer sh.mu.Unlock()
		if sh.shards[s.id] == s && s.cause != nil && s.stopped.Equal(began) {
			sh.cfg.Logger.Warn("shard was told to stop and has not returned yet", "kind", sh.cfg.Kind, "shard", s.id, "since", tooLong)
		}
	})
}

// stopAll tells all funcs to return, and lets none begin.
func (sh *Shards) stopAll(cause error) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.over == nil || errors.Is(sh.over, tenure.ErrUnhealthy) {
		sh.over = cause
	}
	for _, s := range sh.shards {
		sh.stop(s, cause)
	}
}

// stopSurplus tells the newest funcs to return if this process has too many, and returns how
// many.
func (sh *Shards) stopSurplus() int {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	surplus := sh.current().surplus()
	if surplus == 0 {
		return 0
	}
	var running []*shard
	for _, s := range sh.shards {
		if s.cause == nil && s.claim.Session == sh.me.Session {
			running = append(running, s)
		}
	}
	slices.SortFunc(running, func(a, b *shard) int { return cmp.Compare(b.nth, a.nth) })
	for _, s := range running[:surplus] {
		sh.stop(s, tenure.ErrResigned)
	}
	return surplus
}

// update notes what a look has found, and returns it with this process's shards.
func (sh *Shards) update(v view) view {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.view = v
	return sh.current()
}

// current returns the view of the last look with the shards that this process has now. The
// caller holds the mutex.
func (sh *Shards) current() view {
	v := sh.view
	for _, s := range sh.shards {
		if s.claim.Session != sh.me.Session {
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
func (sh *Shards) wants() bool {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	_, room := sh.current().room()
	return room > 0
}

// former returns the sessions that were lost and whose funcs have not all returned.
func (sh *Shards) former() map[string]bool {
	current := sh.session.ID()
	sh.mu.Lock()
	defer sh.mu.Unlock()
	former := make(map[string]bool)
	for _, s := range sh.shards {
		if s.claim.Session != current {
			former[s.claim.Session] = true
		}
	}
	return former
}

// running returns the shards for which a goroutine runs, also those of a session that was lost.
func (sh *Shards) running() map[string]bool {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	running := make(map[string]bool, len(sh.shards))
	for id := range sh.shards {
		running[id] = true
	}
	return running
}
