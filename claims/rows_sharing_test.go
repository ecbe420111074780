package claims_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// remote begins a session that a server keeps for a worker.
func (w *rowsWorld) remote(id string) string {
	testkit.MustAcquire(w, testkit.NewLease(w, w.store, tenure.LeaseConfig{Key: claims.SessionKey(id), TTL: 10 * time.Hour}))
	return id
}

// A program whose config lacks the column may take a row for which another had set an expiry.
func TestTheExpiryOfAnEarlierClaimEndsNoOther(t *testing.T) {
	cfg := effect
	cfg.Expires, cfg.Deadline = "expires", time.Minute
	inRowsBubble(t, cfg, 1, func(w *rowsWorld) {
		one, two := w.remote("one"), w.remote("two")
		q, err := claims.NewQueue(w.store, cfg)
		require.NoError(w, err)
		got, err := takeFor(w.Context(), q, one, claims.TakeOptions{N: 1})
		require.NoError(w, err)
		require.NoError(w, q.Release(w.Context(), got...))
		time.Sleep(2 * time.Minute)
		rows := w.rowsOf(w.start("a"), effect)
		mine := takeOf(w, rows, 1)
		time.Sleep(time.Second)
		other, err := q.TryTakeFor(w.Context(), two, claims.TakeOptions{N: 1})
		require.NoError(w, err)
		require.Empty(w, other)
		require.True(w, rows.Holds(mine[0]))
	})
}

func TestAClaimOfAWorkerIsNotExtended(t *testing.T) {
	cfg := effect
	cfg.Expires, cfg.Deadline = "expires", time.Hour
	inRowsBubble(t, cfg, 1, func(w *rowsWorld) {
		rows := w.rowsOf(w.start("a"), cfg)
		mine := takeOf(w, rows, 1)
		require.ErrorIs(w, rows.Extend(w.Context(), time.Second, mine[0]), tenure.ErrInvalid)
	})
}

// The caller may use its slice for its next call while another one waits in the same line.
func TestTheArgumentsOfAFilterAreTheCallsOwn(t *testing.T) {
	inRowsBubble(t, effect, 0, func(w *rowsWorld) {
		rows := w.rowsOf(w.start("a"), effect)
		args := []any{1}
		ctx, cancel := context.WithCancel(w.Context())
		first := make(chan error, 1)
		go func() {
			_, err := rows.TakeWith(ctx, claims.TakeOptions{N: 1, Where: "priority = $1", Args: args})
			first <- err
		}()
		time.Sleep(100 * time.Millisecond)
		second := make(chan []claims.Claim, 1)
		go func() {
			got, _ := rows.TakeWith(w.Context(), claims.TakeOptions{N: 1, Where: "priority = $1", Args: []any{1}})
			second <- got
		}()
		time.Sleep(100 * time.Millisecond)
		cancel()
		require.ErrorIs(w, <-first, context.Canceled)
		args[0] = 2
		_, err := w.db.Exec(`INSERT INTO tasks (id, priority) VALUES (22, 2)`)
		require.NoError(w, err)
		time.Sleep(time.Minute)
		require.Empty(w, second)
		_, err = w.db.Exec(`INSERT INTO tasks (id, priority) VALUES (11, 1)`)
		require.NoError(w, err)
		require.Equal(w, "11", (<-second)[0].Key.ID)
	})
}
