//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure"
)

const (
	requestTimeout = 10 * time.Second // for a request's work with store and driver
	cleanupTimeout = 5 * time.Second  // for the cleanup after that
	maxRequest     = 64 << 10         // bytes
)

// server answers HTTP requests. Every gateway does, whether it holds the lease or not: only
// the watchers need the lease. Requests are ordered by compare-and-swap.
type server struct {
	sandboxes   sandboxes
	driver      Driver
	coordinator *tenure.Coordinator
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("POST /sandboxes", handle(http.StatusCreated, s.create))
	mux.Handle("GET /sandboxes", handle(http.StatusOK, s.list))
	mux.Handle("GET /sandboxes/{name}", handle(http.StatusOK, s.get))
	mux.Handle("DELETE /sandboxes/{name}", handle(http.StatusNoContent, s.delete))
	mux.Handle("GET /healthz", handle(http.StatusOK, s.health))
	return http.MaxBytesHandler(mux, maxRequest)
}

// handle answers requests with what do returns, as JSON. The work of a request does not end
// with the connection: a client that hangs up must not leave a sandbox half created.
func handle(success int, do func(context.Context, *http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), requestTimeout)
		defer cancel()
		body, err := do(ctx, r)
		status := success
		if err != nil {
			var message string
			status, message = explain(err)
			body = map[string]string{"error": message}
			if status >= http.StatusInternalServerError {
				slog.Error("request failed", "method", r.Method, "path", r.URL.Path, "error", err)
			}
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		if body != nil {
			json.NewEncoder(w).Encode(body) // fails if the client is gone
		}
	})
}

var errBadRequest = errors.New("bad request")

// explain returns the status and the message for an error. The message has no details that
// concern only the operator.
func explain(err error) (status int, message string) {
	switch {
	case errors.Is(err, errBadRequest), errors.Is(err, tenure.ErrInvalid):
		return http.StatusBadRequest, err.Error()
	case errors.Is(err, tenure.ErrNotFound):
		return http.StatusNotFound, "no such sandbox"
	case errors.Is(err, tenure.ErrExists), errors.Is(err, tenure.ErrTaken):
		return http.StatusConflict, "the name is taken"
	case errors.Is(err, tenure.ErrConflict):
		return http.StatusConflict, "the sandbox was changed or deleted meanwhile"
	}
	return http.StatusServiceUnavailable, "the store or the backend does not answer; try again"
}

type createRequest struct {
	Name    string   `json:"name"`
	Command []string `json:"command"`
}

var validName = regexp.MustCompile(`^[a-z0-9-]{1,63}$`)

func readCreateRequest(r *http.Request) (req createRequest, err error) {
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &req)
	}
	switch {
	case err != nil:
	case !validName.MatchString(req.Name):
		err = fmt.Errorf("name %q is not 1 to 63 of a-z, 0-9 and -", req.Name)
	case len(req.Command) == 0 || req.Command[0] == "":
		err = errors.New("command is empty")
	case slices.ContainsFunc(req.Command, func(arg string) bool { return strings.ContainsRune(arg, 0) }):
		err = errors.New("command has a NUL byte")
	}
	if err != nil {
		return createRequest{}, fmt.Errorf("%w: %w", errBadRequest, err)
	}
	return req, nil
}

// create returns the sandbox in phase Ready, or in phase Error if its command cannot be
// started or has exited already. If the store fails in between, the sandbox stays as it is,
// and a sweep cleans it up after the grace period.
func (s *server) create(ctx context.Context, r *http.Request) (any, error) {
	req, err := readCreateRequest(r)
	if err != nil {
		return nil, err
	}
	sb, err := s.sandboxes.create(ctx, req.Name, req.Name+"."+uuid.NewString(), req.Command)
	if err != nil {
		return nil, err
	}
	pid, err := s.driver.Create(ctx, sb.Instance, sb.Command)
	if err != nil {
		return s.sandboxes.fail(ctx, sb, err.Error())
	}
	ready, err := s.sandboxes.ready(ctx, sb, pid)
	if !errors.Is(err, tenure.ErrConflict) {
		return ready, err
	}
	// The process has exited, and the watchers have recorded it. Otherwise another request has
	// deleted the sandbox, or a sweep has given it up; they may have come before the process, so
	// end it here.
	now, getErr := s.sandboxes.get(ctx, sb.Name)
	if getErr == nil && now.Instance == sb.Instance && now.Phase == Error {
		err = nil
	}
	return now, errors.Join(err, s.driver.Delete(ctx, sb.Instance))
}

func (s *server) list(ctx context.Context, _ *http.Request) (any, error) {
	return s.sandboxes.list(ctx)
}

func (s *server) get(ctx context.Context, r *http.Request) (any, error) {
	return s.sandboxes.get(ctx, r.PathValue("name"))
}

// delete returns when process and record are gone. If it is interrupted, the next deletion
// or the next sweep finishes it.
func (s *server) delete(ctx context.Context, r *http.Request) (any, error) {
	for {
		sb, err := s.sandboxes.get(ctx, r.PathValue("name"))
		if err == nil && sb.Phase != Deleting {
			sb, err = s.sandboxes.startDeletion(ctx, sb)
		}
		switch {
		case errors.Is(err, tenure.ErrConflict): // look at the sandbox again
		case err != nil:
			return nil, err
		default:
			return nil, s.sandboxes.finishDeletion(ctx, s.driver, sb)
		}
	}
}

// health is the answer to GET /healthz.
type health struct {
	IsHolder bool          `json:"is_holder"` // false once the term is over, even if the job still runs
	Status   tenure.Status `json:"status"`
}

func (s *server) health(context.Context, *http.Request) (any, error) {
	return health{s.coordinator.IsHolder(), s.coordinator.Status()}, nil
}
