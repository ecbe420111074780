package sqliteobjects

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/tenurelib/tenure/internal/objects"
)

// errClaimed is why a lock on a file could not be had: another process has one.
var errClaimed = errors.New("locked by another process")

// Claim says that this process uses the table alone, or together with others, and fails with
// [objects.ErrSetup] if another process has said otherwise: two that each believe to be alone
// would both run their jobs. It holds until Close, or until the process ends: it is a lock on
// a file beside the database, since a lock on the database's own file would get in SQLite's
// way. Claim does nothing for a database in memory, and nothing when it is called again.
func (t *Table) Claim(ctx context.Context, shared bool) error {
	t.claiming.Lock()
	defer t.claiming.Unlock()
	if t.claimed {
		return nil
	}
	var path string
	err := t.db.QueryRowContext(ctx, `SELECT coalesce(file, '') FROM pragma_database_list WHERE name = 'main'`).Scan(&path)
	switch {
	case err != nil && shared: // whoever shares a file needs a lease, and will hear of the error then
		return nil
	case err != nil:
		return explain(err)
	case path == "":
		t.claimed = true
		return nil
	}
	path += "-" + url.PathEscape(t.name) + "-lock"
	file, err := lockFile(path, shared)
	switch {
	case errors.Is(err, errClaimed) && shared:
		return fmt.Errorf("%w: %s uses this file as if alone; set Shared in every program that uses it", objects.ErrSetup, owner(path))
	case errors.Is(err, errClaimed):
		return fmt.Errorf("%w: %s uses this file too; set Shared in every program that uses it", objects.ErrSetup, owner(path))
	case err != nil && !shared: // the directory cannot be written, or there are no locks
		t.logger.Warn("another process that uses this SQLite file without Shared would not be refused", "error", err)
	}
	t.claimed, t.lock = true, file
	return nil
}

// unclaim ends what Claim began.
func (t *Table) unclaim() {
	t.claiming.Lock()
	defer t.claiming.Unlock()
	if t.lock != nil {
		_ = t.lock.Close()
		t.lock = nil
	}
}

// owner says which process has locked a file, if it has said so.
func owner(path string) string {
	if pid, _ := os.ReadFile(path); len(pid) > 0 {
		return "process " + strings.TrimSpace(string(pid))
	}
	return "another process"
}
