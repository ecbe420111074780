// Command runs drives durable runs: programs of some steps that survive the death of the process
// that drives them, at any moment. A run is a row of a table. A driver that claims it reads its
// journal of what has happened so far, and continues from there. The journal is extended only
// under the claim: a driver that was paused, and has lost the run, adds nothing.
//
// The runs of this example are orders, which another system, the provider, charges and then
// ships. Calls are made as from an outbox: the journal says that a call is about to be made,
// then it is made, then the journal has its outcome. A driver that finds a call without an
// outcome asks the provider what has become of it.
//
//	export DATABASE_URL=postgres://…
//	go run ./examples/runs migrate
//	go run ./examples/runs provide
//	go run ./examples/runs drive
//	go run ./examples/runs drive
//	psql $DATABASE_URL -c "INSERT INTO runs VALUES ('order 1'), ('order 2')"
//	psql $DATABASE_URL -c 'SELECT * FROM events ORDER BY run, seq'
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

const ttl = 5 * time.Second // short, to see a failover soon; the default is 30 s

// runs is the table of the runs.
var runs = claims.QueueConfig{
	Table: "runs", Attempts: "attempts", NotBefore: "not_before",
	Ready: "status = 'running'", Done: "status = 'done'",
}

func main() {
	url := flag.String("store", os.Getenv("DATABASE_URL"), "postgres:// `URL`; default: $DATABASE_URL")
	provider := flag.String("provider", "127.0.0.1:8090", "`address` of the provider")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch flag.Arg(0) {
	case "migrate":
		err = withStore(ctx, *url, migrate)
	case "provide":
		err = http.ListenAndServe(*provider, newProvider())
	case "drive":
		err = withStore(ctx, *url, func(ctx context.Context, store *tenure.PostgresStore) error { return drive(ctx, store, *provider) })
	default:
		err = errors.New("usage: runs [flags] migrate|provide|drive")
	}
	if err != nil {
		log.Fatal(err)
	}
}

func withStore(ctx context.Context, url string, do func(context.Context, *tenure.PostgresStore) error) error {
	store, err := tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{})
	if err != nil {
		return err
	}
	defer store.Close()
	return do(ctx, store)
}

// migrate makes the tables. A real program leaves this to its migration tool.
func migrate(ctx context.Context, store *tenure.PostgresStore) error {
	columns, err := runs.PostgresDDL()
	if err != nil {
		return err
	}
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	if err := claims.Migrate(ctx, store); err != nil {
		return err
	}
	_, err = store.Pool().Exec(ctx, `
		CREATE TABLE IF NOT EXISTS runs (id text PRIMARY KEY, status text NOT NULL DEFAULT 'running');
		CREATE TABLE IF NOT EXISTS events (
			run  text NOT NULL REFERENCES runs,
			seq  integer NOT NULL,
			name text NOT NULL,
			data text NOT NULL,
			PRIMARY KEY (run, seq));
		`+columns)
	return err
}

// drive drives runs until ctx is done. Any number of processes may do so at the same time.
func drive(ctx context.Context, store *tenure.PostgresStore, provider string) error {
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: ttl})
	if err != nil {
		return err
	}
	queue, err := claims.NewQueue(store, runs)
	if err != nil {
		return err
	}
	worker, err := claims.NewWorker(session, queue)
	if err != nil {
		return err
	}
	if err := queue.Check(ctx); err != nil { // the error says what migrate has not made
		return err
	}
	var errs [2]error
	var running sync.WaitGroup
	running.Go(func() { errs[0] = session.Run(ctx) })
	running.Go(func() {
		errs[1] = worker.Serve(ctx, atOnce, func(ctx context.Context, c claims.Claim) error {
			return order(ctx, &journal{queue: queue, db: store.Pool(), provider: provider, claim: c})
		})
	})
	running.Wait()
	return errors.Join(errs[:]...)
}
