package sqliteobjects

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"strings"

	"github.com/tenurelib/tenure/internal/objects"
)

// claimedError means that another process has locked a file.
type claimedError struct{ pid int } // 0: unknown

func (e *claimedError) Error() string {
	if e.pid == 0 {
		return "another process"
	}
	return fmt.Sprintf("process %d", e.pid)
}

// strangeError means that what has the name of the file of locks is not a file of its own, so nobody can
// tell who uses the database. It is an [objects.ErrInUse].
type strangeError struct {
	path string
	mode fs.FileMode
}

func (e *strangeError) Error() string {
	what := "has more than one name"
	switch {
	case e.mode&fs.ModeSymlink != 0:
		what = "is a symbolic link"
	case !e.mode.IsRegular():
		what = "is not a regular file"
	}
	return fmt.Sprintf("%s, which processes lock to claim the database, %s: somebody who may write to its folder has put it there; remove it", e.path, what)
}

func (e *strangeError) Is(target error) bool {
	return target == objects.ErrInUse || target == objects.ErrSetup
}

// LockFile returns the path of the file that a process locks to claim a table of a database.
func LockFile(database, table string) string {
	return database + "-" + url.PathEscape(strings.ToLower(table)) + "-lock" // names of tables are equal in any case
}

// remedy is for a file that one of two processes assumed to have to itself.
const remedy = "set Shared in all programs that use it, or add ?shared=true to the path that they open"

// Claim declares that this process uses the table alone, or shares it with other processes, and fails with
// [objects.ErrInUse] if another process has declared the opposite: if one of them assumed that it was alone,
// both would run their jobs. The claim is a lock on a file beside the database, because a lock on the
// database's own file would interfere with SQLite's. It holds until Close, or until the process ends. Claim
// does nothing for a database in memory, or when it is called again.
func (t *Table) Claim(ctx context.Context, shared bool) error {
	if t.claimed.Load() {
		return nil
	}
	path, err := t.path(ctx)
	if err != nil {
		return explain(err)
	}
	t.claiming.Lock()
	defer t.claiming.Unlock()
	if t.claimed.Load() {
		return nil
	}
	if path != "" {
		lock := LockFile(path, t.name)
		t.lock, err = lockFile(lock, path, shared)
		claimed, strange := (*claimedError)(nil), (*strangeError)(nil)
		switch {
		case errors.As(err, &claimed) && shared:
			return fmt.Errorf("%w: %v has it open without Shared; "+remedy, objects.ErrInUse, claimed)
		case errors.As(err, &claimed):
			return fmt.Errorf("%w: %v has it open too; "+remedy, objects.ErrInUse, claimed)
		case errors.As(err, &strange):
			return strange
		case err != nil: // the directory cannot be written, or there are no locks
			t.logger.Warn("two processes that use this SQLite file, one of them without Shared, would not be refused", "error", err)
		}
	}
	t.claimed.Store(true)
	return nil
}

// path returns the path of the database's file, or "" if it is in memory.
func (t *Table) path(ctx context.Context) (path string, err error) {
	err = whenFree(ctx, func() error {
		return t.db.QueryRowContext(ctx, `SELECT coalesce(file, '') FROM pragma_database_list WHERE name = 'main'`).Scan(&path)
	})
	return path, err
}

// Use keeps the claim until done is called, even if the table is closed first.
func (t *Table) Use() (done func()) {
	t.claiming.Lock()
	defer t.claiming.Unlock()
	t.users++
	return func() {
		t.claiming.Lock()
		defer t.claiming.Unlock()
		t.users--
		t.unlock()
	}
}

// unclaim ends the claim, unless it is in use.
func (t *Table) unclaim() {
	t.claiming.Lock()
	defer t.claiming.Unlock()
	t.closed = true
	t.unlock()
}

// unlock ends the claim if the table is closed and the claim not in use. The caller holds the mutex.
func (t *Table) unlock() {
	if t.closed && t.users == 0 && t.lock != nil {
		_ = t.lock.Close()
		t.lock = nil
		t.claimed.Store(false)
	}
}
