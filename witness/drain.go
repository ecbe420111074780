package witness

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pace"
)

// longestDrain is how long the witness waits for the program's sessions to end, before it tries again.
const longestDrain = time.Second

// appName returns the program's PGAPPNAME. Drivers use it for each connection that has no application_name of its own,
// which is how the witness finds the program's sessions.
func (w *witness) appName(name string) string {
	const most = 63 // of Postgres
	return name[:min(len(name), most-len(w.tag())-1)] + "/" + w.tag()
}

func (w *witness) tag() string { return w.name[:16] }

// ofProgram selects the program's sessions. A pooler may have added something to the name.
const ofProgram = `FROM pg_stat_activity WHERE strpos(application_name, $1) > 0`

// pool returns the pool through which the program's sessions are ended, or nil if none are.
func (w *witness) pool(store tenure.Store) *pgxpool.Pool {
	if store, ok := store.(interface{ Pool() *pgxpool.Pool }); ok && !w.cfg.NoDrain {
		return store.Pool()
	}
	return nil
}

// drain ends the sessions of the dead program. Otherwise the server would complete the statements that it still
// executes for them, when the next job has begun. Found reports whether there were any.
func (w *witness) drain(ctx context.Context, store tenure.Store) (found bool, err error) {
	pool := w.pool(store)
	if pool == nil {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, longestDrain)
	defer cancel()
	for {
		// A session leaves the view after its transaction has ended. If it cannot be ended, it may just have ended itself.
		var left int
		err := pool.QueryRow(ctx, `SELECT count(pg_terminate_backend(pid)) `+ofProgram, w.tag()).Scan(&left)
		switch {
		case err != nil:
			return found, fmt.Errorf("end the program's sessions: %w", err)
		case left == 0:
			return found, nil
		case !pace.Sleep(ctx, time.Millisecond):
			return true, fmt.Errorf("end the program's sessions: %d are left after %v", left, longestDrain)
		}
		found = true
	}
}
