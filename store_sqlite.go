package tenure

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/wake"
)

const (
	sqliteDriver      = "sqlite" // the name under which modernc.org/sqlite registers
	sqliteBusyTimeout = 5 * time.Second
	sqliteBusyOnce    = 25 * time.Millisecond // how long SQLite itself waits, which hears of no context
	sqliteBusy        = 5                     // SQLITE_BUSY, the low byte of the code
)

// SQLiteConfig configures a [SQLiteStore]. The zero value serves.
type SQLiteConfig struct {
	Table string // default "objects"

	// Shared says that other processes, or other coordinators of this one, use
	// the same database: then they compete for leases. Without it the store
	// answers SingleReplica() == true.
	Shared bool

	Logger *slog.Logger // default slog.Default()
}

// validate returns an [ErrInvalid] for a config that no database can serve.
func (cfg SQLiteConfig) validate() error {
	const reserved = "sqlite_"
	if len(cfg.Table) >= len(reserved) && strings.EqualFold(cfg.Table[:len(reserved)], reserved) {
		return fmt.Errorf("%w: Table %q begins with %q, which SQLite keeps for itself", ErrInvalid, cfg.Table, reserved)
	}
	return validTable(cfg.Table)
}

// SQLiteStore is a [Store] in a SQLite database. It imports no driver; the
// program does. Times are those of the process clock, for all users of the
// database share one host.
//
// All methods are safe for concurrent use.
type SQLiteStore struct {
	db    *sql.DB
	owned bool // opened by OpenSQLite, so its transactions begin with the write lock
	cfg   SQLiteConfig
	sql   sqliteStatements

	refused error // what is wrong with the config

	// turn is held by the one who writes. SQLite has one writer at a time anyway,
	// but lets those who wait for it starve: it does not queue them.
	turn chan struct{}

	mu    sync.Mutex // guards check
	check *sql.Stmt  // the fence's, once it was needed

	watches sqliteWatches
}

var _ interface {
	Store
	Lister
	Fencer
	Watcher
	Notifier
	Exclusive
} = (*SQLiteStore)(nil)

// NewSQLiteStore returns a store in the caller's database, which stays the
// caller's to close. The database should be opened as [OpenSQLite] does: with
// immediate transactions, a busy timeout of some milliseconds, in WAL mode, and
// with one connection if it is in memory. The store waits for a lock that is
// somebody else's as long as a call's context allows; within a busy timeout that
// is long it would not hear that the context has ended. Standbys that wait keep
// one of its connections, if there may be three or more. All calls of a store
// whose config cannot be served are [ErrInvalid]. It panics if db is nil.
func NewSQLiteStore(db *sql.DB, cfg SQLiteConfig) *SQLiteStore {
	if db == nil {
		panic("tenure: NewSQLiteStore: db is nil")
	}
	if cfg.Table == "" {
		cfg.Table = "objects"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &SQLiteStore{
		db:      db,
		cfg:     cfg,
		sql:     newSQLiteStatements(cfg.Table),
		refused: cfg.validate(),
		turn:    make(chan struct{}, 1),
		watches: sqliteWatches{hub: wake.NewHub[Key](false)},
	}
}

// OpenSQLite opens the file at path, or makes it, and returns a store in it; a
// path of ":memory:" is a new database in memory. It sets WAL mode, full
// synchronisation and immediate transactions, and waits for a lock as long as a
// call's context allows, but no longer than 5 s. A driver
// must be registered as "sqlite"; otherwise the error, an [ErrSetup], says
// which import is missing. [SQLiteStore.Migrate] makes the table.
func OpenSQLite(ctx context.Context, path string, cfg SQLiteConfig) (*SQLiteStore, error) {
	switch {
	case path == "":
		return nil, fmt.Errorf("tenure: open SQLite: %w: path is empty", ErrInvalid)
	case strings.ContainsRune(path, 0):
		return nil, fmt.Errorf("tenure: open SQLite: %w: path %q has a NUL", ErrInvalid, path)
	case strings.HasPrefix(path, "file:"): // whoever means it would get a file of that name
		return nil, fmt.Errorf("tenure: open SQLite: %w: path %q is a URI; NewSQLiteStore takes a database opened by one", ErrInvalid, path)
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("tenure: open SQLite %s: %w", path, err)
	}
	if !slices.Contains(sql.Drivers(), sqliteDriver) {
		return nil, fmt.Errorf("tenure: open SQLite %s: %w: no driver %q is registered, add: import _ %q",
			path, ErrSetup, sqliteDriver, "modernc.org/sqlite")
	}
	db, err := sql.Open(sqliteDriver, sqliteDSN(path))
	if err != nil {
		return nil, fmt.Errorf("tenure: open SQLite %s: %w", path, err)
	}
	db.SetMaxOpenConns(4)
	if path == ":memory:" {
		// Each connection would have a database of its own, which ends with it.
		db.SetMaxOpenConns(1)
		db.SetMaxIdleConns(1)
		db.SetConnMaxLifetime(0)
		db.SetConnMaxIdleTime(0)
	}
	if err := pingSQLite(ctx, db); err != nil {
		db.Close()
		return nil, fmt.Errorf("tenure: open SQLite %s: %w", path, sqliteError(err))
	}
	store := NewSQLiteStore(db, cfg)
	store.owned = true
	return store, nil
}

func sqliteDSN(path string) string {
	file := url.URL{Path: path}
	return "file:" + file.EscapedPath() + "?" + url.Values{
		"_txlock": {"immediate"},
		"_pragma": {
			fmt.Sprintf("busy_timeout(%d)", sqliteBusyOnce.Milliseconds()),
			"journal_mode(WAL)",
			"synchronous(FULL)",
		},
	}.Encode()
}

// pingSQLite connects. The change to WAL mode does not honour the busy timeout:
// of several processes that start together, some are told at once that the
// database is busy.
func pingSQLite(ctx context.Context, db *sql.DB) error {
	return whenSQLiteFree(ctx, func() error { return db.PingContext(ctx) })
}

// whenSQLiteFree takes a lock, again and again while it is somebody else's, for as
// long as ctx allows, but no longer than the busy timeout. SQLite's own wait goes
// on when the context has ended.
func whenSQLiteFree(ctx context.Context, take func() error) error {
	waiting, cancel := context.WithTimeout(ctx, sqliteBusyTimeout)
	defer cancel()
	for {
		err := take()
		if err == nil || !isSQLiteBusy(err) || !sleep(waiting, jitter(5*time.Millisecond)) {
			return err
		}
	}
}

const uniqueSQLite = `
	SELECT EXISTS (SELECT 1 FROM pragma_index_list(?1) AS i WHERE i."unique" AND NOT i.partial AND
		(SELECT group_concat(c) FROM (SELECT coalesce(lower(name), '?') AS c FROM pragma_index_info(i.name) ORDER BY c))
			IN ('id', 'id,object_type'))`

// Migrate creates the tables that are missing. It may be called at every start,
// by many processes at once. A table that is there and does not fit is [ErrSetup].
func (s *SQLiteStore) Migrate(ctx context.Context) error {
	err := s.inTx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, s.sql.migrate); err != nil {
			return err
		}
		// A table of another program may be there, and lack a column.
		if _, err := tx.ExecContext(ctx, s.sql.probe); err != nil {
			return err
		}
		var unique bool
		err := tx.QueryRowContext(ctx, uniqueSQLite, s.cfg.Table).Scan(&unique)
		if err == nil && !unique { // two could create one object, and hold one lease
			return fmt.Errorf("%w: table %q has no unique key on (object_type, id), nor on id", ErrSetup, s.cfg.Table)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("tenure: migrate %q: %w", s.cfg.Table, sqliteError(err))
	}
	return nil
}

// Close ends the watches, and closes the database if [OpenSQLite] opened it.
func (s *SQLiteStore) Close() error {
	s.watches.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	if s.check != nil {
		err = s.check.Close()
	}
	if s.owned {
		err = errors.Join(err, s.db.Close())
	}
	return err
}

// SingleReplica implements [Exclusive]: it reports whether the store was configured
// without Shared.
func (s *SQLiteStore) SingleReplica() bool { return !s.cfg.Shared }

// Get implements [Store].
func (s *SQLiteStore) Get(ctx context.Context, key Key) (Object, error) {
	if err := cmp.Or(key.Validate(), s.refused); err != nil {
		return Object{}, opError(ctx, "get", key, err)
	}
	var obj Object
	err := whenSQLiteFree(ctx, func() (err error) { // who comes after a crash locks readers out too, for a moment
		obj, err = s.get(ctx, s.db, key)
		return err
	})
	if err != nil {
		return Object{}, opError(ctx, "get", key, sqliteError(sqliteUnreadable(err)))
	}
	return obj, nil
}

// get returns the object, or [sql.ErrNoRows].
func (s *SQLiteStore) get(ctx context.Context, conn sqliteConn, key Key) (Object, error) {
	var r row
	err := conn.QueryRowContext(ctx, s.sql.get, key.Type, key.ID).
		Scan(&r.name, &r.labels, &r.payload, &r.version, &r.created, &r.updated)
	if err != nil {
		return Object{}, err
	}
	return r.object(key, time.Now()), nil
}

// List implements [Lister].
func (s *SQLiteStore) List(ctx context.Context, objectType, after string, limit int) ([]Object, error) {
	fail := func(err error) ([]Object, error) { return nil, opError(ctx, "list", Key{Type: objectType}, err) }
	if err := cmp.Or(validList(objectType, after, limit), s.refused); err != nil {
		return fail(err)
	}
	rows, err := s.db.QueryContext(ctx, s.sql.list, objectType, after, limit)
	if err != nil {
		return fail(sqliteError(err))
	}
	defer rows.Close()
	var objects []Object
	for rows.Next() {
		var r row
		key := Key{Type: objectType}
		if err := rows.Scan(&key.ID, &r.name, &r.labels, &r.payload, &r.version, &r.created, &r.updated); err != nil {
			return fail(sqliteError(sqliteUnreadable(err)))
		}
		objects = append(objects, r.object(key, time.Now()))
	}
	if err := rows.Err(); err != nil {
		return fail(sqliteError(err))
	}
	return objects, nil
}

// PutIf implements [Store].
func (s *SQLiteStore) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	return s.putIf(ctx, obj, cond, nil)
}

// putIf is PutIf, fenced by a term unless that is nil.
func (s *SQLiteStore) putIf(ctx context.Context, obj Object, cond WriteCondition, fence *Term) (Object, error) {
	if err := errors.Join(obj.Validate(), cond.Validate(), fence.fenceFor(obj.Key)); err != nil {
		return Object{}, opError(ctx, "put", obj.Key, err)
	}
	var r row
	var err error
	if cond.kind == matchVersion && fence == nil { // one statement: a transaction by itself
		err = s.inTurn(ctx, func() error {
			return whenSQLiteFree(ctx, func() error {
				r, err = s.replace(ctx, s.db, obj, cond)
				return err
			})
		})
	} else {
		err = s.inFencedTx(ctx, fence, func(tx *sql.Tx) error {
			if cond.kind == matchVersion {
				r, err = s.replace(ctx, tx, obj, cond)
			} else {
				r, err = s.create(ctx, tx, obj, cond)
			}
			return err
		})
	}
	if err != nil {
		return Object{}, opError(ctx, "put", obj.Key, sqliteError(err))
	}
	return r.written(obj), nil
}

// sqliteConn is a *sql.DB or a *sql.Tx.
type sqliteConn interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// replace writes an object that exists, in one statement. Its stamp is of the
// time before any wait for the lock; the version is right all the same, for it
// counts from the row's.
func (s *SQLiteStore) replace(ctx context.Context, conn sqliteConn, obj Object, cond WriteCondition) (row, error) {
	now := time.Now()
	var r row
	err := conn.QueryRowContext(ctx, s.sql.replace, obj.Key.Type, obj.Key.ID, nameColumn(obj.Name), encodeLabels(obj.Labels),
		payloadColumn(obj.Payload), now.UnixMilli(), now.UnixMicro(), cond.version).Scan(&r.version, &r.created, &r.updated)
	if !errors.Is(err, sql.ErrNoRows) {
		return r, err
	}
	current, err := s.version(ctx, conn, obj.Key)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return r, err
	}
	return r, &ConflictError{Key: obj.Key, Wanted: cond.version, Current: current}
}

// create inserts an object; where it exists and that is allowed, it replaces it.
func (s *SQLiteStore) create(ctx context.Context, tx *sql.Tx, obj Object, cond WriteCondition) (r row, err error) {
	// The insert comes first and takes the write lock, also in a transaction
	// that began without it. A version drawn before could be an old one.
	done, err := tx.ExecContext(ctx, s.sql.insert, obj.Key.Type, obj.Key.ID, nameColumn(obj.Name),
		encodeLabels(obj.Labels), payloadColumn(obj.Payload))
	if err != nil {
		return r, err
	}
	if n, err := done.RowsAffected(); err != nil {
		return r, err
	} else if n == 0 {
		switch _, err := s.version(ctx, tx, obj.Key); {
		case errors.Is(err, sql.ErrNoRows):
			return r, s.takenBy(ctx, tx, obj)
		case err != nil:
			return r, err
		case cond.kind == mustCreate:
			return r, ErrExists
		}
		return s.replace(ctx, tx, obj, cond)
	}
	now := time.Now()
	err = tx.QueryRowContext(ctx, s.sql.number, obj.Key.Type, obj.Key.ID, now.UnixMilli(), now.UnixMicro()).
		Scan(&r.version, &r.created, &r.updated)
	return r, err
}

// version returns the object's current version, or [sql.ErrNoRows].
func (s *SQLiteStore) version(ctx context.Context, conn sqliteConn, key Key) (v int64, err error) {
	err = conn.QueryRowContext(ctx, s.sql.version, key.Type, key.ID).Scan(&v)
	return v, err
}

// takenBy names the object that has this one's name, or on another program's
// table its ID.
func (s *SQLiteStore) takenBy(ctx context.Context, conn sqliteConn, obj Object) error {
	var other Key
	err := conn.QueryRowContext(ctx, s.sql.taken, obj.Key.Type, obj.Key.ID, obj.Name).Scan(&other.Type, &other.ID)
	switch {
	case err == nil:
		return fmt.Errorf("%w: %s", ErrTaken, other)
	case errors.Is(err, sql.ErrNoRows):
		return fmt.Errorf("%w: by a key that only table %s knows of", ErrTaken, s.cfg.Table)
	default:
		return err
	}
}

// DeleteIf implements [Store].
func (s *SQLiteStore) DeleteIf(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, nil)
}

// DeleteAndWake implements [Notifier].
func (s *SQLiteStore) DeleteAndWake(ctx context.Context, key Key, version int64) error {
	return s.deleteAndWake(ctx, key, version, nil)
}

// deleteAndWake is DeleteAndWake, fenced by a term unless that is nil.
func (s *SQLiteStore) deleteAndWake(ctx context.Context, key Key, version int64, fence *Term) error {
	err := s.deleteIf(ctx, key, version, fence)
	if err == nil {
		s.watches.hub.Wake(key)
	}
	return err
}

// deleteIf is DeleteIf, fenced by a term unless that is nil.
func (s *SQLiteStore) deleteIf(ctx context.Context, key Key, version int64, fence *Term) error {
	if err := errors.Join(key.Validate(), validVersion(version), fence.fenceFor(key)); err != nil {
		return opError(ctx, "delete", key, err)
	}
	err := s.inFencedTx(ctx, fence, func(tx *sql.Tx) error {
		done, err := tx.ExecContext(ctx, s.sql.remove, key.Type, key.ID, version)
		if err != nil {
			return err
		}
		if n, err := done.RowsAffected(); err != nil {
			return err
		} else if n == 0 {
			current, err := s.version(ctx, tx, key)
			if err != nil {
				return err
			}
			return &ConflictError{Key: key, Wanted: version, Current: current}
		}
		if _, err := tx.ExecContext(ctx, s.sql.bury, key.Type, key.ID, version); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, s.sql.prune, time.Now().Add(-tombstoneAge).UnixMicro())
		return err
	})
	if err != nil {
		return opError(ctx, "delete", key, sqliteError(err))
	}
	return nil
}

// inTurn runs a write when those before it are done.
func (s *SQLiteStore) inTurn(ctx context.Context, write func() error) error {
	if s.refused != nil {
		return s.refused
	}
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
		return write()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// inTx runs fn in a transaction, which is rolled back where fn fails or panics.
func (s *SQLiteStore) inTx(ctx context.Context, fn func(*sql.Tx) error) error {
	return s.inTurn(ctx, func() error { return s.transact(ctx, fn) })
}

func (s *SQLiteStore) transact(ctx context.Context, fn func(*sql.Tx) error) error {
	var tx *sql.Tx
	err := whenSQLiteFree(ctx, func() (err error) {
		tx, err = s.db.BeginTx(ctx, nil)
		return err
	})
	if err != nil {
		return err
	}
	// After a commit it does nothing; where ctx has ended, database/sql rolls
	// back too, and we need not hear which of the two it was.
	defer tx.Rollback()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// payloadColumn keeps an empty payload from becoming NULL.
func payloadColumn(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// sqliteError adds to a driver's error what it means here. Drivers differ in
// their types, so it goes by the code, where there is one, and the text.
func sqliteError(err error) error {
	text := err.Error()
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(text, p) })
	}
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return ErrNotFound
	case has("no such table"):
		return fmt.Errorf("%w: %w (call Migrate once)", ErrSetup, err)
	case has("UNIQUE constraint failed"):
		return fmt.Errorf("%w: %w", ErrTaken, err)
	case has("no such column", "has no column named", "datatype mismatch",
		"unable to open database", "readonly database", "not a database"):
		return fmt.Errorf("%w: %w", ErrSetup, err)
	}
	return err
}

// sqliteUnreadable marks a value that a read cannot take for what it should be. It
// is not for writes: theirs have happened when their answer cannot be read.
func sqliteUnreadable(err error) error {
	if strings.Contains(err.Error(), "sql: Scan error") {
		return fmt.Errorf("%w: %w", ErrSetup, err)
	}
	return err
}

func isSQLiteBusy(err error) bool {
	var coded interface{ Code() int }
	return errors.As(err, &coded) && coded.Code()&0xff == sqliteBusy
}
