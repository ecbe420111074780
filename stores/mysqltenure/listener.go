package mysqltenure

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"time"

	"github.com/tenurelib/tenure"
)

const (
	listenFor     = 5 * time.Second // at once; servers log queries that take ten as slow
	lookEvery     = time.Second     // while there is no bell to wait for
	shortestPause = 20 * time.Millisecond
)

// listener waits on a connection for what becomes of an object. The process that has written it has its bell, a named
// lock, on its own connection. All others wait for that lock, and get it, one after the other, when the object is
// deleted, is replaced by another process, or when the first process dies, which ends its connection. The bell only
// says when to look: what there is, the table decides. So it does not matter when a listener comes, or that nobody has
// the bell in the moment between two holders. If nobody has it for longer, the writer does not watch, and the listener
// looks each second. Where there are no bells, it only looks.
type listener struct {
	*bells
	key     tenure.Key
	tell    func(tenure.Change) // wakes the subscribers
	mayRing bool
	changed chan struct{} // has room for one: this process has another bell

	conn  querier
	rings bool
	last  *sight // nil: none yet
	held  string // the name of the lock that the connection has; empty: none
	pause time.Duration
}

// sight is what a listener sees of an object.
type sight struct {
	bell    string   // its name; empty: there is no object
	content [32]byte // a hash
	wakes   int64
	deleted int64 // at this version; an object may have come and gone since the last look
}

// listen listens until its connection breaks, or its context ends.
func (l *listener) listen(ctx context.Context) error {
	for {
		rest, err := l.step(ctx)
		if err != nil {
			return err
		}
		timer := time.NewTimer(rest)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-l.changed:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// step looks at the object, and takes its bell, or waits for it. It returns how long to rest before the next step.
func (l *listener) step(ctx context.Context) (rest time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout) // the connection may be cut off
	defer cancel()
	own := l.ownOf(l.key)
	is, err := l.look(ctx)
	if err != nil {
		return 0, err
	}
	if l.last == nil || is != *l.last {
		l.last, l.pause = &is, shortestPause
		l.tell(tenure.Change{})
	}
	switch {
	case !l.rings:
		return l.pollRest(), nil
	case is.bell != "" && is.bell == own && l.held == own:
		return lookEvery, nil
	case is.bell != "" && is.bell == own:
		return shortestPause, l.take(ctx, own) // which may have waited, as for the holder whose record this process has written to
	}
	nobodys := l.held == is.bell // what this connection has waited for is still there
	if err := l.unlock(ctx, l.held); err != nil {
		return 0, err
	}
	l.held = ""
	switch {
	case is.bell == "":
		return lookEvery, nil
	case nobodys:
		rest, l.pause = l.pause, min(2*l.pause, lookEvery)
		return rest, nil
	}
	_, err = l.lock(ctx, is.bell, listenFor)
	return 0, err
}

// take makes a bell this process's, in place of the one that it had. The new one comes first, so that whoever the old
// one wakes finds it. It may be a moment until those that find the new one free have let go of it.
func (l *listener) take(ctx context.Context, name string) error {
	before := l.held
	got, err := l.lock(ctx, name, lookEvery)
	if err != nil || !got { // a connection of before that has just broken still has it
		return err
	}
	return l.unlock(ctx, before)
}

// lock waits for a lock, and reports whether the connection has it.
func (l *listener) lock(ctx context.Context, name string, longest time.Duration) (bool, error) {
	var got sql.NullInt64
	err := l.conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, ?)", name, longest.Seconds()).Scan(&got)
	if err == nil && got.Int64 == 1 {
		l.held = name
		return true, nil
	}
	return false, err
}

// unlock lets go of a lock that the connection has, if there is a name.
func (l *listener) unlock(ctx context.Context, name string) error {
	if name == "" {
		return nil
	}
	_, err := l.conn.ExecContext(ctx, "DO RELEASE_LOCK(?)", name)
	return err
}

var errReadOnly = errors.New("the server is read-only")

func (l *listener) look(ctx context.Context) (is sight, err error) {
	var labels, payload []byte
	var readOnly bool
	err = l.conn.QueryRowContext(ctx, l.sql.watch, []byte(l.key.Type), []byte(l.key.ID)).Scan(&labels, &payload, &is.wakes, &is.deleted, &readOnly)
	if errors.Is(err, sql.ErrNoRows) {
		return is, nil
	}
	if readOnly { // the next connection may lead to the server that accepts writes now
		return is, errReadOnly
	}
	if payload != nil {
		is.bell = l.name(l.key, payload)
		is.content = sha256.Sum256(append(append(labels, 0), payload...))
	}
	return is, err
}
