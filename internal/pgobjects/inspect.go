package pgobjects

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// queryRow sends a query that returns one row.
type queryRow func(ctx context.Context, sql string, args []any, dest ...any) error

// inspect checks whether the tables are suitable. It compares types because the server's
// own errors come late or don't name the column. What was found is returned together with an
// [objects.ErrSetup], too.
func (s *setups) inspect(ctx context.Context, query queryRow) (*setup, error) {
	found := &setup{at: time.Now()}
	var tables []tableState
	var creates, isolation string
	var idleMS int64
	wanted, last := make([]string, 0, tableCount), []string{}
	for _, t := range ownTables {
		wanted = append(wanted, s.cfg.Table+t.suffix)
	}
	if told := s.told.Load(); told != nil {
		last = told.schemas[:]
	}
	err := query(ctx, inspectTables, []any{s.cfg.Schema, wanted, last}, &tables, &creates, &idleMS, &found.synchronousCommit, &isolation)
	if err != nil {
		return nil, err
	}
	found.idleTimeout = time.Duration(idleMS) * time.Millisecond
	var wrong [tableCount][]string
	for i := range tables {
		found.schemas[i] = cmp.Or(tables[i].Schema, creates)
		if tables[i].exists() {
			wrong[i] = ownTables[i].wrong(&tables[i], s.names.table(i))
		}
	}
	found.place(s.cfg.Table, s.found.Load())

	own, tombstones := &tables[tableOfObjects], &tables[tableOfTombstones]
	found.exists = own.exists()
	found.schema, found.ahead, found.lacks = own.Schema, own.Ahead, own.Lacks
	found.idAlone = slices.ContainsFunc(own.Keys, func(k keyState) bool { return k.isOf([]string{"id"}) })
	found.uniqueNames = slices.ContainsFunc(own.Keys, func(k keyState) bool {
		return k.Valid && slices.Contains(k.Columns, "name") && !slices.Contains(k.Columns, "id")
	})
	found.hasTombstones = tombstones.exists()
	// As long as there is no crash, unlogged tombstones are better than none.
	found.unlogged = tombstones.Persistence == tableUnlogged
	if found.unlogged {
		logged := *tombstones
		logged.Persistence = ""
		wrong[tableOfTombstones] = ownTables[tableOfTombstones].wrong(&logged, s.names.tombstones)
	}
	found.misburied = strings.Join(wrong[tableOfTombstones], "; ")
	found.tombstones = found.hasTombstones && found.misburied == "" && !tombstones.Denied
	found.unlogged = found.unlogged && found.tombstones
	for _, i := range []int{tableOfClaims, tableOfRequests} {
		if !tables[i].exists() {
			found.unclaimed = s.names.table(i)
		}
	}
	found.misclaimed = strings.Join(slices.Concat(wrong[tableOfClaims], wrong[tableOfRequests]), "; ")
	return found, s.unfit(found, isolation, wrong[tableOfObjects])
}

// unfit returns why no lease can be kept.
func (s *setups) unfit(found *setup, isolation string, wrong []string) error {
	if !found.exists {
		return &objects.NoTable{Cause: fmt.Errorf("%s: %w", s.names.objects, errNoTable)}
	}
	var errs []error
	if isolation != "read committed" {
		// A snapshot from before the wait for a lock hides the change that was waited for.
		errs = append(errs, fmt.Errorf("%w: default_transaction_isolation is %q, which must be \"read committed\" for the store's connections: set it in their URL, or for the role",
			objects.ErrSetup, isolation))
	}
	for _, what := range wrong {
		errs = append(errs, fmt.Errorf("%w: %s", objects.ErrSetup, what))
	}
	return errors.Join(errs...)
}

// mayClaim returns an error if no promise about claims can be kept.
func (s *setup) mayClaim() error {
	switch {
	case s.misclaimed != "":
		return fmt.Errorf("%w: %s", objects.ErrSetup, s.misclaimed)
	case s.unclaimed != "":
		return &objects.NoTable{Cause: fmt.Errorf("%s: %w", s.unclaimed, errNoTable)}
	}
	return nil
}
