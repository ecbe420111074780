package tenure

import (
	"context"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// PrunedAt sets when tombstones were last pruned.
func (s *PostgresStore) PrunedAt(at time.Time) { s.table.SetPruned(at) }

// LookAgain ages what was found in the database, if anything, so that the store looks again.
func (s *PostgresStore) LookAgain() { s.table.ForceLook() }

// Grouped makes a lease's write wait until it is sent in a group, as if another write were
// under way.
func (s *PostgresStore) Grouped(ctx context.Context) context.Context {
	s.table.ForceGroups()
	return objects.WithLeaseCall(ctx)
}

// Active reports whether the replica is drained, or may be because its mark has not been read yet.
func (d *Drain) Active() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-d.known:
		return d.drained
	default:
		return true
	}
}

// LostTerm returns the error of a lost term with this key.
func LostTerm(key Key) error { return &lostError{key: key} }
