package claims

import (
	"context"
	"errors"
)

// Serve takes rows and calls fn for each, at most so many at once, until ctx is done or the
// session closes. Then it takes no more, waits until all funcs have returned, and returns nil. fn's
// context is that of [Rows.Do], and does not end with ctx: [Session.Run] tells funcs to return when it closes.
//
// fn ends the claim by a Finish method, Release or ReleaseAfter. If it returns nil without that, the row is finished
// as by [Rows.Finish], if [RowsConfig.Done] is set. If it returns an error, which is logged, the row is
// released, to be taken again after [RowsConfig.Backoff].
//
// A panic of fn releases the row, and is passed on. An [tenure.ErrSetup] is returned.
func (r *Rows) Serve(ctx context.Context, workers int, fn func(context.Context, Claim) error) error {
	return errors.ErrUnsupported
}
