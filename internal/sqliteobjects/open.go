package sqliteobjects

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

const (
	driverName = "sqlite" // under which modernc.org/sqlite registers

	// The low bytes of error codes.
	busyCode       = 5  // SQLITE_BUSY
	cantOpenCode   = 14 // SQLITE_CANTOPEN
	constraintCode = 19 // SQLITE_CONSTRAINT

	busyTimeout = 25 * time.Millisecond
	lockTimeout = 5 * time.Second
)

// openDB opens the file at path, or a new database in memory.
func openDB(ctx context.Context, path string) (*sql.DB, error) {
	if !slices.Contains(sql.Drivers(), driverName) {
		return nil, fmt.Errorf("%w: no driver %q is registered, add: import _ %q", objects.ErrSetup, driverName, "modernc.org/sqlite")
	}
	inMemory := path == ":memory:"
	if !inMemory {
		var err error
		if path, err = located(path); err != nil {
			return nil, err
		}
	}
	db, err := sql.Open(driverName, dsn(path))
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(4)
	if inMemory {
		// Otherwise each connection would have a database of its own, which ends with it.
		db.SetMaxOpenConns(1)
		db.SetMaxIdleConns(1)
		db.SetConnMaxLifetime(0)
		db.SetConnMaxIdleTime(0)
	}
	// The switch to WAL mode ignores the busy timeout: if several processes start at the
	// same time, some of them immediately get an error that the database is busy.
	if err := whenFree(ctx, func() error { return db.PingContext(ctx) }); err != nil {
		db.Close()
		return nil, explainOpen(err)
	}
	return db, nil
}

// located returns the path of the file itself, absolute and without links. Each new connection opens the file
// by its path: after a change of the working directory, or of a link, it would open another file, with a lease
// of its own. A link to nothing is refused, because whoever may write to the folder could have any file created.
func located(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", objects.SetupError(err)
	}
	if file, err := filepath.EvalSymlinks(path); err == nil {
		return file, nil
	}
	if info, err := os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink != 0 {
		return "", fmt.Errorf("%w: it is a symbolic link to a file that does not exist or cannot be reached: name that file instead", objects.ErrSetup)
	}
	folder, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return path, nil // SQLite says that it can't open it
	}
	return filepath.Join(folder, filepath.Base(path)), nil
}

// fileURL returns a path as a URL to which parameters can be added. The path is clean: SQLite would take two slashes at its
// start for the beginning of an authority.
func fileURL(path string) string { return "file:" + (&url.URL{Path: path}).EscapedPath() }

func dsn(path string) string {
	return fileURL(path) + "?" + url.Values{
		"_txlock": {"immediate"},
		"_pragma": {
			fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()),
			"journal_mode(WAL)",
			"synchronous(FULL)",
		},
	}.Encode()
}

// whenFree calls a func that takes a lock. While another connection holds the lock, it repeats the call until
// ctx ends or lockTimeout has passed. SQLite itself waits only for busyTimeout, because it does not
// notice the end of ctx. A call that ctx interrupts says only that; whenFree adds what it was waiting for.
func whenFree(ctx context.Context, take func() error) error {
	waiting, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	var busy error
	for {
		err := take()
		switch {
		case err == nil:
			return nil
		case !isBusy(err):
			if busy != nil && ctx.Err() != nil {
				err = fmt.Errorf("%w: %w", busy, err)
			}
			return err
		case !pace.Sleep(waiting, pace.Jitter(5*time.Millisecond)):
			return err
		}
		busy = err
	}
}

func isBusy(err error) bool { return isOf(err, busyCode, "database is locked") }

// isConstraint reports whether a constraint, or RAISE in a trigger, has refused a row.
func isConstraint(err error) bool { return isOf(err, constraintCode, "constraint failed") }

// isOf reports whether an error has the code or, if its driver's errors have no codes, the text.
func isOf(err error, code int, text string) bool {
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		return coded.Code()&0xff == code
	}
	return err != nil && strings.Contains(err.Error(), text)
}

// explain wraps a driver's error with its meaning. Drivers have different error types, so the text decides.
func explain(err error) error {
	var own refusal
	if err == nil || errors.As(err, &own) {
		return err
	}
	text := err.Error()
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(text, p) })
	}
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return objects.ErrNotFound
	case has("no such table"):
		return &objects.NoTable{Cause: err}
	case has("UNIQUE constraint failed"):
		return fmt.Errorf("%w: %w", objects.ErrTaken, err)
	case has("no such column", "has no column named"):
		return fmt.Errorf("%w: %w (%s)", objects.ErrSetup, err, objects.OtherTable)
	case has("datatype mismatch", "ON CONFLICT clause does not match",
		"readonly database", "not a database"):
		return fmt.Errorf("%w: %w", objects.ErrSetup, err)
	}
	return err
}

// explainOpen explains why a file can't be opened. Later, when a connection is added, the process may only lack file
// descriptors for a moment.
func explainOpen(err error) error {
	if isOf(err, cantOpenCode, "unable to open database") {
		return fmt.Errorf("%w: %w", objects.ErrSetup, err)
	}
	return explain(err)
}

// explain does what the func explain does, and knows which tables package claims creates.
func (t *Table) explain(err error) error {
	err = explain(err)
	if missing := (*objects.NoTable)(nil); errors.As(err, &missing) {
		text := missing.Cause.Error()
		missing.OfClaims = strings.Contains(text, t.name+objects.ClaimsSuffix) || strings.Contains(text, t.name+objects.RequestsSuffix)
	}
	return err
}
