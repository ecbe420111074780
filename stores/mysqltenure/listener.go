package mysqltenure

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"database/sql/driver"
	"errors"
	"time"
)

const (
	listenFor = 5 * time.Second // at once; servers log queries that take ten as slow
	lookEvery = time.Second     // while there is no bell to wait for
)

// listener waits on a connection for what becomes of an object. The process that has written it has its bell, a named
// lock, on its own connection. All others wait for that lock, and get it, one after the other, when the object is
// deleted, is replaced by another process, or when the first process dies, which ends its connection. The bell only
// says when to look: what there is, the table decides. So it does not matter when a listener comes, or that the
// server knows nothing of the bell in the moment between two holders.
type listener struct {
	*bell
	conn  *sql.Conn
	last  sight
	held  string // the name of the lock that the connection has; empty: none
	pause time.Duration
}

// sight is what a listener sees of an object.
type sight struct {
	bell    string   // its name; empty: there is no object
	content [32]byte // a hash
	wakes   int64
}

// listen listens until its connection breaks, or its context ends.
func (b *bell) listen(ctx context.Context) error {
	conn, err := b.bells.pools.bells.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer conn.Raw(func(any) error { return driver.ErrBadConn }) // not to be used again: it has the lock
	if err := b.bells.ring(ctx, conn); err != nil {
		return err
	}
	l := &listener{bell: b, conn: conn}
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
		case <-b.changed:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// step looks at the object, and takes its bell, or waits for it. It returns how long to rest before the next step.
func (l *listener) step(ctx context.Context) (rest time.Duration, err error) {
	own := l.ownName()
	if own == "" { // rings at once, before it looks
		if err := l.release(ctx); err != nil {
			return 0, err
		}
	}
	is, err := l.look(ctx)
	if err != nil {
		return 0, err
	}
	if is != l.last {
		l.last, l.pause = is, shortestRetry
		l.wake()
	}
	if is.bell != "" && is.bell == own {
		l.setLive(true)
		return lookEvery, l.take(ctx, own)
	}
	if err := l.release(ctx); err != nil {
		return 0, err
	}
	if is.bell == "" {
		l.setLive(true)
		return lookEvery, nil
	}
	return l.await(ctx, is.bell)
}

// await waits for the bell of what another process has written. If nobody has that, its writer is gone, or does not
// watch.
func (l *listener) await(ctx context.Context, name string) (rest time.Duration, err error) {
	var holder, got sql.NullInt64
	if err := l.conn.QueryRowContext(ctx, "SELECT IS_USED_LOCK(?)", name).Scan(&holder); err != nil {
		return 0, err
	}
	l.setLive(holder.Valid)
	if !holder.Valid {
		rest, l.pause = l.pause, min(2*l.pause, lookEvery)
		return rest, nil
	}
	if err := l.conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, ?)", name, listenFor.Seconds()).Scan(&got); err != nil {
		return 0, err
	}
	if got.Int64 == 1 {
		l.held = name
		l.wake()
		err = l.release(ctx) // for the next one
	}
	return 0, err
}

// take makes a bell this process's, in place of the one that it had. The new one comes first, so that whoever the old
// one wakes finds it.
func (l *listener) take(ctx context.Context, name string) error {
	if l.held == name {
		return nil
	}
	var got sql.NullInt64
	if err := l.conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, 0)", name).Scan(&got); err != nil {
		return err
	}
	err := l.release(ctx)
	if got.Int64 == 1 { // otherwise a connection of before that has just broken still has it
		l.held = name
	}
	return err
}

// release rings the bell that this process has, if it has one.
func (l *listener) release(ctx context.Context) error {
	if l.held == "" {
		return nil
	}
	_, err := l.conn.ExecContext(ctx, "DO RELEASE_LOCK(?)", l.held)
	l.held = ""
	return err
}

func (l *listener) look(ctx context.Context) (is sight, err error) {
	var labels, payload []byte
	err = l.conn.QueryRowContext(ctx, l.bells.sql.watch, []byte(l.key.Type), []byte(l.key.ID)).Scan(&labels, &payload, &is.wakes)
	if errors.Is(err, sql.ErrNoRows) {
		return is, nil
	}
	if payload != nil {
		is.bell = l.bells.name(l.key, payload)
		is.content = sha256.Sum256(append(append(labels, 0), payload...))
	}
	return is, err
}
