// Package reach gives other packages of this module what the stores of the root package keep
// to themselves. The root package sets its funcs; those who call them import it.
package reach

import (
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
)

var (
	// Postgres returns the table of a *tenure.PostgresStore.
	Postgres func(store any) *pgobjects.Table

	// SQLite returns the table of a *tenure.SQLiteStore.
	SQLite func(store any) *sqliteobjects.Table
)
