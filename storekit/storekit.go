// Package storekit is for authors of a [tenure.Store]. It has the code that stores for other
// databases share. natstenure and etcdtenure are built with it, and storetest has the tests that
// such a store must pass.
//
//	func (s *Store) Get(ctx context.Context, key tenure.Key) (obj tenure.Object, err error) {
//		defer storekit.OpError(ctx, &err, "mystore: get", key)
//		ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
//		defer cancel()
//		…
//	}
package storekit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/report"
)

// Refusal reports whether err is an answer of the store: an error of package tenure that says
// that nothing was written. After any other error the write may have happened.
func Refusal(err error) bool { return objects.Refusal(err) }

// OpError adds to the error of a store's method the operation, its object, and whether ctx has
// ended, because some clients only report that they were interrupted. Defer it before the calls
// that may fail. It leaves a nil error alone.
func OpError(ctx context.Context, err *error, op string, what any) {
	if *err == nil {
		return
	}
	cause := *err
	if ended := ctx.Err(); ended != nil && !errors.Is(cause, ended) && !Refusal(cause) {
		cause = fmt.Errorf("%w: %w", ended, cause)
	}
	*err = fmt.Errorf("%s %v: %w", op, what, cause)
}

// NotMigrated returns the [tenure.ErrSetup] of a call that needs something that Migrate creates.
// The cause says what is missing. The command tenure recognises the error, and tells the user to
// migrate.
func NotMigrated(cause error) error { return &objects.NoTable{Cause: cause} }

// CheckList returns [tenure.ErrInvalid] for arguments of List that no store accepts.
func CheckList(objectType, after string, limit int) error {
	return objects.ValidList(objectType, after, limit)
}

// FenceTerm returns the term that fences a store that supports only terms, or nil for the term of a
// single replica, which has no lease to lose. It returns [errors.ErrUnsupported] for any other
// guard, and if the store is fenced already: then had is the term that fences it, and otherwise
// nil.
func FenceTerm(had *tenure.Term, guard tenure.Guard) (*tenure.Term, error) {
	term, ok := guard.(*tenure.Term)
	switch {
	case guard != nil && !ok:
		return nil, fmt.Errorf("%w: only terms can fence writes to this store", errors.ErrUnsupported)
	case had != nil:
		return nil, fmt.Errorf("%w: the store is fenced already", errors.ErrUnsupported)
	case term == nil || term.ID() == "":
		return nil, fmt.Errorf("%w: no term is given", tenure.ErrInvalid)
	case term.Record() == nil:
		return nil, nil
	}
	return term, nil
}

// CheckFenced returns [tenure.ErrInvalid] for a write to the lease's own object that is fenced by
// the lease's term. A nil term means no fence.
func CheckFenced(term *tenure.Term, key tenure.Key) error {
	if term != nil && term.Key() == key {
		return fmt.Errorf("%w: the lease's own object can't be written through its fence", tenure.ErrInvalid)
	}
	return nil
}

// LostTo ends a term whose record is no longer the lease's, and returns the [tenure.ErrLost] of the write that has
// found out. It reads the present holder from the store.
func LostTo(ctx context.Context, store tenure.Store, term *tenure.Term) error {
	fence, err := term.Fence()
	if err != nil {
		return err
	}
	obj, err := store.Get(ctx, term.Key())
	switch {
	case errors.Is(err, tenure.ErrNotFound):
		return fence.Refused(nil, nil)
	case err != nil:
		return fence.Refused(nil, err)
	}
	return fence.Refused(&objects.Row{ID: objects.ID(obj.Key), Labels: []byte(objects.EncodeLabels(obj.Labels)), Payload: obj.Payload, Version: obj.Version, Age: obj.Age}, nil)
}

// WithLimit adds a deadline to a context that has none. Otherwise a request could wait forever for
// a server that is gone.
func WithLimit(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, limit)
}

// Pause waits for a random time up to most, so that writers that have overtaken each other do not
// retry at the same moment. It returns the error of ctx if ctx ends first.
func Pause(ctx context.Context, most time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(rand.N(most)):
		return nil
	}
}

// Logger returns a logger that passes its records to the given one in a separate goroutine, so that
// a logger that blocks cannot delay a renewal. Nil stands for [slog.Default].
func Logger(to *slog.Logger) *slog.Logger {
	logger, _ := report.Logger(cmp.Or(to, slog.Default()))
	return logger
}

// Flush waits, for at most a second, until a logger that [Logger] returned has passed on all its
// records. Call it in Close.
func Flush(logger *slog.Logger) { report.Flush(logger) }
