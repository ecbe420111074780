// Package reach gives other packages of this module what the stores of the root package, and the
// keys of package claims, keep to themselves. These packages set the funcs; those who call them
// import the package.
package reach

import (
	"context"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
)

var (
	// Postgres returns the table of a *tenure.PostgresStore.
	Postgres func(store any) *pgobjects.Table

	// Trust returns for how long a renewal of a *tenure.Term is trusted: the TTL less the Margin.
	Trust func(term any) time.Duration

	// FencePostgres and FenceSQLite return a store of the same type whose writes pass the fence of
	// a claim.
	FencePostgres, FenceSQLite func(store any, claim *objects.Fence) (any, error)

	// SQLite returns the table of a *tenure.SQLiteStore.
	SQLite func(store any) *sqliteobjects.Table

	// FitKeys rejects keys of a kind that are too long for the database of a *claims.Session.
	FitKeys func(session any, kind string, ids []string) error

	// InNATS reports whether the stream of a *natstenure.Store has a message of an object, also one
	// that says that it was deleted.
	InNATS func(ctx context.Context, store any, id objects.ID) (bool, error)

	// DropKeys undoes the NewKeys that has returned a *claims.Keys, which must not have been used.
	DropKeys func(keys any)
)
