package tenure

import (
	"database/sql"
	"time"
)

// DB is the store's database, for benchmarks that compare with the bare thing.
func (s *SQLiteStore) DB() *sql.DB { return s.db }

// PrunedAt sets when tombstones were last pruned.
func (s *PostgresStore) PrunedAt(at time.Time) { s.pruned.Store(at.Unix()) }
