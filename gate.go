package tenure

import (
	"fmt"
	"sync/atomic"
)

// Gate keeps stale holders away from a resource outside the database. The
// resource asks it, under the same lock or in the same transaction as what it
// then does: a gate cannot stop a write that passed it and is still under way.
//
// A gate is for the tokens of one lease; those of two do not compare. The zero
// value is ready, and admits every term's token until it has seen one. It
// forgets what it has seen with its process: a resource that outlives it keeps
// the token beside its data, as the example shows in SQL. A Gate is safe for
// concurrent use, and must not be copied after its first use.
type Gate struct {
	highest atomic.Int64
}

// Admit returns nil for a fencing token that is not below the highest seen, and
// [ErrLost] for one that is: its term is over, for a later one has been here. A
// token that is not positive is no term's, and [ErrInvalid].
func (g *Gate) Admit(token int64) error {
	if token <= 0 {
		return fmt.Errorf("tenure: gate: %w: token %d is not positive", ErrInvalid, token)
	}
	for {
		highest := g.highest.Load()
		if token < highest {
			return fmt.Errorf("tenure: gate: %w: token %d is below %d", ErrLost, token, highest)
		}
		if g.highest.CompareAndSwap(highest, token) {
			return nil
		}
	}
}
