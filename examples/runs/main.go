// Command runs drives durable runs: programs of several steps that survive the death, at any moment, of the
// process that drives them. A run is a row of a table. A driver that claims it reads its journal of what has
// happened so far, and continues from there. The journal is extended only under the claim: a driver that was
// paused, and has lost the run, adds nothing.
//
// The runs of this example are orders, which another system, the provider, charges and then ships. Calls are
// made as from an outbox: the journal first records that a call is about to be made, and after the call its
// outcome. A driver that finds a call without an outcome asks the provider what has become of it.
//
// The database is Postgres or a SQLite file; the URL decides. The example has no SQL of its own for
// claims.
//
//	export DATABASE_URL=postgres://… # or sqlite:runs.db
//	go run ./examples/runs migrate
//	go run ./examples/runs provide
//	go run ./examples/runs drive
//	go run ./examples/runs drive
//	go run ./examples/runs start 'order 1' 'order 2'
//	go run ./examples/runs show
//	go run ./examples/runs attach 'order 1' # drives this run here, wherever it is driven now
//
// A process that is stopped between its writes delays only its own runs, and only until its session expires.
// On SQLite there is one write lock for the whole file. A process that is stopped, with SIGSTOP or by a
// debugger, while it holds that lock keeps all others from writing: sessions are not renewed, runs are not
// taken over, and no event is added, until the process is continued or killed. Even then, nothing is written
// twice or late. Where processes may be stopped, use Postgres, which ends idle transactions.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

const ttl = 5 * time.Second // short, to see a failover soon; the default is 30 s

// runs is the name of the runs' table.
var runs = claims.QueueConfig{
	Table: "runs", Attempts: "attempts", NotBefore: "not_before", Requested: "requested",
	Ready: "status = 'running'", Done: "status = 'done'",
}

func main() {
	url := flag.String("store", os.Getenv("DATABASE_URL"), "postgres:// `URL` or the path of a SQLite file; default: $DATABASE_URL")
	provider := flag.String("provider", "127.0.0.1:8090", "`address` of the provider")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch flag.Arg(0) {
	case "migrate":
		err = withDatabase(ctx, *url, database.migrate)
	case "start":
		err = withDatabase(ctx, *url, func(db database, ctx context.Context) error { return db.start(ctx, flag.Args()[1:]) })
	case "show":
		err = withDatabase(ctx, *url, database.show)
	case "provide":
		err = http.ListenAndServe(*provider, newProvider())
	case "drive":
		err = withDatabase(ctx, *url, func(db database, ctx context.Context) error { return db.drive(ctx, *provider, "") })
	case "attach":
		err = withDatabase(ctx, *url, func(db database, ctx context.Context) error { return db.drive(ctx, *provider, flag.Arg(1)) })
	default:
		err = errors.New("usage: runs [flags] migrate|provide|drive|start RUN…|attach RUN|show")
	}
	if err != nil {
		log.Fatal(err)
	}
}

// database has the runs.
type database struct{ store tenure.Database }

func withDatabase(ctx context.Context, url string, do func(database, context.Context) error) error {
	store, err := tenure.Open(ctx, url)
	if err != nil {
		return err
	}
	defer store.Close()
	return do(database{store}, ctx)
}

// migrate creates the tables. A real program leaves this to its migration tool.
func (db database) migrate(ctx context.Context) error {
	columns, err := runs.PostgresDDL()
	if _, ok := db.store.(*tenure.SQLiteStore); ok {
		columns, err = runs.SQLiteDDL()
	}
	if err != nil {
		return err
	}
	if err := db.store.Migrate(ctx); err != nil {
		return err
	}
	if err := claims.Migrate(ctx, db.store); err != nil {
		return err
	}
	if _, err := db.store.DB().ExecContext(ctx, `SELECT count(*) FROM events`); err == nil {
		return nil // it was migrated before
	}
	_, err = db.store.DB().ExecContext(ctx, `
		CREATE TABLE runs (id text PRIMARY KEY, status text NOT NULL DEFAULT 'running');
		CREATE TABLE events (
			run  text NOT NULL REFERENCES runs,
			seq  integer NOT NULL,
			name text NOT NULL,
			data text NOT NULL,
			PRIMARY KEY (run, seq));
		`+columns)
	return err
}

// start adds runs.
func (db database) start(ctx context.Context, ids []string) error {
	for _, id := range ids {
		if _, err := db.store.DB().ExecContext(ctx, `INSERT INTO runs (id) VALUES ($1)`, id); err != nil {
			return err
		}
	}
	queue, err := claims.NewQueue(db.store, runs)
	if err == nil {
		queue.Wake()
	}
	return err
}

// show prints all journals.
func (db database) show(ctx context.Context) error {
	rows, err := db.store.DB().QueryContext(ctx, `SELECT run, seq, name, data FROM events ORDER BY run, seq`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var run, name, data string
		var seq int
		if err := rows.Scan(&run, &seq, &name, &data); err != nil {
			return err
		}
		fmt.Println(run, seq, name, data)
	}
	return rows.Err()
}

// drive drives runs until ctx is done, or only one run until it is finished. Any number of processes may
// do so at the same time.
func (db database) drive(ctx context.Context, provider, run string) error {
	session, err := claims.NewSession(db.store, claims.SessionConfig{TTL: ttl})
	if err != nil {
		return err
	}
	queue, err := claims.NewQueue(db.store, runs)
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
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var errs [2]error
	var running sync.WaitGroup
	running.Go(func() { errs[0] = session.Run(ctx) })
	running.Go(func() {
		work := func(ctx context.Context, c claims.Claim) error {
			return order(ctx, &journal{queue: queue, database: db, provider: provider, claim: c})
		}
		if run == "" {
			errs[1] = worker.Serve(ctx, atOnce, work)
			return
		}
		defer stop()
		errs[1] = db.attach(ctx, queue, worker, run, work)
	})
	running.Wait()
	return errors.Join(errs[:]...)
}

// attach drives one run in this process, unless it is finished. It asks the driver that has the run to release
// it, and asks again if another driver was faster.
func (db database) attach(ctx context.Context, queue *claims.Queue, worker *claims.Worker, run string, work func(context.Context, claims.Claim) error) error {
	for {
		var status string
		if err := db.store.DB().QueryRowContext(ctx, `SELECT status FROM runs WHERE id = $1`, run).Scan(&status); err != nil || status == "done" {
			return err
		}
		if err := queue.RequestRelease(ctx, run); err != nil {
			return err
		}
		waiting, cancel := context.WithTimeout(ctx, time.Second)
		got, err := worker.Claim(waiting, run)
		cancel()
		if len(got) > 0 {
			return worker.Do(ctx, got[0], func(ctx context.Context) error { return work(ctx, got[0]) })
		}
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
	}
}
