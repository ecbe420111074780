package claims

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// refusal is a row that the database has refused to have taken for a session: it may be the session
// that it refuses.
type refusal struct{ session, id string }

// leaving is how long a row is left.
type leaving struct {
	until time.Time
	last  time.Duration
}

// taker takes rows that are ready, and leaves those for a while that the database refuses to have taken.
type taker struct {
	q       *Queue
	limit   time.Duration // of a statement
	longest time.Duration // for which a row is left

	mu      sync.Mutex
	refused map[refusal]leaving
}

func newTaker(q *Queue, limit, longest time.Duration) *taker {
	return &taker{q: q, limit: limit, longest: longest, refused: make(map[refusal]leaving)}
}

// leave leaves a row for a while, if it would be taken for that session: each time for longer, and at
// most for the longest time, because what refuses it may end at any time, and the rows behind it must have their turn.
func (t *taker) leave(session, id string, atLeast time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := refusal{session, id}
	d := max(min(2*t.refused[of].last, t.longest), t.longest/32, atLeast)
	t.refused[of] = leaving{time.Now().Add(d), d}
}

// skipped returns the rows that are not to be taken for a session now.
func (t *taker) skipped(session string, strays []string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, skipped := time.Now(), slices.Clone(strays)
	maps.DeleteFunc(t.refused, func(_ refusal, left leaving) bool { return now.Sub(left.until) > t.longest })
	for of, left := range t.refused {
		if of.session == session && now.Before(left.until) {
			skipped = append(skipped, of.id)
		}
	}
	return skipped
}

// take takes at most n rows for a session. If the database refuses to have some of them taken, it
// takes the others, and leaves those for a while. Beside an error, it may return rows.
func (t *taker) take(ctx context.Context, session string, n int, strays []string, send func(n int, skip, only []string) ([]objects.Claim, error)) (rows []objects.Claim, err error) {
	const most = 10 // then others have their turn
	groups, all := t.q.rows.groups, error(nil)
	for tries := 0; ; {
		var skip []string
		n, err := groups.page(ctx, n, func(n int) (err error) {
			skip = t.skipped(session, strays)
			rows, err = send(n, skip, nil)
			return err
		})
		if err == nil {
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
		ids, readErr := t.q.table.Ready(ctx, min(n<<tries, groups.size()), skip, t.limit)
		if readErr != nil || len(ids) == 0 { // it may be Ready that fails, for any row
			return nil, cmp.Or(readErr, err)
		}
		var refused error
		rows, refused, err = t.takeOf(session, n, ids, func(only []string) ([]objects.Claim, error) { return send(len(only), skip, only) })
		if err != nil || len(rows) > 0 {
			return rows, err
		}
		all = cmp.Or(all, refused)
	}
}

// takeOf takes those of the rows that the database does not refuse to have taken: those of the first n
// of which it refuses not all. If it refuses all of several, that is told as well: then it may be the
// session that it refuses.
func (t *taker) takeOf(session string, n int, ids []string, send func(only []string) ([]objects.Claim, error)) (rows []objects.Claim, all, err error) {
	refused := make(map[string]error)
	for some := range slices.Chunk(ids, n) {
		err = inGroups(t.q.rows.groups, some, func(ids []string) error {
			more, err := send(ids)
			rows = append(rows, more...)
			return err
		}, func(id string, err error) {
			refused[id] = err
			t.leave(session, id, 0)
		})
		if err != nil || len(rows) > 0 {
			break
		}
	}
	logger := t.q.cfg.Logger.With("table", t.q.cfg.Table, "session", session)
	if len(refused) == len(ids) && len(ids) > 1 {
		all = fmt.Errorf("the database refuses to have any of %d rows taken for session %q: %w", len(ids), session, refused[ids[0]])
		logger.Warn("failed to take rows: the database refuses all of them, maybe because of the session; retrying", "rows", len(ids), "error", refused[ids[0]])
		return rows, all, err
	}
	for id, err := range refused { // one line, however many they are
		logger.Warn("the database refuses to have a row taken; leaving it for a while", "id", id, "rows", len(refused), "error", err)
		break
	}
	return rows, nil, err
}
