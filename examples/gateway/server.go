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

// server answers HTTP requests. Every gateway does, whether it holds the lease or not: the
// lease is only for the watchers, and requests are ordered by compare-and-swap.
type server struct {
	sandboxes sandboxes
	driver    Driver
	watchers  *watchers
	log       *slog.Logger
	locks     nameLocks
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /sandboxes", s.post)
	mux.HandleFunc("GET /sandboxes", s.getAll)
	mux.HandleFunc("GET /sandboxes/{name}", s.get)
	mux.HandleFunc("DELETE /sandboxes/{name}", s.delete)
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("POST /handover", s.handover)
	return mux
}

// newHTTPServer returns a server with timeouts for connections.
func newHTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      10*time.Second + requestTimeout + cleanupTimeout,
		IdleTimeout:       time.Minute,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

var errBadRequest = errors.New("bad request")

var validName = regexp.MustCompile(`^[a-z0-9-]{1,63}$`)

type createRequest struct {
	Name    string   `json:"name"`
	Command []string `json:"command"`
}

func (r createRequest) validate() error {
	switch {
	case !validName.MatchString(r.Name):
		return fmt.Errorf("%w: name %q is not 1 to 63 of a-z, 0-9 and -", errBadRequest, r.Name)
	case len(r.Command) == 0 || r.Command[0] == "":
		return fmt.Errorf("%w: command is empty", errBadRequest)
	case slices.ContainsFunc(r.Command, func(arg string) bool { return strings.ContainsRune(arg, 0) }):
		return fmt.Errorf("%w: command has a NUL byte", errBadRequest)
	}
	return nil
}

// decodeRequest decodes a request's body. For an empty body the error matches both
// errBadRequest and [io.EOF].
func decodeRequest(w http.ResponseWriter, r *http.Request, req any) error {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	dec.DisallowUnknownFields()
	if err := dec.Decode(req); err != nil {
		return fmt.Errorf("%w: %w", errBadRequest, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return fmt.Errorf("%w: more than one JSON value", errBadRequest)
	}
	return nil
}

func (s *server) post(w http.ResponseWriter, r *http.Request) {
	var req createRequest
	err := decodeRequest(w, r, &req)
	if err == nil {
		err = req.validate()
	}
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	ctx, cancel := operation(r)
	defer cancel()
	sb, err := s.createSandbox(ctx, req)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	answer(w, http.StatusCreated, sb)
}

// createSandbox returns the sandbox in phase Ready, or in phase Error if its command could
// not be started or has exited already. If the store fails on the way, the sandbox stays as
// it is, and the sweep sees to it after the grace period.
func (s *server) createSandbox(ctx context.Context, req createRequest) (Sandbox, error) {
	unlock, err := s.locks.lock(ctx, req.Name)
	if err != nil {
		return Sandbox{}, err
	}
	defer unlock()

	sb, err := s.sandboxes.create(ctx, req.Name, uuid.NewString(), req.Command)
	if err != nil {
		return Sandbox{}, err
	}
	inst, err := s.driver.Create(ctx, sb.Instance, sb.Name, sb.Command)
	if err != nil {
		return s.sandboxes.fail(ctx, sb, err.Error())
	}
	provisioning := sb
	sb, err = s.sandboxes.ready(ctx, provisioning, inst.PID)
	if errors.Is(err, tenure.ErrConflict) {
		// Another gateway has deleted the sandbox, or has given it up after the grace period.
		// It may not have seen the process, so end it here.
		return Sandbox{}, errors.Join(err, s.discard(ctx, provisioning.Instance))
	}
	if err != nil {
		return Sandbox{}, err
	}

	// The watch stream may have reported the exit before the sandbox was Ready, and won't
	// report it again.
	if inst, err = s.driver.Get(ctx, sb.Instance); err == nil && !inst.Alive {
		if err := s.sandboxes.exited(ctx, inst); err != nil {
			return Sandbox{}, err
		}
		return s.sandboxes.get(ctx, sb.Name)
	}
	return sb, nil
}

// discard deletes an instance even if the request has timed out.
func (s *server) discard(ctx context.Context, instance string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if err := s.driver.Delete(ctx, instance); err != nil {
		return &driverError{err}
	}
	return nil
}

func (s *server) getAll(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := operation(r)
	defer cancel()
	list, err := s.sandboxes.list(ctx)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	answer(w, http.StatusOK, list)
}

func (s *server) get(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := operation(r)
	defer cancel()
	sb, err := s.sandboxes.get(ctx, r.PathValue("name"))
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	answer(w, http.StatusOK, sb)
}

func (s *server) delete(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := operation(r)
	defer cancel()
	if err := s.deleteSandbox(ctx, r.PathValue("name")); err != nil {
		s.refuse(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// deleteSandbox returns when process and record are gone. If it is interrupted, the next
// deletion or the sweep finishes it.
func (s *server) deleteSandbox(ctx context.Context, name string) error {
	unlock, err := s.locks.lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()

	for {
		sb, err := s.sandboxes.get(ctx, name)
		if err != nil {
			return err
		}
		if sb.Phase != Deleting {
			sb, err = s.sandboxes.doom(ctx, sb)
			if errors.Is(err, tenure.ErrConflict) {
				continue
			}
			if err != nil {
				return err
			}
		}
		return s.sandboxes.finish(ctx, s.driver, sb)
	}
}

// health is the answer to GET /healthz.
type health struct {
	Replica      string   `json:"replica"`
	Role         string   `json:"role"`
	Holder       string   `json:"holder"` // the lease's holder when it was last read
	IsHolder     bool     `json:"is_holder"`
	Token        int64    `json:"token"`
	TrustSeconds *float64 `json:"trust_seconds"` // null if there is no lease to lose
	Terms        int      `json:"terms"`         // held by this replica
	Sweeps       int64    `json:"sweeps"`        // done by this replica
	LastError    string   `json:"last_error,omitempty"`
}

func (s *server) healthz(w http.ResponseWriter, r *http.Request) {
	coordinator := s.watchers.coordinator
	h := health{IsHolder: coordinator.IsHolder(), Sweeps: s.watchers.sweeps.Load()}
	status := coordinator.Status()
	h.Replica, h.Role, h.Holder = status.Replica, status.Role.String(), status.Holder
	h.Token, h.Terms, h.LastError = status.Token, status.Terms, status.LastError
	if exclusive, ok := s.sandboxes.store.(tenure.Exclusive); !ok || !exclusive.SingleReplica() {
		seconds := status.TrustLeft.Seconds()
		h.TrustSeconds = &seconds
	}
	answer(w, http.StatusOK, h)
}

type handoverRequest struct {
	To string `json:"to"` // the replica that should hold the lease next; any if empty
}

// handover asks the holder, whichever gateway that is, to hand the lease over. It answers
// when the request is stored; /healthz shows who holds the lease.
func (s *server) handover(w http.ResponseWriter, r *http.Request) {
	var req handoverRequest
	if err := decodeRequest(w, r, &req); err != nil && !errors.Is(err, io.EOF) {
		s.refuse(w, r, err)
		return
	}
	ctx, cancel := operation(r)
	defer cancel()
	err := s.watchers.lease.RequestHandover(ctx, req.To)
	switch {
	case err == nil:
		w.WriteHeader(http.StatusAccepted)
	case errors.Is(err, tenure.ErrNotFound):
		answerError(w, http.StatusNotFound, "nobody holds the lease")
	case errors.Is(err, errors.ErrUnsupported):
		answerError(w, http.StatusConflict, "the holder is a program that can't be asked")
	case errors.Is(err, tenure.ErrConflict):
		answerError(w, http.StatusConflict, "the lease kept changing; try again")
	default:
		s.refuse(w, r, err)
	}
}

// operation returns a context that bounds a request's work. It doesn't end with the
// connection, so that a client that hangs up doesn't leave a sandbox half created.
func operation(r *http.Request) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.Context()), requestTimeout)
}

// refuse answers with an error. Details that concern only the operator are logged, and not
// sent to the client.
func (s *server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	status, message := http.StatusServiceUnavailable, "the store does not answer; try again"
	var driverErr *driverError
	switch {
	case errors.Is(err, errBadRequest), errors.Is(err, tenure.ErrInvalid):
		status, message = http.StatusBadRequest, err.Error()
	case errors.As(err, &driverErr):
		status, message = http.StatusInternalServerError, "the compute driver failed"
	case errors.Is(err, tenure.ErrNotFound):
		status, message = http.StatusNotFound, "no such sandbox"
	case errors.Is(err, tenure.ErrExists), errors.Is(err, tenure.ErrTaken):
		status, message = http.StatusConflict, "the name is taken"
	case errors.Is(err, tenure.ErrConflict):
		status, message = http.StatusConflict, "the sandbox was changed or deleted meanwhile"
	}
	if status >= http.StatusInternalServerError {
		s.log.Error("request failed", "method", r.Method, "path", r.URL.Path, "error", err)
	}
	answerError(w, status, message)
}

func answerError(w http.ResponseWriter, status int, message string) {
	answer(w, status, map[string]string{"error": message})
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(body) // ignore the error: the client may be gone
}
