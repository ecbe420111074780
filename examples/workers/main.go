// Command workers hands the rows of a table over HTTP to workers that cannot reach the database. Any number of
// servers may run, and a worker goes on with another one when its server fails. If a worker dies, other workers
// get its tasks a TTL later. A result that comes too late is refused.
//
//	export DATABASE_URL=postgres://…
//	go run ./examples/workers migrate
//	go run ./examples/workers serve
//	go run ./examples/workers -listen 127.0.0.1:8081 serve
//	go run ./examples/workers -servers http://127.0.0.1:8080,http://127.0.0.1:8081 work
//	psql $DATABASE_URL -c "INSERT INTO tasks (payload) VALUES ('https://example.com')"
//	psql $DATABASE_URL -c 'SELECT * FROM results'
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/claims/queuehttp"
)

const ttl = 6 * time.Second // short, to see a failover soon; the default is 30 s

var tasks = claims.QueueConfig{
	Table: "tasks", Attempts: "attempts", NotBefore: "not_before",
	Ready: "status = 'queued'", Done: "status = 'done'",
	MaxAttempts: 5, Exhausted: "status = 'failed'",
}

func main() {
	url := flag.String("store", os.Getenv("DATABASE_URL"), "postgres:// `URL`; default: $DATABASE_URL")
	listen := flag.String("listen", "127.0.0.1:8080", "`address` of a server")
	servers := flag.String("servers", "http://127.0.0.1:8080", "`URLs` of the servers for a worker, with commas between")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch flag.Arg(0) {
	case "migrate":
		err = withStore(ctx, *url, migrate)
	case "serve":
		err = withStore(ctx, *url, func(ctx context.Context, store *tenure.PostgresStore) error { return serve(ctx, store, *listen) })
	case "work":
		err = work(ctx, strings.Split(*servers, ","), fetch)
	default:
		err = errors.New("usage: workers [flags] migrate|serve|work")
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

// migrate creates the tables. A real program leaves this to its migration tool.
func migrate(ctx context.Context, store *tenure.PostgresStore) error {
	columns, err := tasks.PostgresDDL()
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
		CREATE TABLE IF NOT EXISTS tasks (
			id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			payload text NOT NULL,
			status  text NOT NULL DEFAULT 'queued');
		CREATE TABLE IF NOT EXISTS results (task bigint NOT NULL REFERENCES tasks, result jsonb NOT NULL);
		`+columns)
	return err
}

func serve(ctx context.Context, store *tenure.PostgresStore, address string) error {
	queue, err := claims.NewQueue(store, tasks)
	if err != nil {
		return err
	}
	if err := queue.Check(ctx); err != nil { // the error says what migrate has not made
		return err
	}
	handler, err := queuehttp.NewHandler(store, queue, queuehttp.Config{
		TTL: ttl,
		Payloads: func(ctx context.Context, ids []string) (map[string]any, error) {
			rows, err := store.Pool().Query(ctx, `SELECT id::text, payload FROM tasks WHERE id = ANY($1::text[]::bigint[])`, ids)
			if err != nil {
				return nil, err
			}
			payloads := make(map[string]any)
			var id, payload string
			_, err = pgx.ForEachRow(rows, []any{&id, &payload}, func() error { payloads[id] = payload; return nil })
			return payloads, err
		},
		Finish: func(ctx context.Context, results []queuehttp.Result) error {
			var done []claims.Claim
			var ids, texts []string
			for _, r := range results {
				done, ids, texts = append(done, r.Claim), append(ids, r.Claim.Key.ID), append(texts, string(r.Result))
			}
			return queue.FinishPostgres(ctx, done, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `INSERT INTO results SELECT * FROM unnest($1::text[]::bigint[], $2::text[]::jsonb[])`, ids, texts)
				return err
			})
		},
	})
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	web := &http.Server{Handler: handler}
	go web.Serve(listener)
	log.Printf("listening on %s", listener.Addr())
	err = handler.Run(ctx)
	// A connection on which no request ever came counts as idle after 5 s.
	stopping, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(err, web.Shutdown(stopping))
}

func work(ctx context.Context, servers []string, do func(ctx context.Context, payload string) (string, error)) error {
	client, err := queuehttp.NewClient(queuehttp.ClientConfig{Servers: servers})
	if err != nil {
		return err
	}
	return client.Serve(ctx, 8, func(ctx context.Context, t queuehttp.Task) (any, error) {
		var payload string
		if err := json.Unmarshal(t.Payload, &payload); err != nil {
			return nil, err
		}
		return do(ctx, payload)
	})
}

// fetch does this example's work on a task's payload, which is a URL.
func fetch(ctx context.Context, url string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	n, err := io.Copy(io.Discard, response.Body)
	return fmt.Sprintf("%s, %d bytes", response.Status, n), err
}
