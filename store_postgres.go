package tenure

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// PostgresConfig configures a [PostgresStore]. The zero value serves.
type PostgresConfig struct {
	Schema string       // default: the first schema of the search_path that has the table
	Table  string       // default "objects"
	Logger *slog.Logger // default slog.Default()

	// PollOnly keeps the store from holding a connection to listen on. Its
	// standbys then find a released lease by polling, within their
	// AcquireInterval.
	PollOnly bool

	// ListenURL is where to listen, for a pool whose connections lead through a
	// pooler in transaction mode: there nothing is heard. Default: as the pool.
	ListenURL string
}

// validate returns an [ErrInvalid] for a config that no database can serve.
func (cfg PostgresConfig) validate() error {
	const longest = 63 // bytes; Postgres cuts off what is longer
	errs := []error{validTable(cfg.Table), validText("Schema", cfg.Schema)}
	if more := len(cfg.Table+tombstonesSuffix) - longest; more > 0 {
		errs = append(errs, fmt.Errorf("%w: Table %q is too long by %d bytes: with %q behind it Postgres would cut it off",
			ErrInvalid, cfg.Table, more, tombstonesSuffix))
	}
	if more := len(cfg.Schema) - longest; more > 0 {
		errs = append(errs, fmt.Errorf("%w: Schema %q is too long by %d bytes: Postgres would cut it off", ErrInvalid, cfg.Schema, more))
	}
	if cfg.ListenURL != "" {
		if _, err := pgxpool.ParseConfig(cfg.ListenURL); err != nil { // pgx leaves the password out
			errs = append(errs, fmt.Errorf("%w: ListenURL: %w", ErrInvalid, err))
		}
	}
	return errors.Join(errs...)
}

// PostgresStore is a [Store] in a PostgreSQL database, version 13 or later. All
// times are those of the database's clock.
//
// Leases have connections of their own, so that renewals never wait behind the
// application's queries: usually one, and more, up to the size of the pool but at
// least four, while many leases are busy at the same moment. Where standbys watch,
// one more listens for all of them.
//
// All methods are safe for concurrent use.
type PostgresStore struct {
	pool   *pgxpool.Pool
	owned  bool
	leases *leasePool
	cfg    PostgresConfig
	tables postgresTables
	sql    postgresStatements

	refused error // what is wrong with the config

	// found is nil until the database has been looked at.
	found atomic.Pointer[postgresSetup]

	pruned  atomic.Int64 // when tombstones were last pruned, in Unix seconds
	watches postgresWatches
}

var _ interface {
	Store
	Lister
	Fencer
	Watcher
} = (*PostgresStore)(nil)

// NewPostgresStore returns a store that uses the caller's pool, which stays the
// caller's to close. It does no I/O. What leases need beside the pool they open
// with its settings when they need it; Close closes that. All calls of a store whose
// config cannot be served are [ErrInvalid]. It panics if pool is nil.
func NewPostgresStore(pool *pgxpool.Pool, cfg PostgresConfig) *PostgresStore {
	if pool == nil {
		panic("tenure: NewPostgresStore: pool is nil")
	}
	if cfg.Table == "" {
		cfg.Table = "objects"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	tables := newPostgresTables(cfg.Schema, cfg.Table)
	s := &PostgresStore{
		pool:   pool,
		leases: newLeasePool(pool.Config()),
		cfg:    cfg,
		tables: tables,
		sql:    newPostgresStatements(tables),
	}
	s.refused = cfg.validate()
	s.pruned.Store(time.Now().Unix())
	s.watches.init(s)
	return s
}

// OpenPostgres opens a small pool of connections of its own and returns a store
// that uses it. It waits for a database that is down, until ctx ends; one that
// refuses the role or does not exist is an [ErrSetup] at once. The pool_* and
// all other parameters of pgxpool may stand in the URL. Of pool_max_conns, by
// default 4, there are as many for the leases and as many for all else; none is
// opened before it is needed.
func OpenPostgres(ctx context.Context, url string, cfg PostgresConfig) (*PostgresStore, error) {
	if url == "" {
		return nil, fmt.Errorf("tenure: open Postgres: %w: the URL is empty", ErrInvalid)
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("tenure: open Postgres: %w", err)
	}
	poolConfig, err := pgxpool.ParseConfig(url)
	if err != nil {
		if !strings.HasPrefix(url, "postgres") {
			err = fmt.Errorf("%w; want postgres://user:password@host:port/database", err)
		}
		return nil, fmt.Errorf("tenure: open Postgres: %w: %w", ErrInvalid, err) // pgx leaves the password out
	}
	if !strings.Contains(url, "pool_max_conns") {
		poolConfig.MaxConns = 4
	}
	if poolConfig.ConnConfig.ConnectTimeout == 0 {
		poolConfig.ConnConfig.ConnectTimeout = connectTimeout
	}
	if _, ok := poolConfig.ConnConfig.RuntimeParams["application_name"]; !ok {
		poolConfig.ConnConfig.RuntimeParams["application_name"] = "tenure"
	}
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, fmt.Errorf("tenure: open Postgres: %w", err)
	}
	store := NewPostgresStore(pool, cfg)
	store.owned = true
	store.leases.config.MaxConns = poolConfig.MaxConns
	err = store.whenUp(ctx, func() error {
		_, err := store.setup(leaseCall(ctx)) // on a connection that will be needed
		if errors.Is(err, errNoTable) {
			return nil // Migrate makes it
		}
		return err
	})
	if err != nil {
		store.Close()
		return nil, fmt.Errorf("tenure: open Postgres: %w", err)
	}
	return store, nil
}

// Close closes the connections that the store has opened: those of leases and of
// watches, and the pool if it is [OpenPostgres]'s. It waits for calls that are
// under way, and some seconds for a server that does not answer. Coordinators
// should have ended before.
func (s *PostgresStore) Close() error {
	var watches sync.WaitGroup
	watches.Go(s.watches.close) // beside the others: a server that does not answer takes its time of each
	s.leases.close()
	if s.owned {
		s.pool.Close()
	}
	watches.Wait()
	return nil
}

// SingleReplica returns false: anybody may reach the database.
func (s *PostgresStore) SingleReplica() bool { return false }

// Get implements [Store].
func (s *PostgresStore) Get(ctx context.Context, key Key) (Object, error) {
	if err := key.Validate(); err != nil {
		return Object{}, opError(ctx, "get", key, err)
	}
	var r row
	var nowUS int64
	err := s.readRow(ctx, s.sql.get, []any{key.Type, key.ID},
		&r.name, &r.labels, &r.payload, &r.version, &r.created, &r.updated, &nowUS)
	if err != nil {
		return Object{}, opError(ctx, "get", key, s.explain(unreadable(err)))
	}
	return r.object(key, time.UnixMicro(nowUS)), nil
}

// List implements [Lister].
func (s *PostgresStore) List(ctx context.Context, objectType, after string, limit int) ([]Object, error) {
	if err := validList(objectType, after, limit); err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, err)
	}
	pool, _, err := s.conns(ctx)
	if err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, err)
	}
	rows, err := pool.Query(ctx, s.sql.list, objectType, after, limit)
	if err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, s.explain(err))
	}
	objects, err := pgx.CollectRows(rows, func(rows pgx.CollectableRow) (Object, error) {
		var r row
		var nowUS int64
		key := Key{Type: objectType}
		err := rows.Scan(&key.ID, &r.name, &r.labels, &r.payload, &r.version, &r.created, &r.updated, &nowUS)
		return r.object(key, time.UnixMicro(nowUS)), err
	})
	if err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, s.explain(unreadable(err)))
	}
	return objects, nil
}

// PutIf implements [Store].
func (s *PostgresStore) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	return s.putIf(ctx, obj, cond, nil)
}

// putIf is PutIf, fenced by a term unless that is nil.
func (s *PostgresStore) putIf(ctx context.Context, obj Object, cond WriteCondition, fence *Term) (Object, error) {
	if err := errors.Join(obj.Validate(), cond.Validate(), fence.fenceFor(obj.Key)); err != nil {
		return Object{}, opError(ctx, "put", obj.Key, err)
	}
	r, err := s.put(ctx, obj, cond, fence)
	if err != nil {
		return Object{}, opError(ctx, "put", obj.Key, s.explain(err))
	}
	return r.written(obj), nil
}

func (s *PostgresStore) put(ctx context.Context, obj Object, cond WriteCondition, fence *Term) (row, error) {
	if cond.kind == matchVersion {
		r, err := s.replace(ctx, obj, cond, fence)
		if !errors.Is(err, pgx.ErrNoRows) {
			return r, err
		}
		current, err := s.version(ctx, obj.Key)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return row{}, err
		}
		return row{}, &ConflictError{Key: obj.Key, Wanted: cond.version, Current: current}
	}
	// What was in the way may be gone before we ask for it; three times, and it is
	// others' doing.
	for range 3 {
		if cond.kind == unconditional {
			if r, err := s.replace(ctx, obj, cond, fence); !errors.Is(err, pgx.ErrNoRows) {
				return r, err
			}
		}
		r, err := s.create(ctx, obj, fence)
		if !errors.Is(err, pgx.ErrNoRows) {
			return r, err
		}
		if err := s.inTheWay(ctx, obj, cond); err != nil {
			return row{}, err
		}
	}
	if cond.kind == mustCreate {
		return row{}, ErrExists
	}
	return row{}, &ConflictError{Key: obj.Key}
}

// replace writes an object that exists, in one round trip, or returns
// [pgx.ErrNoRows].
func (s *PostgresStore) replace(ctx context.Context, obj Object, cond WriteCondition, fence *Term) (r row, err error) {
	err = s.inTime(ctx, func(pool *pgxpool.Pool, bounded bool) error {
		statement, args := s.sql.replace, []any{obj.Key.Type, obj.Key.ID, nameColumn(obj.Name), encodeLabels(obj.Labels),
			payloadColumn(obj.Payload), cond.version}
		if !bounded {
			statement, args = s.sql.replaceInTime, append(args, lockTimeout(ctx))
		}
		return s.writeOne(ctx, pool, statement, args, fence, &r.version, &r.created, &r.updated)
	})
	return r, err
}

// create inserts an object, in one round trip, or returns [pgx.ErrNoRows] where
// something is in its way.
func (s *PostgresStore) create(ctx context.Context, obj Object, fence *Term) (r row, err error) {
	setup, err := s.setup(ctx)
	if err != nil {
		return row{}, err
	}
	args := []any{obj.Key.Type, obj.Key.ID, nameColumn(obj.Name), encodeLabels(obj.Labels), payloadColumn(obj.Payload)}
	if setup.tombstones && fence == nil {
		err = s.inTime(ctx, func(pool *pgxpool.Pool, bounded bool) error {
			batch := s.newBatch(ctx, bounded)
			answer := batch.Queue(s.sql.insertNumbered, args...)
			batch.Queue(s.sql.checkNumber, obj.Key.Type, obj.Key.ID)
			return s.sendWrite(ctx, pool, batch, answer, nil, &r.version, &r.created, &r.updated)
		})
		if sqlState(err) != divisionByZeroState {
			return r, err
		}
	}
	// The insert may have waited for another transaction that deleted the object,
	// and its version, computed before, is below the deleted one's. So the row is
	// numbered by a statement of its own, which sees what was waited for.
	number := s.sql.number
	if !setup.tombstones {
		number = s.sql.numberByClock
	}
	err = s.inTime(ctx, func(pool *pgxpool.Pool, bounded bool) error {
		batch := s.newBatch(ctx, bounded)
		batch.Queue(s.sql.insert, args...)
		answer := batch.Queue(number, obj.Key.Type, obj.Key.ID)
		return s.sendWrite(ctx, pool, batch, answer, fence, &r.version, &r.created, &r.updated)
	})
	return r, err
}

// newBatch returns a batch whose statements wait for locks no longer than ctx
// allows.
func (s *PostgresStore) newBatch(ctx context.Context, bounded bool) *pgx.Batch {
	batch := &pgx.Batch{}
	if !bounded {
		batch.Queue(s.sql.setLockTimeout, lockTimeout(ctx))
	}
	return batch
}

// writeOne is sendWrite for a write of one statement, which by itself needs no
// pipeline.
func (s *PostgresStore) writeOne(ctx context.Context, pool *pgxpool.Pool, statement string, args []any, fence *Term, dest ...any) error {
	if fence == nil {
		return pool.QueryRow(ctx, statement, args...).Scan(dest...)
	}
	batch := &pgx.Batch{}
	return s.sendWrite(ctx, pool, batch, batch.Queue(statement, args...), fence, dest...)
}

// sendWrite sends the statements of one write, which are one transaction, and
// scans the row of one of them, or returns [pgx.ErrNoRows]. A fence is checked
// behind them, before they commit.
func (s *PostgresStore) sendWrite(ctx context.Context, pool *pgxpool.Pool, batch *pgx.Batch, answer *pgx.QueuedQuery, fence *Term, dest ...any) error {
	var noRow error
	answer.QueryRow(func(written pgx.Row) error {
		err := written.Scan(dest...)
		if errors.Is(err, pgx.ErrNoRows) {
			noRow, err = err, nil // let the fence be heard
		}
		return err
	})
	if fence != nil {
		s.queueFence(ctx, batch, fence)
		fence.giveWay(ctx)
	}
	err := pool.SendBatch(ctx, batch).Close()
	if fence != nil && sqlState(err) == divisionByZeroState {
		return s.fencedOut(ctx, fence, err)
	}
	return cmp.Or(err, noRow)
}

// inTheWay says why an object could not be created: [ErrExists] or [ErrTaken];
// nil where the reason is gone meanwhile, or is to be replaced.
func (s *PostgresStore) inTheWay(ctx context.Context, obj Object, cond WriteCondition) error {
	switch _, err := s.version(ctx, obj.Key); {
	case err == nil && cond.kind == mustCreate:
		return ErrExists
	case err == nil:
		return nil
	case !errors.Is(err, pgx.ErrNoRows):
		return err
	}
	setup, err := s.setup(ctx)
	if err != nil {
		return err
	}
	var other Key
	err = s.readRow(ctx, s.sql.nameTaken, []any{obj.Key.Type, obj.Key.ID, obj.Name}, &other.Type, &other.ID)
	if errors.Is(err, pgx.ErrNoRows) && setup.idAlone {
		err = s.readRow(ctx, s.sql.idTaken, []any{obj.Key.Type, obj.Key.ID}, &other.Type, &other.ID)
	}
	switch {
	case err == nil:
		return fmt.Errorf("%w: %s", ErrTaken, other)
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	default:
		return err
	}
}

// version returns the object's current version, or [pgx.ErrNoRows].
func (s *PostgresStore) version(ctx context.Context, key Key) (v int64, err error) {
	err = s.readRow(ctx, s.sql.version, []any{key.Type, key.ID}, &v)
	return v, err
}

// DeleteIf implements [Store].
func (s *PostgresStore) DeleteIf(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, nil, false)
}

// DeleteAndWake implements [Watcher].
func (s *PostgresStore) DeleteAndWake(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, nil, true)
}

// deleteIf is DeleteIf or DeleteAndWake, fenced by a term unless that is nil.
func (s *PostgresStore) deleteIf(ctx context.Context, key Key, version int64, fence *Term, wake bool) error {
	if err := errors.Join(key.Validate(), validVersion(version), fence.fenceFor(key)); err != nil {
		return opError(ctx, "delete", key, err)
	}
	if err := s.remove(ctx, key, version, fence, wake); err != nil {
		return opError(ctx, "delete", key, s.explain(err))
	}
	return nil
}

func (s *PostgresStore) remove(ctx context.Context, key Key, version int64, fence *Term, wake bool) error {
	setup, err := s.setup(ctx)
	if err != nil {
		return err
	}
	var gone int
	send := func(pool *pgxpool.Pool, bounded bool) error {
		statements := s.sql.remove[removeKind{buries: setup.tombstones, wakes: wake}]
		statement, args := statements.plain, []any{key.Type, key.ID, version}
		if wake {
			args = append(args, s.watches.channel, setup.hint(key))
		}
		if !bounded {
			statement, args = statements.inTime, append(args, lockTimeout(ctx))
		}
		return s.writeOne(ctx, pool, statement, args, fence, &gone, nil, nil)
	}
	err = s.inTime(ctx, send)
	if wake && cannotNotify(err) {
		wake = false // better a standby that looks later than a lease that stands
		err = s.inTime(ctx, send)
	}
	if err != nil {
		return err
	}
	if gone == 1 {
		s.prune(ctx, setup, time.Hour)
		return nil
	}
	current, err := s.version(ctx, key)
	if err != nil {
		return err
	}
	return &ConflictError{Key: key, Wanted: version, Current: current}
}

// cannotNotify reports whether a statement may have failed for its notification:
// the queue is full, or the role may not.
func cannotNotify(err error) bool {
	code := sqlState(err)
	return code == "42501" || strings.HasPrefix(code, "54")
}

// prune deletes tombstones that are old enough, unless that was done lately, once
// a delete is done. There is no index that tells which are: it would cost each
// delete more than this search costs all of them.
func (s *PostgresStore) prune(ctx context.Context, setup *postgresSetup, lately time.Duration) {
	last, now := s.pruned.Load(), time.Now().Unix()
	if !setup.tombstones || now-last < int64(lately.Seconds()) || !s.pruned.CompareAndSwap(last, now) {
		return
	}
	pool, _, err := s.conns(ctx)
	if err == nil {
		var done pgconn.CommandTag
		done, err = pool.Exec(ctx, s.sql.prune)
		if done.RowsAffected() == pruneAtMost {
			s.pruned.Store(0) // the next delete goes on
		}
	}
	if err != nil {
		s.cfg.Logger.Warn("old tombstones are not deleted; the next try is in an hour", "table", s.tables.tombstones, "error", err)
	}
}

// lockTimeout returns how long a statement may wait for a lock, in
// milliseconds: a little less than ctx allows, so that it is the server that
// ends the wait, which keeps the connection. It is NULL where ctx has no
// deadline.
func lockTimeout(ctx context.Context) sql.NullString {
	deadline, ok := ctx.Deadline()
	if !ok {
		return sql.NullString{}
	}
	left := time.Until(deadline)
	left -= min(left/10, 200*time.Millisecond)
	return sql.NullString{String: strconv.FormatInt(min(max(1, left.Milliseconds()), math.MaxInt32), 10), Valid: true}
}
