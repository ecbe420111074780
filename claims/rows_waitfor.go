package claims

import (
	"context"

	"github.com/tenurelib/tenure/internal/pace"
)

// WaitFor is [Rows.TakeFor], and waits until a row is ready. It returns none, and no error, if ctx
// is done before. While it waits, the rows of a session that expires are free at once rather than
// within a TTL, if [Session.Run] runs in this process.
func (r *Rows) WaitFor(ctx context.Context, session string, n int) ([]Claim, error) {
	s := r.s
	take := func() ([]Claim, error) {
		ctx, cancel := s.uncut(ctx) // a statement that is cut off may take rows all the same
		defer cancel()
		return r.TakeFor(ctx, session, n)
	}
	got, err := take()
	if err != nil || len(got) > 0 {
		return got, err
	}
	hints := s.hints(keyOf(r.keys.kind)) // then it looks again before it waits, so that no hint is missed
	defer hints.Stop()
	defer s.sweeper.waits()()
	var spurious pace.Limiter
	for woken := false; ctx.Err() == nil; {
		if got, err := take(); err != nil || len(got) > 0 {
			return got, err
		}
		pause := pace.Jitter(r.cfg.PollInterval)
		woken, _ = pace.Await(ctx, hints.C(), spurious.IgnoreFor(woken, min(coalesce, pause)), pause)
	}
	return nil, nil
}
