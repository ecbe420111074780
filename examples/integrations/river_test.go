package integrations

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// planArgs is a River job for any worker of any replica.
type planArgs struct{}

func (planArgs) Kind() string { return "plan" }

// plan enqueues a job in a fenced transaction. River enqueues it only if the term is still
// the lease's, so a former holder enqueues nothing.
func plan(ctx context.Context, store *tenure.PostgresStore, client *river.Client[pgx.Tx]) error {
	return store.Fenced(ctx, nil, func(tx pgx.Tx) error {
		_, err := client.InsertTx(ctx, tx, planArgs{}, nil)
		return err
	})
}

func TestOnlyTheHolderEnqueuesJobsOfRiver(t *testing.T) {
	ctx := limited(t)
	pool, err := pgxpool.New(ctx, testkit.PostgresURL(t))
	must(t, err)
	defer pool.Close()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	must(t, err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	must(t, err)
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{}) // of the workers, elsewhere
	must(t, err)
	store, err := tenure.NewPostgresStore(pool, tenure.PostgresConfig{})
	must(t, err)
	defer store.Close()
	must(t, store.Migrate(ctx))

	run, stop := context.WithCancel(ctx)
	var former context.Context // of a term that is over
	coordinator := newCoordinator(store, "river", func(ctx context.Context) error {
		defer stop()
		former = ctx
		return plan(ctx, store, client)
	})
	must(t, coordinator.Run(run))
	if err := plan(context.WithoutCancel(former), store, client); !errors.Is(err, tenure.ErrLost) {
		t.Errorf("a former holder enqueues a job: got error %v, want %v", err, tenure.ErrLost)
	}
	var jobs int
	must(t, pool.QueryRow(ctx, `SELECT count(*) FROM river_job WHERE kind = 'plan'`).Scan(&jobs))
	if jobs != 1 {
		t.Errorf("got %d jobs, want 1", jobs)
	}
}
