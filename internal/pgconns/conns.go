// Package pgconns manages the connections of a store on Postgres: it keeps separate
// connections for leases, draws conclusions from failed calls, parses URLs without showing
// the password in errors, and closes sockets by force.
package pgconns

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"math"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/tenurelib/tenure/internal/objects"
)

// closeTimeout is how long Close waits before it cuts connections off.
const closeTimeout = 4 * time.Second

// Conns has the connections of a store: the application's pool, the leases' connections, the
// claims' connections, and the connection that listens. All methods are safe for concurrent use.
type Conns struct {
	Pool *pgxpool.Pool // the application's pool

	owned   bool            // Close closes the pool
	config  *pgxpool.Config // for connections outside of the pool
	cutter  *Cutter         // for all connections except those of a caller's pool
	leases  *leases
	claims  *leases     // separate connections of the same kind, so that no renewal waits for a claim
	reached atomic.Bool // the database has answered at least once
	db      func() *sql.DB

	connected func(ctx context.Context, conn *pgx.Conn) error // see OnConnect
}

// New returns the connections of a store in the caller's pool.
func New(pool *pgxpool.Pool) *Conns {
	c := pool.Config()
	findPrimary(c.ConnConfig) // the store's own connections must write, whatever the pool is for
	return newConns(pool, c, max(c.MaxConns, leaseConns), NewCutter(), c.ConnConfig.DialFunc)
}

// Open opens a pool, which belongs to the Conns. It does not connect yet.
func Open(ctx context.Context, config *pgxpool.Config) (*Conns, error) {
	cutter, dial := NewCutter(), config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = cutter.Dial(dial)
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = connectTimeout
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	c := newConns(pool, pool.Config(), config.MaxConns, cutter, dial)
	c.owned = true
	return c, nil
}

// newConns returns the connections of a store, at most forLeases of them for leases. All except the pool's
// are dialed with dial and cut off by cutter.
func newConns(pool *pgxpool.Pool, config *pgxpool.Config, forLeases int32, cutter *Cutter, dial pgconn.DialFunc) *Conns {
	config.ConnConfig.DialFunc = cutter.Dial(dial)
	c := &Conns{Pool: pool, config: config, cutter: cutter, db: sync.OnceValue(func() *sql.DB { return stdlib.OpenDBFromPool(pool) })}
	own := config.Copy()
	c.checkNew(own)
	c.leases, c.claims = newLeases(own.Copy(), forLeases), newLeases(own, ClaimConns)
	return c
}

// checkNew makes a pool refuse an [Unfit] server, and check its connections as [Conns.OnConnect] says. The check follows the caller's own
// hooks, which may choose a role or a search_path, some of them anew for each call.
func (c *Conns) checkNew(config *pgxpool.Config) {
	check := func(ctx context.Context, conn *pgx.Conn) error {
		if err := Unfit(conn); err != nil || c.connected == nil {
			return err
		}
		return c.connected(ctx, conn)
	}
	prepare := config.PrepareConn
	//lint:ignore SA1019 the caller may still use this one
	if before := config.BeforeAcquire; prepare == nil && before != nil {
		prepare = func(ctx context.Context, conn *pgx.Conn) (bool, error) { return before(ctx, conn), nil }
	}
	if prepare == nil {
		after := config.AfterConnect
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			if after != nil {
				if err := after(ctx, conn); err != nil {
					return err
				}
			}
			return check(ctx, conn)
		}
		return
	}
	const checked = "tenure: checked"
	config.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
		ok, err := prepare(ctx, conn)
		data := conn.PgConn().CustomData()
		if !ok || err != nil || data[checked] != nil {
			return ok, err
		}
		if err := check(ctx, conn); err != nil {
			return false, err
		}
		data[checked] = true
		return true, nil
	}
}

// OnConnect sets the check of each new connection for leases and claims, which precedes its first use. If the
// check fails, the connection is closed and the call that needed it returns the error. OnConnect must precede
// the first call.
func (c *Conns) OnConnect(check func(ctx context.Context, conn *pgx.Conn) error) { c.connected = check }

// Close closes the connections, and the pool unless it is the caller's. It calls stop to end what uses
// connections in the background. It waits a few seconds for calls in progress and for a server that
// does not answer; then it cuts their connections off.
func (c *Conns) Close(stop func()) {
	defer time.AfterFunc(closeTimeout, c.cutter.Cut).Stop()
	var all sync.WaitGroup
	all.Go(stop)
	all.Go(c.leases.close)
	all.Go(c.claims.close)
	all.Go(func() {
		_ = c.DB().Close() // first, because it may keep connections of the pool
		if c.owned {
			c.Pool.Close()
		}
	})
	all.Wait()
}

// DB returns a database/sql handle on the application's pool, which Close closes.
func (c *Conns) DB() *sql.DB { return c.db() }

// Reached reports whether the database has ever answered.
func (c *Conns) Reached() bool { return c.reached.Load() }

// MayGroup reports whether the writes of several leases may share a transaction.
func (c *Conns) MayGroup() bool { return c.leases.groups }

// own returns the store's connections for a call, or nil if the call uses the application's pool.
func (c *Conns) own(ctx context.Context) *leases {
	switch {
	case objects.IsClaimCall(ctx):
		return c.claims
	case objects.IsLeaseCall(ctx):
		return c.leases
	}
	return nil
}

// isOwn reports whether a call uses the store's connections for leases or claims.
func isOwn(ctx context.Context) bool { return objects.IsLeaseCall(ctx) || objects.IsClaimCall(ctx) }

// For returns the pool for a call: that of leases, of claims, or of the application. bounded reports
// whether its sessions have a lock_timeout that suits the call. The caller must call done when it has
// finished with the pool.
func (c *Conns) For(ctx context.Context) (pool *pgxpool.Pool, bounded bool, done func(), err error) {
	own := c.own(ctx)
	if own == nil {
		return c.Pool, false, func() {}, nil
	}
	set, bounded, err := own.get(ctx)
	if err != nil {
		return nil, false, nil, err
	}
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < leaseLockTimeout {
		bounded = false
	}
	return set.Pool, bounded, func() { own.put(set) }, nil
}

// Call runs send with the pool for ctx. It runs send once more if it finds that a pooler is now
// between the store and the server.
func (c *Conns) Call(ctx context.Context, send func(pool *pgxpool.Pool, bounded bool) error) error {
	for again := false; ; again = true {
		pool, bounded, done, err := c.For(ctx)
		if err != nil {
			return err
		}
		began := time.Now()
		err = send(pool, bounded)
		c.NoteResult(ctx, pool, began, err)
		done()
		own := c.own(ctx)
		if own == nil || !RefusesSetting(err) || again {
			return err
		}
		own.forget()
	}
}

// Statement is a statement of a transaction.
type Statement struct {
	SQL  string
	Args []any
	Dest []any // where to scan the row that it returns; nil if it returns none
}

// Queue adds the statement to a batch. If its row is missing, Queue sets noRow to [pgx.ErrNoRows]
// instead of failing, because after an error the results of later statements would not be read.
func (s Statement) Queue(batch *pgx.Batch, noRow *error) { s.queue(batch, noRow, new(scanner)) }

func (s Statement) queue(batch *pgx.Batch, noRow *error, into *scanner) {
	queued := batch.Queue(s.SQL, s.Args...)
	if s.Dest == nil {
		return
	}
	queued.QueryRow(func(row pgx.Row) error {
		err := into.scan(row, s.Dest)
		if errors.Is(err, pgx.ErrNoRows) {
			*noRow, err = err, nil
		}
		return err
	})
}

// Write sends statements as one transaction, in one round trip. It waits for locks as long as ctx allows:
// if the session's own limit ends a wait earlier, Write sends the statements again with a limit of their
// own. It returns [pgx.ErrNoRows] if a row is missing.
func (c *Conns) Write(ctx context.Context, statements ...Statement) error {
	return c.Call(ctx, func(pool *pgxpool.Pool, bounded bool) error {
		for {
			err := write(ctx, pool, bounded, statements)
			if !bounded || SQLState(err) != StateLockNotAvailable {
				return err
			}
			bounded = false
		}
	})
}

func write(ctx context.Context, pool *pgxpool.Pool, bounded bool, statements []Statement) error {
	if bounded && len(statements) == 1 { // for example a renewal; this is a sixth faster than a batch
		return QueryOne(ctx, pool, statements[0])
	}
	into := new(scanner)
	defer into.end()
	return Send(ctx, pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		batch := &pgx.Batch{}
		switch {
		case isOwn(ctx) && !bounded:
			batch.Queue(`SELECT set_config('lock_timeout', $1, true), `+Durably, lockWait(ctx))
		case !bounded:
			LimitLockWait(ctx, batch)
		}
		var noRow error
		for _, s := range statements {
			s.queue(batch, &noRow, into)
		}
		return cmp.Or(conn.SendBatch(ctx, batch).Close(), noRow)
	})
}

// QueryOne reads one row, or returns [pgx.ErrNoRows].
func QueryOne(ctx context.Context, pool *pgxpool.Pool, s Statement) error {
	into := new(scanner)
	defer into.end()
	return Send(ctx, pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		rows, _ := conn.Query(ctx, s.SQL, s.Args...) // the error is also that of rows
		_, err := pgx.CollectOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, into.scan(row, s.Dest)
		})
		return err
	})
}

// LimitLockWait lets a batch's transaction wait for locks slightly less long than ctx allows, so that the
// server ends the wait and the connection survives. Without a deadline it may wait as long as any call may
// take. The limit applies only to this transaction, so it also works behind a pooler.
func LimitLockWait(ctx context.Context, batch *pgx.Batch) {
	batch.Queue(`SELECT set_config('lock_timeout', $1, true)`, lockWait(ctx))
}

// Durably is an expression that makes a transaction of leases or claims wait until its commit survives a crash
// or a failover, whatever the role's setting is. Where there is no pooler, the session itself has the setting.
const Durably = `CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN set_config('synchronous_commit', 'on', true) END`

// lockWait is the lock_timeout that [LimitLockWait] describes.
func lockWait(ctx context.Context) string {
	left := objects.CallLimit()
	if deadline, ok := ctx.Deadline(); ok {
		left = time.Until(deadline)
	}
	left -= min(left/10, 200*time.Millisecond)
	return strconv.FormatInt(min(max(1, left.Milliseconds()), math.MaxInt32), 10)
}

// QueryRow reads one row, or returns [pgx.ErrNoRows]. After the session's own limit has ended a wait for a
// lock, it waits again.
func (c *Conns) QueryRow(ctx context.Context, statement string, args []any, dest ...any) error {
	return c.Call(ctx, func(pool *pgxpool.Pool, _ bool) error {
		for {
			err := QueryOne(ctx, pool, Statement{statement, args, dest})
			if !objects.IsLeaseCall(ctx) || SQLState(err) != StateLockNotAvailable || ctx.Err() != nil {
				return err
			}
		}
	})
}

// NoteResult draws conclusions from the result of a call. If the server did not answer, the other
// connections of the leases may be dead too. Each would cost a call before that is noticed, so they
// are replaced, unless one of them has been answered since: then the server is only slow, and new
// connections would make it slower. A server that rejected the call because it is read-only may no
// longer be the primary: its connections still work, and only new ones find the current primary.
func (c *Conns) NoteResult(ctx context.Context, pool *pgxpool.Pool, began time.Time, err error) {
	own, answered := c.own(ctx), err == nil || errors.Is(err, pgx.ErrNoRows)
	if answered {
		c.reached.Store(true)
	}
	switch {
	case IsReadOnly(err):
		if c.owned || own != nil {
			pool.Reset()
		}
	case own == nil:
	case answered || SQLState(err) != "" && !IsConnecting(err):
		own.answered(pool)
	case unanswered(err, time.Since(began)):
		own.replace(ctx, pool, began)
	}
}

// LeaveReadOnly replaces the connections of the application's pool, if the store owns it, when an error
// of one of its transactions says that the server is read-only, as NoteResult does.
func (c *Conns) LeaveReadOnly(errs ...error) {
	if c.owned && slices.ContainsFunc(errs, IsReadOnly) {
		c.Pool.Reset()
	}
}

// Leave replaces all connections except the caller's, because they lead to a server that must not be used.
func (c *Conns) Leave() {
	if c.owned {
		c.Pool.Reset()
	}
	for _, own := range []*leases{c.leases, c.claims} {
		own.mu.Lock()
		if own.current != nil {
			own.current.Reset()
		}
		own.mu.Unlock()
	}
}

// NoteAbandoned is NoteResult for a call that one caller has given up with err while other callers
// still wait for the answer.
func (c *Conns) NoteAbandoned(ctx context.Context, pool *pgxpool.Pool, began time.Time, err error) {
	if gaveUp(err, time.Since(began)) {
		c.leases.replace(ctx, pool, began)
	}
}

// unanswered reports whether a call was sent and not answered. A call that got no connection was not sent,
// and an answer that can't be decoded is an answer.
func unanswered(err error, took time.Duration) bool {
	switch {
	case SQLState(err) != "", errors.As(err, new(pgx.ScanArgError)), IsConnecting(err), errors.Is(err, objects.ErrSetup):
		return false
	case errors.As(err, new(*noAnswer)):
		return gaveUp(err, took)
	case errors.Is(err, context.DeadlineExceeded) && !pgconn.Timeout(err): // it waited for a connection
		return false
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return !pgconn.SafeToRetry(err) && gaveUp(err, took)
	default:
		return true
	}
}

// gaveUp reports whether a call whose context ended had waited long enough to blame the server. A caller
// that cancels a call early has other reasons.
func gaveUp(err error, took time.Duration) bool {
	return !errors.Is(err, context.Canceled) || took >= time.Second
}

// Connect opens a connection outside of the pools, to the same server or to another URL.
func (c *Conns) Connect(ctx context.Context, url string) (*pgx.Conn, error) {
	config := c.config
	if url != "" {
		var err error
		if config, err = ParseURL(url); err != nil { // which knows the pool_* parameters
			return nil, err
		}
		config.ConnConfig.DialFunc = c.cutter.Dial(config.ConnConfig.DialFunc)
	}
	conn := config.ConnConfig.Copy()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, conn); err != nil {
			return nil, err
		}
	}
	// The caller handles notifications itself, and the end of a wait must leave the connection open.
	conn.OnNotification = nil
	conn.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
	}
	connected, err := pgx.ConnectConfig(ctx, conn)
	return connected, ExplainConnecting(err)
}
