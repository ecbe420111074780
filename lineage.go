package tenure

import (
	"context"
	"fmt"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/sighting"
)

// ErrMoved means that a write was not done because the store is on another server than the one
// that the write's condition names: see [WriteCondition.OnServer]. It is an [ErrConflict].
var ErrMoved = objects.ErrMoved

// Lineaged is implemented by stores whose history can be cut off: by a failover or a restore that
// loses what they had acknowledged. [PostgresStore] does. In any other store, what was acknowledged
// must never be lost.
type Lineaged interface {
	// Lineage returns the lineage in which the store is: the history that one primary continues.
	// If the store has not been marked in this lineage, Lineage first marks it. It does I/O only
	// at the first call, and after a read or a write has reached another server than before. The
	// zero Lineage says that the store has none, as one that wraps another may have to.
	Lineage(ctx context.Context) (Lineage, error)
}

// Lineage is a store's lineage, as it was last seen.
type Lineage struct {
	Server string        // the server, and its start, for [WriteCondition.OnServer]
	Mark   string        // another one in each lineage
	Age    time.Duration // how long ago the store was marked, by its clock
	Seen   time.Duration // how long ago this process first saw the mark; as long as Age if nothing can have been lost
}

// LineageOf returns the lineage of any store; the zero one if the store is not [Lineaged].
func LineageOf(ctx context.Context, store Store) (Lineage, error) {
	if lineaged, ok := store.(Lineaged); ok {
		return lineaged.Lineage(ctx)
	}
	return Lineage{}, nil
}

// OnServer makes a write fail with [ErrMoved] on any other server than the one that
// [Lineage.Server] names, and gives it a version above least. If server is empty, it changes
// nothing.
func (c WriteCondition) OnServer(server string, least int64) WriteCondition {
	if server != "" {
		c.c.Server, c.c.Least = server, least
	}
	return c
}

// CheckServer returns [ErrMoved] if the condition names another server. It is for
// implementations of [Lineaged].
func (c WriteCondition) CheckServer(server string) error {
	if c.c.Server != "" && c.c.Server != server {
		return ErrMoved
	}
	return nil
}

// Least returns the version that the write's must be above.
func (c WriteCondition) Least() int64 { return c.c.Least }

// lineage returns the lineage in which the lease's store is; the zero one if it has none.
func (l *Lease) lineage(ctx context.Context) (Lineage, error) {
	return LineageOf(ctx, l.store)
}

// settlesIn returns how long it is until the lease may be taken if there is no record: the holder's may be
// lost, and until then it may still be trusted. 0 or less: it may be taken.
func (l *Lease) settlesIn(on Lineage) time.Duration {
	if l.cfg.Key.Type == objects.SessionType { // its ID is new, so nobody can have held it
		return 0
	}
	return sighting.SettlesIn(objects.Lineage(on), "", l.cfg.TTL, l.cfg.Expiry == Observed)
}

// settlesIn returns how long it is until a record may be taken that was perhaps written in an earlier lineage.
func (r reading) settlesIn(l *Lease) time.Duration {
	return sighting.SettlesIn(objects.Lineage(r.on), r.stored.Mark(), max(l.cfg.TTL, r.holding.TTL), l.cfg.Expiry == Observed)
}

// isCurrent reports whether the record was written by a term that was valid in this lineage.
func (r reading) isCurrent() bool { return r.on.Mark == "" || r.stored.Mark() == r.on.Mark }

// mayReassert reports whether a valid term has to write its record again, because a failover has
// lost it: what stands is from before the term, and the term has not written in this lineage yet.
// Exists says whether there is a record.
func (t *Term) mayReassert(r reading, exists bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return r.on.Mark != t.vouched && (!exists || !r.isCurrent() && r.stored.AsRenewed().Version < t.token)
}

// compare is called when a renewal was answered. If that was the first one in its lineage, and the term owns more than
// its record, it has that compared with the store first: a claim whose row a failover has lost must
// not profit from the renewal.
func (t *Term) compare(ctx context.Context, version int64, on Lineage) error {
	compare := objects.Comparison(ctx)
	if t.vouchedIn(on) || compare == nil && t.key.Type != objects.SessionType {
		return nil
	}
	t.mu.Lock()
	t.movedTo(version)
	t.mu.Unlock()
	if compare == nil {
		return fmt.Errorf("%w: the database has failed over, and only the process that began a session knows its claims", ErrHeld)
	}
	return compare(ctx, objects.Lineage(on))
}

// markIn returns the mark that the record of a valid term has if it is written in a lineage. That of a session has the
// mark of before until its claims are compared, so that no other process resumes it.
func (t *Term) markIn(on Lineage) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.key.Type == objects.SessionType && t.vouched != "" {
		return t.vouched
	}
	return on.Mark
}

// vouchedIn reports whether the last write of the term that was answered was done in that lineage.
func (t *Term) vouchedIn(on Lineage) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.vouched == on.Mark
}
