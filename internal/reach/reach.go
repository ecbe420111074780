// Package reach gives other packages of this module what the stores of the root package keep
// to themselves. The root package sets its funcs; those who call them import it.
package reach

import (
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
)

var (
	// Postgres returns the table of a *tenure.PostgresStore.
	Postgres func(store any) *pgobjects.Table

	// FencePostgres and FenceSQLite return a store of the same type whose writes pass the fence of
	// a claim.
	FencePostgres, FenceSQLite func(store any, claim *objects.Fence) (any, error)

	// SQLite returns the table of a *tenure.SQLiteStore.
	SQLite func(store any) *sqliteobjects.Table
)
