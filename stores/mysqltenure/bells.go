package mysqltenure

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

const (
	mostBells = 4                      // objects that are watched on connections of their own
	pollEvery = 500 * time.Millisecond // for the others
	pollApart = 10 * time.Millisecond  // on average, however many there are
)

// bells has a listener for each watched object. A bell is a named lock: see the type listener.
type bells struct {
	*shared
	feeds  *storekit.Feeds
	silent sync.Once // logs that there are no bells

	mu        sync.Mutex
	listeners map[tenure.Key]*listener
	own       map[tenure.Key]string // the bells of what this process has written last, and watches
	rings     int                   // how many listeners have a connection
}

func newBells(s *shared) *bells {
	b := &bells{shared: s, listeners: make(map[tenure.Key]*listener), own: make(map[tenure.Key]string)}
	b.feeds = storekit.NewFeeds(b.follow, s.cfg.Logger)
	return b
}

// hints is a subscription of feeds without the changes: they may come too late to count from them.
type hints struct{ tenure.Subscription }

// Watch watches an object. All subscriptions of this store to the object share what it costs: a connection, on which
// it waits. They are woken at once when another process that watches the object too deletes it, or replaces what it has
// written itself; within a second by other changes; and within five by Wake. Beyond four objects, where several servers
// accept writes, and behind a proxy that shares connections, the store looks for changes twice a second instead, or
// more seldom if there are more than fifty objects.
func (s *Store) Watch(key tenure.Key) tenure.Subscription { return hints{s.bells.feeds.Watch(key)} }

// follow watches an object until its connection breaks, or its context ends.
func (b *bells) follow(ctx context.Context, key tenure.Key, tell func(tenure.Change)) error {
	l := &listener{bells: b, key: key, tell: tell, conn: b.pools.calls, changed: make(chan struct{}, 1)}
	defer b.leave(ctx, l)
	if b.enter(l) {
		limited, cancel := storekit.WithLimit(ctx, requestTimeout) // there may be no connection left
		defer cancel()
		conn, err := b.pools.bells.Conn(limited)
		if err != nil {
			return err
		}
		defer discard(conn) // it may have a lock
		if l.rings, err = b.ring(limited, conn); err != nil {
			return err
		}
		l.conn = conn
	}
	return l.listen(ctx)
}

// enter makes a listener known, and reports whether it may have a connection.
func (b *bells) enter(l *listener) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.listeners[l.key] = l
	if l.mayRing = b.rings < mostBells && !b.server.hasManyWriters() && b.pools.bellsFit(); l.mayRing {
		b.rings++
	}
	return l.mayRing
}

func (b *bells) leave(ctx context.Context, l *listener) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.listeners[l.key] == l { // otherwise another one follows the object already
		delete(b.listeners, l.key)
		if ctx.Err() != nil { // otherwise the next one rings on a new connection
			delete(b.own, l.key)
		}
	}
	if l.mayRing {
		b.rings--
	}
}

// wrote is called when this process has written an object, with the name of its bell, or has deleted it, with "".
func (b *bells) wrote(key tenure.Key, name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.listeners[key]
	if l == nil {
		return
	}
	if name == "" {
		l.tell(tenure.Change{})
	}
	if b.own[key] != name {
		b.own[key] = name
		select {
		case l.changed <- struct{}{}:
		default:
		}
	}
}

func (b *bells) ownOf(key tenure.Key) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.own[key]
}

// pollRest returns how long to rest between two looks at an object without a bell.
func (b *bells) pollRest() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return max(pollEvery, time.Duration(len(b.listeners))*pollApart)
}

// name returns the name of the bell of an object with that payload. A server compares names without regard to
// case, and they have at most 64 characters.
func (b *bells) name(key tenure.Key, payload []byte) string {
	database, table := b.table()
	hash := sha256.New()
	for _, part := range []string{database, table, key.Type, key.ID} {
		fmt.Fprintf(hash, "%d %s ", len(part), part)
	}
	hash.Write(payload)
	return fmt.Sprintf("tenure.%.40x", hash.Sum(nil))
}

// ring reports whether a named lock of the connection is seen on another one. The first time that it is not, it logs that.
func (b *bells) ring(ctx context.Context, conn *sql.Conn) (bool, error) {
	name := "tenure.test." + rand.Text()
	var got, seen sql.NullInt64
	if err := conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, 0)", name).Scan(&got); err != nil {
		return false, err
	}
	if err := b.pools.calls.QueryRowContext(ctx, "SELECT IS_USED_LOCK(?)", name).Scan(&seen); err != nil {
		return false, err
	}
	if got.Int64 != 1 || !seen.Valid {
		b.silent.Do(func() {
			b.cfg.Logger.Warn("standbys are woken by polling: a named lock of one connection is not seen on another, as behind a proxy that shares connections")
		})
		return false, nil
	}
	_, err := conn.ExecContext(ctx, "DO RELEASE_LOCK(?)", name)
	return true, err
}

// DeleteAndWake is [Store.DeleteIf].
func (s *Store) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return s.DeleteIf(ctx, key, cond)
}

// Wake wakes all watches of an object: in this process at once, and in others within a second, or, if they wait for
// this object's bell, within five.
func (s *Store) Wake(ctx context.Context, key tenure.Key) (err error) {
	defer storekit.OpError(ctx, &err, "mysqltenure: wake", key)
	if err := errors.Join(key.Validate(), ctx.Err(), s.checkLengths(tenure.Object{Key: key})); err != nil {
		return err
	}
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	err = again(ctx, func() error {
		_, err := s.pools.calls.ExecContext(ctx, s.sql.wake, []byte(key.Type), []byte(key.ID))
		return err
	})
	s.bells.mu.Lock()
	defer s.bells.mu.Unlock()
	if l := s.bells.listeners[key]; l != nil && err == nil {
		l.tell(tenure.Change{})
	}
	return err
}
