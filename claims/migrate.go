package claims

import (
	"context"
	"errors"
	"fmt"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Migrate creates the tables of claims and requests if they are missing. Their names are the name of the
// objects' table with _claims and _requests appended. Call it after the store's own Migrate, which creates the
// table that has the sessions' records. It changes nothing that exists, and may be called at every start, by
// many processes at once. On Postgres it waits for a database that is down. It returns [tenure.ErrSetup] if the
// role may not create what is missing, or if the promises can't be kept on a table that exists, and
// [errors.ErrUnsupported] for a store that is not on Postgres or SQLite.
//
// A [Session] needs these tables, even if it only has a [Worker]. A [Queue] by itself needs none of them: it
// works with the application's table and the sessions' records.
func Migrate(ctx context.Context, store tenure.Store) error {
	backend, err := backendOf(store)
	if err == nil {
		err = backend.Claims().Migrate(ctx)
	}
	return opError("migrate", err)
}

// backend is a store that has the tables for claims.
type backend interface{ Backend() objects.Backend }

func backendOf(store tenure.Store) (objects.Backend, error) {
	if objects.IsNil(store) {
		return nil, fmt.Errorf("%w: store is nil", tenure.ErrInvalid)
	}
	if s, ok := objects.As[backend](store); ok {
		if b := s.Backend(); b != nil {
			return b, nil
		}
	}
	return nil, fmt.Errorf("%w: %T has no tables for claims, and no method Unwrap() tenure.Store that returns a store with them", errors.ErrUnsupported, store)
}
