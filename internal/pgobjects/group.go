package pgobjects

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/pgconns"
)

const (
	// groupPatience is how long a write waits for the answer to those before it.
	groupPatience = 10 * time.Millisecond

	// groupTimeout is how long a group may take, including waits for locks, before it is
	// rolled back; each statement gets a share of it. A call with less than twice that time
	// left is sent alone, because it could not be repeated after a rollback.
	groupTimeout = 500 * time.Millisecond

	// groupsApart is how long all writes are sent alone after a rollback.
	groupsApart = time.Second

	// A group has to arrive in one piece. The server starts with what has arrived, and if
	// the rest never arrives because this host is gone, the rows stay locked and no replica
	// can take these leases over.
	groupAtMost  = 16  // writes
	groupLargest = 512 // bytes of an object; a larger one is sent alone
)

// errGoAlone means that nothing of a group was written, because of one of its writes.
var errGoAlone = errors.New("has to be written alone")

// writeGroups implements group commit: a store's leases that write at the same moment share round
// trips and commits. Each kind of write has its own groups, because a release need not be durable,
// but the others must be.
//
// With 200 leases that renew as often as they can, this was measured to allow two to ten times as
// many renewals per second; at the usual rate of renewals it makes no difference.
type writeGroups struct{ create, replace, remove writeGroup }

func (g *writeGroups) all() []*writeGroup { return []*writeGroup{&g.create, &g.replace, &g.remove} }

// writeGroup sends writes of one kind. A write that arrives while none is in flight is sent immediately and
// alone. Writes that arrive in the meantime are sent as one transaction as soon as the first is answered.
//
// No write delays another for long. If the server rejects a group, or is slow with one of its writes, each
// is sent alone, as if there were no groups. If the answer that they wait for does not come soon, they are
// sent without it.
type writeGroup struct {
	table *Table

	mu      sync.Mutex // guards the fields below; never held across I/O
	busy    bool       // a write is in flight, so the next one waits
	waiting []*groupedWrite
	overdue *time.Timer // runs while writes are waiting
	apart   time.Time   // until then each write is sent alone
}

// groupedWrite is a write that waits for a group, or is part of one.
type groupedWrite struct {
	*write
	ctx     context.Context
	done    chan struct{} // closed when there is an answer
	err     error
	noRow   error  // [pgx.ErrNoRows] if the answer has no row
	gone    bool   // its caller has given up; guarded by the group's mu
	abandon func() // called when gone becomes true; nil until the write is part of a group

	sent time.Time     // when it was sent with its group; zero before that; guarded by the group's mu
	pool *pgxpool.Pool // the pool that it was sent with; guarded by the group's mu
}

// write does a write, alone or in a group. After an error the scanned values must not be
// read.
func (g *writeGroup) write(ctx context.Context, write *write) error {
	deadline, ok := ctx.Deadline()
	hurried := ok && time.Until(deadline) < 2*groupTimeout
	g.mu.Lock()
	if hurried || time.Now().Before(g.apart) || write.size > groupLargest {
		g.mu.Unlock()
		return g.table.alone(ctx, write)
	}
	if !g.busy {
		g.busy = true
		g.mu.Unlock()
		defer g.next()
		return g.table.alone(ctx, write)
	}
	w := &groupedWrite{write: write, ctx: ctx, done: make(chan struct{})}
	g.waiting = append(g.waiting, w)
	if len(g.waiting) == 1 {
		g.overdue = time.AfterFunc(groupPatience, g.next)
	}
	g.mu.Unlock()

	select {
	case <-w.done:
	case <-ctx.Done():
		if !g.leave(ctx, w) {
			return ctx.Err()
		}
	}
	if errors.Is(w.err, errGoAlone) {
		return g.table.alone(ctx, write)
	}
	return w.err
}

// next sends the waiting writes, if any. It is called when a write or a group has been
// answered or is overdue.
func (g *writeGroup) next() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiting) == 0 {
		g.busy = false
		return
	}
	g.overdue.Stop()
	n := min(len(g.waiting), groupAtMost)
	group := slices.Clone(g.waiting[:n])
	g.waiting = slices.Delete(g.waiting, 0, n)
	if len(g.waiting) > 0 {
		g.overdue = time.AfterFunc(groupPatience, g.next)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(group[0].ctx))
	waiters := n
	for _, w := range group {
		w.abandon = func() {
			if waiters--; waiters == 0 {
				cancel()
			}
		}
	}
	// The callers of the group's writes wait for this goroutine. When the last of them
	// gives up, ctx ends it, and Close waits for its connection.
	go func() {
		defer g.next()
		defer cancel()
		g.send(ctx, group)
	}()
}

// leave removes a write that its caller has given up, and reports whether an answer has come after
// all.
func (g *writeGroup) leave(ctx context.Context, w *groupedWrite) (answered bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-w.done:
		return true
	default:
	}
	w.gone = true
	if w.abandon != nil {
		if !w.sent.IsZero() {
			g.table.conns.NoteAbandoned(ctx, w.pool, w.sent, ctx.Err())
		}
		w.abandon()
		return false
	}
	g.waiting = slices.DeleteFunc(g.waiting, func(o *groupedWrite) bool { return o == w })
	if len(g.waiting) == 0 {
		g.overdue.Stop()
	}
	return false
}

func (g *writeGroup) send(ctx context.Context, group []*groupedWrite) {
	// Every process uses the same order, so that no two groups deadlock.
	slices.SortStableFunc(group, func(a, b *groupedWrite) int {
		return cmp.Or(cmp.Compare(a.id.Type, b.id.Type), cmp.Compare(a.id.ID, b.id.ID))
	})
	err := g.transact(ctx, group)
	if rolledBack(err) {
		err = errGoAlone
		g.mu.Lock()
		g.apart = time.Now().Add(groupsApart)
		g.mu.Unlock()
	}
	for _, w := range group {
		w.err = cmp.Or(err, w.noRow)
		close(w.done)
	}
}

// transact writes a group in one round trip and one transaction.
func (g *writeGroup) transact(ctx context.Context, group []*groupedWrite) error {
	pool, _, done, err := g.table.conns.For(ctx)
	if err != nil {
		return err
	}
	defer done()
	began := time.Now()
	conn, err := pool.Acquire(ctx)
	if err != nil {
		g.table.conns.NoteResult(ctx, pool, began, err)
		return err
	}
	defer conn.Release()
	group = g.remaining(group, pool)
	if len(group) == 0 {
		return ctx.Err()
	}
	const most = 2 // statements per write
	each := groupTimeout / time.Duration(most*len(group))
	batch := &pgx.Batch{}
	batch.Queue(`SELECT set_config('statement_timeout', $1, true), `+pgconns.Durably, strconv.FormatInt(each.Milliseconds(), 10))
	for _, w := range group {
		for _, s := range w.statements {
			s.Queue(batch, &w.noRow)
		}
	}
	err = conn.SendBatch(ctx, batch).Close()
	g.table.conns.NoteResult(ctx, pool, began, err)
	return err
}

// remaining returns the writes whose callers still wait, and marks them as sent. If an abandoned acquire were
// sent, its record would be an orphan.
func (g *writeGroup) remaining(group []*groupedWrite, pool *pgxpool.Pool) []*groupedWrite {
	g.mu.Lock()
	defer g.mu.Unlock()
	group = slices.DeleteFunc(slices.Clone(group), func(w *groupedWrite) bool { return w.gone })
	for _, w := range group {
		w.sent, w.pool = time.Now(), pool
	}
	return group
}

// rolledBack reports whether nothing of a group was written, because the server rejected
// the group or a pooler rejected the connection. An error that ends the session may come
// after the commit, for example when the server shuts down or a pooler reports that the
// server is gone.
func rolledBack(err error) bool {
	refused := (*pgconn.PgError)(nil)
	if !errors.As(err, &refused) {
		return false
	}
	severity := cmp.Or(refused.SeverityUnlocalized, refused.Severity)
	return severity == "ERROR" && !strings.HasPrefix(refused.Code, "08") || pgconns.RefusesSetting(err)
}
