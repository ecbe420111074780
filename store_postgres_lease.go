package tenure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	leaseConns       = 4           // at least to be had, lest leases wait for one whose row is locked
	leaseLockTimeout = time.Second // of the lease connections, where the server keeps one for us
	connectTimeout   = 5 * time.Second

	lockTimeoutState = "55P03"
	readOnlyState    = "25006"
	protocolState    = "08P01"

	notSupportedState = "0A000"
	noSuchObjectState = "42704"
)

var errStoreClosed = errors.New("the store is closed")

type leaseCallKey struct{}

// leaseCall marks a call to the store as one of a lease. The mark passes through
// whatever wraps the store, down to [PostgresStore], which has connections that
// only leases use.
func leaseCall(ctx context.Context) context.Context {
	return context.WithValue(ctx, leaseCallKey{}, true)
}

func isLeaseCall(ctx context.Context) bool { return ctx.Value(leaseCallKey{}) != nil }

// leasePool is the connections that only leases use, so that no renewal ever
// waits behind the application's queries. They are opened as they are needed.
//
// Their lock_timeout is set when they connect, which spares each statement from
// setting it; and so is that they look for rows by the index. A pooler, whose sessions
// are not ours to set anything in, refuses that, and then each statement sets the
// first.
type leasePool struct {
	config *pgxpool.Config
	groups bool // writes may go in groups

	mu     sync.Mutex
	pool   *pgxpool.Pool // nil before the first use, and after close
	state  sessionState
	closed bool
}

type sessionState uint8

const (
	sessionUnknown sessionState = iota
	sessionOurs
	sessionPooled
)

// newLeasePool takes the settings of another pool, its hooks among them but
// ShouldPing.
func newLeasePool(config *pgxpool.Config) *leasePool {
	p := &leasePool{config: config}
	// A hook may prepare a connection for the context of one call. Where statements are
	// not prepared, a group of their texts is too large.
	//lint:ignore SA1019 the caller's may still be this one
	p.groups = config.BeforeAcquire == nil && config.PrepareConn == nil &&
		config.ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
	config.MaxConns = max(config.MaxConns, leaseConns)
	config.MinConns, config.MinIdleConns = 0, 0
	// Where nothing tells that the connection is dead, no round trip is spent on
	// asking: what fails is tried again in any case.
	config.ShouldPing = func(_ context.Context, params pgxpool.ShouldPingParams) bool {
		return params.IdleDuration > time.Second && !isQuiet(params.Conn.PgConn().Conn())
	}
	config.PingTimeout = cmp.Or(config.PingTimeout, time.Second)
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = connectTimeout
	}
	const setting = "lock_timeout"
	if config.ConnConfig.RuntimeParams[setting] != "" { // the caller's own
		p.state = sessionPooled
		return p
	}
	before := config.BeforeConnect
	config.BeforeConnect = func(ctx context.Context, conn *pgx.ConnConfig) error {
		if p.sessions() != sessionPooled {
			conn.RuntimeParams[setting] = fmt.Sprint(leaseLockTimeout.Milliseconds())
			// A plan that was made while the table had one page reads all of it each
			// time, and goes on so when rows that died fill it. Not enable_seqscan=off:
			// a trigger's plan that has to read a whole table would seem so dear that it
			// is compiled, which takes longer than a lease has.
			conn.RuntimeParams["random_page_cost"] = cmp.Or(conn.RuntimeParams["random_page_cost"], "0.1")
		}
		if before != nil {
			return before(ctx, conn)
		}
		return nil
	}
	return p
}

func (p *leasePool) sessions() sessionState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

// get returns the pool, and whether its sessions have a lock_timeout. At first it
// connects, to find that out.
func (p *leasePool) get(ctx context.Context) (pool *pgxpool.Pool, bounded bool, err error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, false, errStoreClosed
	}
	if p.pool == nil {
		p.pool, err = pgxpool.NewWithConfig(context.WithoutCancel(ctx), p.config)
	}
	pool, state := p.pool, p.state
	p.mu.Unlock()
	if err != nil || state != sessionUnknown {
		return pool, state == sessionOurs, err
	}

	var is string
	err = pool.QueryRow(ctx, "SHOW lock_timeout").Scan(&is)
	switch {
	case refusesSetting(err):
		state = sessionPooled
	case err != nil:
		return nil, false, err
	case is == fmt.Sprintf("%ds", int(leaseLockTimeout.Seconds())):
		state = sessionOurs
	default: // a pooler that keeps the setting to itself
		state = sessionPooled
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state = state
	return pool, state == sessionOurs, nil
}

// forget makes the next call find out anew what the sessions are, unless nothing is
// set in them.
func (p *leasePool) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == sessionOurs {
		p.state = sessionUnknown
	}
}

func (p *leasePool) close() {
	p.mu.Lock()
	pool := p.pool
	p.pool, p.closed = nil, true
	p.mu.Unlock()
	if pool != nil {
		pool.Close()
	}
}

// refusesSetting reports whether a connection was refused for a setting that it
// came with, as poolers do, each by an error of its own.
func refusesSetting(err error) bool {
	switch sqlState(err) {
	case protocolState:
		return strings.Contains(err.Error(), "startup parameter")
	case notSupportedState, noSuchObjectState:
		return errors.As(err, new(*pgconn.ConnectError))
	default:
		return false
	}
}

// conns returns the connections for a call: those of the leases, or those of the
// application. Bounded is that a statement of its own for the lock_timeout is
// not needed.
func (s *PostgresStore) conns(ctx context.Context) (pool *pgxpool.Pool, bounded bool, err error) {
	if s.refused != nil {
		return nil, false, s.refused
	}
	if !isLeaseCall(ctx) {
		return s.pool, false, nil
	}
	pool, bounded, err = s.leases.get(ctx)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < leaseLockTimeout {
		bounded = false
	}
	return pool, bounded, err
}

// inTime sends a write in such a way that it waits for locks no longer than ctx
// allows. Where the session's own limit has ended the wait before that, it is
// sent again, with a limit of its own.
func (s *PostgresStore) inTime(ctx context.Context, send func(pool *pgxpool.Pool, bounded bool) error) error {
	for again := false; ; again = true {
		pool, bounded, err := s.conns(ctx)
		if err != nil {
			return err
		}
		err = send(pool, bounded)
		switch {
		case bounded && sqlState(err) == lockTimeoutState:
			if _, ok := ctx.Deadline(); ok {
				return send(pool, false)
			}
		case isLeaseCall(ctx) && refusesSetting(err) && !again: // a pooler may have come in between
			s.leases.forget()
		default:
			s.heard(pool, err)
			return err
		}
	}
}

// readRow reads one row. A wait for a lock that the session's own limit has ended
// goes on.
func (s *PostgresStore) readRow(ctx context.Context, statement string, args []any, dest ...any) error {
	for again := false; ; again = true {
		pool, _, err := s.conns(ctx)
		if err != nil {
			return err
		}
		err = pool.QueryRow(ctx, statement, args...).Scan(dest...)
		switch {
		case isLeaseCall(ctx) && sqlState(err) == lockTimeoutState && ctx.Err() == nil:
		case isLeaseCall(ctx) && refusesSetting(err) && !again: // as inTime
			s.leases.forget()
		default:
			s.heard(pool, err)
			return err
		}
	}
}

// heard judges how a call ended. After one that the server did not answer, the
// other connections may be as dead, and each would cost a call to find out. After one
// that it refused because it is read-only, it may be a primary no more: the
// connections stay good, and only new ones find the server that is.
func (s *PostgresStore) heard(pool *pgxpool.Pool, err error) {
	if err == nil || errors.Is(err, pgx.ErrNoRows) {
		return
	}
	switch readOnly := sqlState(err) == readOnlyState; {
	case sqlState(err) != "" && !readOnly:
	case s.leases.is(pool), readOnly && s.owned: // an application's call may end because its context does
		pool.Reset()
	}
}

// reset makes sure that no connection is used again that is open now.
func (p *leasePool) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pool != nil {
		p.pool.Reset()
	}
}

func (p *leasePool) is(pool *pgxpool.Pool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return pool == p.pool
}

// connect opens a connection beside a pool, as the pool would.
func connect(ctx context.Context, config *pgxpool.Config) (*pgx.Conn, error) {
	conn := config.ConnConfig.Copy()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, conn); err != nil {
			return nil, err
		}
	}
	// Notifications must come to who waits for them, and a wait that ends must
	// leave the connection as it is.
	conn.OnNotification = nil
	conn.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
	}
	return pgx.ConnectConfig(ctx, conn)
}
