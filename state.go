package tenure

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure/internal/listen"
)

// state is what a coordinator knows, for [Coordinator.Status]. The coordinator's
// mutex guards it.
type state struct {
	role      Role
	stuck     bool
	working   bool // the job's funcs were started, and not all have returned
	terms     int
	since     time.Time
	reason    string
	holder    string
	seen      *Holding // the holder's record as it was last read; nil: there is none, or it is this replica's
	latency   time.Duration
	lastError string
	past      []PastTerm    // the latest last; nil until a term is over
	changed   chan struct{} // closed at the next change; nil: nobody waits for it
}

// become notes a change of role.
func (s *state) become(role Role, reason string) {
	s.role, s.since, s.reason = role, time.Now(), reason
}

// saw notes a record that another holder wrote; nil: there is none.
func (s *state) saw(h *Holding) {
	if h == nil || h.Offered {
		if s.seen != nil {
			how := "released"
			if h != nil {
				how = h.how()
			}
			s.over(s.seen.past(how))
		}
		s.seen, s.holder = nil, ""
		return
	}
	if s.seen != nil && !s.seen.sameTerm(h) {
		s.over(s.seen.past("followed by " + h.Holder))
	}
	s.seen, s.holder = h, h.Holder
}

// over notes a term that has ended.
func (s *state) over(term PastTerm) {
	const most = 10
	if len(s.past) == most {
		copy(s.past, s.past[1:])
		s.past = s.past[:most-1]
	}
	s.past = append(s.past, term)
}

// called notes how the last call to the store went, and says so to all who follow
// if it is news.
func (s *state) called(err error) (changed bool) {
	last := s.lastError
	s.lastError = ""
	if err != nil {
		s.lastError = err.Error()
	}
	if s.lastError == last || listen.Gist(s.lastError) == listen.Gist(last) {
		return false
	}
	s.publish()
	return true
}

func (h *Holding) sameTerm(other *Holding) bool {
	return h.Term == other.Term && h.Holder == other.Holder
}

func (h *Holding) past(reason string) PastTerm {
	return PastTerm{ID: h.Term, Holder: h.Holder, Began: h.AcquiredAt, Ended: time.Now(), Reason: reason}
}

// What follows is called as things happen. Each notes it, logs it and tells the
// trace, in this order, so that a func of the trace finds it in the status.

// attempted is told of each attempt of a standby.
func (c *Coordinator) attempted(began time.Time, err error) {
	if attempt := c.cfg.Trace.Attempt; attempt != nil {
		attempt(time.Since(began), err)
	}
}

// sawHolder is told of the record that was in the way of an attempt.
func (c *Coordinator) sawHolder(h Holding) {
	c.log().Debug("lease is held", "holder", h.Holder)
	c.mu.Lock()
	c.state.called(nil)
	c.mu.Unlock()
	if h.Version != 0 { // else it was gone before it was read
		c.noteHolder(&h)
	}
}

// noteHolder is told of the record that was read; nil: there is none.
func (c *Coordinator) noteHolder(h *Holding) {
	c.mu.Lock()
	before := c.state.holder
	c.state.saw(h)
	holder := c.state.holder
	if holder != before {
		c.state.reason = "held by " + cmp.Or(holder, "nobody")
		c.state.publish()
	}
	c.mu.Unlock()
	if holder != before {
		c.log().Info("lease has another holder", "holder", holder)
		c.holderChanged(holder)
	}
}

// enterTerm is told that a term has begun. Its job has not.
func (c *Coordinator) enterTerm(term *Term, keeper *keeper) {
	reason, ended := "acquired", "released"
	from := term.stolenFrom
	if from != nil {
		reason, ended = "stolen from "+from.Holder, "expired"
	}
	c.mu.Lock()
	s := &c.state
	before := s.holder
	if from != nil {
		s.saw(from)
	}
	if s.seen != nil {
		s.over(s.seen.past(ended))
	}
	c.held, c.lost, c.token = term, keeper.lost, term.Token()
	s.holder, s.seen = term.Holder(), nil
	s.latency, s.lastError = time.Since(term.AcquiredAt()), ""
	s.terms++
	s.become(Confirming, reason)
	if c.mustConfirm(term) { // else it is the holder at once
		s.publish()
	}
	c.mu.Unlock()

	c.log().Info("lease acquired", "holder", term.Holder(), "token", term.Token())
	if acquired := c.cfg.Trace.Acquired; acquired != nil {
		acquired(term, from)
	}
	if before != term.Holder() {
		c.holderChanged(term.Holder())
	}
}

// becomeHolder is told that the term's job begins.
func (c *Coordinator) becomeHolder(term *Term) {
	c.term.Store(term)
	c.mu.Lock()
	c.state.working = true
	c.state.become(Holder, c.state.reason)
	c.state.publish()
	c.mu.Unlock()
	if started := c.cfg.Trace.JobStarted; started != nil {
		started(term)
	}
}

// renewed is told of a renewal that was sent at began, when the trust was to end
// at the deadline.
func (c *Coordinator) renewed(term *Term, began, deadline time.Time) {
	now := time.Now()
	c.mu.Lock()
	c.state.latency = now.Sub(began)
	c.state.called(nil)
	c.mu.Unlock()
	c.log().Debug("lease renewed", "token", term.Token())
	c.renewals.Lock()
	defer c.renewals.Unlock()
	if renewed := c.cfg.Trace.Renewed; renewed != nil {
		renewed(term, now.Sub(began), deadline.Sub(now))
	}
}

func (c *Coordinator) renewalFailed(term *Term, err error) {
	c.report("lease not renewed, trying again", err)
	c.renewals.Lock()
	defer c.renewals.Unlock()
	if failed := c.cfg.Trace.RenewalFailed; failed != nil {
		failed(term, err, term.Remaining())
	}
}

// stopping is told that the term is over, before the job is.
func (c *Coordinator) stopping(term *Term, cause error) {
	c.term.Store(nil)
	c.mu.Lock()
	s := &c.state
	var lost *LostError
	if errors.As(cause, &lost) {
		s.holder, s.seen = "", nil
		if lost.To != nil && !lost.To.Offered {
			s.holder, s.seen = lost.To.Holder, lost.To
		}
	}
	holder := s.holder
	s.become(Stopping, cause.Error())
	s.publish()
	c.mu.Unlock()

	level, msg := slog.LevelDebug, "job is told to return"
	switch {
	case errors.Is(cause, ErrJobEnded):
		level, msg = slog.LevelWarn, "job ended before its term"
	case errors.Is(cause, ErrUnhealthy):
		level, msg = slog.LevelWarn, "replica is not fit to hold the lease"
	case isLoss(cause):
		level, msg = slog.LevelInfo, "lease lost"
	}
	c.log().Log(context.Background(), level, msg, "holder", holder, "token", term.Token(), "cause", cause)
	if isLoss(cause) {
		c.traceLost(term, cause)
	}
	if holder != term.Holder() {
		c.holderChanged(holder)
	}
}

// isLoss reports whether a term with this cause is over because the lease is, and
// not by a decision of this replica. A job's or a check's word is not enough.
func isLoss(cause error) bool {
	return (errors.Is(cause, ErrLost) || errors.Is(cause, ErrDeadline)) &&
		!errors.Is(cause, ErrJobEnded) && !errors.Is(cause, ErrUnhealthy)
}

func (c *Coordinator) jobStuck(term *Term, since time.Duration) {
	c.mu.Lock()
	c.state.stuck = true
	c.state.publish()
	c.mu.Unlock()
	c.log().Error("job does not return although its context has ended; its lease is renewed no longer",
		"token", term.Token(), "waited", since)
	if stuck := c.cfg.Trace.JobStuck; stuck != nil {
		stuck(term, since)
	}
}

// jobReturned is told that all of the job has returned.
func (c *Coordinator) jobReturned(term *Term, cause error) {
	c.mu.Lock()
	worked := c.state.working
	took := time.Since(c.state.since)
	c.state.working = false
	if c.state.stuck {
		c.state.stuck = false
		c.state.publish()
	}
	c.mu.Unlock()
	c.log().Debug("job returned", "token", term.Token(), "took", took)
	if ended := c.cfg.Trace.JobEnded; ended != nil && worked {
		ended(term, cause, took)
	}
}

// released is told that a lease was given back.
func (c *Coordinator) released(term *Term, cause error) {
	c.log().Info("lease released", "holder", term.Holder(), "token", term.Token(), "cause", cause)
	c.mu.Lock()
	c.state.called(nil)
	begun := c.held == term // else it came when the coordinator was shutting down
	before := c.state.holder
	if begun {
		c.state.holder, c.state.seen = "", nil
	}
	c.mu.Unlock()
	if released := c.cfg.Trace.Released; released != nil && begun {
		released(term, cause)
	}
	if begun && before != "" {
		c.holderChanged("")
	}
}

// notReleased is told that a lease could not be given back: err is [ErrLost] where
// it was another's already. Else it will expire.
func (c *Coordinator) notReleased(term *Term, cause, err error) {
	if errors.Is(err, ErrLost) {
		c.log().Info("lease lost before it was released", "holder", term.Holder(), "token", term.Token(), "error", err)
	} else {
		c.report("lease cannot be released; it will expire", err)
	}
	if c.holds(term) && !isLoss(cause) { // else it was told already
		c.traceLost(term, errors.Join(cause, err))
	}
}

func (c *Coordinator) holds(term *Term) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.held == term
}

// leaveTerm is told that nothing is left to do for the term held: the lease was given
// back, or err says why not. It returns whose resignation that was, nil where it was none.
func (c *Coordinator) leaveTerm(err error) *resignation {
	c.mu.Lock()
	s := &c.state
	s.over(PastTerm{
		ID: c.held.ID(), Holder: c.held.Holder(), Token: c.held.Token(),
		Began: c.held.AcquiredAt(), Ended: time.Now(), Reason: s.reason,
	})
	resign := c.resign
	c.held, c.lost, c.resign = nil, nil, nil
	standing := s.seen == nil && s.holder != "" // the record that could not be released
	if standing {
		s.holder = ""
	}
	s.become(Standby, s.reason)
	s.publish()
	c.mu.Unlock()
	if standing {
		c.holderChanged("")
	}
	if resign != nil {
		resign.err = err
		close(resign.over)
	}
	return resign
}

// log returns the logger, with what all lines of this coordinator say. To keep it
// would cost each of many leases more memory than their terms do.
func (c *Coordinator) log() *slog.Logger {
	return c.cfg.Logger.With("lease", c.lease.cfg.Key.String(), "replica", c.lease.cfg.Holder)
}

func (c *Coordinator) lastToken() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.token
}

func (c *Coordinator) traceLost(term *Term, cause error) {
	if lost := c.cfg.Trace.Lost; lost != nil {
		lost(term, cause)
	}
}

func (c *Coordinator) holderChanged(holder string) {
	if changed := c.cfg.Trace.HolderChanged; changed != nil {
		changed(holder)
	}
}

// report logs an error of the store: aloud when it is a new one, quietly while
// it stays the same.
func (c *Coordinator) report(msg string, err error) {
	c.mu.Lock()
	changed := c.state.called(err)
	c.mu.Unlock()
	level := slog.LevelDebug
	if changed {
		level = slog.LevelWarn
	}
	c.log().Log(context.Background(), level, msg, "error", err)
}
