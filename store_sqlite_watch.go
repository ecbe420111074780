package tenure

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/wake"
)

const (
	sqlitePoll     = 50 * time.Millisecond // how often it is asked whether somebody has written
	sqlitePollRest = time.Second           // after it could not be asked
)

// sqliteWatches wakes those who watch: at once for what is deleted through the
// same store, and within a poll for what others delete.
type sqliteWatches struct {
	hub *wake.Hub[Key]

	mu      sync.Mutex
	count   int // of watches
	closed  bool
	cancel  context.CancelFunc // ends the polling; nil before the first watch
	done    sync.WaitGroup
	polling sync.Mutex // held by who polls: the next one waits until the last has ended
}

// Watch implements [Watcher]. While there are watches, one connection is kept to
// ask SQLite, 20 times a second, whether anybody has written to the file; none of
// a pool that has only one or two.
func (s *SQLiteStore) Watch(key Key) Watch {
	w := &s.watches
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return noWatch{}
	}
	if w.count++; w.count == 1 {
		var ctx context.Context
		ctx, w.cancel = context.WithCancel(context.Background())
		w.done.Go(func() { s.poll(ctx) })
	}
	return &sqliteWatch{Watch: w.hub.Watch(key), all: w}
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

// poll looks for what others delete, until ctx is done.
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
		if !sleep(ctx, sqlitePollRest) {
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
	for seen := int64(-1); ; {
		var version int64
		if err := conn.QueryRowContext(ctx, `PRAGMA data_version`).Scan(&version); err != nil {
			return err
		}
		switch {
		case seen == -1:
			s.watches.hub.SetLive(true)
		case version != seen:
			if err := s.wakeDeleted(ctx, conn); err != nil {
				return err
			}
		}
		seen = version
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

// wakeDeleted wakes those whose object is not there.
func (s *SQLiteStore) wakeDeleted(ctx context.Context, conn sqliteConn) error {
	for _, key := range s.watches.hub.Keys() {
		switch _, err := s.version(ctx, conn, key); {
		case errors.Is(err, sql.ErrNoRows):
			s.watches.hub.Wake(key)
		case err != nil:
			return err
		}
	}
	return nil
}
