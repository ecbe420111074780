package sqliteobjects

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/tenurelib/tenure/internal/objects"
)

// errClaimed means that another process has locked a file.
var errClaimed = errors.New("locked by another process")

// LockFile returns the path of the file that a process locks to claim a table of a database.
func LockFile(database, table string) string {
	return database + "-" + url.PathEscape(strings.ToLower(table)) + "-lock" // names of tables are equal in any case
}

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
		switch {
		case errors.Is(err, errClaimed) && shared:
			return fmt.Errorf("%w: %s has it open without Shared; set Shared in all programs that use it", objects.ErrInUse, owner(lock))
		case errors.Is(err, errClaimed):
			return fmt.Errorf("%w: %s has it open too; set Shared in all programs that use it", objects.ErrInUse, owner(lock))
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

// owner returns which process has locked a file, if the file names a process that still runs.
func owner(path string) string {
	text, _ := os.ReadFile(path)
	if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && isAlive(pid) {
		return fmt.Sprintf("process %d", pid)
	}
	return "another process"
}
