package schedule

import (
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Slot is one time at which the job is due.
type Slot struct {
	Time time.Time

	store    tenure.Store
	done     record // what the store keeps once it is done, with the version that this replaces
	recorded *bool
}

// Statement returns a statement that marks the slot as done, for the transaction in which
// Do does its work in the same database, with any driver. Then the work's effect happens
// exactly once: if the slot was done in the meantime, the statement fails and the
// transaction has to be rolled back. As without the statement, Do must return an error if
// the transaction failed.
//
// It returns [errors.ErrUnsupported] if the store is neither Postgres nor SQLite.
func (slot Slot) Statement() (query string, args []any, err error) {
	store, ok := objects.As[tenure.SQLStore](slot.store)
	if !ok {
		return "", nil, fmt.Errorf("schedule: statement: %w: %T is not a SQLStore", errors.ErrUnsupported, slot.store)
	}
	*slot.recorded = true
	return store.PutStatement(slot.done.object(), slot.done.version)
}
