// Command runs drives durable runs: programs of some steps that survive the death of the process
// that drives them, at any moment. A run is a row of a table. A driver that claims it reads its
// journal of what has happened so far, and goes on from there. The journal is extended only under the claim, so a
// driver that was paused, and has lost the run, adds nothing.
//
// The runs of this example are orders, which are charged and then shipped by another system, the provider.
// A call is made as from an outbox: the journal says that it is about to be made, then it is
// made, then the journal has its outcome. A driver that finds one without an outcome asks the
// provider what has become of it.
//
//	export DATABASE_URL=postgres://… PROVIDER=http://127.0.0.1:8090
//	go run ./examples/runs migrate
//	go run ./examples/runs provide 127.0.0.1:8090
//	go run ./examples/runs drive
//	go run ./examples/runs drive
//	psql $DATABASE_URL -c "INSERT INTO runs VALUES ('order 1'), ('order 2')"
//	psql $DATABASE_URL -c 'SELECT * FROM events ORDER BY run, seq'
package main

import (
	"context"
	"errors"
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
var runs = claims.RowsConfig{
	Table: "runs", Attempts: "attempts", NotBefore: "not_before",
	Ready: "status = 'running'", Done: "status = 'done'",
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 2 && args[0] == "provide" {
		return http.ListenAndServe(args[1], newProvider())
	}
	store, err := tenure.OpenPostgres(ctx, os.Getenv("DATABASE_URL"), tenure.PostgresConfig{})
	if err != nil {
		return err
	}
	defer store.Close()
	switch {
	case len(args) == 1 && args[0] == "migrate":
		return migrate(ctx, store)
	case len(args) == 1 && args[0] == "drive":
		return drive(ctx, store, os.Getenv("PROVIDER"))
	}
	return errors.New("usage: runs migrate | drive | provide ADDRESS")
}

// migrate makes the tables. A real program gives this to its migration tool.
func migrate(ctx context.Context, store *tenure.PostgresStore) error {
	columns, err := runs.PostgresDDL()
	if err != nil {
		return err
	}
	if err := store.Migrate(ctx); err != nil {
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

// drive drives runs until ctx is done. Any number of processes may do that.
func drive(ctx context.Context, store *tenure.PostgresStore, provider string) error {
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: ttl})
	if err != nil {
		return err
	}
	rows, err := claims.NewRows(session, runs)
	if err != nil {
		return err
	}
	if err := rows.Check(ctx); err != nil { // it says what migrate has not made
		return err
	}
	var errs [2]error
	var running sync.WaitGroup
	running.Go(func() { errs[0] = session.Run(ctx) })
	running.Go(func() {
		errs[1] = rows.Serve(ctx, atOnce, func(ctx context.Context, c claims.Claim) error {
			return order(ctx, &journal{rows: rows, db: store.Pool(), provider: provider, claim: c})
		})
	})
	running.Wait()
	return errors.Join(errs[:]...)
}
