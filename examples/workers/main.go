// Command workers hands the rows of a table over HTTP to workers that reach no database. There
// may be any number of servers, which keep nothing in memory, and a worker may talk to any of
// them at any time. A worker works on some tasks at once under a session of its own, for which
// it sends one heartbeat. If it dies, other workers get its tasks a TTL later. A result that
// comes too late is refused.
//
//	export DATABASE_URL=postgres://…
//	go run ./examples/workers migrate
//	go run ./examples/workers serve
//	go run ./examples/workers -listen 127.0.0.1:8081 serve
//	go run ./examples/workers -servers http://127.0.0.1:8080,http://127.0.0.1:8081 work
//	curl -d '["https://example.com", "https://go.dev"]' 127.0.0.1:8080/tasks
//	psql $DATABASE_URL -c 'SELECT * FROM results'
//
// This is how a worker talks to a server. All requests are POST, and bodies are JSON:
//
//	/tasks      adds tasks
//	/begin      begins a session
//	/heartbeat  renews it; 409: it has expired, and all its claims have ended
//	/claim      takes tasks; it waits for a moment if there are none
//	/submit     finishes tasks, all or none; 409 lists the tasks that another worker has by now
//	/nack       gives tasks back, to be taken again after a while
//	/abandon    gives tasks back, to be taken again at once
//	/goodbye    ends the session
//
// A request may be repeated. If the first try has already finished the tasks or given them back,
// the answer is 409.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

const (
	ttl      = 3 * time.Second // short, to see a failover soon; the default is 30 s
	patience = ttl / 6         // of a claim for tasks
)

// session is a worker's session. Only the worker knows the term, so no other process renews it.
type session struct {
	ID    string `json:"id"`
	Term  string `json:"term"`
	Token int64  `json:"token"`
}

// claim is a request for tasks.
type claim struct {
	Session string         `json:"session"`
	N       int            `json:"n"`
	Have    []claims.Claim `json:"have"` // the claims that the worker already has
}

type task struct {
	Claim   claims.Claim `json:"claim"`
	Payload string       `json:"payload"`
}

type result struct {
	Claim  claims.Claim `json:"claim"`
	Result string       `json:"result"`
}

// giveBack is a request of a worker that gives tasks back.
type giveBack struct {
	Claims []claims.Claim `json:"claims"`
	After  time.Duration  `json:"after"` // until they may be taken again; /abandon ignores it
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
		newWorker(strings.Split(*servers, ","), fetch).run(ctx)
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

// fetch is what this example's workers do with a task's payload, which is a URL.
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
