package tenure

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/record"
)

// PostgresConfig configures a [PostgresStore]. The zero value is ready to use.
type PostgresConfig struct {
	// Schema is where the tables are. Default: the schemas in which the search_path of the
	// store's own connections finds them, except temporary tables. In either case every
	// statement names the schema.
	Schema string
	Table  string       // default "objects"
	Logger *slog.Logger // default slog.Default()

	// PollOnly keeps the store from holding a connection to listen on. Its standbys then find
	// a released lease by polling, within their AcquireInterval.
	PollOnly bool

	// ListenURL is where to listen, for a pool behind a transaction-mode pooler, which does
	// not deliver notifications. No log shows it, because it may contain a password. Default: as
	// the pool.
	ListenURL string `json:"-"`

	// Lossless says that no failover of this database loses an acknowledged write, as on Aurora, on
	// storage that is replicated synchronously, or where every commit waits for a standby. Replicas
	// then don't wait after a failover, and take a free lease at once. If Lossless is set and a
	// failover loses a write after all, two replicas may hold the lease. Lossless must be the same
	// in all replicas.
	Lossless bool
}

// String names the table but not the ListenURL, which may contain a password.
func (cfg PostgresConfig) String() string {
	return fmt.Sprintf("{Schema:%q Table:%q PollOnly:%t}", cfg.Schema, cfg.Table, cfg.PollOnly)
}

// PostgresStore is a [Store] in a PostgreSQL database, version 13 or later. All
// times are those of the database's clock.
//
// Leases have connections of their own, so that renewals never wait behind the application's
// queries: usually one, and more while many leases are busy at the same moment or some wait for
// locks, up to the size of the pool but at least four. Leases that write at the same moment share
// transactions, and so need few connections. They do not share them if the pool has a PrepareConn
// hook, which may depend on the context of a single call, or if the connections prepare no
// statements, as behind a pooler. Connections older than the pool's MaxConnLifetime are replaced:
// a new one is opened first, and if the server has no slot for it, the old ones are kept. An idle
// connection is kept for at least half an hour. Where standbys watch, one more connection listens
// for all of them.
//
// A call whose context has no deadline takes at most 30 s, with two exceptions: [OpenPostgres] and
// Migrate wait for a database, and a func of Fenced takes as long as it likes.
//
// All methods are safe for concurrent use.
type PostgresStore struct {
	tables
	conns *pgconns.Conns
	table *pgobjects.Table // is all of tables
}

var _ Database = (*PostgresStore)(nil)

// NewPostgresStore returns a store that uses the caller's pool, which the caller has to close. It
// does no I/O. Leases open further connections with the pool's settings when they need them;
// Close closes these. A pool that is nil, or a config that no database can serve, is [ErrInvalid].
func NewPostgresStore(pool *pgxpool.Pool, cfg PostgresConfig) (*PostgresStore, error) {
	if pool == nil {
		return nil, fmt.Errorf("tenure: new Postgres store: %w: pool is nil", ErrInvalid)
	}
	if err := pgobjects.Config(cfg).Validate(); err != nil {
		return nil, fmt.Errorf("tenure: new Postgres store: %w", err)
	}
	return newPostgresStore(pgconns.New(pool), cfg), nil
}

func newPostgresStore(conns *pgconns.Conns, cfg PostgresConfig) *PostgresStore {
	cfg.Table = cmp.Or(cfg.Table, "objects")
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	table := pgobjects.New(conns, pgobjects.Config(cfg))
	return &PostgresStore{tables{all: table}, conns, table}
}

// OpenPostgres opens a small pool of its own and returns a store that uses it. It waits for a
// database that is down until ctx ends; a database that refuses the role or does not exist is an
// [ErrSetup] at once. Of several hosts in the URL it uses one that accepts writes, unless
// target_session_attrs says otherwise. The URL may contain the pool_* and all other parameters of
// pgxpool. Each new connection reads a password that is in a file (passfile, service) anew, as it may
// have been rotated. There are up to pool_max_conns connections, by default 4, for the leases, and as many
// for everything else; none is opened before it is needed.
func OpenPostgres(ctx context.Context, url string, cfg PostgresConfig) (*PostgresStore, error) {
	if url == "" {
		return nil, fmt.Errorf("tenure: open Postgres: %w: the URL is empty", ErrInvalid)
	}
	if err := pgobjects.Config(cfg).Validate(); err != nil {
		return nil, fmt.Errorf("tenure: open Postgres: %w", err)
	}
	config, err := pgconns.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("tenure: open Postgres: %w: %w", ErrInvalid, err)
	}
	if !strings.Contains(url, "pool_max_conns") {
		config.MaxConns = 4
	}
	if _, ok := config.ConnConfig.RuntimeParams["application_name"]; !ok {
		config.ConnConfig.RuntimeParams["application_name"] = "tenure"
	}
	conns, err := pgconns.Open(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("tenure: open Postgres: %w", err)
	}
	store := newPostgresStore(conns, cfg)
	if err := store.table.AwaitServer(ctx); err != nil {
		store.Close()
		return nil, fmt.Errorf("tenure: open Postgres: %w", err)
	}
	return store, nil
}

// Pool returns the pool of the application's connections: the caller's, or the one that
// [OpenPostgres] opened, which Close closes. Leases do not use it.
func (s *PostgresStore) Pool() *pgxpool.Pool { return s.conns.Pool }

// DB returns a database/sql handle whose connections are those of Pool. Close closes the handle.
func (s *PostgresStore) DB() *sql.DB { return s.conns.DB() }

// Close closes the connections that the store has opened: those of leases and of watches, and
// the pool if [OpenPostgres] opened it. It waits a few seconds for calls that are under way and for
// a server that does not answer; then it cuts these connections off, and the calls fail. End all
// coordinators first.
func (s *PostgresStore) Close() error {
	s.table.Close()
	return nil
}

// Migrate creates what is missing: the schema, the table, and the table of tombstones. It
// changes nothing that exists, and may be called at every start, by many replicas at
// once. Like [OpenPostgres] it waits for a database that is down. It returns [ErrSetup] if
// the role may not create what is missing, if a column has a type that does not fit, if a crash
// would empty the table (it, or a partition, is UNLOGGED), or if row-level security hides it from
// the role. The table of tombstones is not required: without it, Migrate logs a warning. The func
// Migrate of package claims creates the tables that claims need.
func (s *PostgresStore) Migrate(ctx context.Context) error {
	if err := s.table.Migrate(ctx); err != nil {
		return fmt.Errorf("tenure: migrate %s: %w", s.table, err)
	}
	return nil
}

// resume implements resumer.
func (s *PostgresStore) resume(ctx context.Context, key Key, term, lineage, server string) (Object, error) {
	if s.fence != nil { // writes have to be fenced, and only PutIf does that
		return Object{}, ErrNotFound
	}
	r, err := s.table.Resume(ctx, objects.ID(key), record.TermPart(term), record.Resumable, []string{record.Requested, record.Final}, record.Marked, lineage, server)
	if err != nil {
		return Object{}, opError(ctx, "put", key, err)
	}
	return objectOf(r), nil
}

// Traits implements [Store].
func (s *PostgresStore) Traits() Traits { return Traits{} }

// Lineage implements [Store].
func (s *PostgresStore) Lineage(ctx context.Context) (Lineage, error) {
	on, err := s.table.Lineage(ctx)
	if err != nil {
		return Lineage{}, fmt.Errorf("tenure: look at the lineage of %s: %w", s.table, err)
	}
	return Lineage(on), nil
}

// Watch implements [Watcher].
func (s *PostgresStore) Watch(key Key) Subscription {
	if watch := s.table.Watch(objects.ID(key)); watch != nil {
		return watch
	}
	return noHints{}
}

// Fenced runs fn in a transaction whose writes, to any tables of this database, commit only if
// the guard's right stands: a term is still the lease's, or a claim has not ended. A nil guard is the term or the
// claim for which the func runs that ctx comes from; it must be in this store. If it does not stand, Fenced returns
// [ErrLost] and nothing is written. An error or panic of fn rolls back and is passed on. If the connection fails during the commit, the
// writes may have been committed or not, as with any commit, but never after another term began.
//
// The lease is not locked while fn runs, so neither renewals nor a takeover wait for it; only
// deferred constraints, which run with the commit, delay them. The server ends a transaction that
// idles for a minute, or for about two TTLs if that is longer, so that a holder that is paused in fn
// does not keep its row locks.
//
// fn must use tx and not the store, must not end the transaction itself (Commit and Rollback
// return errors, and COMMIT as SQL makes Fenced return [ErrInvalid]), and should return the first
// error of a statement. Its first statement may choose another isolation level. Above READ
// COMMITTED the server ends the transaction with a serialization failure (40001) if the lease was
// renewed in the meantime; then try again.
//
// With InsertTx of River, as in the [example for River], a former holder enqueues no jobs.
//
// [example for River]: https://github.com/tenurelib/tenure/blob/main/examples/integrations/river_test.go
func (s *PostgresStore) Fenced(ctx context.Context, guard Guard, fn func(tx pgx.Tx) error) error {
	fence, err := fenceOf("fenced", guardOf(ctx, guard))
	switch {
	case err != nil:
		return err
	case fn == nil:
		return fmt.Errorf("tenure: fenced: %w: fn is nil", ErrInvalid)
	case fence == nil:
		return pgx.BeginFunc(ctx, s.conns.Pool, fn)
	}
	fnErr, err := s.table.Fenced(ctx, fence, fn)
	if err != nil {
		return fencedBy(ctx, fence, err)
	}
	return fnErr
}

// place finds out in which schemas the tables are, which FenceStatement has to know.
func (s *PostgresStore) place(ctx context.Context, fence *objects.Fence) error {
	return s.table.Place(ctx, fence)
}

// renew renews what a fence depends on, if this process does that.
func (s *PostgresStore) renew(ctx context.Context, fence *objects.Fence) error {
	return s.table.Renew(ctx, fence)
}

// Fence implements [Fencer].
func (s *PostgresStore) Fence(guard Guard) (Store, error) {
	fenced, err := s.fencedBy(guard)
	if err != nil {
		return nil, err
	}
	return &PostgresStore{fenced, s.conns, s.table}, nil
}
