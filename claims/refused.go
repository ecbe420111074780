package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// isRefused reports whether a statement has written nothing because the database refuses one of its
// rows: a constraint or a trigger of the user's does, or an index for which the row is too long.
func isRefused(err error) bool { return errors.As(err, new(*objects.Refused)) }

// wroteNothing reports whether a statement that has failed is known to have written nothing. After
// any other error of the database it may have, or may yet.
func wroteNothing(err error) bool { return isRefused(err) || isTooSlow(err) }

// refusal is a row that the database has refused to have taken for a session: it may be the session
// that it refuses.
type refusal struct{ session, id string }

// leaving is how long a row is left.
type leaving struct {
	until time.Time
	last  time.Duration
}

// leave leaves a row for a while, if it would be taken for that session: each time for longer, and at
// most for a TTL, because what refuses it may end at any time, and the rows behind it must have their turn.
func (r *Rows) leave(session, id string, atLeast time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := refusal{session, id}
	d := max(min(2*r.refused[of].last, r.s.cfg.TTL), r.s.cfg.TTL/32, atLeast)
	r.refused[of] = leaving{time.Now().Add(d), d}
}

// skipped returns the rows that are not to be taken for a session now.
func (r *Rows) skipped(session string, strays []string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, skipped := time.Now(), slices.Clone(strays)
	maps.DeleteFunc(r.refused, func(_ refusal, left leaving) bool { return now.Sub(left.until) > r.s.cfg.TTL })
	for of, left := range r.refused {
		if of.session == session && now.Before(left.until) {
			skipped = append(skipped, of.id)
		}
	}
	return skipped
}

// takeReady takes at most n rows for a session. If the database refuses to have some of them taken, it
// takes the others, and leaves those for a while. Beside an error, it may return rows.
func (r *Rows) takeReady(ctx context.Context, session string, n int, strays []string, take func(n int, skip, only []string) ([]objects.Claim, error)) (rows []objects.Claim, err error) {
	const most = 10 // then others have their turn
	groups, all := r.keys.groups, error(nil)
	for tries := 0; ; {
		n := min(n, groups.size())
		skip := r.skipped(session, strays)
		rows, err = take(n, skip, nil)
		switch {
		case isTooSlow(err) && n > 1 && ctx.Err() == nil:
			groups.tooSlow(n)
			continue
		case err == nil:
			groups.finished(len(rows))
		}
		if !isRefused(err) || tries == most {
			if len(rows) == 0 && err == nil {
				err = all
			}
			return rows, err
		}
		tries++
		// More each time, because those that the database takes may be behind many that it refuses.
		ids, readErr := r.table.Ready(ctx, min(n<<tries, groups.size()), skip, r.s.limit)
		if readErr != nil || len(ids) == 0 { // it may be Ready that fails, for any row
			return nil, cmp.Or(readErr, err)
		}
		var refused error
		rows, refused, err = r.takeOf(session, n, ids, func(only []string) ([]objects.Claim, error) { return take(len(only), skip, only) })
		if err != nil || len(rows) > 0 {
			return rows, err
		}
		all = cmp.Or(all, refused)
	}
}

// takeOf takes those of the rows that the database does not refuse to have taken: those of the first n
// of which it refuses not all. If it refuses all of several, that is told as well: then it may be the
// session that it refuses.
func (r *Rows) takeOf(session string, n int, ids []string, take func(only []string) ([]objects.Claim, error)) (rows []objects.Claim, all, err error) {
	refused := make(map[string]error)
	for some := range slices.Chunk(ids, n) {
		err = inGroups(r.keys.groups, some, func(ids []string) error {
			more, err := take(ids)
			rows = append(rows, more...)
			return err
		}, func(id string, err error) {
			refused[id] = err
			r.leave(session, id, 0)
		})
		if err != nil || len(rows) > 0 {
			break
		}
	}
	logger := r.s.cfg.Logger.With("table", r.cfg.Table, "session", session)
	if len(refused) == len(ids) && len(ids) > 1 {
		all = fmt.Errorf("the database refuses to have any of %d rows taken for session %q: %w", len(ids), session, refused[ids[0]])
		logger.Warn("failed to take rows: the database refuses all of them, maybe because of the session; retrying", "rows", len(ids), "error", refused[ids[0]])
		return rows, all, err
	}
	for id, err := range refused { // one line, however many they are
		logger.Warn("the database refuses to have a row taken, which is left for a while", "id", id, "rows", len(refused), "error", err)
		break
	}
	return rows, nil, err
}
