package tenure

import (
	"context"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// PrunedAt sets when tombstones were last pruned.
func (s *PostgresStore) PrunedAt(at time.Time) { s.table.SetPruned(at) }

// LookAgain makes what was found in the database, if anything, so old that the store
// looks again.
func (s *PostgresStore) LookAgain() { s.table.ForceLook() }

// Grouped makes a call that writes for a lease wait until it goes in a group, as
// if another were under way.
func (s *PostgresStore) Grouped(ctx context.Context) context.Context {
	s.table.ForceGroups()
	return objects.WithLeaseCall(ctx)
}
