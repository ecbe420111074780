// Package sighting decides when a standby may steal a lease: when its record has expired, by
// its content and by how long it was seen unchanged. It does no I/O.
package sighting

import (
	"bytes"
	"time"

	"github.com/tenurelib/tenure/internal/record"
)

// Sighting is a record as it was last read, and since when it was seen unchanged: since the
// first answer that showed it so.
type Sighting struct {
	Object record.Object
	Since  time.Time
}

// Of reports whether a record that was just read is still the one that was seen. A nil
// Sighting has seen nothing.
func (s *Sighting) Of(o record.Object) bool {
	if s == nil {
		return false
	}
	// An equal version does not prove that nothing has changed, because a program that
	// starts again at 1 after a delete repeats them. A request to release the lease is no
	// change.
	was, is := s.Object.AsRenewed(), o.AsRenewed()
	return was.Version == is.Version && record.WholeMilli(was.UpdatedAt) == record.WholeMilli(is.UpdatedAt) &&
		bytes.Equal(was.Payload, is.Payload)
}

// CanExpireIn is the expiry rule, by which a standby may steal a lease. It returns how soon a record that was just read can
// expire, 0 or less if it has. ByAge says that the record's age decides, so that looking
// again earlier is useless. OnlyObserved leaves the age out.
func (s *Sighting) CanExpireIn(o record.Object, h record.Holding, onlyObserved bool) (in time.Duration, byAge bool) {
	in = h.TTL
	if s.Of(o) {
		in -= time.Since(s.Since)
	}
	// A record without a term was stamped by another program with whatever clock it has,
	// and one of negative age by a clock that was ahead, so their ages mean nothing.
	if !onlyObserved && h.Term != "" && h.Age > 0 {
		return min(in, h.TTL-h.Age), true
	}
	return in, false
}
