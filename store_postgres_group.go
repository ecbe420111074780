package tenure

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
)

const (
	// groupPatience is how long a write waits for the answer to others before it goes
	// without.
	groupPatience = 10 * time.Millisecond

	// groupTimeout is what a group may take, waits for locks among it, before it is
	// undone: a part of it for each statement. A call that has not twice as long goes
	// alone, as it would have to when a group is undone.
	groupTimeout = 500 * time.Millisecond

	// groupsApart is for how long after that all go alone.
	groupsApart = time.Second

	// A group leaves at once, in one piece. The server begins with what has come, and
	// if the rest never does, because this host is gone, what has come stays locked,
	// and nobody can take these leases over.
	groupAtMost  = 16  // writes
	groupLargest = 512 // bytes of an object; a larger one goes alone
)

// errGoAlone says that nothing of a group was written, for the sake of one of it.
var errGoAlone = errors.New("to be written alone")

// writeGroups let the leases of a store that are busy at the same moment share round
// trips and commits. Each kind of write is for itself: one that releases need not be
// durable, and the others must not become like it.
type writeGroups struct{ create, replace, remove writeGroup }

func (g *writeGroups) all() []*writeGroup { return []*writeGroup{&g.create, &g.replace, &g.remove} }

// writeGroup sends writes of one kind. One that comes while none is under way goes at
// once, alone. Those that come meanwhile go as one transaction when that is
// answered.
//
// None has to bear with another for long: where the server refuses a group, or is slow
// with one of it, each goes alone, as if there were no groups; and where the answer
// that they wait for does not come soon, they go without.
type writeGroup struct {
	store *PostgresStore

	mu      sync.Mutex // guards the fields below; never held across I/O
	busy    bool       // a write that comes now waits
	waiting []*groupedWrite
	overdue *time.Timer // runs while some wait
	apart   time.Time   // until then each goes alone
}

// groupedWrite is a write of one object.
type groupedWrite struct {
	key   Key
	size  int                               // in bytes, about
	queue func(*pgx.Batch) *pgx.QueuedQuery // its statements, of which one answers
	dest  []any                             // where the answer goes; nobody's before done
	alone func() error                      // the same, in a transaction of its own

	ctx     context.Context
	done    chan struct{} // closed when there is an answer
	err     error
	noRow   error  // [pgx.ErrNoRows] where the answer has none
	left    bool   // nobody waits for the answer any more; guarded by the group's mu
	abandon func() // called when that comes to be so; nil while the write waits itself

	sent time.Time     // when it was sent with its group; zero: not yet; guarded by the group's mu
	pool *pgxpool.Pool // where to; guarded by the group's mu
}

// write does a write, alone or in a group. After an error its dest must not be read.
func (g *writeGroup) write(ctx context.Context, w *groupedWrite) error {
	deadline, ok := ctx.Deadline()
	hurried := ok && time.Until(deadline) < 2*groupTimeout
	g.mu.Lock()
	if hurried || time.Now().Before(g.apart) || w.size > groupLargest {
		g.mu.Unlock()
		return w.alone()
	}
	if !g.busy {
		g.busy = true
		g.mu.Unlock()
		defer g.next()
		return w.alone()
	}
	w.ctx, w.done = ctx, make(chan struct{})
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
		return w.alone()
	}
	return w.err
}

// next sends those that wait, if any. It is called when a write or a group has been
// answered, or is overdue.
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
	// Each of the group waits for this goroutine. Once none does any more ctx ends
	// it, and closing the store waits for its connection.
	go func() {
		defer g.next()
		defer cancel()
		g.send(ctx, group)
	}()
}

// leave is called when nobody waits for a write any more. It reports whether there is
// an answer after all.
func (g *writeGroup) leave(ctx context.Context, w *groupedWrite) (answered bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-w.done:
		return true
	default:
	}
	w.left = true
	if w.abandon != nil {
		if !w.sent.IsZero() && gaveUp(ctx.Err(), time.Since(w.sent)) {
			g.store.leases.replace(ctx, w.pool) // as after any call of a lease that was not answered
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
	// In the same order by everyone, lest two groups wait for each other.
	slices.SortStableFunc(group, func(a, b *groupedWrite) int {
		return cmp.Or(cmp.Compare(a.key.Type, b.key.Type), cmp.Compare(a.key.ID, b.key.ID))
	})
	err := g.transact(ctx, group)
	if undone(err) {
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
	pool, _, done, err := g.store.conns(ctx)
	if err != nil {
		return err
	}
	defer done()
	began := time.Now()
	conn, err := pool.Acquire(ctx)
	if err != nil {
		g.store.heard(ctx, pool, began, err)
		return err
	}
	defer conn.Release()
	group = g.remaining(group, pool)
	if len(group) == 0 {
		return ctx.Err()
	}
	const most = 2 // statements of a write
	each := groupTimeout / time.Duration(most*len(group))
	batch := &pgx.Batch{}
	batch.Queue(g.store.sql.setStatementTimeout, strconv.FormatInt(each.Milliseconds(), 10))
	for _, w := range group {
		w.queue(batch).QueryRow(scanRow(&w.noRow, w.dest))
	}
	err = conn.SendBatch(ctx, batch).Close()
	g.store.heard(ctx, pool, began, err)
	return err
}

// remaining returns the writes that somebody still waits for, and notes that they are
// sent now: a record that appears after its acquire was given up would stand for nobody.
func (g *writeGroup) remaining(group []*groupedWrite, pool *pgxpool.Pool) []*groupedWrite {
	g.mu.Lock()
	defer g.mu.Unlock()
	group = slices.DeleteFunc(slices.Clone(group), func(w *groupedWrite) bool { return w.left })
	for _, w := range group {
		w.sent, w.pool = time.Now(), pool
	}
	return group
}

// undone reports whether nothing of a group was written: the server has refused it, or
// a pooler the connection. An error that ends the session may come behind the commit,
// as the server's shutdown may, and a pooler's word that the server is gone.
func undone(err error) bool {
	refused := (*pgconn.PgError)(nil)
	if !errors.As(err, &refused) {
		return false
	}
	severity := cmp.Or(refused.SeverityUnlocalized, refused.Severity)
	return severity == "ERROR" && !strings.HasPrefix(refused.Code, "08") || refusesSetting(err)
}
