package tenure

import "database/sql"

// DB is the store's database, for benchmarks that compare with the bare thing.
func (s *SQLiteStore) DB() *sql.DB { return s.db }
