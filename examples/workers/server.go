package main

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"net"
	"net/http"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// tasks is the table of the tasks.
var tasks = claims.QueueConfig{
	Table: "tasks", Attempts: "attempts", NotBefore: "not_before",
	Ready: "status = 'queued'", Done: "status = 'done'",
	MaxAttempts: 5, Exhausted: "status = 'failed'",
}

// migrate makes the tables. A real program leaves this to its migration tool.
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
		CREATE TABLE IF NOT EXISTS results (task bigint NOT NULL REFERENCES tasks, result text NOT NULL);
		`+columns)
	return err
}

// server is one of any number of servers.
type server struct {
	store *tenure.PostgresStore
	queue *claims.Queue
}

func serve(ctx context.Context, store *tenure.PostgresStore, address string) error {
	// A server's own session claims nothing: it finds workers' sessions that have expired, and
	// frees their tasks.
	own, err := claims.NewSession(store, claims.SessionConfig{TTL: ttl})
	if err != nil {
		return err
	}
	s := &server{store: store}
	if s.queue, err = claims.NewQueue(store, tasks); err != nil {
		return err
	}
	if _, err := claims.NewWorker(own, s.queue); err != nil { // so that own frees the tasks of sessions that are gone
		return err
	}
	if err := s.queue.Check(ctx); err != nil { // the error says what migrate has not made
		return err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	web := &http.Server{Handler: s.handler()}
	go web.Serve(listener)
	log.Printf("listening on %s", listener.Addr())
	err = own.Run(ctx)
	stopping, cancel := context.WithTimeout(context.Background(), ttl)
	defer cancel()
	return errors.Join(err, web.Shutdown(stopping))
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("POST /tasks", handle(s.add))
	mux.Handle("POST /begin", handle(s.begin))
	mux.Handle("POST /heartbeat", handle(s.heartbeat))
	mux.Handle("POST /claim", handle(s.claim))
	mux.Handle("POST /submit", handle(s.submit))
	mux.Handle("POST /nack", handle(s.nack))
	mux.Handle("POST /abandon", handle(s.abandon))
	mux.Handle("POST /goodbye", handle(s.goodbye))
	return mux
}

// handle answers a request with what do returns, as JSON.
func handle[In any](do func(context.Context, In) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var in In
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		out, err := do(r.Context(), in)
		var lost *claims.EndedError
		switch {
		case errors.As(err, &lost):
			w.WriteHeader(http.StatusConflict)
			out = lost.Claims
		case errors.Is(err, tenure.ErrLost): // the session
			w.WriteHeader(http.StatusConflict)
		case errors.Is(err, tenure.ErrInvalid):
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		case err != nil:
			log.Printf("%s: %v", r.URL.Path, err)
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		json.NewEncoder(w).Encode(out)
	})
}

func (s *server) add(ctx context.Context, payloads []string) (any, error) {
	_, err := s.store.Pool().Exec(ctx, `INSERT INTO tasks (payload) SELECT unnest($1::text[])`, payloads)
	s.queue.Wake()
	return nil, err
}

// lease returns the lease that is a worker's session.
func (s *server) lease(id, worker string) (*tenure.Lease, error) {
	return tenure.NewLease(s.store, tenure.LeaseConfig{
		Key: claims.SessionKey(id), Holder: worker, TTL: ttl,
	})
}

func (s *server) begin(ctx context.Context, worker string) (any, error) {
	id := uuid.NewString() // never one that was used before
	lease, err := s.lease(id, worker)
	if err != nil {
		return nil, err
	}
	term, err := lease.TryAcquire(ctx)
	if err != nil {
		return nil, err
	}
	return session{ID: id, Term: term.ID(), Token: term.Token()}, nil
}

// heartbeat renews a worker's session, whichever server began it.
func (s *server) heartbeat(ctx context.Context, of session) (any, error) {
	lease, err := s.lease(of.ID, "")
	if err != nil {
		return nil, err
	}
	_, err = lease.Resume(ctx, of.Term, of.Token) // the worker trusts the session, and this server does not
	return nil, err
}

func (s *server) claim(ctx context.Context, request claim) (any, error) {
	// Tasks that the worker owns without knowing were claimed by a request whose answer was lost.
	got, err := s.queue.OwnedBy(ctx, request.Session)
	if err != nil {
		return nil, err
	}
	got = slices.DeleteFunc(got, func(c claims.Claim) bool {
		return slices.ContainsFunc(request.Have, func(has claims.Claim) bool { return has.Key == c.Key && has.Token == c.Token })
	})
	got = slices.DeleteFunc(got, func(c claims.Claim) bool {
		if c.Attempt <= tasks.MaxAttempts {
			return false
		}
		// The server that was to retire it was killed, or is about to retire it. Once it is
		// released, the server that takes it next does so.
		if err := s.queue.Release(ctx, c); err != nil && !errors.Is(err, tenure.ErrLost) {
			log.Printf("%s: %v", c, err)
		}
		return true
	})
	got = got[:min(len(got), request.N)]
	if len(got) == 0 {
		waiting, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if got, err = s.queue.TakeFor(waiting, request.Session, claims.TakeOptions{N: request.N}); err != nil {
			return nil, err
		}
	}
	rows, err := s.store.Pool().Query(ctx, `SELECT id::text, payload FROM tasks WHERE id = ANY($1::text[]::bigint[])`, ids(got))
	if err != nil {
		return nil, err
	}
	payloads := make(map[string]string)
	var id, payload string
	_, err = pgx.ForEachRow(rows, []any{&id, &payload}, func() error { payloads[id] = payload; return nil })
	var given []task
	for _, c := range got {
		given = append(given, task{Claim: c, Payload: payloads[c.Key.ID]})
	}
	return given, err
}

// submit writes the results and finishes the tasks in one transaction.
func (s *server) submit(ctx context.Context, results []result) (any, error) {
	var done []claims.Claim
	var texts []string
	for _, r := range results {
		done, texts = append(done, r.Claim), append(texts, r.Result)
	}
	return nil, s.queue.FinishPostgres(ctx, done, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO results SELECT * FROM unnest($1::text[]::bigint[], $2::text[])`, ids(done), texts)
		return err
	})
}

func (s *server) nack(ctx context.Context, back giveBack) (any, error) {
	return nil, s.queue.ReleaseAfter(ctx, back.After, back.Claims...)
}

func (s *server) abandon(ctx context.Context, back giveBack) (any, error) {
	return nil, s.queue.Release(ctx, back.Claims...)
}

// goodbye ends a worker's session once the worker has stopped all its work.
func (s *server) goodbye(ctx context.Context, of session) (any, error) {
	lease, err := s.lease(of.ID, "")
	if err != nil {
		return nil, err
	}
	term, err := lease.Resume(ctx, of.Term, of.Token) // fails if it is not the worker's
	if err != nil {
		return nil, err
	}
	left, err := s.queue.OwnedBy(ctx, of.ID)
	if err == nil && len(left) > 0 {
		err = s.queue.Release(ctx, left...)
	}
	return nil, errors.Join(err, lease.Release(ctx, term)) // tasks that were not released become free with the session
}

func ids(of []claims.Claim) (ids []string) {
	for _, c := range of {
		ids = append(ids, c.Key.ID)
	}
	return ids
}
