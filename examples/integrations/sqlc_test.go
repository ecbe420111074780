package integrations

import (
	"context"
	"database/sql"
	"fmt"
	"log"

	"github.com/tenurelib/tenure"
)

// Queries is what sqlc generates.
type Queries struct{ db dbtx }

type dbtx interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

func (q *Queries) WithTx(tx *sql.Tx) *Queries { return &Queries{db: tx} }

func (q *Queries) SetPhase(ctx context.Context, phase string) error {
	_, err := q.db.ExecContext(ctx, `UPDATE deployments SET phase = $1`, phase)
	return err
}

func (q *Queries) Phase(ctx context.Context) (phase string, err error) {
	err = q.db.QueryRowContext(ctx, `SELECT phase FROM deployments`).Scan(&phase)
	return phase, err
}

// The queries run in a fenced transaction of database/sql.
func Example_sqlc() {
	store := newStore()
	defer store.Close()
	db := store.DB()
	queries := &Queries{db: db}
	if _, err := db.Exec(`CREATE TABLE deployments (phase TEXT); INSERT INTO deployments VALUES ('new')`); err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	coordinator := newCoordinator(store, "sqlc", func(ctx context.Context) error {
		defer stop()
		return tenure.FencedTx(ctx, store, tenure.TermFromContext(ctx), db, nil, func(tx *sql.Tx) error {
			return queries.WithTx(tx).SetPhase(ctx, "promoted")
		})
	})
	if err := coordinator.Run(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(queries.Phase(context.Background()))
	// Output: promoted <nil>
}
