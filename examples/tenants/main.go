// Command tenants runs one actor per tenant, over any number of replicas. A request for a tenant
// may go to any replica, which forwards it to the one that runs the tenant's actor. The actor of
// this example counts: each answer is a number that was never given before.
//
//	DATABASE_URL=tenants.db LISTEN=127.0.0.1:8080 go run ./examples/tenants
//	DATABASE_URL=tenants.db LISTEN=127.0.0.1:8081 go run ./examples/tenants
//	curl -X POST 127.0.0.1:8080/acme; curl -X POST 127.0.0.1:8081/acme
package main

import (
	"context"
	"database/sql"
	"errors"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/statuspage"
)

const ttl = 5 * time.Second // short, to see a failover soon; the default is 30 s

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	store, err := tenure.Open(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer store.Close()
	db := databaseOf(store)
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	migration, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "migration"}, TTL: ttl})
	if err != nil {
		return err
	}
	err = tenure.Do(ctx, migration, func(ctx context.Context) error { // one replica after another
		_, err := db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS counters (tenant TEXT PRIMARY KEY, n BIGINT NOT NULL)`)
		return err
	})
	if err != nil {
		return err
	}

	listener, err := net.Listen("tcp", os.Getenv("LISTEN")) // an address that the other replicas can reach
	if err != nil {
		return err
	}
	r := &replica{address: listener.Addr().String(), store: store, db: db}
	session, err := claims.NewSession(store, claims.SessionConfig{
		TTL:          ttl,
		PollInterval: 50 * time.Millisecond, // on SQLite, no other process wakes this one
		Labels:       map[string]string{"address": r.address},
	})
	if err != nil {
		return err
	}
	r.tenants, err = claims.NewKeys(session, "tenant")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /{tenant}", r.serve)
	mux.Handle("GET /sessions", statuspage.Sessions(session)) // what this replica owns, for operators
	server := &http.Server{Handler: mux}
	go server.Serve(listener)
	log.Printf("listening on %s", r.address)
	err = session.Run(ctx) // returns when the actors have stopped, and others may run them
	closing, cancel := context.WithTimeout(context.Background(), ttl)
	defer cancel()
	return errors.Join(err, server.Shutdown(closing)) // last, because it forwards requests until then
}

func databaseOf(store tenure.Database) *sql.DB {
	if s, ok := store.(*tenure.PostgresStore); ok {
		return stdlib.OpenDBFromPool(s.Pool())
	}
	return store.(*tenure.SQLiteStore).DB()
}
