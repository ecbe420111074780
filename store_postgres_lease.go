package tenure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
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

// leasePool is the connections that only leases use, so that no renewal ever
// waits behind the application's queries. They are opened as they are needed.
//
// Their lock_timeout is set when they connect, which spares each statement from
// setting it; and so is that they look for rows by the index. A pooler, whose sessions
// are not ours to set anything in, refuses that, and then each statement sets the
// first.
//
// No connection is closed because it is old, or because it may be dead, until another
// one is open: the server may have no slot for a new one, and then the term would be
// lost. Instead, all connections are replaced at once.
type leasePool struct {
	config   *pgxpool.Config
	groups   bool          // writes may go in groups
	lifetime time.Duration // after which connections are replaced; 0: never
	jitter   time.Duration // at most, on top of the lifetime

	closing context.Context // done when the pool is being closed
	cancel  context.CancelFunc
	open    sync.WaitGroup // sets of connections, and goroutines that open them

	mu        sync.Mutex
	current   *leaseConnections // nil before the first use, and after close
	state     sessionState
	endless   bool // new sessions turn off the role's idle_session_timeout
	closed    bool
	replacing bool
	replaced  time.Time // when the last replacement began
}

// leaseConnections is a set of connections that is replaced as a whole. Its fields are
// guarded by the leasePool's mu.
type leaseConnections struct {
	*pgxpool.Pool
	due     time.Time // when the set should be replaced; zero: never
	users   int       // calls that use the set
	retired bool      // the last call to use it closes it
}

const (
	// replaceAtMost is the shortest time between two attempts to replace connections.
	replaceAtMost = time.Second

	// replaceAgain is the pause after an attempt to replace old connections failed.
	replaceAgain = 10 * time.Second

	// leastIdle is the shortest time for which an idle connection is kept. A lease that
	// is renewed less often has a TTL that leaves it time to wait for a new one.
	leastIdle = 30 * time.Minute

	idleSessionTimeout = "idle_session_timeout"
)

type sessionState uint8

const (
	sessionUnknown sessionState = iota
	sessionOurs
	sessionPooled
)

// newLeasePool takes the settings of another pool, its hooks among them but
// ShouldPing.
func newLeasePool(config *pgxpool.Config) *leasePool {
	p := &leasePool{config: config, lifetime: config.MaxConnLifetime, jitter: config.MaxConnLifetimeJitter}
	p.closing, p.cancel = context.WithCancel(context.Background())
	// A hook may prepare a connection for the context of one call. Where statements are
	// not prepared, a group of their texts is too large.
	//lint:ignore SA1019 the caller's may still be this one
	p.groups = config.BeforeAcquire == nil && config.PrepareConn == nil &&
		config.ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
	config.MaxConns = max(config.MaxConns, leaseConns)
	config.MinConns, config.MinIdleConns = 0, 0
	config.MaxConnLifetime = 0 // a pool closes a connection before it opens the next
	config.MaxConnIdleTime = max(config.MaxConnIdleTime, leastIdle)
	// Where nothing tells that the connection is dead, no round trip is spent on
	// asking: what fails is tried again in any case.
	config.ShouldPing = func(_ context.Context, params pgxpool.ShouldPingParams) bool {
		return params.IdleDuration > time.Second && !pgconns.IsQuiet(params.Conn.PgConn().Conn())
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
		state, endless := p.sessions()
		if state != sessionPooled {
			conn.RuntimeParams[setting] = fmt.Sprint(leaseLockTimeout.Milliseconds())
			// A plan that was made while the table had one page reads all of it each
			// time, and goes on so when rows that died fill it. Not enable_seqscan=off:
			// a trigger's plan that has to read a whole table would seem so dear that it
			// is compiled, which takes longer than a lease has.
			conn.RuntimeParams["random_page_cost"] = cmp.Or(conn.RuntimeParams["random_page_cost"], "0.1")
			if endless {
				conn.RuntimeParams[idleSessionTimeout] = "0"
			}
		}
		if before != nil {
			return before(ctx, conn)
		}
		return nil
	}
	return p
}

func (p *leasePool) sessions() (state sessionState, endless bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state, p.endless
}

// get returns the current connections, and whether their sessions have a lock_timeout.
// The caller must give them back with put. The first call connects, to find that out.
func (p *leasePool) get(ctx context.Context) (conns *leaseConnections, bounded bool, err error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, false, errStoreClosed
	}
	if p.current == nil {
		p.current, err = p.openLocked(ctx)
		if err != nil {
			p.mu.Unlock()
			return nil, false, err
		}
	}
	conns, state := p.current, p.state
	conns.users++
	if !conns.due.IsZero() && time.Now().After(conns.due) {
		p.replaceLocked(ctx)
	}
	p.mu.Unlock()
	if state != sessionUnknown {
		return conns, state == sessionOurs, nil
	}

	state, err = p.findOut(ctx, conns)
	if err != nil {
		p.put(conns)
		return nil, false, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state = state
	return conns, state == sessionOurs, nil
}

func (p *leasePool) put(conns *leaseConnections) {
	p.mu.Lock()
	conns.users--
	over := conns.retired && conns.users == 0
	p.mu.Unlock()
	if over {
		p.end(conns)
	}
}

func (p *leasePool) openLocked(ctx context.Context) (*leaseConnections, error) {
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), p.config)
	if err != nil {
		return nil, err
	}
	p.open.Add(1)
	conns := &leaseConnections{Pool: pool}
	if p.lifetime > 0 {
		conns.due = time.Now().Add(p.lifetime + rand.N(max(0, p.jitter)+1))
	}
	return conns, nil
}

// retire closes connections once no call uses them any more. Until then the idle ones
// stay, too: a call may be about to take one, and the server may have no slot for another.
// It must be called only once for each set.
func (p *leasePool) retire(conns *leaseConnections) {
	p.mu.Lock()
	conns.retired = true
	over := conns.users == 0
	p.mu.Unlock()
	if over {
		p.end(conns)
	}
}

func (p *leasePool) end(conns *leaseConnections) {
	go func() {
		defer p.open.Done()
		conns.Close()
	}()
}

// findOut finds out what kind of sessions these are, and connects if it has to.
func (p *leasePool) findOut(ctx context.Context, conns *leaseConnections) (state sessionState, err error) {
	conn, err := conns.Acquire(ctx)
	if err == nil {
		defer conn.Release()
		state, err = p.ask(ctx, conn)
	}
	if refusesSetting(err) {
		return sessionPooled, nil
	}
	return state, err
}

func (p *leasePool) ask(ctx context.Context, conn *pgxpool.Conn) (sessionState, error) {
	var lock, idle string
	err := conn.QueryRow(ctx, "SELECT current_setting('lock_timeout'), coalesce(current_setting('"+idleSessionTimeout+"', true), '0')").Scan(&lock, &idle)
	if err != nil {
		return sessionUnknown, err
	}
	if lock != fmt.Sprintf("%ds", int(leaseLockTimeout.Seconds())) { // a pooler that keeps the setting to itself
		return sessionPooled, nil
	}
	if idle != "0" {
		// Otherwise the server would end the session between two renewals. Only later
		// connections set this as they connect, because servers before version 14 would
		// refuse it.
		if _, err := conn.Exec(ctx, "SET "+idleSessionTimeout+" = 0"); err != nil {
			return sessionUnknown, err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.endless = true
	}
	return sessionOurs, nil
}

// replace opens new connections in the background, which then take the place of the
// pool's. Until they are open, and if the server has no slot for them, the old ones
// stay in use.
func (p *leasePool) replace(ctx context.Context, pool *pgxpool.Pool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current != nil && p.current.Pool == pool {
		p.replaceLocked(ctx)
	}
}

func (p *leasePool) replaceLocked(ctx context.Context) {
	if p.replacing || time.Since(p.replaced) < replaceAtMost {
		return
	}
	next, err := p.openLocked(ctx)
	if err != nil {
		return // impossible: the same config worked before
	}
	p.replacing, p.replaced = true, time.Now()
	p.open.Go(func() {
		// The caller's hooks may need the values of a call's context.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.config.ConnConfig.ConnectTimeout)
		defer cancel()
		defer context.AfterFunc(p.closing, cancel)()
		p.retire(p.succeed(next, p.connect(ctx, next)))
	})
}

// connect opens the first of new connections. They may meet another kind of session
// than the old ones did: a pooler may have come in between.
func (p *leasePool) connect(ctx context.Context, conns *leaseConnections) error {
	if state, _ := p.sessions(); state != sessionPooled {
		state, err := p.findOut(ctx, conns)
		if err != nil {
			return err
		}
		p.mu.Lock()
		p.state = state
		p.mu.Unlock()
	}
	return conns.Ping(ctx) // connects without the setting if that was refused
}

// succeed makes new connections the current ones, unless opening them failed with err,
// and returns the set that is no longer needed.
func (p *leasePool) succeed(next *leaseConnections, err error) (last *leaseConnections) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.replacing = false
	last = p.current
	if last == nil || err != nil { // closed, or no slot
		if again := time.Now().Add(replaceAgain); last != nil && !last.due.IsZero() && last.due.Before(again) {
			last.due = again
		}
		return next
	}
	p.current = next
	return last
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

// close returns when all connections are closed.
func (p *leasePool) close() {
	p.mu.Lock()
	conns := p.current
	p.current, p.closed = nil, true
	p.mu.Unlock()
	p.cancel()
	if conns != nil {
		p.retire(conns)
	}
	p.open.Wait()
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
// not needed. The caller must call done when it has finished with them.
func (s *PostgresStore) conns(ctx context.Context) (pool *pgxpool.Pool, bounded bool, done func(), err error) {
	if !objects.IsLeaseCall(ctx) {
		return s.pool, false, func() {}, nil
	}
	conns, bounded, err := s.leases.get(ctx)
	if err != nil {
		return nil, false, nil, err
	}
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < leaseLockTimeout {
		bounded = false
	}
	return conns.Pool, bounded, func() { s.leases.put(conns) }, nil
}

// inTime sends a write in such a way that it waits for locks no longer than ctx
// allows. Where the session's own limit has ended the wait before that, it is
// sent again, with a limit of its own.
func (s *PostgresStore) inTime(ctx context.Context, send func(pool *pgxpool.Pool, bounded bool) error) error {
	return s.call(ctx, func(pool *pgxpool.Pool, bounded bool) error {
		for {
			err := send(pool, bounded)
			if !bounded || sqlState(err) != lockTimeoutState {
				return err
			}
			if _, ok := ctx.Deadline(); ok {
				bounded = false
			}
		}
	})
}

// readRow reads one row. A wait for a lock that the session's own limit has ended
// goes on.
func (s *PostgresStore) readRow(ctx context.Context, statement string, args []any, dest ...any) error {
	return s.call(ctx, func(pool *pgxpool.Pool, _ bool) error {
		for {
			err := pool.QueryRow(ctx, statement, args...).Scan(dest...)
			if !objects.IsLeaseCall(ctx) || sqlState(err) != lockTimeoutState || ctx.Err() != nil {
				return err
			}
		}
	})
}

// call runs send with the connections for ctx, and once more if a pooler turns out to
// have come in between.
func (s *PostgresStore) call(ctx context.Context, send func(pool *pgxpool.Pool, bounded bool) error) error {
	for again := false; ; again = true {
		pool, bounded, done, err := s.conns(ctx)
		if err != nil {
			return err
		}
		began := time.Now()
		err = send(pool, bounded)
		s.heard(ctx, pool, began, err)
		done()
		if !objects.IsLeaseCall(ctx) || !refusesSetting(err) || again {
			return err
		}
		s.leases.forget()
	}
}

// heard draws conclusions from how a call ended. If the server did not answer, the
// other connections of the leases may be dead too, and each would cost a call to find
// out, so they are replaced. If it refused the call because it is read-only, it may no
// longer be the primary: the connections stay good, and only new ones find the server
// that is.
func (s *PostgresStore) heard(ctx context.Context, pool *pgxpool.Pool, began time.Time, err error) {
	switch {
	case err == nil || errors.Is(err, pgx.ErrNoRows):
		s.reached.Store(true)
	case sqlState(err) == readOnlyState:
		if s.owned || s.leases.is(pool) {
			pool.Reset()
		}
	case unanswered(err, time.Since(began)):
		s.leases.replace(ctx, pool) // does nothing for the application's pool
	}
}

// unanswered reports whether a call was sent and the server did not answer it. A call
// that got no connection was not sent, and an answer that can't be decoded is one.
func unanswered(err error, took time.Duration) bool {
	switch {
	case sqlState(err) != "", errors.As(err, new(pgx.ScanArgError)), errors.As(err, new(*pgconn.ConnectError)):
		return false
	case errors.Is(err, context.DeadlineExceeded) && !pgconn.Timeout(err): // it waited for a connection
		return false
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return !pgconn.SafeToRetry(err) && gaveUp(err, took)
	default:
		return true
	}
}

// gaveUp reports whether a call that its context ended with err had waited long enough
// to blame the server. A caller that cancels a call early has reasons of its own.
func gaveUp(err error, took time.Duration) bool {
	return !errors.Is(err, context.Canceled) || took >= time.Second
}

func (p *leasePool) is(pool *pgxpool.Pool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current != nil && p.current.Pool == pool
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
