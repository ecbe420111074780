package claims

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// perStatement is the greatest number of keys that one statement claims or frees.
const perStatement = 1000

// groups decides how many keys or rows one statement gets, so that the database finishes the statement
// within its time limit. The limit follows from the TTL, but the speed of the database does not. A group
// that was too slow is halved. After each full group that was in time, the next may be a little larger.
//
// The zero value is ready to use. All methods are safe for concurrent use.
type groups struct{ less atomic.Int64 } // how much smaller than perStatement a group is

// size returns how many items the next group may have, at least one.
func (g *groups) size() int { return perStatement - int(g.less.Load()) }

// tooSlow notes that a group of n was not finished in time.
func (g *groups) tooSlow(n int) {
	for less := g.less.Load(); int(less) < perStatement-max(1, n/2); less = g.less.Load() {
		if g.less.CompareAndSwap(less, int64(perStatement-max(1, n/2))) {
			return
		}
	}
}

// finished notes that a group of n was finished in time.
func (g *groups) finished(n int) {
	const growth = perStatement / 50
	if less := g.less.Load(); less > 0 && n >= perStatement-int(less) {
		g.less.CompareAndSwap(less, max(0, less-growth))
	}
}

// page calls read for up to most rows, and retries with fewer while that is too slow. It returns how many rows
// the last call asked for.
func (g *groups) page(ctx context.Context, most int, read func(n int) error) (n int, err error) {
	for {
		n = min(most, g.size())
		if err = read(n); !isTooSlow(err) || n == 1 || ctx.Err() != nil {
			return n, err
		}
		g.tooSlow(n)
	}
}

// inGroups calls write with all items, group by group. It halves a group that is too slow. If the database
// refuses an item, it bisects the group: every item that is not refused is written, and refused is called
// for the others. It stops at any other error, when a single item is too slow, and, if refused is nil, at
// a refusal.
func inGroups[T any](g *groups, items []T, write func([]T) error, refused func(item T, err error)) error {
	for len(items) > 0 {
		n := min(len(items), g.size())
		switch err := write(items[:n]); {
		case err == nil:
			g.finished(n)
		case isTooSlow(err) && n > 1: // nothing is written
			g.tooSlow(n)
			continue
		case isRefused(err) && n == 1 && refused != nil:
			refused(items[0], err)
		case isRefused(err) && n > 1 && refused != nil:
			half := (n + 1) / 2
			for _, some := range [][]T{items[:half], items[half:n]} {
				if err := inGroups(g, some, write, refused); err != nil {
					return err
				}
			}
		default:
			return err
		}
		items = items[n:]
	}
	return nil
}

// isTooSlow reports whether the database has ended a statement at its time limit, so that nothing is
// written.
func isTooSlow(err error) bool { return errors.As(err, new(*objects.TooSlow)) }

// isRefused reports whether a statement has written nothing because the database refuses one of its rows.
// The reason is a constraint or a trigger of the user's, or an index for which the row is too long.
func isRefused(err error) bool { return errors.As(err, new(*objects.Refused)) }

// wroteNothing reports whether a failed statement is known to have written nothing. After any other error of
// the database it may have written, or may yet.
func wroteNothing(err error) bool {
	return isRefused(err) || isTooSlow(err) || errors.Is(err, tenure.ErrMoved)
}
