package tenure

import (
	"database/sql"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// DB is the store's database, for benchmarks that compare with the bare thing.
func (s *SQLiteStore) DB() *sql.DB { return s.db }

// PrunedAt sets when tombstones were last pruned.
func (s *PostgresStore) PrunedAt(at time.Time) { s.pruned.Store(at.Unix()) }

// Pool is the application's.
func (s *PostgresStore) Pool() *pgxpool.Pool { return s.pool }
