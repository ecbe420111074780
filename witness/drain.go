package witness

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pace"
)

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
// executes for them, when the next job has begun. Found reports whether there were any: then no acquire is under way.
func (w *witness) drain(ctx context.Context, store tenure.Store) (found bool, err error) {
	pool := w.pool(store)
	for failures := 0; pool != nil; {
		// A session leaves the view after its transaction has ended. If it cannot be ended, it may just have ended itself.
		var left int
		calling, cancel := context.WithTimeout(ctx, time.Second)
		err := pool.QueryRow(calling, `SELECT count(pg_terminate_backend(pid)) `+ofProgram, w.tag()).Scan(&left)
		cancel()
		pause := time.Millisecond
		switch {
		case err != nil:
			pause = pace.Retry(firstPause, lastPause, failures)
			failures++
		case left == 0:
			return found, nil
		default:
			found, err = true, fmt.Errorf("%d are left", left)
		}
		if !pace.Sleep(ctx, pause) {
			return found, fmt.Errorf("end the program's sessions: %w", err)
		}
	}
	return found, nil
}
