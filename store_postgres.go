package tenure

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
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

// String names the table, and not the ListenURL, which may hold a password.
func (cfg PostgresConfig) String() string {
	return fmt.Sprintf("{Schema:%q Table:%q PollOnly:%t}", cfg.Schema, cfg.Table, cfg.PollOnly)
}

// LogValue makes logs show the config as [PostgresConfig.String] does.
func (cfg PostgresConfig) LogValue() slog.Value { return slog.StringValue(cfg.String()) }

// validate returns an [ErrInvalid] for a config that no database can serve.
func (cfg PostgresConfig) validate() error {
	const longest = 63 // bytes; Postgres cuts off what is longer
	errs := []error{objects.ValidTable(cfg.Table), objects.ValidText("Schema", cfg.Schema)}
	if more := len(cfg.Table+objects.TombstonesSuffix) - longest; more > 0 {
		errs = append(errs, fmt.Errorf("%w: Table %q is too long by %d bytes: with %q behind it Postgres would cut it off",
			ErrInvalid, cfg.Table, more, objects.TombstonesSuffix))
	}
	if more := len(cfg.Schema) - longest; more > 0 {
		errs = append(errs, fmt.Errorf("%w: Schema %q is too long by %d bytes: Postgres would cut it off", ErrInvalid, cfg.Schema, more))
	}
	if cfg.ListenURL != "" {
		if _, err := pgconns.ParseURL(cfg.ListenURL); err != nil {
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
// least four, while many leases are busy at the same moment, or some wait for locks.
// Those that write at the same moment share transactions, and so need few
// connections, unless the pool has a PrepareConn hook, which may go by the context
// of a single call, or the connections prepare no statements, as behind a pooler.
// When they are older than the pool's MaxConnLifetime they are replaced: a new one is
// opened first, and if the server has no slot for it the old ones are kept. An idle
// one is kept for at least half an hour. Where standbys watch, one more connection
// listens for all of them.
//
// All methods are safe for concurrent use.
type PostgresStore struct {
	pool   *pgxpool.Pool
	owned  bool
	config *pgxpool.Config // of connections beside the pool
	cutter *pgconns.Cutter // of all connections but those of a caller's pool
	leases *leasePool
	cfg    PostgresConfig
	tables postgresTables
	sql    postgresStatements

	// found is nil until the store has looked at the database, and while what it found
	// there is unfit.
	found   atomic.Pointer[postgresSetup]
	told    atomic.Pointer[postgresSetup] // what was last logged
	looking atomic.Bool                   // a call is looking again, because found is old
	reached atomic.Bool                   // the database has answered at least once

	pruned  atomic.Int64 // when tombstones were last pruned, in Unix seconds
	watches postgresWatches
	groups  writeGroups
}

var _ interface {
	Store
	Lister
	Fencer
	Watcher
	Notifier
} = (*PostgresStore)(nil)

// NewPostgresStore returns a store that uses the caller's pool, which stays the
// caller's to close. It does no I/O. What leases need beside the pool they open
// with its settings when they need it; Close closes that. A pool that is nil, or a
// config that no database can serve, is [ErrInvalid].
func NewPostgresStore(pool *pgxpool.Pool, cfg PostgresConfig) (*PostgresStore, error) {
	if pool == nil {
		return nil, fmt.Errorf("tenure: new Postgres store: %w: pool is nil", ErrInvalid)
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("tenure: new Postgres store: %w", err)
	}
	return newPostgresStore(pool, cfg, pgconns.NewCutter(), pool.Config().ConnConfig.DialFunc), nil
}

// newPostgresStore returns a store that dials its own connections with dial, and cuts
// them off with cutter.
func newPostgresStore(pool *pgxpool.Pool, cfg PostgresConfig, cutter *pgconns.Cutter, dial pgconn.DialFunc) *PostgresStore {
	if cfg.Table == "" {
		cfg.Table = "objects"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	tables := newPostgresTables(cfg.Schema, cfg.Table)
	config := pool.Config()
	config.ConnConfig.DialFunc = cutter.Dial(dial)
	s := &PostgresStore{
		pool:   pool,
		cutter: cutter,
		config: config,
		leases: newLeasePool(config.Copy()),
		cfg:    cfg,
		tables: tables,
		sql:    newPostgresStatements(tables),
	}
	s.pruned.Store(time.Now().Unix())
	s.watches.init(s)
	for _, g := range s.groups.all() {
		g.store = s
	}
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
	poolConfig, err := pgconns.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("tenure: open Postgres: %w: %w", ErrInvalid, err)
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
	cutter, dial := pgconns.NewCutter(), poolConfig.ConnConfig.DialFunc
	poolConfig.ConnConfig.DialFunc = cutter.Dial(dial)
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, fmt.Errorf("tenure: open Postgres: %w", err)
	}
	store := newPostgresStore(pool, cfg, cutter, dial)
	store.owned = true
	store.leases.config.MaxConns = poolConfig.MaxConns
	err = store.whenUp(ctx, func() error {
		_, err := store.setup(objects.WithLeaseCall(ctx)) // on a connection that will be needed
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

// closeTimeout is how long Close waits before it cuts connections off.
const closeTimeout = 4 * time.Second

// Close closes the connections that the store has opened: those of leases and of
// watches, and the pool if it is [OpenPostgres]'s. It waits some seconds for calls
// that are under way and for a server that does not answer; then it cuts these
// connections off, and the calls fail. Coordinators should have ended before.
func (s *PostgresStore) Close() error {
	defer time.AfterFunc(closeTimeout, s.cutter.Cut).Stop()
	var all sync.WaitGroup
	all.Go(s.watches.close)
	all.Go(s.leases.close)
	if s.owned {
		all.Go(s.pool.Close)
	}
	all.Wait()
	return nil
}

// Get implements [Store].
func (s *PostgresStore) Get(ctx context.Context, key Key) (Object, error) {
	if err := key.Validate(); err != nil {
		return Object{}, opError(ctx, "get", key, err)
	}
	if objects.IsLeaseCall(ctx) && s.found.Load() != nil {
		_, _ = s.setup(ctx) // a standby only reads, and must notice when the table moves
	}
	var r objects.Row
	var nowUS int64
	err := s.readRow(ctx, s.sql.get, []any{key.Type, key.ID},
		&r.Name, &r.Labels, &r.Payload, &r.Version, &r.Created, &r.Updated, &nowUS)
	if err != nil {
		return Object{}, opError(ctx, "get", key, s.explain(unreadable(err)))
	}
	r.ID, r.Age = objects.ID(key), objects.Age(r.Updated, time.UnixMicro(nowUS))
	return objectOf(r), nil
}

// List implements [Lister].
func (s *PostgresStore) List(ctx context.Context, objectType, after string, limit int) ([]Object, error) {
	if err := validList(objectType, after, limit); err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, err)
	}
	pool, _, done, err := s.conns(ctx)
	if err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, err)
	}
	defer done()
	rows, err := pool.Query(ctx, s.sql.list, objectType, after, limit)
	if err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, s.explain(err))
	}
	found, err := pgx.CollectRows(rows, func(rows pgx.CollectableRow) (Object, error) {
		var r objects.Row
		var nowUS int64
		key := Key{Type: objectType}
		err := rows.Scan(&key.ID, &r.Name, &r.Labels, &r.Payload, &r.Version, &r.Created, &r.Updated, &nowUS)
		r.ID, r.Age = objects.ID(key), objects.Age(r.Updated, time.UnixMicro(nowUS))
		return objectOf(r), err
	})
	if err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, s.explain(unreadable(err)))
	}
	return found, nil
}
