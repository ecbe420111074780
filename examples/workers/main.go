// Command workers hands the rows of a table to workers that reach no database, over HTTP. There
// may be any number of servers, which keep nothing in memory, and a worker may talk to any of
// them at any time. A worker works on some tasks at a time under a session of its own, for which
// it sends one heartbeat. What it owned when it dies is another's a TTL later, and a result that comes
// too late is refused.
//
//	export DATABASE_URL=postgres://…
//	go run ./examples/workers migrate
//	LISTEN=127.0.0.1:8080 go run ./examples/workers serve
//	LISTEN=127.0.0.1:8081 go run ./examples/workers serve
//	SERVERS=http://127.0.0.1:8080,http://127.0.0.1:8081 go run ./examples/workers work
//	curl -d '["https://example.com", "https://go.dev"]' 127.0.0.1:8080/tasks
//	psql $DATABASE_URL -c 'SELECT * FROM results'
//
// This is how a worker talks to a server. All requests are POST, and bodies are JSON:
//
//	/tasks      adds tasks
//	/begin      begins a session
//	/heartbeat  renews it; 409: it has expired, so all its claims have ended
//	/claim      takes tasks; it waits for a moment if there are none
//	/submit     finishes tasks, all or none; 409 lists those that are another's by now
//	/nack       gives tasks back, to be taken again after a while
//	/abandon    gives tasks back, to be taken again at once
//	/goodbye    ends the session
//
// Requests may be repeated. One that gives back or finishes what an earlier try has ended answers 409.
package main

import (
	"context"
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

// session is a worker's. Only the worker knows the term, so nobody else renews the session.
type session struct {
	ID    string `json:"id"`
	Term  string `json:"term"`
	Token int64  `json:"token"`
}

// claim is a request for tasks.
type claim struct {
	Session string         `json:"session"`
	N       int            `json:"n"`
	Have    []claims.Claim `json:"have"` // which the worker has already
}

type task struct {
	Claim   claims.Claim `json:"claim"`
	Payload string       `json:"payload"`
}

type result struct {
	Claim  claims.Claim `json:"claim"`
	Result string       `json:"result"`
}

// setBack are claims of tasks that are given back.
type setBack struct {
	Claims []claims.Claim `json:"claims"`
	After  time.Duration  `json:"after"` // which /abandon ignores
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch mode := strings.Join(os.Args[1:], " "); mode {
	case "migrate", "serve":
		err = withStore(ctx, mode)
	case "work":
		newWorker(strings.Split(os.Getenv("SERVERS"), ","), fetch).run(ctx)
	default:
		err = fmt.Errorf("usage: workers migrate|serve|work")
	}
	if err != nil {
		log.Fatal(err)
	}
}

func withStore(ctx context.Context, mode string) error {
	store, err := tenure.OpenPostgres(ctx, os.Getenv("DATABASE_URL"), tenure.PostgresConfig{})
	if err != nil {
		return err
	}
	defer store.Close()
	if mode == "migrate" {
		return migrate(ctx, store)
	}
	return serve(ctx, store, os.Getenv("LISTEN"))
}

// fetch is what this example's workers do with a task, which is a URL.
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
