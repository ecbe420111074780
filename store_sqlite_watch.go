package tenure

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/wake"
)

const (
	sqlitePoll     = 50 * time.Millisecond // how often it is asked whether somebody has written
	sqlitePollRest = time.Second           // after it could not be asked
)

// sqliteWatches wakes those who watch: at once for what happens through the same
// store, and within a poll for what others do.
type sqliteWatches struct {
	hub *wake.Hub[Key]

	mu      sync.Mutex
	begun   atomic.Int64 // watches ever
	count   int          // of watches
	closed  bool
	cancel  context.CancelFunc // ends the polling; nil before the first watch
	done    sync.WaitGroup
	polling sync.Mutex // held by who polls: the next one waits until the last has ended
}

// Watch implements [Watcher]. While there are watches, one connection is kept to
// ask SQLite, 20 times a second, whether anybody has written to the file; none of
// a pool that has only one or two.
func (s *SQLiteStore) Watch(key Key) Subscription {
	w := &s.watches
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return noHints{}
	}
	watch := &sqliteWatch{Watch: w.hub.Watch(key), all: w}
	w.begun.Add(1)
	if w.count++; w.count == 1 {
		var ctx context.Context
		ctx, w.cancel = context.WithCancel(context.Background())
		w.done.Go(func() { s.poll(ctx) })
	}
	return watch
}

type sqliteWatch struct {
	*wake.Watch[Key]
	all  *sqliteWatches
	once sync.Once
}

func (w *sqliteWatch) Stop() {
	w.once.Do(func() {
		w.Watch.Stop()
		w.all.mu.Lock()
		defer w.all.mu.Unlock()
		if w.all.count--; w.all.count == 0 {
			w.all.cancel()
		}
	})
}

func (w *sqliteWatches) close() {
	w.mu.Lock()
	w.closed = true
	if w.cancel != nil {
		w.cancel()
	}
	w.mu.Unlock()
	w.done.Wait()
}

// Wake implements [Notifier]. Other processes are woken by the change itself.
func (s *SQLiteStore) Wake(ctx context.Context, key Key) error {
	if err := cmp.Or(key.Validate(), ctx.Err()); err != nil {
		return opError(ctx, "wake", key, err)
	}
	s.watches.hub.Wake(key)
	return nil
}

// poll looks for what others do, until ctx is done.
func (s *SQLiteStore) poll(ctx context.Context) {
	hub := s.watches.hub
	s.watches.polling.Lock()
	defer s.watches.polling.Unlock()
	for {
		err := s.pollFile(ctx)
		hub.SetLive(false)
		if ctx.Err() == nil {
			s.cfg.Logger.Debug("standbys are not woken by other processes, and poll", "table", s.cfg.Table, "error", err)
		}
		if !pace.Sleep(ctx, sqlitePollRest) {
			return
		}
	}
}

func (s *SQLiteStore) pollFile(ctx context.Context) error {
	conn, err := s.pollConn(ctx)
	if err != nil {
		return err
	}
	if conn == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	defer conn.Close()
	ticker := time.NewTicker(sqlitePoll)
	defer ticker.Stop()
	last := make(map[Key][]byte)
	for seen, known := int64(-1), int64(0); ; {
		begun := s.watches.begun.Load()
		var version int64
		if err := conn.QueryRowContext(ctx, `PRAGMA data_version`).Scan(&version); err != nil {
			return err
		}
		if version != seen || begun != known {
			if err := s.wakeChanged(ctx, conn, last); err != nil {
				return err
			}
		}
		if seen == -1 {
			s.watches.hub.SetLive(true)
		}
		seen, known = version, begun
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// pollConn returns a connection to poll on, which is told of what all others write;
// nil where there is none to spare, or nothing to be told. Then the watches are
// not live, and are woken by the same store all the same.
func (s *SQLiteStore) pollConn(ctx context.Context) (*sql.Conn, error) {
	if most := s.db.Stats().MaxOpenConnections; most == 1 || most == 2 {
		return nil, nil // a program may want two at once
	}
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	var file string
	err = conn.QueryRowContext(ctx, `SELECT file FROM pragma_database_list WHERE name = 'main'`).Scan(&file)
	if err != nil || file == "" { // in memory: who else writes there cannot always be seen
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// wakeChanged wakes those whose object is not there, or says something else than
// it did last, or is looked at for the first time. The renewal of a lease changes
// nothing but version and time.
func (s *SQLiteStore) wakeChanged(ctx context.Context, conn sqliteConn, last map[Key][]byte) error {
	keys := s.watches.hub.Keys()
	maps.DeleteFunc(last, func(key Key, _ []byte) bool { return !slices.Contains(keys, key) })
	for _, key := range keys {
		var says []byte
		err := conn.QueryRowContext(ctx, s.sql.says, key.Type, key.ID).Scan(&says)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		before, known := last[key]
		if err != nil || !known || !bytes.Equal(says, before) {
			s.watches.hub.Wake(key)
		}
		last[key] = says
	}
	return nil
}
