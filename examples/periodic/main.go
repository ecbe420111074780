// Command periodic deletes expired sessions once a minute, on one replica at a time. It has
// probes, a status page and metrics, and its database may be Postgres or a SQLite file:
//
//	DATABASE_URL=periodic.db?shared=true LISTEN=:8080 TENURE_REPLICA_ID=a go run .
//	DATABASE_URL=periodic.db?shared=true LISTEN=:8081 TENURE_REPLICA_ID=b go run .
package main

import (
	"context"
	"database/sql"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/oteltenure"
	"github.com/tenurelib/tenure/statuspage"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	store, err := open(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer store.Close()
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sessions"}})
	if err != nil {
		return err
	}
	exporter, err := prometheus.New()
	if err != nil {
		return err
	}
	trace, _, err := oteltenure.ObserveLease(metric.NewMeterProvider(metric.WithReader(exporter)).Meter("periodic"), lease)
	if err != nil {
		return err
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Reconcile: func(ctx context.Context) error {
			// Only the holder does this, so two replicas never create the table at once.
			const table = `CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, expires_at TIMESTAMP NOT NULL)`
			if _, err := store.DB().ExecContext(ctx, table); err != nil {
				return err
			}
			return tenure.Every(time.Minute, func(ctx context.Context) error { return sweep(ctx, store) })(ctx)
		},
		Trace: trace,
	})
	if err != nil {
		return err
	}

	var ready atomic.Bool
	http.Handle("/metrics", promhttp.Handler())
	http.Handle("/leases", statuspage.Handler(coordinator))
	http.HandleFunc("/livez", func(w http.ResponseWriter, r *http.Request) { // would a restart help?
		if err := coordinator.Healthy(10 * time.Second); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) { // may a rollout continue?
		if !ready.Load() {
			http.Error(w, "waiting for the database", http.StatusServiceUnavailable)
		}
	})
	listener, err := net.Listen("tcp", os.Getenv("LISTEN"))
	if err != nil {
		return err
	}
	log.Printf("listening on %v", listener.Addr())
	go http.Serve(listener, nil) // until the process ends, so that the probes also see how the job stops

	// Only now ask the database, because it may be down: Migrate waits for it.
	if err := store.Migrate(ctx); err != nil {
		if ctx.Err() != nil {
			return nil // told to stop
		}
		return err
	}
	ready.Store(true)           // a standby is as ready as the holder
	return coordinator.Run(ctx) // returns when the job has, and the lease is released
}

// open does not connect to Postgres yet.
func open(ctx context.Context, url string) (tenure.Database, error) {
	if strings.HasPrefix(url, "postgres://") || strings.HasPrefix(url, "postgresql://") {
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			return nil, err
		}
		return tenure.NewPostgresStore(pool, tenure.PostgresConfig{})
	}
	return tenure.Open(ctx, url) // the path of a SQLite file; anything else is an error
}

// sweep deletes the sessions that have expired. Its ctx ends when this replica no longer
// holds the lease; if the replica finds out too late, the fence refuses the commit.
func sweep(ctx context.Context, store tenure.Database) error {
	var deleted int64
	err := tenure.FencedTx(ctx, store, nil, store.DB(), nil, func(tx *sql.Tx) error {
		result, err := tx.ExecContext(ctx, `DELETE FROM sessions WHERE expires_at < CURRENT_TIMESTAMP`)
		if err != nil {
			return err
		}
		deleted, err = result.RowsAffected()
		return err
	})
	if err == nil {
		log.Printf("%d sessions deleted", deleted)
	}
	return err
}
