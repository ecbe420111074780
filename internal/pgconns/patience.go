package pgconns

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
)

// patience is how long a connection waits for an answer after the call has ended. A server that is merely
// slow then need not start a session for the next call, which would cost it many times as much as the answer,
// make it slower still, and end more calls.
const patience = 2 * time.Second

// noAnswer is the error of a call that has ended while its connection still waits for the answer.
type noAnswer struct{ error }

func (e *noAnswer) Error() string { return "no answer: " + e.error.Error() }
func (e *noAnswer) Unwrap() error { return e.error }

// Send calls send with a connection of the pool. On the connections of leases and claims it returns as soon
// as ctx ends. If that was its deadline, send still waits for the answer to what it has sent: see [patience].
// After an error the caller must not touch anything that send writes.
func Send(ctx context.Context, pool *pgxpool.Pool, send func(ctx context.Context, conn *pgxpool.Conn) error) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	if !isOwn(ctx) {
		defer conn.Release()
		return send(ctx, conn)
	}
	answer := make(chan error, 1)
	go func() { // closing the pool waits for it
		err := send(context.WithValue(ctx, patient{}, true), conn)
		conn.Release()
		answer <- err
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-answer: // it has just come
		return err
	default:
		return &noAnswer{ctx.Err()}
	}
}

// patient is the key of a context whose deadline leaves the connection time for the answer. If the caller
// cancels a call instead, the call is cancelled on the server too.
type patient struct{}

// patiently makes the connections of a pool wait for answers as [Send] says, at most half of them at a time,
// until closing is done.
func patiently(config *pgxpool.Config, closing context.Context) {
	half := make(chan struct{}, config.MaxConns/2)
	config.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &patientHandler{conn: conn.Conn(), half: half, closing: closing}
	}
}

// patientHandler ends what a connection does when a context ends.
type patientHandler struct {
	conn    net.Conn
	half    chan struct{} // has an element for each connection that waits
	closing context.Context
	resume  func()
}

func (h *patientHandler) HandleCancel(ctx context.Context) {
	until := time.Now()
	h.conn.SetWriteDeadline(until) // a batch may not have been sent whole
	h.resume = func() {}
	if ctx.Value(patient{}) != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		select {
		case h.half <- struct{}{}:
			until = until.Add(patience)
			stop := context.AfterFunc(h.closing, func() { h.conn.SetDeadline(time.Now()) })
			h.resume = func() { stop(); <-h.half }
		default:
		}
	}
	h.conn.SetReadDeadline(until)
}

func (h *patientHandler) HandleUnwatchAfterCancel() {
	h.resume()
	h.conn.SetDeadline(time.Time{})
}

// scanner scans rows into the variables of a call until the call has ended.
type scanner struct {
	mu    sync.Mutex
	ended bool
}

func (s *scanner) scan(row pgx.Row, dest []any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return errors.New("the call has ended")
	}
	return row.Scan(dest...)
}

func (s *scanner) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
}
