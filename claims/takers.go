package claims

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
)

// takers are the callers of this session that wait for keys. Once the record of another session is gone, they take
// its keys themselves, and do not wait until its rows are freed. All methods are safe for concurrent use.
type takers struct {
	hints sync.Map // of [tenure.Subscription]: what the callers wait for
}

// add notes a caller, until it calls remove.
func (t *takers) add(hints tenure.Subscription) (remove func()) {
	t.hints.Store(hints, true)
	return func() { t.hints.Delete(hints) }
}

// wake has the callers look at once. Callers in other processes are woken when the first rows are free.
func (t *takers) wake() {
	t.hints.Range(func(hints, _ any) bool {
		if caller, ok := hints.(interface{ Wake() }); ok {
			caller.Wake()
		}
		return true
	})
}

// taking tells whether callers take keys of a kind. All methods are safe for concurrent use.
type taking struct {
	calls atomic.Int32              // under way
	last  atomic.Pointer[time.Time] // when a call that has taken keys has ended
}

func (t *taking) begin() { t.calls.Add(1) }

func (t *taking) end(taken int) {
	if taken > 0 {
		now := time.Now()
		t.last.Store(&now)
	}
	t.calls.Add(-1)
}

// isUnderWay reports whether a call takes keys, or another will probably follow the last one.
func (t *taking) isUnderWay() bool {
	last := t.last.Load()
	return t.calls.Load() > 0 || last != nil && time.Since(*last) < coalesce
}

// mayTake reports whether callers of this session take keys of a kind at this moment. To free such keys meanwhile makes
// no sense: each is about to be taken in any case, and the database would write its row twice. While the session closes,
// nobody takes its own.
func (s *Session) mayTake(table *ownerTable, kind string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[kind]
	return !s.closed && table == s.table && k != nil && k.taking.isUnderWay()
}
