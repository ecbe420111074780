package sighting

import (
	"bytes"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
)

// Memory is what a lease remembers about its record and its terms, which it knows by their IDs. The
// zero value is empty. All methods are safe for concurrent use and do no I/O.
type Memory[T any] struct {
	mu        sync.Mutex
	seen      *Sighting // the record; nil: there is none, or it was not read yet
	orphans   []orphan[T]
	newest    int64    // the greatest version that the record of any term had
	last      string   // the last term that this lease began
	copied    string   // the last term that a copy of this process also holds
	beginning []string // terms whose first write is under way
}

// orphan is a term that nothing relies on, but whose record may be in the store, because its
// acquire or its release failed without a clear answer. The record is removed, which wakes the
// standbys. The term is never taken up again, because each attempt would make the record young
// again and so keep the lease from a replica that can hold it.
type orphan[T any] struct {
	term          string
	kept          T         // what the caller needs to remove the record
	releaseFailed bool      // otherwise the acquire failed
	expires       time.Time // when the record expires, because nothing renews it
}

func (o orphan[T]) mayStand() bool { return !time.Now().After(o.expires) }

// Saw notes a record that was read, or nil if there was none, and when the answer came. It reports
// whether the payload is new.
func (m *Memory[T]) Saw(o *record.Object, answered time.Time) (isNew bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.seen
	switch {
	case o == nil:
		m.seen = nil
	case !before.Of(*o):
		m.seen = &Sighting{Object: *o, Since: answered}
	}
	// A record that is gone after its release can't come back. A record whose acquire was not
	// answered may still appear.
	m.orphans = slices.DeleteFunc(m.orphans, func(r orphan[T]) bool { return r.releaseFailed && (o == nil || !o.IsOf(r.term)) })
	return o != nil && (before == nil || !bytes.Equal(before.Object.Payload, o.Payload))
}

// LastSeen returns the record as it was last read; nil if there was none.
func (m *Memory[T]) LastSeen() *Sighting {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seen
}

// HasSeenNewer reports whether a record of a later version was seen. It is also true if the
// store's versions went back; then the record has to be read.
func (m *Memory[T]) HasSeenNewer(version int64) bool {
	seen := m.LastSeen()
	return seen != nil && version < seen.Object.Version
}

// Newest returns the greatest version seen in a term's record.
func (m *Memory[T]) Newest() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.newest
}

// SawVersion notes the version of a term's record and returns the greatest version seen before. It
// ignores a version near the limit, because the store does not continue from there, and all later
// tokens would be refused.
func (m *Memory[T]) SawVersion(v int64) (before int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before = m.newest
	if v < objects.VersionLimit/2 {
		m.newest = max(m.newest, v)
	}
	return before
}

// Begins notes that the first write of a term is under way, until done is called.
func (m *Memory[T]) Begins(term string) (done func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.beginning = append(m.beginning, term)
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.beginning = slices.DeleteFunc(m.beginning, func(id string) bool { return id == term })
	}
}

// IsBeginning reports whether the first write of a term is under way.
func (m *Memory[T]) IsBeginning(term string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Contains(m.beginning, term)
}

// Began notes that the first write of a term has succeeded.
func (m *Memory[T]) Began(term string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = term
}

// FoundCopy notes that a copy of this process also holds a term of this lease.
func (m *Memory[T]) FoundCopy(term string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.copied = term
}

// IsLast reports whether a term is the last that this lease began, and no copy holds it.
func (m *Memory[T]) IsLast(term string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return term != "" && term == m.last && term != m.copied
}

// AddOrphan notes that the record of a term may stand although its acquire or its release
// failed. The record expires after the TTL.
func (m *Memory[T]) AddOrphan(term string, kept T, releaseFailed bool, ttl time.Duration) {
	const most = 512 // each attempt whose answer is lost adds one, and any of them may have landed
	m.DropOrphan(term)
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.orphans) == most {
		m.orphans = m.orphans[1:]
	}
	m.orphans = append(m.orphans, orphan[T]{term, kept, releaseFailed, time.Now().Add(ttl)})
}

// DropOrphan forgets an orphan.
func (m *Memory[T]) DropOrphan(term string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.orphans = slices.DeleteFunc(m.orphans, func(o orphan[T]) bool { return o.term == term })
}

// Orphan returns what was kept with an orphan, if the term is one.
func (m *Memory[T]) Orphan(term string) (kept T, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := slices.IndexFunc(m.orphans, func(o orphan[T]) bool { return o.term == term })
	if i < 0 {
		return kept, false
	}
	return m.orphans[i].kept, true
}

// ReleasePending reports whether the record of a term that could not be released may stand.
func (m *Memory[T]) ReleasePending() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.orphans, func(o orphan[T]) bool { return o.releaseFailed && o.mayStand() })
}

// HasOrphans reports whether the record of any orphan may stand.
func (m *Memory[T]) HasOrphans() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.orphans, orphan[T].mayStand)
}
