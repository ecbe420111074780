package claims_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// Workers take the rows of a table of the application, and each row's result is written once.
func ExampleQueue() {
	ctx, stop := context.WithCancel(context.Background()) // in a server: signal.NotifyContext
	defer stop()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	cfg := claims.QueueConfig{
		Table:    "mails",
		Attempts: "attempts", NotBefore: "not_before", // both optional
		Ready:       "status = 'queued'",
		OrderBy:     "id",
		Done:        "status = 'sent'",
		MaxAttempts: 5, Exhausted: "status = 'failed'",
	}
	ddl, err := cfg.SQLiteDDL()
	if err != nil {
		fmt.Println(err)
		return
	}
	// What the application's migrations do.
	const mails = `CREATE TABLE mails (id INTEGER PRIMARY KEY, address TEXT, status TEXT DEFAULT 'queued')`
	for _, statement := range []string{mails, ddl, `INSERT INTO mails (address) VALUES ('ann@example.com'), ('bob@example.com')`} {
		if _, err := store.DB().ExecContext(ctx, statement); err != nil {
			fmt.Println(err)
			return
		}
	}
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	if err := claims.Migrate(ctx, store); err != nil {
		fmt.Println(err)
		return
	}

	session, err := claims.NewSession(store, claims.SessionConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	queue, err := claims.NewQueue(store, cfg)
	if err != nil {
		fmt.Println(err)
		return
	}
	worker, err := claims.NewWorker(session, queue)
	if err != nil {
		fmt.Println(err)
		return
	}
	var running sync.WaitGroup
	running.Go(func() {
		if err := session.Run(ctx); err != nil {
			fmt.Println(err)
		}
	})
	var sent sync.WaitGroup
	sent.Add(2)
	running.Go(func() {
		err := worker.Serve(ctx, 16, func(ctx context.Context, claim claims.Claim) error {
			fmt.Println("mail", claim.Key.ID, "attempt", claim.Attempt)
			sent.Done()
			return nil // Serve finishes the row
		})
		if err != nil {
			fmt.Println(err)
		}
	})
	sent.Wait()
	stop()
	running.Wait()
	// Unordered output:
	// mail 1 attempt 1
	// mail 2 attempt 1
}

// A row whose func fails is taken again.
func ExampleWorker() {
	ctx, stop := context.WithCancel(context.Background()) // in a server: signal.NotifyContext
	defer stop()
	store, err := migrated(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	cfg := claims.QueueConfig{
		Table: "mails", Attempts: "attempts", Ready: "status = 'queued'", Done: "status = 'sent'",
		MaxAttempts: 5, Exhausted: "status = 'failed'",
		Backoff: func(claims.Claim) time.Duration { return time.Millisecond },
		Logger:  slog.New(slog.DiscardHandler),
	}
	ddl, err := cfg.SQLiteDDL()
	if err != nil {
		fmt.Println(err)
		return
	}
	const mails = `CREATE TABLE mails (id INTEGER PRIMARY KEY, status TEXT DEFAULT 'queued'); INSERT INTO mails DEFAULT VALUES;`
	if _, err := store.DB().ExecContext(ctx, mails+ddl); err != nil {
		fmt.Println(err)
		return
	}
	queue, err := claims.NewQueue(store, cfg)
	if err != nil {
		fmt.Println(err)
		return
	}
	session, err := claims.NewSession(store, claims.SessionConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	worker, err := claims.NewWorker(session, queue)
	if err != nil {
		fmt.Println(err)
		return
	}
	ended := make(chan error)
	go func() { ended <- session.Run(ctx) }()
	err = worker.Serve(ctx, 16, func(ctx context.Context, claim claims.Claim) error {
		fmt.Println("mail", claim.Key.ID, "attempt", claim.Attempt)
		if claim.Attempt == 1 {
			return errors.New("the server is busy")
		}
		defer stop()
		return queue.Finish(ctx, claim)
	})
	fmt.Println(err, <-ended)
	// Output:
	// mail 1 attempt 1
	// mail 1 attempt 2
	// <nil> <nil>
}

// The result of a row is written in the transaction that finishes it.
func ExampleQueue_FinishPostgres() {
	var queue *claims.Queue // see NewQueue
	var worker *claims.Worker
	err := worker.Serve(context.Background(), 16, func(ctx context.Context, claim claims.Claim) error {
		total := 4200 // computed meanwhile
		return queue.FinishPostgres(ctx, []claims.Claim{claim}, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO invoices (run, cents) VALUES ($1, $2)`, claim.Key.ID, total)
			return err
		})
	})
	if err != nil {
		fmt.Println(err)
	}
}

// A batch is taken and finished without Serve.
func ExampleWorker_Take() {
	ctx := context.Background()
	var queue *claims.Queue // see NewQueue
	var worker *claims.Worker
	batch, err := worker.Take(ctx, 100) // waits until there is at least one
	if err != nil {
		fmt.Println(err)
		return
	}
	err = queue.FinishSQLite(ctx, batch, func(tx *sql.Tx) error {
		for _, claim := range batch {
			if _, err := tx.ExecContext(ctx, `INSERT INTO invoices (run) VALUES (?)`, claim.Key.ID); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		fmt.Println(err) // a *claims.EndedError lists the claims that have ended; nothing was written
	}
}

// A server hands rows to workers that cannot reach the database.
func ExampleQueue_TryTakeFor() {
	ctx := context.Background()
	var queue *claims.Queue // see NewQueue
	var lease *tenure.Lease
	var worker struct { // the session that its first request began
		Term, Session string
		Token         int64
		Has           []claims.Claim // that it reports
	}
	if _, err := lease.Resume(ctx, worker.Term, worker.Token); err != nil { // its heartbeat
		fmt.Println(err)
		return
	}
	batch, err := queue.TryTakeFor(ctx, worker.Session, claims.TakeOptions{N: 10, Have: worker.Has})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("these go to the worker as JSON:", batch)
	if err := queue.Finish(ctx, batch...); err != nil { // when it has submitted the results
		fmt.Println(err)
	}
	_ = queue.ReleaseAfter(ctx, time.Minute, batch...) // if it says that it can't work on them
}

// Tenants share a table, and each has workers of its own.
func ExampleWorker_TakeWith() {
	ctx := context.Background()
	var worker *claims.Worker // see NewWorker; its queue has the config
	cfg := claims.QueueConfig{Table: "mails"}
	cfg.Ready, cfg.Taken, cfg.Released = "status = 'queued'", "status = 'running'", "status = 'queued'"
	tenant := "acme"
	mine := claims.TakeOptions{N: 10, Where: "tenant = $1", Args: []any{tenant}}
	batch, err := worker.TakeWith(ctx, mine)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("the tenant's rows:", batch)
}

// At most two imports of a customer run at once, in all processes together.
func ExamplePerKey() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	cfg := claims.QueueConfig{
		Table: "imports", Ready: "status = 'queued'", OrderBy: "id", Done: "status = 'done'",
		PerKey: claims.PerKey{Column: "customer", Limit: 2},
	}
	ddl, err := cfg.SQLiteDDL() // with two indexes more
	if err != nil {
		fmt.Println(err)
		return
	}
	const imports = `CREATE TABLE imports (id INTEGER PRIMARY KEY, customer TEXT NOT NULL, status TEXT DEFAULT 'queued')`
	for _, statement := range []string{imports, ddl, `INSERT INTO imports (customer) VALUES ('acme'), ('acme'), ('acme'), ('acme'), ('globex')`} {
		if _, err := store.DB().ExecContext(ctx, statement); err != nil {
			fmt.Println(err)
			return
		}
	}
	if err := errors.Join(store.Migrate(ctx), claims.Migrate(ctx, store)); err != nil {
		fmt.Println(err)
		return
	}
	session, err := claims.NewSession(store, claims.SessionConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	queue, err := claims.NewQueue(store, cfg)
	if err != nil {
		fmt.Println(err)
		return
	}
	worker, err := claims.NewWorker(session, queue)
	if err != nil {
		fmt.Println(err)
		return
	}
	ended := make(chan error)
	go func() { ended <- session.Run(ctx) }()
	take := func() []claims.Claim {
		batch, err := worker.Take(ctx, 10)
		if err != nil {
			fmt.Println(err)
		}
		for _, claim := range batch {
			fmt.Print(claim.Key.ID, " ")
		}
		fmt.Println("taken")
		return batch
	}
	batch := take()
	fmt.Println(queue.Finish(ctx, batch[0]))
	take()
	stop()
	fmt.Println(<-ended)
	// Output:
	// 1 2 5 taken
	// <nil>
	// 3 taken
	// <nil>
}
