package schedule

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/logtext"
)

const (
	// lookAgain is the longest time between two reads of the store's time: its clock may be
	// set, and a timer stands still while the machine is suspended.
	lookAgain = 5 * time.Minute

	storePause  = 2 * time.Second // after a failed call to the store
	storeLonger = 5 * time.Second // time to mark a slot as done after the context has ended
)

// Run runs the slots that are due, until ctx is done; then it returns nil. It is meant to be
// a func of a [tenure.CoordinatorConfig]; without a term in its context it returns a
// [tenure.ErrInvalid], and so it does if the plan has no slots or the Key is not a schedule's alone. An error of Do is
// logged, and the slot is run again; a panic ends the job.
func (s *Schedule) Run(ctx context.Context) error {
	term := tenure.TermFromContext(ctx)
	switch {
	case term == nil:
		return fmt.Errorf("schedule: run %s: %w: the context is not that of a coordinator's job", s.cfg.Key, tenure.ErrInvalid)
	case term.Key() == s.cfg.Key:
		return fmt.Errorf("schedule: run %s: %w: Key is the lease's own: give the schedule one of its own", s.cfg.Key, tenure.ErrInvalid)
	}
	store, err := tenure.Fence(s.cfg.Store, term)
	if err != nil {
		return err
	}
	asked := tenure.Watch(s.cfg.Store, s.cfg.Key)
	defer asked.Stop()
	j := &job{Schedule: s, store: store}
	var retries logtext.Retries
	failing := false
	for ctx.Err() == nil {
		pause, err := j.step(ctx)
		switch {
		case err == nil:
			if retries.Reset(); failing {
				failing = false
				j.recordStore(ctx, nil)
			}
		case errors.Is(err, tenure.ErrInvalid): // a retry would not help
			return err
		case errors.Is(err, tenure.ErrLost):
			<-ctx.Done() // it is about to end
		case ctx.Err() == nil:
			failing = true
			j.recordStore(ctx, err)
			retries.Log(s.cfg.Logger, slog.LevelError, "schedule failed to use the store; retrying", err)
			pause = storePause + rand.N(storePause)
		}
		var hints <-chan struct{}
		if err == nil && j.idle { // otherwise the pause is that of a retry, and its own write may have woken it
			hints = asked.C()
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		case <-hints: // [RunAgain], for one
		}
	}
	if j.last.failed != 0 { // the last chance to mark a slot that is done
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLonger)
		defer cancel()
		r, err := read(ctx, store, s.cfg.Key)
		if err == nil {
			_, err = j.restore(ctx, r, tenure.Lineage{})
		}
		if err != nil {
			s.cfg.Logger.Error("failed to mark a slot as done; it will be run again", "slot", j.last.Done, "error", logtext.OneLine(err))
		}
	}
	return nil
}

// job is what one term does for a schedule.
type job struct {
	*Schedule
	store     tenure.Store // fenced by the term
	idleSince time.Time    // when this term began, or the last slot ended
	last      marked
	told      bool // of the next slots
	idle      bool // no slot was due at the last step
}

// recordStore has the status of the coordinator show whether the store could be used. The name is not that of the slots' runs, whose
// last success is the last slot's.
func (j *job) recordStore(ctx context.Context, err error) {
	_ = tenure.RecordRun(ctx, j.cfg.Key.String()+" state", func(context.Context) error { return err })
}

// marked is the state with which this term last marked a slot as done, and the store's lineage at that time. A
// failover may lose the mark but not the work of the slot, which is elsewhere.
type marked struct {
	stored
	lineage string
	failed  int64 // the version that the mark was to replace, if the call has failed; otherwise 0
}

// restore marks a slot as done again if the mark has failed, or if a failover has lost it. Any other change of the
// state was intended. r was read after on.
func (j *job) restore(ctx context.Context, r record, on tenure.Lineage) (record, error) {
	last := &j.last
	if !last.Done.After(r.Done) {
		last.lineage = on.Mark // a failover before has not lost it
		return r, nil
	}
	if last.failed != 0 && r.version == last.failed {
		r.stored = last.stored
		return r.write(ctx, j.store)
	}
	on, err := j.cfg.Store.Lineage(ctx)
	if err != nil {
		return r, err
	}
	isAsked := r.Begun.Equal(last.Done) && r.Done.Equal(last.Done.Add(-1)) // see [RunAgain]
	if on.Mark == last.lineage || isAsked {
		*last = marked{lineage: on.Mark} // a failover that follows has not lost it either
		return r, nil
	}
	r.stored = last.stored
	if r, err = r.write(ctx, j.store); err == nil {
		j.cfg.Logger.Warn("the database has failed over and lost that a slot is done; it was marked again", "slot", last.Done)
	}
	return r, err
}

// step runs the slot that is due, if any, and returns how long to wait before the next step.
func (j *job) step(ctx context.Context) (pause time.Duration, err error) {
	on, err := j.cfg.Store.Lineage(ctx)
	if err != nil {
		return 0, err
	}
	r, err := read(ctx, j.store, j.cfg.Key)
	if err == nil || errors.Is(err, tenure.ErrNotFound) && !j.last.Done.IsZero() {
		r, err = j.restore(ctx, r, on)
	}
	if errors.Is(err, tenure.ErrNotFound) || err == nil && r.Location == "" { // before a slot runs, because another replica could place it at another time
		r.Location = j.cfg.Location.String()
		r, err = r.write(ctx, j.store)
	}
	if err != nil {
		return 0, err
	}
	if r, err = j.follow(ctx, r); err != nil {
		return 0, err
	}
	if err := j.tell(r); err != nil {
		return 0, err
	}
	if j.idleSince.IsZero() || j.idleSince.After(r.now) { // the clock was ahead, and was set right
		j.idleSince = r.now
	}
	due, wait, err := j.due(r, j.idleSince)
	if j.idle = err == nil && due.IsZero(); err != nil || j.idle {
		return wait, err
	}
	if r.Begun.Equal(due) {
		j.cfg.Logger.Info("slot runs again", "slot", due)
	} else {
		r.Begun = due
		if r, err = r.write(ctx, j.store); err != nil {
			return 0, err
		}
	}
	done, err := j.done(r, due)
	if err != nil {
		return 0, err
	}
	slot := Slot{Time: due, store: j.cfg.Store, done: done, recorded: new(bool)}
	failed, err := j.run(ctx, slot)
	if failed == nil && !*slot.recorded { // otherwise a failover loses the mark only together with the work
		j.last = marked{stored: done.stored, lineage: on.Mark}
		if err != nil {
			j.last.failed = r.version
		}
	}
	if err != nil {
		return 0, err
	}
	j.idleSince = time.Time{} // the next step reads the time
	if failed == nil {
		return 0, nil
	}
	if ctx.Err() != nil {
		j.cfg.Logger.Info("slot was interrupted; it will be run again", "slot", due, "cause", logtext.OneLine(context.Cause(ctx)), "error", logtext.OneLine(failed))
	} else {
		j.cfg.Logger.Error("slot failed; it will be run again", "slot", due, "error", logtext.OneLine(failed))
	}
	return j.cfg.Retry, nil
}

// tell logs the next slots, once. It returns an error if the plan never had one.
func (j *job) tell(r record) error {
	if j.told {
		return nil
	}
	location, err := j.location(r)
	if err != nil {
		return err
	}
	plan, next := located{j.cfg.Plan, location}, []time.Time(nil)
	for at := r.since(); len(next) < 3; next = append(next, at) {
		if at, err = plan.next(at); err != nil {
			return err
		}
		if at.IsZero() {
			break
		}
	}
	j.told = true
	switch {
	case len(next) > 0:
		j.cfg.Logger.Info("the next slots of the schedule", "slots", next, "overdue", !next[0].After(r.now))
	case plan.isEmpty():
		return fmt.Errorf("schedule: run %s: %w: Plan has no slot after %v: is it for a date that does not exist?", j.cfg.Key, tenure.ErrInvalid, r.since().In(location))
	default:
		j.cfg.Logger.Warn("the plan has ended: it has no slot any more", "after", r.since().In(location))
	}
	return nil
}

// follow notes a change of the plan: the first slot that is not done is not the one that the plan had when it was last
// asked. The new plan counts from now. A slot that both plans have, and that is due, stays due.
func (j *job) follow(ctx context.Context, r record) (record, error) {
	location, err := j.location(r)
	if err != nil {
		return record{}, err
	}
	plan, before := located{j.cfg.Plan, location}, r.Next
	r.Next, err = plan.next(r.since())
	if err == nil && r.Next.Equal(before) {
		return r, nil
	}
	changed := !before.IsZero()
	if err == nil && changed {
		if overdue := !before.After(r.now); overdue && j.cfg.Missed != MissedSkip && !r.Begun.After(r.Done) {
			var same time.Time
			if same, err = plan.next(before.Add(-1)); same.Equal(before) {
				r.Begun = before // so that it runs
			}
		}
		r.From = r.now
		if err == nil {
			r.Next, err = plan.next(r.From)
		}
	}
	if err != nil {
		return record{}, err
	}
	next := r.Next
	if r, err = r.write(ctx, j.store); err == nil && changed {
		j.cfg.Logger.Warn("the plan has changed: the new one counts from now", "next", next, "next_before", before.In(location))
	}
	return r, err
}

// done returns what the store keeps once a slot is done.
func (s *Schedule) done(r record, slot time.Time) (record, error) {
	location, err := s.location(r)
	if err != nil {
		return record{}, err
	}
	r.Done, r.Begun = slot, slot
	r.Next, err = located{s.cfg.Plan, location}.next(r.since())
	return r, err
}

// due returns the slot to run now. If it is zero, none is due, and wait is how long to wait
// before the next step.
func (s *Schedule) due(r record, idleSince time.Time) (due time.Time, wait time.Duration, err error) {
	location, err := s.location(r)
	if err != nil {
		return time.Time{}, 0, err
	}
	plan, after := located{s.cfg.Plan, location}, r.since()
	interrupted := r.Begun.After(r.Done)
	switch {
	case interrupted && s.cfg.Missed != MissedRunLatest:
		return r.Begun.In(location), 0, nil
	case s.cfg.Missed == MissedRunLatest:
		due, err = plan.latest(after, r.now)
		if interrupted && r.Begun.After(due) {
			due = r.Begun
		}
		if err != nil || !due.IsZero() {
			return due.In(location), 0, err
		}
	case s.cfg.Missed == MissedSkip && idleSince.After(after):
		after = idleSince
	}
	slot, err := plan.next(after)
	switch {
	case err != nil:
		return time.Time{}, 0, err
	case slot.IsZero(): // the plan has ended, unless its owner changes it
		return time.Time{}, lookAgain, nil
	case slot.After(r.now):
		return time.Time{}, min(slot.Sub(r.now), lookAgain), nil
	}
	return slot.In(location), 0, nil
}

// location returns the location that all replicas use: the record's. If each used its own, a slot
// that one replica has run would be due again in another one, at another time.
func (s *Schedule) location(r record) (*time.Location, error) {
	own := s.cfg.Location.String()
	if r.Location == own {
		return s.cfg.Location, nil
	}
	location, err := time.LoadLocation(r.Location)
	if err != nil {
		return nil, fmt.Errorf("schedule: run %s: %w: the Location is %s, and the schedule was begun in %q: give all replicas the same, or delete the object under the key: %w",
			s.cfg.Key, tenure.ErrInvalid, own, r.Location, err)
	}
	s.otherLocation.Do(func() {
		s.cfg.Logger.Warn("schedule uses the location in which it was begun; give all replicas the same, or delete the object under its key to change it",
			"location", r.Location, "configured", own)
	})
	return location, nil
}

// run runs one slot that was noted as begun, and marks it as done unless it failed. It returns why the slot is not
// done, or nil if it is, and separately the error of a call to the store.
func (j *job) run(ctx context.Context, slot Slot) (failed, err error) {
	_ = tenure.RecordRun(ctx, j.cfg.Key.String(), func(ctx context.Context) error {
		did := logtext.Sound(j.cfg.Do(ctx, slot))
		failed, err = j.finish(ctx, slot, did)
		return cmp.Or(err, failed, did) // another replica may have done the slot meanwhile
	})
	return failed, err
}

// finish marks a slot as done, unless Do has failed. It returns what [job.run] does.
func (j *job) finish(ctx context.Context, slot Slot, failed error) (notDone, err error) {
	// If Do has returned nil the slot is done, even if the lease is about to be given up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLonger)
	defer cancel()
	if *slot.recorded { // in a transaction that may or may not have been committed
		now, err := read(ctx, j.store, j.cfg.Key)
		if done := err == nil && !now.Done.Before(slot.Time); done {
			return nil, nil
		}
		return cmp.Or(failed, errors.New("Do has returned nil, but its transaction with the slot's statement was not committed")), err
	}
	if failed == nil {
		_, err = slot.done.write(ctx, j.store)
	}
	return failed, err
}
