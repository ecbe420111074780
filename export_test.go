package tenure

import (
	"context"
	"database/sql"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// DB is the store's database, for benchmarks that compare with the bare thing.
func (s *SQLiteStore) DB() *sql.DB { return s.table.DB() }

// PrunedAt sets when tombstones were last pruned.
func (s *PostgresStore) PrunedAt(at time.Time) { s.table.SetPruned(at) }

// LookAgain makes what was found in the database, if anything, so old that the store
// looks again.
func (s *PostgresStore) LookAgain() { s.table.ForceLook() }

// ParseURL parses a connection string as the store does.
func ParseURL(url string) error {
	_, err := pgconns.ParseURL(url)
	return err
}

// Pool is the application's.
func (s *PostgresStore) Pool() *pgxpool.Pool { return s.conns.Pool }

// Grouped makes a call that writes for a lease wait until it goes in a group, as
// if another were under way.
func (s *PostgresStore) Grouped(ctx context.Context) context.Context {
	s.table.ForceGroups()
	return objects.WithLeaseCall(ctx)
}
