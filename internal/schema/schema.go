// Package schema holds the tables of the stores as SQL. {objects}, {tombstones}
// and {tombstones_by_age} stand for quoted names.
package schema

import _ "embed"

//go:embed postgres_objects.sql
var PostgresObjects string

//go:embed postgres_tombstones.sql
var PostgresTombstones string

//go:embed sqlite.sql
var SQLite string
