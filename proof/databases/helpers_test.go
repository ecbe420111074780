package databases_test

import (
	"context"
	"database/sql"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// takeoverSQL takes the lease over as another replica would, in a transaction of its own, so
// that a test can stop it anywhere.
const takeoverSQL = `UPDATE objects SET payload = '{"holder":"thief","term":"another","ttl_ms":30000}',
	resource_version = resource_version + 1 WHERE object_type = 'reconciler_lease' AND id = 'singleton'`

// countRows counts the rows of the table ledger.
func countRows(t *testing.T, db interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
}) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRowContext(context.Background(), `SELECT count(*) FROM ledger`).Scan(&n))
	return n
}

// stacksOf counts the goroutines in whose stack any of the given texts appears.
func stacksOf(code ...string) (n int) {
	stacks := make([]byte, 1<<22)
	for g := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
		if slices.ContainsFunc(code, func(code string) bool { return strings.Contains(g, code) }) {
			n++
		}
	}
	return n
}
