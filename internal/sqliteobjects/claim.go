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

// errClaimed is why a lock on a file could not be had: another process has one.
var errClaimed = errors.New("locked by another process")

// Claim says that this process uses the table alone, or together with others, and fails with
// [objects.ErrInUse] if another process has said otherwise: two of which one believes that it
// is alone would both run their jobs. It holds until Close, or until the process ends: it is a
// lock on a file beside the database, since a lock on the database's own file would get in
// SQLite's way. Claim does nothing for a database in memory, and nothing when it is called
// again.
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
		lock := path + "-" + url.PathEscape(strings.ToLower(t.name)) + "-lock" // names of tables are equal in any case
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

// Use keeps the claim until done is called, even if the table is closed before.
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

// unclaim ends what Claim began, unless somebody uses the claim.
func (t *Table) unclaim() {
	t.claiming.Lock()
	defer t.claiming.Unlock()
	t.closed = true
	t.unlock()
}

// unlock ends the claim if nobody has a use for it. The caller holds the mutex.
func (t *Table) unlock() {
	if t.closed && t.users == 0 && t.lock != nil {
		_ = t.lock.Close()
		t.lock = nil
		t.claimed.Store(false)
	}
}

// owner says which process has locked a file, if it has said so and is still there.
func owner(path string) string {
	text, _ := os.ReadFile(path)
	if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && isAlive(pid) {
		return fmt.Sprintf("process %d", pid)
	}
	return "another process"
}
