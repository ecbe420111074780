package integrations

import (
	"context"
	"errors"
	"testing"

	"github.com/jmoiron/sqlx"

	"github.com/tenurelib/tenure"
)

// deploy is a transaction of sqlx that commits only if the guard stands. Otherwise it returns tenure.ErrLost.
func deploy(ctx context.Context, store tenure.SQLStore, guard tenure.Guard, db *sqlx.DB, phase string) error {
	fence, args, err := store.FenceStatement(guard)
	if err != nil {
		return err
	}
	tx, err := db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.NamedExecContext(ctx, "INSERT INTO deployments (phase) VALUES (:phase)", map[string]any{"phase": phase}); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, fence, args...); err != nil { // the last statement before the commit
		return tenure.FenceError(err)
	}
	return tenure.FenceError(tx.Commit())
}

func TestOnlyTheHolderCommitsTransactionsOfSQLX(t *testing.T) {
	for driver, open := range sqlStores {
		t.Run(driver, func(t *testing.T) {
			ctx := limited(t)
			store, dsn := open(t)
			db, err := sqlx.ConnectContext(ctx, driver, dsn)
			must(t, err)
			defer db.Close()
			_, err = db.ExecContext(ctx, "CREATE TABLE deployments (phase VARCHAR(20))")
			must(t, err)

			run, stop := context.WithCancel(ctx)
			must(t, newCoordinator(store, "sqlx", func(ctx context.Context) error {
				defer stop()
				return deploy(ctx, store, tenure.TermFromContext(ctx), db, "promoted")
			}).Run(run))
			if err := deploy(ctx, store, takenOver(t, store, "sqlx"), db, "late"); !errors.Is(err, tenure.ErrLost) {
				t.Errorf("a holder that does not know yet: got error %v, want %v", err, tenure.ErrLost)
			}
			var phases []string
			must(t, db.SelectContext(ctx, &phases, "SELECT phase FROM deployments"))
			if len(phases) != 1 || phases[0] != "promoted" {
				t.Errorf("got deployments %v, want one that is promoted", phases)
			}
		})
	}
}
