// Package reach gives other packages of this module what the stores of the root package, and the
// keys of package claims, keep to themselves. These packages set the funcs; those who call them
// import the package.
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

	// FitKeys rejects keys of a kind that are too long for the database of a *claims.Session.
	FitKeys func(session any, kind string, ids []string) error

	// DropKeys undoes the NewKeys that has returned a *claims.Keys, which must not have been used.
	DropKeys func(keys any)
)
