// Package sqliteobjects keeps objects in a table of a SQLite database. Its errors are those
// of package objects, or the driver's; the root package names the operation and the key.
package sqliteobjects

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/report"
)

// Table is a table of objects. All methods are safe for concurrent use.
type Table struct {
	db    *sql.DB
	owned bool // opened by Open
	name  string
	texts *objects.Texts

	takeLock string // the statement with which a transaction takes the write lock; empty: it takes the lock when it begins

	claims   Claims
	rows     objects.RowTables[*Rows]
	renewals objects.Renewals

	// turn is held by the call that writes. SQLite allows only one writer at a time anyway,
	// but it does not queue waiting writers, so some would starve.
	turn chan struct{}

	fits, fitsClaims atomic.Bool // what fit has found

	check, checkClaim atomic.Pointer[sql.Stmt] // of fences; nil until they are needed

	watches *watches
	logger  *slog.Logger

	claimed  atomic.Bool // see Claim
	claiming sync.Mutex  // guards the fields below
	lock     *os.File    // nil: nothing is locked
	users    int         // of the claim, which lasts even after Close while there are any
	closed   bool
}

// New returns a table in the caller's database. It does no I/O.
func New(db *sql.DB, name string, logger *slog.Logger) *Table {
	logger, _ = report.Logger(logger)
	logger = logger.With("table", name)
	t := &Table{
		db:     db,
		name:   name,
		texts:  objects.NewTexts(tableWords("main.", name)...),
		turn:   make(chan struct{}, 1),
		logger: logger,
	}
	t.takeLock = t.in(takeWriteLock)
	t.watches = newWatches(db, t.in(objectContent), logger)
	t.claims = Claims{table: t}
	return t
}

// in returns the statement of a text.
func (t *Table) in(text string) string { return t.texts.In(text) }

// DDL returns the statements that create everything that [Table.Migrate] and [Claims.Migrate] create.
func DDL(name string) string {
	return objects.NewTexts(tableWords("", name)...).In(objects.SQLite + objects.SQLiteClaims)
}

// Open returns a table in a database of its own: the file at path, which it creates if
// necessary, or a new one in memory if path is ":memory:".
func Open(ctx context.Context, path, name string, logger *slog.Logger) (*Table, error) {
	db, err := openDB(ctx, path)
	if err != nil {
		return nil, err
	}
	t := New(db, name, logger)
	t.owned = true
	t.takeLock = "" // its transactions take the write lock when they begin
	return t, nil
}

// DB returns the database, for tests that bypass the table.
func (t *Table) DB() *sql.DB { return t.db }

// String returns the name of the table.
func (t *Table) String() string { return t.name }

// Close ends the watches, and closes the database if Open opened it.
func (t *Table) Close() error {
	t.watches.close()
	defer report.Flush(t.logger)
	defer t.unclaim()
	var err error
	checks := []*sql.Stmt{t.check.Load(), t.checkClaim.Load()}
	for _, r := range t.rows.All() {
		checks = append(checks, r.check.Load())
	}
	for _, check := range checks {
		if check != nil {
			err = errors.Join(err, check.Close())
		}
	}
	if t.owned {
		err = errors.Join(err, t.db.Close())
	}
	return err
}

// Migrate creates the tables of objects and tombstones if they are missing.
func (t *Table) Migrate(ctx context.Context) error { return t.createTables(ctx, objects.SQLite, false) }

// createTables creates tables, and rolls back if they cannot be relied on.
func (t *Table) createTables(ctx context.Context, ddl string, forClaims bool) error {
	if err := t.fit(ctx, forClaims); err != nil { // an error of CREATE INDEX would not say what is wrong
		return explain(err)
	}
	return explain(t.transact(ctx, t.in(ddl), func(tx *sql.Tx) error {
		unfit, misclaimed, err := t.inspect(ctx, tx)
		if forClaims {
			unfit = errors.Join(unfit, misclaimed)
		}
		return errors.Join(unfit, err)
	}))
}

// Get returns the object, or [objects.ErrNotFound].
func (t *Table) Get(ctx context.Context, id objects.ID) (r objects.Row, err error) {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	err = whenFree(ctx, func() (err error) { // the first process to open the file after a crash briefly locks out readers too
		r, err = t.get(ctx, t.db, id)
		return err
	})
	return r, explain(err)
}

// get returns the object, or [sql.ErrNoRows].
func (t *Table) get(ctx context.Context, conn reader, id objects.ID) (objects.Row, error) {
	r := objects.Row{ID: id}
	err := conn.QueryRowContext(ctx, t.in(getObject), id.Type, id.ID).Scan(columns(&r)...)
	r.Age = objects.Age(r.Updated, time.Now())
	return r, err
}

// version returns the object's current version, or [sql.ErrNoRows].
func (t *Table) version(ctx context.Context, conn reader, id objects.ID) (v int64, err error) {
	err = conn.QueryRowContext(ctx, t.in(objectVersion), id.Type, id.ID).Scan(versionColumn{&v})
	return v, err
}

// List returns at most limit objects of a type whose IDs come after the given one.
func (t *Table) List(ctx context.Context, objectType, after string, limit int) ([]objects.Row, error) {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	var found []objects.Row
	err := whenFree(ctx, func() error {
		rows, err := t.db.QueryContext(ctx, t.in(listObjects), objectType, after)
		if err != nil {
			return err
		}
		defer rows.Close()
		for found = nil; len(found) < limit && rows.Next(); {
			r := objects.Row{ID: objects.ID{Type: objectType}}
			if err := rows.Scan(append([]any{&r.ID.ID}, columns(&r)...)...); err != nil {
				return err
			}
			if r.ID.Validate() != nil { // another program's row, which no caller could ask for
				continue
			}
			r.Age = objects.Age(r.Updated, time.Now())
			found = append(found, r)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, explain(err)
	}
	return found, nil
}

// Watch returns a watch of an object. After Close it returns a watch that never receives.
func (t *Table) Watch(id objects.ID) *Watch { return t.watches.watch(id) }

// Wake wakes every watch of an object through this table. Other processes notice the change
// itself.
func (t *Table) Wake(ctx context.Context, id objects.ID) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	t.watches.hub.Wake(id)
	return nil
}
