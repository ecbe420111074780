package tenure

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime/debug"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

// jobScope is what a job's func finds in its context, beside the term.
type jobScope struct {
	of   *base
	job  context.Context // of all the funcs; unlike a func's own, it never has a deadline of the caller's
	name string          // of this func
}

const jobScopeKey objects.RightKey = "job"

// runningJob is the job of one term: the caller's funcs, running. Only Run's goroutine touches it.
type runningJob struct {
	of       *base
	ctx      context.Context
	cancel   context.CancelCauseFunc
	results  chan *jobResult // has room for the results of all funcs, so that none waits
	alone    bool            // the job has only one func
	running  int
	panicked *report.Panic
}

type jobResult struct {
	name     string
	alone    bool // the job has no other func
	began    time.Time
	err      error
	text     string // of err
	panicked *report.Panic
	cause    error // why the term is over, if the func was not told to return
}

const confirmName = "fence predecessor"

// newJob returns a job whose funcs don't run yet. Their context has the values of ctx, but it
// doesn't end with ctx: the coordinator ends it, with a cause.
func newJob(ctx context.Context, term *Term, b *base) *runningJob {
	ctx, cancel := context.WithCancelCause(withTerm(context.WithoutCancel(ctx), term))
	return &runningJob{of: b, ctx: ctx, cancel: cancel, results: make(chan *jobResult, 2)}
}

// start starts a func, unless it is nil.
func (j *runningJob) start(name string, run func(context.Context) error) {
	if run == nil {
		return
	}
	j.running++
	ctx := context.WithValue(j.ctx, jobScopeKey, jobScope{j.of, j.ctx, name})
	go func() {
		result := &jobResult{name: name, alone: j.alone, began: time.Now(), err: report.ErrGoexit}
		defer func() {
			if v := recover(); v != nil {
				result.panicked = &report.Panic{Value: v, Stack: debug.Stack()}
			}
			// Here, because the caller's Error method may block, too.
			result.text, result.cause = logtext.Text(result.err), result.why()
			j.results <- result
		}()
		result.err = logtext.Sound(run(ctx))
	}()
}

// finished notes that a func has returned.
func (j *runningJob) finished(r *jobResult) {
	j.running--
	if j.panicked == nil {
		j.panicked = r.panicked
	}
}

// isConfirmation reports whether the job may begin now.
func (r *jobResult) isConfirmation() bool {
	return r.name == confirmName && r.err == nil && r.panicked == nil
}

// note records that the func has returned an error without having been told to return. It leaves
// out a panic: RecordRun may have recorded that, and Run is about to panic.
func (r *jobResult) note(m *monitor) {
	if r.name != confirmName && r.err != nil && r.panicked == nil {
		m.ran(JobRun{Name: r.name, Outcome: RunFailed, Began: r.began, Ended: time.Now(), Err: r.err}, r.text)
	}
}

// why returns why the term is over if the func has returned too early.
func (r *jobResult) why() error {
	name := r.name
	if r.alone {
		name = "it"
	}
	switch {
	case r.panicked != nil:
		return fmt.Errorf("%w: %s panicked: %v", ErrJobEnded, name, r.panicked.Value)
	case r.name == confirmName:
		return r.err // the job has not begun, so it has not ended
	case r.err != nil && r.alone: // "reconcile" means nothing to readers of the log of tenure run
		return fmt.Errorf("%w: %w", ErrJobEnded, r.err)
	case r.err != nil:
		return fmt.Errorf("%w: %s: %w", ErrJobEnded, name, r.err)
	default:
		return fmt.Errorf("%w: %s returned", ErrJobEnded, name)
	}
}

// mustLast panics if a func of this package is called with a duration that is not positive, or lacks its unit.
func mustLast(function, name string, d time.Duration) {
	if d == 0 {
		panic(fmt.Sprintf("tenure: %s: %s is 0", function, name))
	}
	if err := objects.ValidDuration(name, d, "time.Second"); err != nil {
		panic(fmt.Sprintf("tenure: %s: %v", function, err))
	}
}

// Every returns a job that calls sweep at once, and again one interval after each call has
// returned, until its context is done. It logs a sweep's error and continues; while the error
// stays the same, it logs it once every ten minutes. A sweep that has lasted for more than
// three intervals, and for more than a minute, is logged as well, and again every ten minutes
// until it returns. A panic ends the job. Every itself panics if the
// interval is not positive or sweep is nil.
//
// Each term begins with a sweep, so even with an interval of a day there is a sweep at each
// deployment. Package schedule is for jobs that are due at given times.
//
// The sweeps are recorded as by [RecordRun], named after the job's func: watch or reconcile.
func Every(interval time.Duration, sweep func(context.Context) error) func(context.Context) error {
	mustLast("Every", "interval", interval)
	if sweep == nil {
		panic("tenure: Every: sweep is nil")
	}
	return func(ctx context.Context) error {
		log := sweepLog{logger: slog.Default(), retries: logtext.Retries{Repeat: true}, long: max(3*interval, time.Minute), isLate: func(time.Time) {}}
		scope, ok := ctx.Value(jobScopeKey).(jobScope)
		if ok {
			log.logger = scope.of.monitor.log()
			log.isLate = func(began time.Time) { scope.of.monitor.update(func(s *state) { s.runIsOverdue(scope.name, began) }) }
		}
		log.slow = time.AfterFunc(math.MaxInt64, log.stillRuns)
		defer log.returned()
		for wait := time.Duration(0); pace.Sleep(ctx, wait); wait = interval {
			log.begins()
			err := RecordRun(ctx, scope.name, sweep)
			log.returned()
			if err == nil || ctx.Err() == nil {
				log.ended(err)
			}
		}
		return nil
	}
}

// sweepLog logs how sweeps end, and when one does not end. It logs an unchanged error every ten
// minutes, and at debug level in between.
type sweepLog struct {
	logger   *slog.Logger
	failures int // since the last success
	first    time.Time
	retries  logtext.Retries

	long time.Duration // a sweep that lasts for longer is logged
	slow *time.Timer   // calls stillRuns

	isLate func(began time.Time) // tells the status

	mu    sync.Mutex // guards began and the resets of the timer
	began time.Time  // zero: no sweep runs
}

func (l *sweepLog) begins() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.began = time.Now()
	l.slow.Reset(l.long)
}

func (l *sweepLog) returned() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.began = time.Time{}
	l.slow.Stop()
}

// stillRuns logs that the sweep has been running for long, and does so again in ten minutes.
func (l *sweepLog) stillRuns() {
	l.mu.Lock()
	began := l.began
	running := time.Since(began)
	late := !began.IsZero() && running >= l.long // otherwise it has just returned
	if late {
		l.slow.Reset(10 * time.Minute)
	}
	l.mu.Unlock()
	if late {
		l.isLate(began)
		l.logger.Warn("sweep has not returned", "running", running)
	}
}

func (l *sweepLog) ended(err error) {
	if err == nil {
		if l.failures > 0 {
			l.logger.Info("sweep succeeds again", "failures", l.failures, "after", time.Since(l.first))
		}
		l.failures = 0
		l.retries.Reset()
		return
	}
	if l.failures++; l.failures == 1 {
		l.first = time.Now()
	}
	level := slog.LevelDebug
	if l.retries.IsNew(logtext.Class(err)) {
		level = slog.LevelError
	}
	l.logger.Log(context.Background(), level, "sweep failed", "error", logtext.OneLine(err), "failures", l.failures)
}

var errNotReturned = errors.New("the run did not return: it panicked or called runtime.Goexit")

// RecordRun calls run and returns its error. If ctx is derived from a job's context, the
// coordinator's [Status] and [Trace] show that a run with this name has begun, and how it
// ended. Without that, a job that continues after errors looks healthy even if it always fails.
// [Every] and package schedule record their runs; a loop of your own should record each round.
// RecordRun is safe for concurrent use.
//
// A run that returns an error after its term has ended counts as interrupted, not as failed. Use
// few names, because a coordinator remembers each of them.
func RecordRun(ctx context.Context, name string, run func(context.Context) error) (err error) {
	scope, ok := ctx.Value(jobScopeKey).(jobScope)
	if !ok {
		return run(ctx)
	}
	r := JobRun{Name: name, Outcome: RunBegan, Began: time.Now()}
	scope.of.monitor.ran(r, "")
	returned := false
	defer func() {
		r.Ended, r.Err = time.Now(), logtext.Sound(err)
		switch {
		case !returned:
			r.Outcome, r.Err = RunFailed, errNotReturned
		case err == nil:
			r.Outcome = RunSucceeded
		case scope.job.Err() != nil || isLossOf(TermFromContext(ctx), r.Err):
			r.Outcome = RunInterrupted
		default:
			r.Outcome = RunFailed
		}
		scope.of.monitor.ran(r, logtext.Text(r.Err))
	}()
	err = run(ctx)
	returned = true
	return err
}
