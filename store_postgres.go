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
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// PostgresConfig configures a [PostgresStore]. The zero value serves.
type PostgresConfig struct {
	Schema string       // default: the first schema of the search_path that has the table
	Table  string       // default "objects"
	Logger *slog.Logger // default slog.Default()
}

// PostgresStore is a [Store] in a PostgreSQL database, version 13 or later. All
// times are those of the database's clock.
//
// All methods are safe for concurrent use.
type PostgresStore struct {
	pool   *pgxpool.Pool
	owned  bool
	cfg    PostgresConfig
	tables postgresTables
	sql    postgresStatements

	// found is nil until the database has been looked at.
	found atomic.Pointer[postgresSetup]

	// fencing has a place for each transaction of Fenced: one less than the pool
	// has connections, for the renewals that must go on meanwhile.
	fencing chan struct{}
}

var _ interface {
	Store
	Lister
	Fencer
} = (*PostgresStore)(nil)

// NewPostgresStore returns a store that uses the caller's pool, which stays the
// caller's to close. It does no I/O. A pool that the application keeps busy
// makes renewals wait; [OpenPostgres] opens one of the store's own.
func NewPostgresStore(pool *pgxpool.Pool, cfg PostgresConfig) *PostgresStore {
	if cfg.Table == "" {
		cfg.Table = "objects"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	tables := newPostgresTables(cfg.Schema, cfg.Table)
	return &PostgresStore{
		pool:    pool,
		cfg:     cfg,
		tables:  tables,
		sql:     newPostgresStatements(tables),
		fencing: make(chan struct{}, max(1, pool.Config().MaxConns-1)),
	}
}

// OpenPostgres opens a small pool of connections of its own and returns a store
// that uses it. It waits for a database that is down, until ctx ends; one that
// refuses the role or does not exist is an [ErrSetup] at once. The pool_* and
// all other parameters of pgxpool may stand in the URL.
func OpenPostgres(ctx context.Context, url string, cfg PostgresConfig) (*PostgresStore, error) {
	if url == "" {
		return nil, fmt.Errorf("tenure: open Postgres: %w: the URL is empty", ErrInvalid)
	}
	poolConfig, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("tenure: open Postgres: %w: %w", ErrInvalid, err) // pgx leaves the password out
	}
	if !strings.Contains(url, "pool_max_conns") {
		poolConfig.MaxConns = 4
	}
	if poolConfig.ConnConfig.ConnectTimeout == 0 {
		poolConfig.ConnConfig.ConnectTimeout = 5 * time.Second
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
	err = store.whenUp(ctx, func() error {
		_, err := store.setup(ctx)
		if errors.Is(err, errNoTable) {
			return nil // Migrate makes it
		}
		return err
	})
	if err != nil {
		pool.Close()
		return nil, fmt.Errorf("tenure: open Postgres: %w", err)
	}
	return store, nil
}

// Close closes the pool if [OpenPostgres] opened it.
func (s *PostgresStore) Close() error {
	if s.owned {
		s.pool.Close()
	}
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
	err := s.pool.QueryRow(ctx, s.sql.get, key.Type, key.ID).
		Scan(&r.name, &r.labels, &r.payload, &r.version, &r.created, &r.updated, &nowUS)
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
	rows, err := s.pool.Query(ctx, s.sql.list, objectType, after, limit)
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
	args := []any{obj.Key.Type, obj.Key.ID, nameColumn(obj.Name), encodeLabels(obj.Labels),
		payloadColumn(obj.Payload), cond.version, lockTimeout(ctx)}
	if fence == nil {
		err = s.pool.QueryRow(ctx, s.sql.replace, args...).Scan(&r.version, &r.created, &r.updated)
		return r, err
	}
	batch := &pgx.Batch{}
	batch.Queue(s.sql.replace, args...)
	return r, s.sendWrite(ctx, batch, fence, &r.version, &r.created, &r.updated)
}

// create inserts an object, in one round trip, or returns [pgx.ErrNoRows] where
// something is in its way.
func (s *PostgresStore) create(ctx context.Context, obj Object, fence *Term) (r row, err error) {
	setup, err := s.setup(ctx)
	if err != nil {
		return row{}, err
	}
	number := s.sql.number
	if !setup.tombstones {
		number = s.sql.numberByClock
	}
	// The insert may wait for another transaction that deletes the object, and a
	// version computed before would be below the deleted one's. So the row is
	// numbered by a statement of its own, which sees what was waited for.
	batch := &pgx.Batch{}
	batch.Queue(s.sql.setLockTimeout, lockTimeout(ctx))
	batch.Queue(s.sql.insert, obj.Key.Type, obj.Key.ID, nameColumn(obj.Name), encodeLabels(obj.Labels), payloadColumn(obj.Payload))
	batch.Queue(number, obj.Key.Type, obj.Key.ID)
	return r, s.sendWrite(ctx, batch, fence, &r.version, &r.created, &r.updated)
}

// sendWrite sends the statements of one write, which are one transaction, and
// scans the row of the last, or returns [pgx.ErrNoRows]. A fence is checked
// behind them, before they commit.
func (s *PostgresStore) sendWrite(ctx context.Context, batch *pgx.Batch, fence *Term, dest ...any) error {
	var noRow error
	batch.QueuedQueries[batch.Len()-1].QueryRow(func(written pgx.Row) error {
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
	err := s.pool.SendBatch(ctx, batch).Close()
	if fence != nil && sqlState(err) == fencedOutState {
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
	err = s.pool.QueryRow(ctx, s.sql.nameTaken, obj.Key.Type, obj.Key.ID, obj.Name).Scan(&other.Type, &other.ID)
	if errors.Is(err, pgx.ErrNoRows) && setup.idAlone {
		err = s.pool.QueryRow(ctx, s.sql.idTaken, obj.Key.Type, obj.Key.ID).Scan(&other.Type, &other.ID)
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
	err = s.pool.QueryRow(ctx, s.sql.version, key.Type, key.ID).Scan(&v)
	return v, err
}

// DeleteIf implements [Store].
func (s *PostgresStore) DeleteIf(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, nil)
}

// deleteIf is DeleteIf, fenced by a term unless that is nil.
func (s *PostgresStore) deleteIf(ctx context.Context, key Key, version int64, fence *Term) error {
	if err := errors.Join(key.Validate(), validVersion(version), fence.fenceFor(key)); err != nil {
		return opError(ctx, "delete", key, err)
	}
	if err := s.remove(ctx, key, version, fence); err != nil {
		return opError(ctx, "delete", key, s.explain(err))
	}
	return nil
}

func (s *PostgresStore) remove(ctx context.Context, key Key, version int64, fence *Term) error {
	setup, err := s.setup(ctx)
	if err != nil {
		return err
	}
	remove := s.sql.remove
	switch {
	case !setup.tombstones:
		remove = s.sql.removeOnly
	case fence != nil:
		remove = s.sql.removeFenced
	}
	batch := &pgx.Batch{}
	batch.Queue(remove, key.Type, key.ID, version, lockTimeout(ctx))
	var gone int
	if err := s.sendWrite(ctx, batch, fence, &gone); err != nil {
		return err
	}
	if gone == 1 {
		return nil
	}
	current, err := s.version(ctx, key)
	if err != nil {
		return err
	}
	return &ConflictError{Key: key, Wanted: version, Current: current}
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
	left -= min(left/10, 50*time.Millisecond)
	return sql.NullString{String: strconv.FormatInt(min(max(1, left.Milliseconds()), math.MaxInt32), 10), Valid: true}
}
