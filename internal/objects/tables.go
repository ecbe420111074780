package objects

import _ "embed"

// TombstonesSuffix is appended to the name of the objects' table to get the name of the
// tombstones' table.
const TombstonesSuffix = "_tombstones"

// The tables as SQL. {objects}, {tombstones}, {claims}, {requests} and the indexes
// {tombstones_by_age}, {claims_by_session} and {claims_by_age} stand for quoted names. On SQLite
// these have a schema, except {tombstones_table} and {claims_table}.
var (
	//go:embed postgres_objects.sql
	PostgresObjects string

	//go:embed postgres_tombstones.sql
	PostgresTombstones string

	//go:embed postgres_claims.sql
	PostgresClaims string

	//go:embed sqlite.sql
	SQLite string
)
