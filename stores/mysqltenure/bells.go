package mysqltenure

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// mostBells is how many objects a store watches by bells, each on a connection of its own.
const mostBells = 4

// bells has the bell of each watched object.
type bells struct {
	*shared
	closed context.Context // done when the store is closed
	stop   context.CancelFunc
	ends   sync.WaitGroup // of the goroutines that listen
	silent sync.Once      // logs that there are no bells

	mu    sync.Mutex
	byKey map[tenure.Key]*bell
	rings int // how many of them have a goroutine
}

func newBells(s *shared) *bells {
	b := &bells{shared: s, byKey: make(map[tenure.Key]*bell)}
	b.closed, b.stop = context.WithCancel(context.Background())
	return b
}

// close ends the bells, and waits for their goroutines.
func (b *bells) close() {
	b.mu.Lock() // no goroutine is started from now on
	b.stop()
	b.mu.Unlock()
	b.ends.Wait()
}

// Watch watches an object. A subscription is live while a bell tells of releases: see the type listener. It needs a
// connection, which all subscriptions of this store to the object share. There is none, and the subscriber has to
// poll, beyond four objects, where several servers accept writes, behind a proxy that shares connections, and while the
// process that has written the object does not watch it itself. A change of other content is noticed within some
// seconds.
func (s *Store) Watch(key tenure.Key) tenure.Subscription {
	b := s.bells
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.byKey[key]
	if of == nil {
		of = &bell{bells: b, key: key, changed: make(chan struct{}, 1)}
		b.byKey[key] = of
		if b.closed.Err() == nil && b.rings < mostBells && !s.server.hasManyWriters() && s.pools.bellsFit() {
			var ctx context.Context
			ctx, of.stop = context.WithCancel(b.closed)
			b.rings++
			b.ends.Go(func() { of.run(ctx) })
		}
	}
	sub := &subscription{bell: of, c: make(chan struct{}, 1)}
	of.mu.Lock()
	defer of.mu.Unlock()
	of.subs = append(of.subs, sub)
	return sub
}

// unwatch ends a subscription.
func (b *bells) unwatch(sub *subscription) {
	b.mu.Lock()
	defer b.mu.Unlock()
	of := sub.bell
	of.mu.Lock()
	defer of.mu.Unlock()
	of.subs = slices.DeleteFunc(of.subs, func(other *subscription) bool { return other == sub })
	if len(of.subs) > 0 || b.byKey[of.key] != of {
		return
	}
	delete(b.byKey, of.key)
	if of.stop != nil {
		of.stop()
		b.rings--
	}
}

func (b *bells) find(key tenure.Key) *bell {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.byKey[key]
}

// wrote is called when this process has written an object, with the name of its bell, or has deleted it, with "".
func (b *bells) wrote(key tenure.Key, name string) {
	if of := b.find(key); of != nil {
		of.wrote(name)
	}
}

// name returns the name of the bell of an object with that payload. A server compares names without regard to
// case, and they have at most 64 characters.
func (b *bells) name(key tenure.Key, payload []byte) string {
	database, table := b.cfg.names()
	if database == "" {
		database = b.server.database
	}
	hash := sha256.New()
	for _, part := range []string{database, table, key.Type, key.ID} {
		fmt.Fprintf(hash, "%d %s ", len(part), part)
	}
	hash.Write(payload)
	return fmt.Sprintf("tenure.%.40x", hash.Sum(nil))
}

var errNoBells = errors.New("a named lock of one connection is not seen on another: is there a proxy that shares connections?")

// ring makes sure that named locks work.
func (b *bells) ring(ctx context.Context, conn *sql.Conn) error {
	name := "tenure.test." + rand.Text()
	var got, seen sql.NullInt64
	if err := conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, 0)", name).Scan(&got); err != nil {
		return err
	}
	if err := b.pools.bells.QueryRowContext(ctx, "SELECT IS_USED_LOCK(?)", name).Scan(&seen); err != nil {
		return err
	}
	if got.Int64 != 1 || !seen.Valid {
		return errNoBells
	}
	_, err := conn.ExecContext(ctx, "DO RELEASE_LOCK(?)", name)
	return err
}

// DeleteAndWake is [Store.DeleteIf].
func (s *Store) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return s.DeleteIf(ctx, key, cond)
}

// Wake wakes all watches of an object: in this process at once, and in others within a second, or, if they wait for
// this object's bell, within five.
func (s *Store) Wake(ctx context.Context, key tenure.Key) (err error) {
	defer storekit.OpError(ctx, &err, "mysqltenure: wake", key)
	if err := errors.Join(key.Validate(), ctx.Err(), checkLengths(key, "")); err != nil {
		return err
	}
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	err = again(ctx, func() error {
		_, err := s.pools.calls.ExecContext(ctx, s.sql.wake, []byte(key.Type), []byte(key.ID))
		return err
	})
	if of := s.bells.find(key); of != nil && err == nil {
		of.wake()
	}
	return err
}
