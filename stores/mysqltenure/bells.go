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
	"time"

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
	rings int // how many of them have a connection
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

// Watch watches an object. All subscriptions of this store to the object share what it costs: a connection, on which
// it waits. They are woken at once when another process that watches the object too deletes it, or replaces what it has
// written itself; within a second by other changes; and within five by Wake. Beyond four objects, where several servers
// accept writes, and behind a proxy that shares connections, the store looks for changes twice a second instead, or
// more seldom if there are more than fifty objects.
func (s *Store) Watch(key tenure.Key) tenure.Subscription {
	b := s.bells
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.byKey[key]
	if of == nil {
		of = &bell{bells: b, key: key, changed: make(chan struct{}, 1), stop: func() {}}
		b.byKey[key] = of
		if b.closed.Err() == nil {
			if of.mayRing = b.rings < mostBells && !s.server.hasManyWriters() && s.pools.bellsFit(); of.mayRing {
				b.rings++
			}
			var ctx context.Context
			ctx, of.stop = context.WithCancel(b.closed)
			b.ends.Go(func() { of.run(ctx) })
		}
	}
	sub := &subscription{bell: of, c: make(chan struct{}, 1)}
	of.mu.Lock()
	defer of.mu.Unlock()
	of.subs = append(of.subs, sub)
	return sub
}

// pollRest returns how long to rest between two looks at an object without a bell.
func (b *bells) pollRest() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return max(pollEvery, time.Duration(len(b.byKey))*pollApart)
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
	of.stop()
	if of.mayRing {
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
			b.cfg.Logger.Warn("a named lock of one connection is not seen on another, so standbys are woken by polling: is there a proxy that shares connections?")
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
	if of := s.bells.find(key); of != nil && err == nil {
		of.wake()
	}
	return err
}
