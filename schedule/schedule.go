// Package schedule runs a job once at each planned time, on whichever replica holds a lease.
//
//	nightly, err := schedule.New(schedule.Config{
//		Store: store,
//		Key:   tenure.Key{Type: "schedule", ID: "nightly-report"},
//		Plan:  schedule.Interval(24*time.Hour, 3*time.Hour), // or a cron expression's schedule
//		Do:    func(ctx context.Context, slot schedule.Slot) error { … },
//	})
//	…
//	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: nightly.Run})
//
// [tenure.Every], in contrast, runs its sweep at the beginning of each term, and counts
// the interval from the end of the last run: a daily job with two deployments a day would
// run three times a day.
//
// The last finished slot is kept in the store, in an object of its own, so it survives
// handovers, crashes and restarts. It is written through the term's fence: a former holder
// can't mark a slot as done. The clock of the store decides when a slot is due.
//
// # How often a slot runs
//
// A finished slot is never run again. A slot that was interrupted, by a crash or the loss
// of the lease, or whose Do returned an error, is run again, so Do should be idempotent. If
// Do only writes to the same database, [Slot.Statement] makes its effect happen exactly
// once.
//
// Each run is recorded as by [tenure.RecordRun], under the schedule's key, so the status and the
// metrics show a job that always fails.
package schedule

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

// Missed determines what happens to slots that came due while no replica could run them.
type Missed int

const (
	// MissedRunLatest runs only the latest slot that is due, and regards earlier ones as done.
	MissedRunLatest Missed = iota

	// MissedRunEach runs all of them, one after another, the earliest first.
	MissedRunEach

	// MissedSkip runs none of them, except one that was interrupted. A slot is missed if it came
	// due before this term began, or while the slot before it was running.
	MissedSkip
)

// Config configures a [Schedule].
type Config struct {
	// Store keeps the last finished slot, under Key. It must be the lease's store, and its clock says when a slot is due: see
	// [tenure.Traits.Clockless].
	Store tenure.Store
	Key   tenure.Key

	// Plan names the slots. It is called by one goroutine at a time, with times in Location.
	Plan Plan

	// Location is the time zone of all times that Plan and Do get, whatever the host's is. It
	// must be the same in all replicas, so it can't be [time.Local]. It is kept with the last
	// finished slot: a replica with another Location logs a warning, and uses the one that is
	// kept. To change it, delete the object under Key. Default [time.UTC].
	Location *time.Location

	// Do does the work of one slot. It should return when ctx is done, which happens when
	// the lease is lost or the program shuts down. The slot is done when Do has returned
	// nil.
	Do func(ctx context.Context, slot Slot) error

	Missed Missed        // default MissedRunLatest
	Retry  time.Duration // pause after Do has failed; default 1 minute
	Logger *slog.Logger  // default slog.Default()
}

// Schedule runs a job at planned times. Its methods are safe for concurrent use.
type Schedule struct {
	cfg           Config
	otherLocation sync.Once // for the warning that the record has another Location
}

// hostLocation is [time.Local] as the host has it. A program that sets time.Local later does so in all replicas.
var hostLocation = time.Local

// New returns a schedule, or a [tenure.ErrInvalid] that names everything that is wrong
// with the config. It does no I/O.
func New(cfg Config) (*Schedule, error) {
	var problems objects.Problems
	problems.Add(cfg.Key.Validate())
	if problems.If(objects.IsNil(cfg.Store), "Store is nil"); !objects.IsNil(cfg.Store) {
		problems.If(cfg.Store.Traits().Clockless, "Store has no clock to say when a slot is due: keep schedules in a database")
	}
	problems.If(objects.IsNil(cfg.Plan), "Plan is nil")
	problems.If(cfg.Do == nil, "Do is nil")
	problems.If(cfg.Missed < MissedRunLatest || cfg.Missed > MissedSkip, "Missed is %d, which is none of the constants", cfg.Missed)
	problems.Duration("Retry", cfg.Retry)
	cfg.Location = cmp.Or(cfg.Location, time.UTC)
	name := cfg.Location.String()
	// Not by its name alone: where TZ names a zone, or none is set, time.Local has the name of a zone that may be loaded.
	problems.If(cfg.Location == hostLocation && cfg.Location != time.UTC || name == "Local",
		"Location is time.Local, which need not be the same in all replicas: load one by its name")
	problems.If(name == "", "Location has no name")
	if !objects.IsNil(cfg.Plan) {
		problems.Add(located{cfg.Plan, cfg.Location}.checkAnchor(time.Now()))
	}
	if err := problems.Err(); err != nil {
		return nil, fmt.Errorf("schedule: new: %w", err)
	}
	cfg.Retry = cmp.Or(cfg.Retry, time.Minute)
	logger, _ := report.Logger(cmp.Or(cfg.Logger, slog.Default()))
	cfg.Logger = logger.With("schedule", cfg.Key)
	return &Schedule{cfg: cfg}, nil
}

// State is the state of a schedule in the store.
type State struct {
	Done  time.Time `json:"done"`           // the last finished slot; before the first one, the time when the schedule was first run
	Begun time.Time `json:"begun,omitzero"` // the slot that was begun last; later than Done if it failed, was interrupted, or is running

	// Location is the name of the Location that the schedule uses. It is empty if only an
	// earlier version of this package has written the state.
	Location string `json:"location,omitempty"`

	// Next is the first slot that has not been done. It is zero if the plan has ended, or if only an earlier version
	// of this package has written the state.
	Next time.Time `json:"next,omitzero"`
}

// stored is what the store keeps.
type stored struct {
	State

	// From is when the plan last changed. Its slots before that were not missed: another plan was in force.
	From time.Time `json:"from,omitzero"`
}

// since returns the time after which the plan's slots are to be done.
func (s stored) since() time.Time {
	if s.From.After(s.Done) {
		return s.From
	}
	return s.Done
}

// State reads the schedule's state. It returns [tenure.ErrNotFound] before the first run.
func (s *Schedule) State(ctx context.Context) (State, error) {
	r, err := s.read(ctx, s.cfg.Store)
	return r.State, err
}

const (
	// lookAgain is the longest time between two reads of the store's time: its clock may be
	// set, and a timer stands still while the machine is suspended.
	lookAgain = 5 * time.Minute

	storePause  = 2 * time.Second // after a failed call to the store
	storeLonger = 5 * time.Second // time to mark a slot as done after the context has ended
)

// Run runs the slots that are due, until ctx is done; then it returns nil. It is meant to be
// a func of a [tenure.CoordinatorConfig]; without a term in its context it returns a
// [tenure.ErrInvalid]. An error of Do is logged, and the slot is run again; a panic
// ends the job.
func (s *Schedule) Run(ctx context.Context) error {
	term := tenure.TermFromContext(ctx)
	if term == nil {
		return fmt.Errorf("schedule: run %s: %w: the context is not that of a coordinator's job", s.cfg.Key, tenure.ErrInvalid)
	}
	store, err := tenure.Fence(s.cfg.Store, term)
	if err != nil {
		return err
	}
	var idleSince time.Time // when this term began, or the last slot ended
	var last marked
	var retries logtext.Retries
	for ctx.Err() == nil {
		pause, err := s.step(ctx, store, &idleSince, &last)
		if err == nil {
			retries.Reset()
		}
		var fatal *fatalError
		switch {
		case errors.As(err, &fatal):
			return fatal.error
		case errors.Is(err, tenure.ErrLost):
			<-ctx.Done() // it is about to end
		case err != nil && ctx.Err() == nil:
			retries.Log(s.cfg.Logger, slog.LevelError, "schedule failed to use the store; retrying", err)
			pause = storePause + rand.N(storePause)
		}
		pace.Sleep(ctx, pause)
	}
	if last.failed != 0 { // the last chance to mark a slot that is done
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLonger)
		defer cancel()
		r, err := s.read(ctx, store)
		if err == nil {
			_, err = s.restore(ctx, store, r, tenure.Lineage{}, &last)
		}
		if err != nil {
			s.cfg.Logger.Error("failed to mark a slot as done; it will be run again", "slot", last.Done, "error", logtext.OneLine(err))
		}
	}
	return nil
}

// fatalError is an error that a retry would not fix.
type fatalError struct{ error }

// marked is the state with which this term last marked a slot as done, and the store's lineage at that time. A
// failover may lose the mark but not the work of the slot, which is elsewhere.
type marked struct {
	stored
	lineage string
	failed  int64 // the version that the mark was to replace, if the call has failed; otherwise 0
}

// restore marks a slot as done again if the mark has failed, or if a failover has lost it. Any other change of the
// state was intended. r was read after on.
func (s *Schedule) restore(ctx context.Context, store tenure.Store, r record, on tenure.Lineage, last *marked) (record, error) {
	if !last.Done.After(r.Done) {
		last.lineage = on.Mark // a failover before has not lost it
		return r, nil
	}
	if last.failed != 0 && r.version == last.failed {
		r.stored = last.stored
		return s.write(ctx, store, r)
	}
	on, err := s.cfg.Store.Lineage(ctx)
	if err != nil || on.Mark == last.lineage {
		return r, err
	}
	r.stored = last.stored
	if r, err = s.write(ctx, store, r); err == nil {
		s.cfg.Logger.Warn("the database has failed over and lost that a slot is done; it was marked again", "schedule", s.cfg.Key.String(), "slot", last.Done)
	}
	return r, err
}

// step runs the slot that is due, if any, and returns how long to wait before the next step.
func (s *Schedule) step(ctx context.Context, store tenure.Store, idleSince *time.Time, last *marked) (pause time.Duration, err error) {
	on, err := s.cfg.Store.Lineage(ctx)
	if err != nil {
		return 0, err
	}
	r, err := s.read(ctx, store)
	if err == nil || errors.Is(err, tenure.ErrNotFound) && !last.Done.IsZero() {
		r, err = s.restore(ctx, store, r, on, last)
	}
	if errors.Is(err, tenure.ErrNotFound) || err == nil && r.Location == "" { // before a slot runs, because another replica could place it at another time
		r.Location = s.cfg.Location.String()
		r, err = s.write(ctx, store, r)
	}
	if err != nil {
		return 0, err
	}
	if r, err = s.follow(ctx, store, r); err != nil {
		return 0, err
	}
	if idleSince.IsZero() || idleSince.After(r.now) { // the clock was ahead, and was set right
		*idleSince = r.now
	}
	due, wait, err := s.due(r, *idleSince)
	switch {
	case err != nil:
		return 0, &fatalError{err}
	case due.IsZero():
		return wait, nil
	}
	if !r.Begun.Equal(due) {
		r.Begun = due
		if r, err = s.write(ctx, store, r); err != nil {
			return 0, err
		}
	}
	done, err := s.done(r, due)
	if err != nil {
		return 0, &fatalError{err}
	}
	slot := Slot{Time: due, Previous: r.Done.In(due.Location()), schedule: s, record: r, done: done, recorded: new(bool)}
	failed, err := s.run(ctx, store, slot)
	if failed == nil && !*slot.recorded { // otherwise a failover loses the mark only together with the work
		*last = marked{stored: done, lineage: on.Mark}
		if err != nil {
			last.failed = r.version
		}
	}
	if err != nil {
		return 0, err
	}
	*idleSince = time.Time{} // the next step reads the time
	if failed != nil {
		s.cfg.Logger.Error("slot failed; it will be run again", "slot", due, "error", logtext.OneLine(failed))
		return s.cfg.Retry, nil
	}
	return 0, nil
}

// follow notes a change of the plan: the first slot that is not done is not the one that the plan had when it was last
// asked. The new plan counts from now. A slot that both plans have, and that is due, stays due.
func (s *Schedule) follow(ctx context.Context, store tenure.Store, r record) (record, error) {
	location, err := s.location(r)
	if err != nil {
		return record{}, &fatalError{err}
	}
	plan, before := located{s.cfg.Plan, location}, r.Next
	r.Next, err = plan.next(r.since())
	if err == nil && r.Next.Equal(before) {
		return r, nil
	}
	changed := !before.IsZero()
	if err == nil && changed {
		if overdue := !before.After(r.now); overdue && s.cfg.Missed != MissedSkip && !r.Begun.After(r.Done) {
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
		return record{}, &fatalError{err}
	}
	next := r.Next
	if r, err = s.write(ctx, store, r); err == nil && changed {
		s.cfg.Logger.Warn("the plan has changed: the new one counts from now", "next", next, "next_before", before.In(location))
	}
	return r, err
}

// done returns what the store keeps once a slot is done.
func (s *Schedule) done(r record, slot time.Time) (stored, error) {
	location, err := s.location(r)
	if err != nil {
		return stored{}, err
	}
	done := r.stored
	done.Done, done.Begun = slot, slot
	done.Next, err = located{s.cfg.Plan, location}.next(done.since())
	return done, err
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
		return nil, fmt.Errorf("schedule: run %s: the Location is %s, and the schedule was begun in %q: give all replicas the same, or delete the object under the key: %w",
			s.cfg.Key, own, r.Location, err)
	}
	s.otherLocation.Do(func() {
		s.cfg.Logger.Warn("schedule uses the location in which it was begun; give all replicas the same, or delete the object under its key to change it",
			"location", r.Location, "configured", own)
	})
	return location, nil
}

// run runs one slot that was noted as begun, and marks it as done unless it failed. It returns why the slot is not
// done, or nil if it is, and separately the error of a call to the store.
func (s *Schedule) run(ctx context.Context, store tenure.Store, slot Slot) (failed, err error) {
	_ = tenure.RecordRun(ctx, s.cfg.Key.String(), func(ctx context.Context) error {
		failed, err = s.finish(ctx, store, slot, logtext.Sound(s.cfg.Do(ctx, slot)))
		return cmp.Or(err, failed)
	})
	return failed, err
}

// finish marks a slot as done, unless Do has failed. It returns what [Schedule.run] does.
func (s *Schedule) finish(ctx context.Context, store tenure.Store, slot Slot, failed error) (notDone, err error) {
	// If Do has returned nil the slot is done, even if the lease is about to be given up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLonger)
	defer cancel()
	if *slot.recorded { // in a transaction that may or may not have been committed
		now, err := s.read(ctx, store)
		if done := err == nil && !now.Done.Before(slot.Time); done {
			return nil, nil
		}
		return cmp.Or(failed, errors.New("Do has returned nil, but its transaction with the slot's statement was not committed")), err
	}
	if failed == nil {
		slot.record.stored = slot.done
		_, err = s.write(ctx, store, slot.record)
	}
	return failed, err
}

// record is the schedule's object in the store.
type record struct {
	stored
	version int64     // 0: there is no object
	now     time.Time // the store's time when it was read or written
}

func (s *Schedule) read(ctx context.Context, store tenure.Store) (record, error) {
	return s.decode(store.Get(ctx, s.cfg.Key))
}

// write replaces the record that was read.
func (s *Schedule) write(ctx context.Context, store tenure.Store, r record) (record, error) {
	cond := tenure.IfAbsent()
	if r.version != 0 {
		cond = tenure.IfVersion(r.version)
	}
	return s.decode(store.PutIf(ctx, s.object(r.stored), cond))
}

// decode decodes what a call to the store has returned.
func (s *Schedule) decode(obj tenure.Object, err error) (record, error) {
	if err != nil {
		return record{}, err
	}
	r := record{version: obj.Version, now: obj.UpdatedAt.Add(obj.Age)}
	if err := json.Unmarshal(obj.Payload, &r.stored); err != nil {
		return record{}, fmt.Errorf("schedule: %s is not the state of a schedule, delete it or choose another key: %w", s.cfg.Key, err)
	}
	if r.Done.IsZero() { // no slot is done yet: the first one is the first after this time
		r.Done = obj.CreatedAt
	}
	return r, nil
}

func (s *Schedule) object(state stored) tenure.Object {
	state.Done, state.Begun, state.Next, state.From = state.Done.UTC(), state.Begun.UTC(), state.Next.UTC(), state.From.UTC()
	payload, _ := json.Marshal(state) // times of a store always encode
	return tenure.Object{Key: s.cfg.Key, Payload: payload}
}

// Slot is one time at which the job is due.
type Slot struct {
	Time     time.Time
	Previous time.Time // the last finished slot; before the first one, the time when the schedule was first run

	schedule *Schedule
	record   record
	done     stored // what the store keeps once it is done
	recorded *bool
}

// Statement returns a statement that marks the slot as done, for the transaction in which
// Do does its work in the same database, with any driver. Then the work's effect happens
// exactly once: if the slot was done in the meantime, the statement fails and the
// transaction has to be rolled back. As without the statement, Do must return an error if
// the transaction failed.
//
// It returns [errors.ErrUnsupported] if the store is neither Postgres nor SQLite.
func (slot Slot) Statement() (query string, args []any, err error) {
	store, ok := slot.schedule.cfg.Store.(tenure.SQLStore)
	if !ok {
		return "", nil, fmt.Errorf("schedule: statement: %w: %T is not a SQLStore", errors.ErrUnsupported, slot.schedule.cfg.Store)
	}
	*slot.recorded = true
	return store.PutStatement(slot.schedule.object(slot.done), slot.record.version)
}
