// Package sighting decides when a standby may steal a lease: when the lease's record has expired,
// judged by its content and by how long it was seen unchanged. It does no I/O.
package sighting

import (
	"bytes"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
)

// Sighting is a record as it was last read, and the time since when it was seen unchanged, which is
// that of the first answer that showed it so.
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
	// An equal version does not prove that nothing has changed, because another program may begin
	// again at 1 after a delete. A request to release the lease does not count as a change.
	was, is := s.Object.AsRenewed(), o.AsRenewed()
	return was.Version == is.Version && record.WholeMilli(was.UpdatedAt) == record.WholeMilli(is.UpdatedAt) &&
		bytes.Equal(was.Payload, is.Payload)
}

// CanExpireIn is the expiry rule by which a standby may steal a lease. It returns how soon a
// record that was just read can expire: 0 or less if it has expired. ByAge says that the record's age, by the store's
// clock, was taken into account, so that a record that is read earlier does not expire sooner. OnlyObserved leaves the age out.
func (s *Sighting) CanExpireIn(o record.Object, h record.Holding, onlyObserved bool) (in time.Duration, byAge bool) {
	in = h.TTL
	if s.Of(o) {
		in -= time.Since(s.Since)
	}
	// Another program stamped a record without a term, by some clock of its own, and a clock
	// that was ahead stamped a record of negative age, so their ages mean nothing.
	if !onlyObserved && h.Term != "" && h.Age > 0 {
		return min(in, h.TTL-h.Age), true
	}
	return in, false
}

// SettlesIn returns how long it is until a failover of the database has settled; 0 or less: it has, and the other
// rules, such as CanExpireIn, decide whether a lease may be taken. Mark is that of the lease's record, or empty if
// there is no record. A record from an earlier lineage may lack what a failover has lost, so its holder, or a later
// one, may still trust a term until a TTL after the store was marked.
func SettlesIn(on objects.Lineage, mark string, ttl time.Duration, onlyObserved bool) time.Duration {
	if on.Mark == "" || on.Mark == mark {
		return 0
	}
	const longAgo = 24 * time.Hour // no clock is that wrong; without this, each process would wait for a TTL after its start
	if onlyObserved && on.Age < max(longAgo, 2*ttl) {
		return ttl - min(on.Age, on.Seen)
	}
	return ttl - on.Age
}
