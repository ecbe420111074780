package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/tenurelib/tenure"
)

const requestTimeout = 10 * time.Second

// server answers HTTP requests. Every gateway does, whether it holds the lease or not: only
// the reconciler needs the lease. Requests are ordered by compare-and-swap.
type server struct {
	sandboxes   sandboxes
	driver      Driver
	coordinator *tenure.Coordinator
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("PUT /sandboxes/{name}", handle(s.create))
	mux.Handle("GET /sandboxes/{name}", handle(s.sandboxes.get))
	mux.Handle("DELETE /sandboxes/{name}", handle(s.delete))
	mux.Handle("GET /sandboxes", handle(func(ctx context.Context, _ string) ([]Sandbox, error) { return s.sandboxes.list(ctx) }))
	mux.Handle("GET /healthz", handle(func(context.Context, string) (tenure.Status, error) { return s.coordinator.Status(), nil }))
	return mux
}

// handle answers requests with what do returns, as JSON. The work of a request does not end
// with the connection: a client that hangs up must not leave a sandbox half created.
func handle[T any](do func(ctx context.Context, name string) (T, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), requestTimeout)
		defer cancel()
		answer, err := do(ctx, r.PathValue("name"))
		switch {
		case err == nil:
			_ = json.NewEncoder(w).Encode(answer) // fails if the client is gone
		case errors.Is(err, tenure.ErrInvalid):
			http.Error(w, err.Error(), http.StatusBadRequest)
		case errors.Is(err, tenure.ErrNotFound):
			http.Error(w, "no such sandbox", http.StatusNotFound)
		case errors.Is(err, tenure.ErrConflict), errors.Is(err, tenure.ErrExists), errors.Is(err, tenure.ErrTaken):
			http.Error(w, "the name is taken, or the sandbox was changed or deleted meanwhile", http.StatusConflict)
		default: // without details, which concern only the operator
			http.Error(w, "the store or the backend does not answer; try again", http.StatusServiceUnavailable)
		}
	})
}

// create records the sandbox before it creates the instance. If it fails in between, the sandbox
// stays as it is, and a sweep sees to it after the grace period.
func (s *server) create(ctx context.Context, name string) (Sandbox, error) {
	sb, err := s.sandboxes.create(ctx, name)
	if err != nil {
		return sb, err
	}
	if err := s.driver.Create(ctx, sb.Instance); err != nil {
		return sb, err
	}
	ready, err := s.sandboxes.set(ctx, sb, Ready)
	if errors.Is(err, tenure.ErrConflict) { // it was deleted meanwhile, perhaps before the instance existed
		err = errors.Join(err, s.driver.Delete(ctx, sb.Instance))
	}
	return ready, err
}

// delete removes the record first. If it fails after that, a sweep removes the instance.
func (s *server) delete(ctx context.Context, name string) (Sandbox, error) {
	sb, err := s.sandboxes.get(ctx, name)
	if err != nil {
		return sb, err
	}
	if err := s.sandboxes.remove(ctx, sb); err != nil {
		return sb, err
	}
	return sb, s.driver.Delete(ctx, sb.Instance)
}
