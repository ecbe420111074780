package tenure

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
	"github.com/tenurelib/tenure/internal/storeurl"
)

// SQLiteConfig configures a [SQLiteStore]. The zero value is ready to use.
type SQLiteConfig struct {
	Table string // default "objects"

	// Shared says that other processes use the same database and compete for leases. Without it,
	// this process has the database to itself: the coordinators of one key take turns without a
	// lease, and while one process uses a file in this way, any other that competes on it gets an
	// [ErrSetup]. The check locks a file beside the database, named after the database and the
	// table, and works on Linux, macOS and the BSDs.
	Shared bool

	Logger *slog.Logger // default slog.Default()
}

// complete sets the defaults. It returns an [ErrInvalid] for a config that no database can
// serve.
func (cfg *SQLiteConfig) complete() error {
	const reserved = "sqlite_"
	if len(cfg.Table) >= len(reserved) && strings.EqualFold(cfg.Table[:len(reserved)], reserved) {
		return fmt.Errorf("%w: Table %q begins with %q, which SQLite keeps for itself", ErrInvalid, cfg.Table, reserved)
	}
	if name := strings.ToLower(cfg.Table); name == "json_each" || strings.HasPrefix(name, "pragma_") {
		return fmt.Errorf("%w: Table %q is the name of a function of SQLite, which a table of that name would hide", ErrInvalid, cfg.Table)
	}
	cfg.Table = cmp.Or(cfg.Table, "objects")
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	return objects.ValidTable(cfg.Table)
}

// SQLiteStore is a [Store] in a SQLite database. It imports no driver; the program does.
// Times are those of the process clock, because all processes that use the database run on one
// host.
//
// A call whose context has no deadline takes at most 30 s, except for the funcs of Fenced.
//
// All methods are safe for concurrent use.
type SQLiteStore struct {
	tables
	table *sqliteobjects.Table // is all of tables
	alone *Turns               // nil: the store is Shared
}

var _ Database = (*SQLiteStore)(nil)

// NewSQLiteStore returns a store in the caller's database, which the caller has to close. Open
// the database as [OpenSQLite] does: by an absolute path, because each new connection resolves a
// relative one again, with immediate transactions, a busy timeout of a few
// milliseconds, in WAL mode, and with one connection if it is in memory. The store waits for a
// lock as long as a call's context allows, but during a busy timeout it does not notice that the
// context has ended. While standbys wait, the store keeps one of the database's connections, if
// the database may have three or more. A database that is nil, or an unusable config, is
// [ErrInvalid].
func NewSQLiteStore(db *sql.DB, cfg SQLiteConfig) (*SQLiteStore, error) {
	if db == nil {
		return nil, fmt.Errorf("tenure: new SQLite store: %w: db is nil", ErrInvalid)
	}
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("tenure: new SQLite store: %w", err)
	}
	return newSQLiteStore(sqliteobjects.New(db, cfg.Table, cfg.Logger), cfg), nil
}

func newSQLiteStore(table *sqliteobjects.Table, cfg SQLiteConfig) *SQLiteStore {
	store := &SQLiteStore{tables: tables{all: table}, table: table}
	if !cfg.Shared {
		store.alone = turnsOf(table.DB(), cfg.Table)
	}
	return store
}

// OpenSQLite opens the file at path, which it creates if necessary, and returns a store in
// it; the path ":memory:" is a new database in memory. The store keeps to that file if the working
// directory changes, or a symbolic link of the path. A relative path with // or one of the
// characters : @ ? = in it, which may be a mistyped URL, is [ErrInvalid]: put ./ before it. It sets WAL mode, full
// synchronisation and immediate transactions. The store waits for a lock as long as a call's
// context allows, but no longer than 5 s. A driver must be registered as "sqlite"; otherwise
// the error, an [ErrSetup], says which import is missing. [SQLiteStore.Migrate] creates the
// table.
func OpenSQLite(ctx context.Context, path string, cfg SQLiteConfig) (*SQLiteStore, error) {
	switch {
	case path == "":
		return nil, fmt.Errorf("tenure: open SQLite: %w: path is empty", ErrInvalid)
	case strings.ContainsRune(path, 0):
		return nil, fmt.Errorf("tenure: open SQLite: %w: path %q has a NUL", ErrInvalid, path)
	case strings.HasPrefix(path, "file:"): // it would become a file of that name
		return nil, fmt.Errorf("tenure: open SQLite: %w: the path is a URI; NewSQLiteStore takes a database opened by one", ErrInvalid)
	case path != ":memory:" && !storeurl.IsPath(path):
		return nil, fmt.Errorf("tenure: open SQLite: %w: the path may be a URL of another database, or a part of one; %s", ErrInvalid, storeurl.Remedy)
	}
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("tenure: open SQLite %s: %w", path, err)
	}
	table, err := sqliteobjects.Open(ctx, path, cfg.Table, cfg.Logger)
	if err != nil {
		return nil, fmt.Errorf("tenure: open SQLite %s: %w", path, err)
	}
	store := newSQLiteStore(table, cfg)
	if cfg.Shared { // then only processes that compete need to be refused, not those that only read
		return store, nil
	}
	if err := store.claim(ctx); err != nil {
		store.Close()
		return nil, fmt.Errorf("tenure: open SQLite %s: %w", path, err)
	}
	return store, nil
}

// claim refuses a file that two programs use if one of them believes that it is alone, and one of which
// nobody can tell. Programs that share the file need a lease, and find any other error when they acquire that.
func (s *SQLiteStore) claim(ctx context.Context) error {
	shared := s.alone == nil
	err := s.table.Claim(ctx, shared)
	if shared && !errors.Is(err, objects.ErrInUse) {
		return nil
	}
	return err
}

// Traits implements [Store].
func (s *SQLiteStore) Traits() Traits { return Traits{Alone: s.alone, Join: s.join} }

// Lineage implements [Store]. A SQLite database has no failovers.
func (s *SQLiteStore) Lineage(context.Context) (Lineage, error) { return Lineage{}, nil }

// join claims the file for as long as a coordinator runs, whatever Close does meanwhile.
func (s *SQLiteStore) join(ctx context.Context) (leave func(), err error) {
	if err := s.claim(ctx); err != nil {
		return nil, err
	}
	return s.table.Use(), nil
}

// Migrate creates the tables of objects and tombstones if they are missing; the func Migrate of
// package claims creates those that claims need. It may be called at every start, by many
// processes at once. An existing table that can't be used is [ErrSetup], as is a file that
// another process uses and that is not Shared.
func (s *SQLiteStore) Migrate(ctx context.Context) error {
	err := s.claim(ctx)
	if err == nil {
		err = s.table.Migrate(ctx)
	}
	if err != nil {
		return fmt.Errorf("tenure: migrate %q: %w", s.table, err)
	}
	return nil
}

// DB returns the database: the caller's, or the one that [OpenSQLite] opened, which Close
// closes. The latter gives up on a lock after a few milliseconds, because the store itself
// retries. A transaction of your own fails there with SQLITE_BUSY while another one writes:
// use [SQLiteStore.Fenced], or a database with a longer busy timeout.
func (s *SQLiteStore) DB() *sql.DB { return s.table.DB() }

// Close ends the subscriptions, and closes the database if [OpenSQLite] opened it.
func (s *SQLiteStore) Close() error { return s.table.Close() }

// PutIf implements [Store].
func (s *SQLiteStore) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	if objects.IsLeaseCall(ctx) {
		if err := s.claim(ctx); err != nil {
			return Object{}, opError(ctx, "put", obj.Key, err)
		}
	}
	return s.tables.PutIf(ctx, obj, cond)
}

// Watch implements [Watcher]. While there are subscriptions, the store keeps one connection, on
// which it asks SQLite whether the file was written: whenever the operating system reports a
// write to the write-ahead log, and once a second, or 20 times a second while the operating
// system can't report writes. A database that may have only one or two connections has none to
// spare for this: then subscriptions are not live, and only changes through this store wake
// them.
func (s *SQLiteStore) Watch(key Key) Subscription { return s.table.Watch(objects.ID(key)) }

// Fence implements [Fencer].
func (s *SQLiteStore) Fence(guard Guard) (Store, error) {
	fenced, err := s.fencedBy(guard)
	if err != nil {
		return nil, err
	}
	return &SQLiteStore{fenced, s.table, s.alone}, nil
}

// Fenced runs fn in a transaction whose writes, to any tables of this database, commit only if
// the guard's right stands: a term is still the lease's, or a claim has not ended. A nil guard is the term or the
// claim for which the func runs that ctx comes from; it must be in this store. If it does not stand, Fenced returns
// [ErrLost] and does not call fn. An error or panic of fn rolls back and is passed on.
//
// The transaction holds the database's one write lock: no process can renew a lease or take one
// over while fn runs, so fn must be short compared with the TTL. fn must use tx and not the
// store, must not end the transaction itself, and must return the first error of a statement:
// after some errors SQLite has rolled back, and later statements would write outside the
// transaction, unfenced.
func (s *SQLiteStore) Fenced(ctx context.Context, guard Guard, fn func(tx *sql.Tx) error) error {
	fence, err := fenceOf("fenced", guardOf(ctx, guard))
	switch {
	case err != nil:
		return err
	case fn == nil:
		return fmt.Errorf("tenure: fenced: %w: fn is nil", ErrInvalid)
	}
	var fnErr error
	err = s.table.Fenced(ctx, fence, func(tx *sql.Tx) error {
		fnErr = fn(tx)
		return fnErr
	})
	if fnErr != nil {
		return fnErr
	}
	return fencedBy(ctx, fence, err)
}
