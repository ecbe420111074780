//go:build linux

package mysqltenure_test

import (
	"context"
	"database/sql"
	"log"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/stores/mysqltenure"
)

// runReplica runs a replica of a program; only one replica at a time does the job.
func runReplica(ctx context.Context, dsn string, job func(ctx context.Context, store *mysqltenure.Store) error) error {
	store, err := mysqltenure.Open(ctx, dsn, mysqltenure.Config{})
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil { // creates the table tenure_objects if it is missing
		return err
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}, TTL: 15 * time.Second})
	if err != nil {
		return err
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Reconcile: func(ctx context.Context) error { return job(ctx, store) },
	})
	if err != nil {
		return err
	}
	return coordinator.Run(ctx)
}

// sweep is a job. What it writes commits only while this replica holds the lease; nil stands for the term of ctx.
func sweep(ctx context.Context, store *mysqltenure.Store) error {
	return store.Fenced(ctx, nil, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO sweeps VALUES (?)", tenure.TermFromContext(ctx).Token())
		return err
	})
}

func Example() {
	err := runReplica(context.Background(), "mysql://app:password@db.example/app", sweep)
	if err != nil {
		log.Fatal(err)
	}
}

func TestTheExampleStartsWithAFreshDatabase(t *testing.T) {
	t.Parallel()
	s := start(t)
	db := s.db(t, "app", "")
	exec1(t, db, "CREATE TABLE sweeps (token BIGINT)")
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, runReplica(ctx, s.DSN("app", ""), func(ctx context.Context, store *mysqltenure.Store) error {
		defer cancel()
		return sweep(ctx, store)
	}))
	var n int
	require.NoError(t, db.QueryRow("SELECT COUNT(*) FROM sweeps").Scan(&n))
	require.Equal(t, 1, n)
}
