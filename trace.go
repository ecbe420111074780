package tenure

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/report"
)

// Trace is a set of funcs that a [Coordinator] calls when something has happened, after it has
// updated its status. Any of them may be nil.
//
// A separate goroutine calls these funcs and the Logger, one at a time and in the order in which
// things happened. No renewal, job or end of a term waits for them, so a call may come a moment
// after the event that it reports. If they fall behind by more than 256 calls, further calls are
// dropped, and a warning in the log says how many. [Coordinator.Run] returns when all calls have
// been made; it waits at most a second for a func that does not return. The funcs may call the
// coordinator's methods. If one of them panics, so does Run.
//
// Each term is Acquired once. When it ends, it is Lost or Released; a term that was not renewed
// in time but could still be released is first Lost and then Released.
type Trace struct {
	// Attempt is called after each attempt of a standby to acquire the lease, with the time
	// that the attempt took. The error is nil if it succeeded, and otherwise usually [ErrHeld].
	Attempt func(took time.Duration, err error)

	// Acquired is called when a term has begun. The predecessor is the holder from which
	// the lease was stolen, as last read; nil if no replica held the lease.
	Acquired func(term *Term, predecessor *Holding)

	// Renewed is called after a renewal, with the time that it took and the trust that was
	// left when its answer came.
	Renewed func(term *Term, took, trustLeft time.Duration)

	// RenewalFailed is called when a renewal has failed, or was not sent because this
	// replica is unhealthy ([ErrUnhealthy]). The renewal will be retried.
	RenewalFailed func(term *Term, err error, trustLeft time.Duration)

	// Lost is called when the job has been told to return because another replica has the
	// lease, the record is gone, or the lease was not renewed in time. It is also called after
	// the job has returned, if the lease could not be released and has to expire.
	Lost func(term *Term, cause error)

	// Released is called when the lease is released.
	Released func(term *Term, cause error)

	// JobStarted is called when the job's funcs begin. JobEnded is called when all of
	// them have returned, with the time since they were told to return, or since the first
	// one returned.
	JobStarted func(term *Term)
	JobEnded   func(term *Term, cause error, took time.Duration)

	// JobStuck is called when the job has not returned although its context ended that
	// long ago. The lease is no longer renewed and will expire.
	JobStuck func(term *Term, since time.Duration)

	// FailedOver is called when the first renewal since a failover or a restore of the database has
	// succeeded. The database may have lost data that the job has read or written before. RecordLost
	// says that it has lost the term's record, which was written again. The term goes on.
	FailedOver func(term *Term, recordLost bool)

	// JobRun is called when a run of the job has begun, and again when it has ended: see
	// [RecordRun]. It is also called when Watch or Reconcile has returned an error without
	// having been told to return: that is a failed run.
	JobRun func(run JobRun)
}

// monitor is the one place that records what happens to a coordinator. It has one method for
// each event, which updates the status, logs, and calls the trace, in this order, so that a func
// of the trace finds the event in the status. The queue calls the logger and the trace, because
// they are the user's and may block.
type monitor struct {
	lease   Key
	replica string
	logger  *slog.Logger // hands its records to reports
	trace   *Trace
	reports *report.Queue

	mu    sync.Mutex
	state state
}

// tell queues a call of one of the trace's funcs, if the user has set it.
func (m *monitor) tell(isSet bool, call func()) {
	if isSet {
		m.reports.Add(call)
	}
}

func (m *monitor) update(change func(*state)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.state)
}

// log returns the logger with the attributes of all this coordinator's lines. It is made anew
// each time, because a program with many leases would otherwise need more memory for loggers
// than for terms.
func (m *monitor) log() *slog.Logger {
	return m.logger.With(logtext.Attrs(objects.ID(m.lease), m.replica)...)
}

// say logs a line in the words that fit the lease.
func (m *monitor) say(level slog.Level, msg string, attrs ...any) {
	m.log().Log(context.Background(), level, logtext.Line(objects.ID(m.lease), msg), attrs...)
}

// attempted notes a standby's attempt to acquire.
func (m *monitor) attempted(took time.Duration, err error) {
	m.tell(m.trace.Attempt != nil, func() { m.trace.Attempt(took, err) })
}

// sawHolder notes the record that was read; nil if there is none.
func (m *monitor) sawHolder(h *Holding) {
	how, msg, attrs := "held by nobody", "lease has another holder", []any{"holder", ""}
	if h != nil {
		how, attrs[1] = h.how(), h.Holder
		if h.isOffer() {
			msg, attrs = "lease is offered to a replica", []any{"offered_to", h.OfferedTo}
		}
	}
	var changed bool
	m.update(func(s *state) {
		before := s.holder
		s.saw(h)
		if changed = s.holder != before; changed {
			s.reason = how
			s.publish()
		}
	})
	if changed {
		m.say(slog.LevelInfo, msg, attrs...)
	}
}

// storeAnswered notes that a call to the store succeeded.
func (m *monitor) storeAnswered() {
	m.update(func(s *state) { s.answered() })
}

// logFailure logs an error of the store: as a warning if its class is new since the store last
// answered, or every ten minutes, and at debug level otherwise.
func (m *monitor) logFailure(msg string, err error) {
	level, text, class := slog.LevelDebug, logtext.Text(err), logtext.Class(err)
	m.update(func(s *state) {
		s.noteError(text, class)
		if objects.IsClosed(err) {
			s.closed = objects.Closed(err)
		}
		if s.retries.IsNew(class) {
			level = slog.LevelWarn
		}
	})
	m.say(level, msg, "error", logtext.OneLine(err))
}

// standsDown notes whether this replica stands down.
func (m *monitor) standsDown(down bool) {
	m.update(func(s *state) {
		s.down = down
		s.publish()
	})
	msg := "replica stands down: it doesn't compete until it is asked to"
	if !down {
		msg = "replica competes again"
	}
	m.say(slog.LevelInfo, msg)
}

// termBegan notes that a term has begun. Its job begins at once unless the takeover must
// be confirmed first.
func (m *monitor) termBegan(term *Term) {
	from := term.stolenFrom
	m.update(func(s *state) {
		reason, ended := "acquired", "released"
		if from != nil {
			reason, ended = "stolen from "+from.Holder, "expired"
			s.saw(from)
		}
		if s.seen != nil {
			s.endTerm(s.seen.pastTerm(ended))
		}
		s.held, s.holder, s.seen = term, term.Holder(), nil
		s.latency, s.lastError, s.overdue = time.Since(term.AcquiredAt()), "", time.Time{}
		s.class = ""
		s.retries.Reset()
		s.token = term.Token()
		s.terms++
		s.become(RoleConfirming, reason)
		if term.unconfirmed() != nil {
			s.publish()
		}
	})
	attrs := []any{"holder", term.Holder(), "token", term.Token()}
	if from != nil {
		attrs = append(attrs, "from", from.Holder, "reason", "expired")
	}
	msg := "lease acquired"
	if term.local() {
		msg = "runs without a lease: this process alone uses the store"
	}
	m.say(slog.LevelInfo, msg, attrs...)
	m.tell(m.trace.Acquired != nil, func() { m.trace.Acquired(term, from) })
}

// jobBegins notes that a term's job is about to begin.
func (m *monitor) jobBegins(term *Term) {
	m.update(func(s *state) {
		s.working = true
		s.become(RoleHolder, s.reason)
		s.publish()
	})
	m.tell(m.trace.JobStarted != nil, func() { m.trace.JobStarted(term) })
}

// renewed notes a renewal that was sent at began, when trustLeft of the trust remained.
func (m *monitor) renewed(term *Term, began time.Time, trustLeft time.Duration) {
	took := time.Since(began)
	var overdue time.Time
	m.update(func(s *state) {
		s.latency = took
		overdue, s.overdue = s.overdue, time.Time{}
		s.answered()
	})
	if overdue.IsZero() {
		m.say(slog.LevelDebug, "lease renewed", "holder", term.Holder(), "token", term.Token(), "took", took)
	} else {
		m.say(slog.LevelInfo, "lease renewed again", "holder", term.Holder(), "token", term.Token(), "after", time.Since(overdue))
	}
	m.tell(m.trace.Renewed != nil, func() { m.trace.Renewed(term, took, trustLeft-took) })
}

// keptOver notes that a term goes on over a failover of the database.
func (m *monitor) keptOver(term *Term, recordLost bool) {
	level, msg := slog.LevelInfo, "lease kept over a failover of the database"
	if recordLost {
		level, msg = slog.LevelWarn, "the database has failed over and lost the lease's record; it was written again"
	}
	m.say(level, msg, "holder", term.Holder(), "token", term.Token())
	m.tell(m.trace.FailedOver != nil, func() { m.trace.FailedOver(term, recordLost) })
}

// awaitsFailover notes that the lease is not taken for a while, because the database has failed over.
func (m *monitor) awaitsFailover(in time.Duration) {
	var isNew bool
	m.update(func(s *state) {
		isNew = time.Now().After(s.settles)
		s.settles = time.Now().Add(in)
		if isNew {
			s.reason = "the database has failed over"
			s.publish()
		}
	})
	if isNew {
		m.say(slog.LevelInfo, "lease is not taken before a failover of the database has settled", "left", in.Round(time.Millisecond))
	}
}

// renewalFailed notes a renewal that will be retried.
func (m *monitor) renewalFailed(term *Term, err error) {
	m.update(func(s *state) {
		if s.overdue.IsZero() {
			s.overdue = time.Now()
		}
	})
	m.logFailure("failed to renew lease; retrying", err)
	trustLeft := term.Remaining()
	m.tell(m.trace.RenewalFailed != nil, func() { m.trace.RenewalFailed(term, err, trustLeft) })
}

// termEnding notes that a term is over and its job has been told so.
func (m *monitor) termEnding(term *Term, cause error) {
	var holder string
	reason := logtext.Text(cause)
	var lost *lostError
	isLost := errors.As(cause, &lost) && lost.key == term.key // the job may have ended by the loss of another lease
	m.update(func(s *state) {
		if isLost {
			s.holder, s.seen = "", nil
			if lost.to != nil && !lost.to.isOffer() {
				s.reads(lost.to)
				s.ending = followedBy(lost.to)
			}
		}
		s.become(RoleStopping, reason)
		s.publish()
		holder = s.holder
	})
	level, msg := slog.LevelDebug, "job is told to return"
	switch {
	case errors.Is(cause, ErrJobEnded):
		level, msg = slog.LevelWarn, "job ended before its term"
	case errors.Is(cause, ErrUnhealthy):
		level, msg = slog.LevelWarn, "replica is unhealthy and gives the lease up"
	case isLoss(cause):
		level, msg = slog.LevelWarn, "lease lost"
	}
	m.say(level, msg, "holder", holder, "token", term.Token(), "cause", logtext.OneLine(cause))
	m.tell(m.trace.Lost != nil && isLoss(cause), func() { m.trace.Lost(term, cause) })
}

// jobStuck notes that a job did not return in time.
func (m *monitor) jobStuck(term *Term, since time.Duration) {
	m.update(func(s *state) {
		s.stuck = true
		s.publish()
	})
	m.say(slog.LevelError, "job has not returned although its context has ended; its lease is no longer renewed",
		"token", term.Token(), "waited", since)
	m.tell(m.trace.JobStuck != nil, func() { m.trace.JobStuck(term, since) })
}

// jobReturned notes that all of the job's funcs have returned.
func (m *monitor) jobReturned(term *Term, cause error) {
	var worked bool
	var took time.Duration
	m.update(func(s *state) {
		worked, took = s.working, time.Since(s.since)
		s.working = false
		if s.stuck {
			s.stuck = false
			s.publish()
		}
	})
	m.say(slog.LevelDebug, "job returned", "token", term.Token(), "took", took)
	m.tell(m.trace.JobEnded != nil && worked, func() { m.trace.JobEnded(term, cause, took) })
}

// released notes that a lease is released. If its term was acquired too late, or during a
// shutdown, it is not in the status, and the trace never heard of it.
func (m *monitor) released(term *Term, cause error) {
	var began bool
	m.update(func(s *state) {
		s.answered()
		if began = s.held == term; began {
			s.holder, s.seen, s.ending = "", nil, "released"
			if r := term.request.Load(); r != nil && r.To != "" && r.To != term.Holder() {
				s.ending = "offered to " + r.To
			}
		}
	})
	if !term.local() {
		m.say(slog.LevelInfo, "lease released", "holder", term.Holder(), "token", term.Token(), "cause", logtext.OneLine(cause))
	}
	m.tell(m.trace.Released != nil && began, func() { m.trace.Released(term, cause) })
}

// notReleased notes that a lease could not be released. With [ErrLost] the lease was another
// replica's already; otherwise it will expire.
func (m *monitor) notReleased(term *Term, cause, err error) {
	if errors.Is(err, ErrLost) {
		level := slog.LevelWarn
		if errors.Is(cause, ErrDeadline) || errors.Is(cause, ErrLost) { // a warning has said so
			level = slog.LevelInfo
		}
		m.say(level, "lease lost before it was released", "holder", term.Holder(), "token", term.Token(), "error", logtext.OneLine(err))
	} else {
		if !isLoss(cause) { // no warning has said yet that the lease stays taken
			m.update(func(s *state) { s.retries.Reset() })
		}
		m.logFailure("failed to release lease; it will expire", err)
	}
	var began bool
	m.update(func(s *state) {
		began = s.held == term
		if lost := (*lostError)(nil); !errors.As(err, &lost) {
			s.ending = "expired"
		} else if lost.to != nil && !lost.to.isOffer() {
			s.ending = followedBy(lost.to)
		}
	})
	toldBefore := isLoss(cause)
	m.tell(m.trace.Lost != nil && began && !toldBefore, func() { m.trace.Lost(term, errors.Join(cause, err)) })
}

// termEnded notes that nothing remains to be done for the term.
func (m *monitor) termEnded() {
	m.update(func(s *state) {
		reason := s.reason
		if s.ending != "" {
			reason = s.ending + ": " + reason
		}
		s.endTerm(PastTerm{
			ID: s.held.ID(), Holder: s.held.Holder(), Token: s.held.Token(),
			Began: s.held.AcquiredAt(), Ended: time.Now(), Reason: reason,
		})
		s.held, s.ending = nil, ""
		if s.seen == nil { // the lease is free, or this replica's own record could not be released
			s.holder = ""
		}
		s.become(RoleStandby, s.reason)
		s.publish()
	})
}

// ran notes that a run of the job has begun or ended, with the text of its error.
func (m *monitor) ran(r JobRun, text string) {
	m.update(func(s *state) { s.ran(&r, text) })
	m.tell(m.trace.JobRun != nil, func() { m.trace.JobRun(r) })
}

// longRun returns when the oldest run that has not ended began, if that is at least so long ago; otherwise nil.
func (m *monitor) longRun(least time.Duration) *time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	oldest := time.Now().Add(-least)
	found := false
	for _, running := range m.state.running {
		if len(running) > 0 && !running[0].began.After(oldest) {
			oldest, found = running[0].began, true
		}
	}
	if !found {
		return nil
	}
	return &oldest
}
