package tenure

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
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
	return objects.ValidTable(cfg.Table)
}

// SQLiteStore is a [Store] in a SQLite database. It imports no driver; the
// program does. Times are those of the process clock, for all users of the
// database share one host.
//
// All methods are safe for concurrent use.
type SQLiteStore struct {
	db    *sql.DB
	owned bool // opened by OpenSQLite
	cfg   SQLiteConfig
	sql   sqliteStatements

	// turn is held by the one who writes. SQLite has one writer at a time anyway,
	// but lets those who wait for it starve: it does not queue them.
	turn chan struct{}

	check atomic.Pointer[sql.Stmt] // the fence's, once it was needed

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
// one of its connections, if there may be three or more. A database that is
// nil, or a config that none can serve, is [ErrInvalid].
func NewSQLiteStore(db *sql.DB, cfg SQLiteConfig) (*SQLiteStore, error) {
	if db == nil {
		return nil, fmt.Errorf("tenure: new SQLite store: %w: db is nil", ErrInvalid)
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("tenure: new SQLite store: %w", err)
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
		turn:    make(chan struct{}, 1),
		watches: sqliteWatches{hub: wake.NewHub[Key](false)},
	}, nil
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
	store, err := NewSQLiteStore(db, cfg)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	store.owned = true
	store.sql.lock = "" // its transactions begin with the write lock
	return store, nil
}

func sqliteDSN(path string) string {
	file := (&url.URL{Path: path}).EscapedPath()
	if strings.HasPrefix(file, "/") {
		file = "//" + file // an empty authority, or SQLite looks for one in a path that begins with two slashes
	}
	return "file:" + file + "?" + url.Values{
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
		if err == nil || !isSQLiteBusy(err) || !pace.Sleep(waiting, pace.Jitter(5*time.Millisecond)) {
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
	err := s.transact(ctx, s.sql.migrate, func(tx *sql.Tx) error {
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
	var err error
	if check := s.check.Load(); check != nil {
		err = check.Close()
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
	if err := key.Validate(); err != nil {
		return Object{}, opError(ctx, "get", key, err)
	}
	var obj Object
	err := whenSQLiteFree(ctx, func() (err error) { // who comes after a crash locks readers out too, for a moment
		obj, err = s.get(ctx, s.db, key)
		return err
	})
	if err != nil {
		return Object{}, opError(ctx, "get", key, sqliteError(err))
	}
	return obj, nil
}

// get returns the object, or [sql.ErrNoRows].
func (s *SQLiteStore) get(ctx context.Context, conn sqliteConn, key Key) (Object, error) {
	var r objects.Row
	err := conn.QueryRowContext(ctx, s.sql.get, key.Type, key.ID).Scan(sqliteColumns(&r)...)
	if err != nil {
		return Object{}, err
	}
	r.ID, r.Age = objects.ID(key), objects.Age(r.Updated, time.Now())
	return objectOf(r), nil
}

// List implements [Lister].
func (s *SQLiteStore) List(ctx context.Context, objectType, after string, limit int) ([]Object, error) {
	fail := func(err error) ([]Object, error) { return nil, opError(ctx, "list", Key{Type: objectType}, err) }
	if err := validList(objectType, after, limit); err != nil {
		return fail(err)
	}
	rows, err := s.db.QueryContext(ctx, s.sql.list, objectType, after)
	if err != nil {
		return fail(sqliteError(err))
	}
	defer rows.Close()
	var found []Object
	for len(found) < limit && rows.Next() {
		var r objects.Row
		key := Key{Type: objectType}
		if err := rows.Scan(append([]any{&key.ID}, sqliteColumns(&r)...)...); err != nil {
			return fail(sqliteError(err))
		}
		if key.Validate() != nil { // another program's: no caller could ask for it
			continue
		}
		r.ID, r.Age = objects.ID(key), objects.Age(r.Updated, time.Now())
		found = append(found, objectOf(r))
	}
	if err := rows.Err(); err != nil {
		return fail(sqliteError(err))
	}
	return found, nil
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
	if cond.c.Kind == objects.MustCreate && fence == nil {
		// Most attempts to acquire a lease find it held. To see that they don't need the
		// write lock, which the holder needs to renew.
		if _, err := s.version(ctx, s.db, obj.Key); err == nil {
			return Object{}, opError(ctx, "put", obj.Key, ErrExists)
		}
	}
	var r objects.Row
	err := s.write(ctx, fence, func(tx *sql.Tx) (err error) {
		if cond.c.Kind != objects.MatchVersion {
			r, err = s.create(ctx, tx, obj, cond)
			return err
		}
		r, err = s.replace(ctx, tx, obj, cond.c.Version)
		if errors.Is(err, sql.ErrNoRows) {
			return &ConflictError{Key: obj.Key, Wanted: cond.c.Version}
		}
		return err
	})
	if err != nil {
		return Object{}, opError(ctx, "put", obj.Key, sqliteError(err))
	}
	return obj.written(r), nil
}

// sqliteConn is a *sql.DB or a *sql.Tx.
type sqliteConn interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// replace writes an object that exists at a version. It returns [sql.ErrNoRows] where
// there is no object. Time and version are drawn under the transaction's write lock.
func (s *SQLiteStore) replace(ctx context.Context, tx *sql.Tx, obj Object, version int64) (r objects.Row, err error) {
	now := time.Now()
	next := now.UnixMicro()
	if version < objects.VersionLimit {
		next = max(next, version+1)
	}
	r.Updated = sql.NullInt64{Int64: now.UnixMilli(), Valid: true}
	err = s.atVersion(ctx, tx, obj.Key, version, func(version int64) error {
		return tx.QueryRowContext(ctx, s.sql.replace, obj.Key.Type, obj.Key.ID, objects.EncodeName(obj.Name), objects.EncodeLabels(obj.Labels),
			objects.EncodePayload(obj.Payload), r.Updated, next, version).Scan(sqliteVersion{&r.Version}, sqliteMillis{&r.Created})
	})
	if err == nil && r.Version != next {
		err = fmt.Errorf("%w: the column resource_version of table %q stores %d as %d", ErrSetup, s.cfg.Table, next, r.Version)
	}
	return r, err
}

// atVersion runs a write that needs the object to be at a version, and that returns
// [sql.ErrNoRows] where the database finds no such row. If the row is another program's,
// whose version merely reads as this one, the write is run again without the condition.
// That is safe because the transaction has the write lock.
func (s *SQLiteStore) atVersion(ctx context.Context, tx *sql.Tx, key Key, version int64, write func(version int64) error) error {
	if err := write(version); !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	current, err := s.version(ctx, tx, key)
	if err != nil {
		return err
	}
	if current != version {
		return &ConflictError{Key: key, Wanted: version, Current: current}
	}
	return write(0)
}

// create inserts an object; where it exists and that is allowed, it replaces it.
func (s *SQLiteStore) create(ctx context.Context, tx *sql.Tx, obj Object, cond WriteCondition) (r objects.Row, err error) {
	done, err := tx.ExecContext(ctx, s.sql.insert, obj.Key.Type, obj.Key.ID, objects.EncodeName(obj.Name),
		objects.EncodeLabels(obj.Labels), objects.EncodePayload(obj.Payload))
	if err != nil {
		return r, err
	}
	if n, err := done.RowsAffected(); err != nil {
		return r, err
	} else if n == 0 {
		switch current, err := s.version(ctx, tx, obj.Key); {
		case errors.Is(err, sql.ErrNoRows):
			return r, s.takenBy(ctx, tx, obj)
		case err != nil:
			return r, err
		case cond.c.Kind == objects.MustCreate:
			return r, ErrExists
		default:
			return s.replace(ctx, tx, obj, current)
		}
	}
	now := time.Now()
	r.Created = sql.NullInt64{Int64: now.UnixMilli(), Valid: true}
	r.Updated = r.Created
	err = tx.QueryRowContext(ctx, s.sql.number, obj.Key.Type, obj.Key.ID, r.Created, now.UnixMicro()).Scan(sqliteVersion{&r.Version})
	return r, err
}

// version returns the object's current version, or [sql.ErrNoRows].
func (s *SQLiteStore) version(ctx context.Context, conn sqliteConn, key Key) (v int64, err error) {
	err = conn.QueryRowContext(ctx, s.sql.version, key.Type, key.ID).Scan(sqliteVersion{&v})
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
	if err := errors.Join(key.Validate(), objects.ValidVersion(version), fence.fenceFor(key)); err != nil {
		return opError(ctx, "delete", key, err)
	}
	err := s.write(ctx, fence, func(tx *sql.Tx) error {
		err := s.atVersion(ctx, tx, key, version, func(version int64) error {
			done, err := tx.ExecContext(ctx, s.sql.remove, key.Type, key.ID, version)
			if err != nil {
				return err
			}
			if n, err := done.RowsAffected(); n > 0 || err != nil {
				return err
			}
			return sql.ErrNoRows
		})
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.sql.bury, key.Type, key.ID, version); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, s.sql.prune, time.Now().Add(-objects.TombstoneAge).UnixMicro())
		return err
	})
	if err != nil {
		return opError(ctx, "delete", key, sqliteError(err))
	}
	return nil
}

// write runs fn in a transaction that has the write lock. If a fence is given and does
// not hold after fn, that is the error, even if fn has failed too.
func (s *SQLiteStore) write(ctx context.Context, fence *Term, fn func(*sql.Tx) error) error {
	if fence == nil {
		return s.transact(ctx, s.sql.lock, fn)
	}
	return s.transactChecked(ctx, func(tx *sql.Tx, check *sql.Stmt) error {
		err := fn(tx)
		if err != nil && !objects.Answered(sqliteError(err)) {
			return err
		}
		return cmp.Or(s.checkFence(ctx, tx, check, fence), err)
	})
}

// transact runs fn in a transaction, after a first statement unless that is empty, when
// the store's earlier writes are done. It rolls back if fn fails or panics.
//
// No write is a transaction by itself. While the row that it returns is scanned,
// database/sql may close the rows because ctx has ended; it then drops the error of the
// commit, which that entails, and the scan succeeds.
func (s *SQLiteStore) transact(ctx context.Context, first string, fn func(*sql.Tx) error) error {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	var tx *sql.Tx
	err := whenSQLiteFree(ctx, func() (err error) {
		if tx, err = s.db.BeginTx(ctx, nil); err != nil || first == "" {
			return err
		}
		if _, err = tx.ExecContext(ctx, first); err != nil {
			tx.Rollback()
		}
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

// sqliteColumns returns where to scan the columns of a row. Another program may have
// stored any value in any of them, and such a row has to be readable as well, or nobody
// could replace it.
func sqliteColumns(r *objects.Row) []any {
	return []any{&r.Name, &r.Labels, &r.Payload, sqliteVersion{&r.Version}, sqliteMillis{&r.Created}, sqliteMillis{&r.Updated}}
}

// sqliteMillis scans a time. A value that is no number is no time.
type sqliteMillis struct{ ms *sql.NullInt64 }

func (m sqliteMillis) Scan(value any) error {
	*m.ms = sqliteInteger(value)
	return nil
}

// sqliteVersion scans a version. What is no positive number is read as one above the
// limit: as a different one for each number, almost always, so that a write can still
// name what was read.
type sqliteVersion struct{ version *int64 }

func (v sqliteVersion) Scan(value any) error {
	n := sqliteInteger(value)
	if *v.version = n.Int64; n.Int64 <= 0 {
		*v.version = max(objects.VersionLimit, math.MaxInt64+n.Int64)
	}
	return nil
}

// sqliteInteger returns a value of any storage class as a number, without its fraction,
// or NULL if it is none.
func sqliteInteger(value any) sql.NullInt64 {
	if f, ok := value.(float64); ok && f > math.MinInt64 && f < math.MaxInt64 {
		value = int64(f)
	}
	var n sql.NullInt64
	if n.Scan(value) != nil {
		return sql.NullInt64{}
	}
	return n
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

func isSQLiteBusy(err error) bool {
	var coded interface{ Code() int }
	return errors.As(err, &coded) && coded.Code()&0xff == sqliteBusy
}
