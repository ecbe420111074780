// Command tenants runs one actor per tenant, over any number of replicas. A request for a tenant may
// go to any replica: package route sends it to the replica that runs the tenant's actor.
// The actor of this example counts: each answer is a number that was never given before.
//
//	go run ./examples/tenants
//	go run ./examples/tenants -listen 127.0.0.1:8081
//	curl -X POST 127.0.0.1:8080/acme; curl -X POST 127.0.0.1:8081/acme
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/route"
	"github.com/tenurelib/tenure/statuspage"
)

const ttl = 5 * time.Second // short, to see a failover soon; the default is 30 s

func main() {
	url := flag.String("store", "tenants.db?shared=true", "`path` of a SQLite file, or a postgres:// URL")
	listen := flag.String("listen", "127.0.0.1:8080", "`address` to serve on, which the other replicas must reach")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *url, *listen); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, url, listen string) error {
	store, err := openStore(ctx, url)
	if err != nil {
		return err
	}
	defer store.Close()
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	r, address := &replica{store}, listener.Addr().String()
	session, err := claims.NewSession(store, claims.SessionConfig{
		TTL:    ttl,
		Labels: map[string]string{"address": address},
	})
	if err != nil {
		return err
	}
	keys, err := claims.NewKeys(session, "tenant")
	if err != nil {
		return err
	}
	tenants, err := route.Keys(keys, func(req *http.Request) string { return req.PathValue("tenant") }, route.Config{
		Run:     r.run,
		MaxWait: 3 * ttl, // longer than a dead replica's tenants have to wait
	})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /{tenant}", tenants)
	mux.Handle("GET /sessions", statuspage.Sessions(session)) // what this replica owns, for operators
	server := &http.Server{Handler: mux}
	go server.Serve(listener)
	log.Printf("listening on %s", address)
	err = session.Run(ctx) // returns when the actors have stopped, and others may run them
	// A connection on which no request ever came counts as idle after 5 s.
	closing, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(err, tenants.Shutdown(closing, server)) // last, because it forwards requests until then
}

// openStore opens the store and creates the tables of tenure and of this program.
func openStore(ctx context.Context, url string) (tenure.Database, error) {
	store, err := tenure.Open(ctx, url)
	if err != nil {
		return nil, err
	}
	if err := migrate(ctx, store); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return store, nil
}

// migrate runs on one replica after another, because a lease protects it.
func migrate(ctx context.Context, store tenure.Database) error {
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	if err := claims.Migrate(ctx, store); err != nil {
		return err
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "migration"}, TTL: ttl})
	if err != nil {
		return err
	}
	return tenure.Do(ctx, lease, func(ctx context.Context) error {
		_, err := store.DB().ExecContext(ctx, `CREATE TABLE IF NOT EXISTS counters (tenant TEXT PRIMARY KEY, n BIGINT NOT NULL)`)
		return err
	})
}
