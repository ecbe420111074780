package witness

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pace"
)

// longestDrain limits the wait for the end of the program's sessions.
const longestDrain = time.Second

// appName returns the PGAPPNAME of the program. Drivers give it to each connection that has no name of its own, so
// that the sessions of a program that is dead can be found.
func (w *witness) appName(name string) string {
	const most = 63 // of Postgres
	return name[:min(len(name), most-len(w.tag())-1)] + "/" + w.tag()
}

func (w *witness) tag() string { return w.name[:16] }

// ofProgram is the program's sessions. A pooler may have added something to the name.
const ofProgram = `FROM pg_stat_activity WHERE strpos(application_name, $1) > 0`

// pool returns the pool by which sessions are ended, or nil.
func (w *witness) pool(store tenure.Store) *pgxpool.Pool {
	if store, ok := store.(interface{ Pool() *pgxpool.Pool }); ok && !w.cfg.NoDrain {
		return store.Pool()
	}
	return nil
}

// drain ends the sessions of the dead program: a statement that the server still executes would be committed when
// the next job has begun. Found says whether there were any.
func (w *witness) drain(ctx context.Context, store tenure.Store) (found bool, err error) {
	pool := w.pool(store)
	if pool == nil {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, longestDrain)
	defer cancel()
	for {
		// A session leaves the view after its transaction has ended. That it can't be ended may mean that it just has.
		var left int
		if err := pool.QueryRow(ctx, `SELECT count(pg_terminate_backend(pid)) `+ofProgram, w.tag()).Scan(&left); err != nil {
			return found, err
		}
		if left == 0 {
			return found, nil
		}
		found = true
		if !pace.Sleep(ctx, time.Millisecond) {
			return found, fmt.Errorf("%d sessions of the program have not ended within %v", left, longestDrain)
		}
	}
}
