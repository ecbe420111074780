package objects

import _ "embed"

// TombstonesSuffix is what the name of the tombstones' table adds to that of the
// objects.
const TombstonesSuffix = "_tombstones"

// The tables as SQL. {objects}, {tombstones} and {tombstones_by_age} stand for quoted
// names.
var (
	//go:embed postgres_objects.sql
	PostgresObjects string

	//go:embed postgres_tombstones.sql
	PostgresTombstones string

	//go:embed sqlite.sql
	SQLite string
)
