package claims_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
)

// The page on queues shows this config.
func TestARowThatIsCancelledWhileItIsClaimedStaysCancelled(t *testing.T) {
	cfg := tasks
	cfg.Taken = "status = 'running'"
	cfg.Done = "status = CASE status WHEN 'running' THEN 'done' ELSE status END"
	cfg.Released = "status = CASE status WHEN 'running' THEN 'queued' ELSE status END"
	cfg.Requested = "requested"
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 4)
		w := db.worker(claims.SessionConfig{}, cfg)
		got, err := w.rows.Take(t.Context(), 4)
		require.NoError(db, err)
		require.Len(db, got, 4)
		told := make(chan error, 1)
		begun := make(chan bool)
		go func() {
			told <- w.rows.Do(context.Background(), got[2], func(ctx context.Context) error { close(begun); <-ctx.Done(); return ctx.Err() })
		}()
		<-begun
		db.exec(`UPDATE tasks SET status = 'cancelled' WHERE id < 4`)
		require.NoError(db, w.rows.Finish(t.Context(), got[0]))
		require.NoError(db, w.rows.Release(t.Context(), got[1]))
		require.NoError(db, w.rows.RequestRelease(t.Context(), got[2].Key.ID))
		require.ErrorIs(db, <-told, context.Canceled)
		require.NoError(db, w.rows.Finish(t.Context(), got[3]))
		require.Equal(db, 3, db.count(`SELECT count(*) FROM tasks WHERE status = 'cancelled' AND session IS NULL`))
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE status = 'done'`))
	})
}
