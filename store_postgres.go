package tenure

import (
	"cmp"
	"context"
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

// PostgresConfig configures a [PostgresStore]. The zero value serves.
type PostgresConfig struct {
	// Schema is where the tables are. Default: the schemas in which the search_path of the
	// store's own connections finds them, temporary tables aside. Either way every
	// statement names it.
	Schema string
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
// A call whose context has no deadline takes 30 s at most, except that [OpenPostgres] and Migrate
// wait for a database, and that funcs of Fenced take as long as they like.
//
// All methods are safe for concurrent use.
type PostgresStore struct {
	conns *pgconns.Conns
	table *pgobjects.Table
	fence *objects.Fence // that all writes pass; nil: they are not fenced
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
	if err := pgobjects.Config(cfg).Validate(); err != nil {
		return nil, fmt.Errorf("tenure: new Postgres store: %w", err)
	}
	return newPostgresStore(pgconns.New(pool), cfg), nil
}

func newPostgresStore(conns *pgconns.Conns, cfg PostgresConfig) *PostgresStore {
	cfg.Table = cmp.Or(cfg.Table, "objects")
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	return &PostgresStore{conns: conns, table: pgobjects.New(conns, pgobjects.Config(cfg))}
}

// OpenPostgres opens a small pool of connections of its own and returns a store
// that uses it. It waits for a database that is down, until ctx ends; one that
// refuses the role or does not exist is an [ErrSetup] at once. Of several hosts in the
// URL it uses one that admits writes, unless target_session_attrs says otherwise. The pool_* and
// all other parameters of pgxpool may stand in the URL. Of pool_max_conns, by
// default 4, there are as many for the leases and as many for all else; none is
// opened before it is needed.
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

// Backend returns the tables that package claims works on. It is for packages of this module.
func (s *PostgresStore) Backend() objects.Backend { return s.table }

// Close closes the connections that the store has opened: those of leases and of
// watches, and the pool if it is [OpenPostgres]'s. It waits some seconds for calls
// that are under way and for a server that does not answer; then it cuts these
// connections off, and the calls fail. Coordinators should have ended before.
func (s *PostgresStore) Close() error {
	s.table.Close()
	return nil
}

// Migrate creates what is missing: the schema, the table, and the table of tombstones. It
// changes nothing that exists, and may be called at every start, by many replicas at
// once. Like [OpenPostgres] it waits for a database that is down. It returns [ErrSetup] if
// the role may not create what is missing, if a column has a type that does not fit, if a
// crash would empty the table (it, or a partition, is UNLOGGED), and if row-level security
// hides it from the role. The table of tombstones is not required: without it,
// Migrate logs a warning. The func Migrate of package claims creates the tables that claims need.
func (s *PostgresStore) Migrate(ctx context.Context) error {
	if err := s.table.Migrate(ctx); err != nil {
		return fmt.Errorf("tenure: migrate %s: %w", s.table, err)
	}
	return nil
}

// Get implements [Store].
func (s *PostgresStore) Get(ctx context.Context, key Key) (Object, error) {
	return getFrom(ctx, s.table, key)
}

// List implements [Lister].
func (s *PostgresStore) List(ctx context.Context, objectType, after string, limit int) ([]Object, error) {
	return listFrom(ctx, s.table, objectType, after, limit)
}

// PutIf implements [Store].
func (s *PostgresStore) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	return putTo(ctx, s.table, s.fence, obj, cond)
}

// resume implements resumer.
func (s *PostgresStore) resume(ctx context.Context, key Key, term string) (Object, error) {
	if s.fence != nil { // its writes are fenced, and PutIf does that
		return Object{}, ErrNotFound
	}
	r, err := s.table.Resume(ctx, objects.ID(key), record.TermPart(term), record.Resumable, []string{record.Requested, record.Final})
	if err != nil {
		return Object{}, opError(ctx, "put", key, err)
	}
	return objectOf(r), nil
}

// DeleteIf implements [Store].
func (s *PostgresStore) DeleteIf(ctx context.Context, key Key, version int64) error {
	return deleteFrom(ctx, s.table, s.fence, key, version, false)
}

// DeleteAndWake implements [Notifier].
func (s *PostgresStore) DeleteAndWake(ctx context.Context, key Key, version int64) error {
	return deleteFrom(ctx, s.table, s.fence, key, version, true)
}

// Wake implements [Notifier].
func (s *PostgresStore) Wake(ctx context.Context, key Key) error { return wakeIn(ctx, s.table, key) }

// Watch implements [Watcher].
func (s *PostgresStore) Watch(key Key) Subscription {
	if watch := s.table.Watch(objects.ID(key)); watch != nil {
		return watch
	}
	return noHints{}
}

// Fenced runs fn in a transaction whose writes, on any tables of this database, commit
// only if the term is still the lease's. Otherwise it returns [ErrLost] and nothing is
// written. An error or panic of fn rolls back and is passed on. After an error of the
// connection during the commit, the writes may have been committed or not, as after any
// commit, but never after another term began.
//
// Nothing is locked on the lease while fn runs, so neither renewals nor a takeover wait
// for it; only deferred constraints, which run with the commit, hold them up. The server
// ends a transaction that idles for a minute, or for two TTLs if that is longer, so that a
// holder that is paused in fn does not keep its row locks.
//
// fn must use tx and not the store, must not end the transaction itself (Commit and
// Rollback are errors, and COMMIT as SQL makes Fenced return [ErrInvalid]), and should return
// the first error of a statement. It may choose
// another isolation level by its first statement. Above READ COMMITTED the server ends
// the transaction with a serialization failure (40001) if the lease was renewed since;
// then try again.
func (s *PostgresStore) Fenced(ctx context.Context, guard Guard, fn func(tx pgx.Tx) error) error {
	fence, err := fenceOf("fenced", guard)
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

// FenceStatement returns a statement that fails, and its transaction with it, unless the
// term is still the lease's. It is for programs that write by database/sql, an ORM or
// another driver than pgx, where [PostgresStore.Fenced] does not fit. [FenceError]
// recognises the failure.
//
// The statement names the table's schema. FenceStatement does no I/O, unless
// [PostgresConfig.Schema] is empty and the store has done nothing yet: then it looks the
// schema up, for up to 5 s.
//
// It must be the last statement before COMMIT, in the same database. Any earlier, it
// protects as well, but its lock on the lease's record holds up the holder's own
// renewals until the transaction ends, so a long transaction ends its own term. In a
// transaction of its own it protects nothing. PREPARE TRANSACTION must not follow it: nobody
// could renew the lease or take it over until the prepared transaction is ended, even after
// a restart of the server. Above READ COMMITTED the server may end the
// transaction with a serialization failure (40001) because the lease was renewed since
// its first statement; then try again.
//
// A term that is known to be over is [ErrLost]. One of a single replica, which has no
// lease to lose, gets a statement that always succeeds.
func (s *PostgresStore) FenceStatement(guard Guard) (query string, args []any, err error) {
	return fenceStatement(s.table, guard)
}

// PutStatement returns a statement that writes an object that exists, if it is at that
// version, and that fails otherwise, and its transaction with it: for a transaction that
// writes other tables of the same database, too, by whatever driver. Of I/O it does what
// [PostgresStore.FenceStatement] does. It neither creates an object nor wakes those that
// watch it.
func (s *PostgresStore) PutStatement(obj Object, version int64) (query string, args []any, err error) {
	return putStatement(s.table, s.fence, obj, version)
}

// Fence implements [Fencer].
func (s *PostgresStore) Fence(guard Guard) (Store, error) {
	fence, err := fenceFor(s.fence, guard)
	if err != nil {
		return nil, err
	}
	return &PostgresStore{conns: s.conns, table: s.table, fence: fence}, nil
}
