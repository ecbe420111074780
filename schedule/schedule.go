// Package schedule runs a job once at each planned time, on whichever replica holds a lease.
//
//	nightly, err := schedule.New(schedule.Config{
//		Store: store,
//		Key:   tenure.Key{Type: "schedule", ID: "nightly-report"},
//		Plan:  schedule.Daily(3, 0), // or a cron expression's schedule
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
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
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

	// Plan names the slots. It is called by one goroutine of each schedule at a time, with times in Location.
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

// All returns a func that runs several schedules under one lease, for a [tenure.CoordinatorConfig]. When one
// returns, all end, and the func returns what that one has returned. If one panics, so does the func. It returns
// [tenure.ErrInvalid] if two have the same Key, or there are none.
func All(schedules ...*Schedule) func(context.Context) error {
	return func(ctx context.Context) error {
		keys := make(map[tenure.Key]bool)
		for _, s := range schedules {
			keys[s.cfg.Key] = true
		}
		if len(keys) != len(schedules) || len(keys) == 0 {
			return fmt.Errorf("schedule: run all: %w: %d schedules have %d keys: each needs its own", tenure.ErrInvalid, len(schedules), len(keys))
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		type end struct {
			err   error
			panic any
		}
		ended := make(chan end)
		for _, s := range schedules {
			go func() {
				e := end{err: report.ErrGoexit}
				defer func() {
					if v := recover(); v != nil {
						e.panic = &report.Panic{Value: v, Stack: debug.Stack()}
					}
					ended <- e
				}()
				e.err = s.Run(ctx)
			}()
		}
		var first end
		for i := range schedules {
			e := <-ended
			if cancel(); i == 0 || e.panic != nil {
				first = e
			}
		}
		if first.panic != nil {
			panic(first.panic)
		}
		return first.err
	}
}
