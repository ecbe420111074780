package tenure

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// Every makes a job of a sweep: it sweeps at once, and then again and again, one
// interval after the end of the last, until ctx is done; then it returns nil.
// An error of a sweep is logged, and the next sweep comes; a panic ends the
// job. An interval that is not positive, or a sweep that is nil, is [ErrInvalid]
// from the job.
func Every(interval time.Duration, sweep func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if interval <= 0 {
			return fmt.Errorf("tenure: every: %w: interval %v is not positive", ErrInvalid, interval)
		}
		if sweep == nil {
			return fmt.Errorf("tenure: every: %w: sweep is nil", ErrInvalid)
		}
		log := slog.Default()
		if scope, ok := ctx.Value(jobScopeKey{}).(jobScope); ok {
			log = scope.of.log()
		}
		for wait := time.Duration(0); sleep(ctx, wait); wait = interval {
			if err := sweep(ctx); err != nil && ctx.Err() == nil {
				log.Error("sweep failed", "error", err)
			}
		}
		return nil
	}
}
