// Package sighting judges when a lease's record may be taken over, by what was read of
// it and by how long it has stood unchanged. It does no I/O.
package sighting

import (
	"bytes"
	"time"

	"github.com/tenurelib/tenure/internal/record"
)

// Sighting is a record as it was last read, and since when it has stood unchanged: the
// instant after the first answer that showed it so.
type Sighting struct {
	Object record.Object
	Since  time.Time
}

// Of reports whether the record still stands as it was seen. A nil sighting has seen
// nothing.
func (s *Sighting) Of(o record.Object) bool {
	if s == nil {
		return false
	}
	// A program that starts its versions at 1 again after a delete repeats
	// them, so the version alone does not tell that nothing has changed. That its
	// holder is asked to release the lease is no change.
	was, is := s.Object.AsRenewed(), o.AsRenewed()
	return was.Version == is.Version && record.WholeMilli(was.UpdatedAt) == record.WholeMilli(is.UpdatedAt) &&
		bytes.Equal(was.Payload, is.Payload)
}

// CanExpireIn is the expiry rule. It returns how soon a record that was just read can
// expire, 0 or less: it has, and whether its age says so: then looking again before
// that is of no use. OnlyObserved leaves the age out.
func (s *Sighting) CanExpireIn(o record.Object, h record.Holding, onlyObserved bool) (left time.Duration, byAge bool) {
	left = h.TTL
	if s.Of(o) {
		left -= time.Since(s.Since)
	}
	// A record without a term was stamped by another program, by whatever clock
	// it has, and one of negative age by a clock that was ahead: their age tells
	// nothing.
	if !onlyObserved && h.Term != "" && h.Age > 0 {
		return min(left, h.TTL-h.Age), true
	}
	return left, false
}
