package sqliteobjects

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/wake"
)

const pollPause = time.Second // after a poll has failed

// watches wakes the watches of an object: immediately after a change through the same table, and at the next
// look after another connection has changed the file.
type watches struct {
	hub     *wake.Hub[objects.ID]
	db      *sql.DB
	content string // the statement that reads an object's content
	logger  *slog.Logger

	started atomic.Int64   // how many watches have been started
	done    sync.WaitGroup // the goroutines that poll
	polling chan struct{}  // of size 1: has an element while a goroutine polls; the next one waits until the last has ended

	mu     sync.Mutex // guards the fields below
	count  int        // number of watches
	closed bool
	cancel context.CancelFunc // ends the polling; nil before the first watch
}

func newWatches(db *sql.DB, content string, logger *slog.Logger) *watches {
	return &watches{hub: wake.NewHub[objects.ID](false), db: db, content: content, logger: logger, polling: make(chan struct{}, 1)}
}

// Watch is a subscription to one object.
type Watch struct {
	*wake.Watch[objects.ID]
	stop func()
}

// Stop ends the watch. It may be called twice.
func (w *Watch) Stop() { w.stop() }

func (w *watches) watch(id objects.ID) *Watch {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		none := wake.NewHub[objects.ID](false).Watch(id)
		return &Watch{Watch: none, stop: none.Stop}
	}
	watch := w.hub.Watch(id)
	w.started.Add(1)
	if w.count++; w.count == 1 {
		var ctx context.Context
		ctx, w.cancel = context.WithCancel(context.Background())
		w.done.Go(func() { w.poll(ctx) })
	}
	return &Watch{Watch: watch, stop: sync.OnceFunc(func() {
		watch.Stop()
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.count--; w.count == 0 {
			w.cancel()
		}
	})}
}

func (w *watches) close() {
	w.mu.Lock()
	w.closed = true
	if w.cancel != nil {
		w.cancel()
	}
	w.mu.Unlock()
	w.done.Wait()
}

// poll looks for changes by other connections until ctx is done.
func (w *watches) poll(ctx context.Context) {
	select { // not a mutex: the next goroutine may come first, and may poll for as long as it likes
	case w.polling <- struct{}{}:
		defer func() { <-w.polling }()
	case <-ctx.Done():
		return
	}
	for {
		err := w.pollFile(ctx)
		w.hub.SetLive(false)
		if ctx.Err() == nil {
			w.logger.Debug("standbys are not woken by other processes, and poll", "error", err)
		}
		if !pace.Sleep(ctx, pollPause) {
			return
		}
	}
}

func (w *watches) pollFile(ctx context.Context) error {
	conn, file, err := w.pollConn(ctx)
	if err != nil {
		return err
	}
	if conn == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	defer conn.Close()
	looks := newLooks(file, w.logger)
	defer looks.close()
	contents := make(map[objects.ID][]byte)
	var spurious pace.Limiter
	for lastVersion, lastStarted := int64(-1), int64(0); ; {
		started := w.started.Load()
		var version int64 // data_version, which changes when another connection writes
		if err := conn.QueryRowContext(ctx, `PRAGMA data_version`).Scan(&version); err != nil {
			return err
		}
		read, ignoreFor := 0, time.Duration(0)
		if version != lastVersion || started != lastStarted {
			uncertain, err := w.wakeChanged(ctx, conn, contents)
			if err != nil {
				return err
			}
			read, ignoreFor = len(contents), spurious.IgnoreFor(uncertain, pollInterval)
		}
		if lastVersion == -1 {
			looks.open()
			w.hub.SetLive(true)
		}
		rest := looks.after(lastVersion != -1 && version != lastVersion, read)
		lastVersion, lastStarted = version, started
		if !looks.await(ctx, max(rest, ignoreFor)) {
			return ctx.Err()
		}
	}
}

// pollConn returns a connection to poll on and the path of its file, or nil if none can be spared or if polling
// would not notice other connections' changes. Then the watches are not live, and only changes through the same
// table wake them.
func (w *watches) pollConn(ctx context.Context) (conn *sql.Conn, file string, err error) {
	if most := w.db.Stats().MaxOpenConnections; most == 1 || most == 2 {
		return nil, "", nil // a program may need two at the same time
	}
	if conn, err = w.db.Conn(ctx); err != nil {
		return nil, "", err
	}
	err = conn.QueryRowContext(ctx, `SELECT file FROM pragma_database_list WHERE name = 'main'`).Scan(&file)
	if err != nil || file == "" { // for a database in memory, data_version is not reliable
		return nil, "", errors.Join(err, conn.Close())
	}
	return conn, file, nil
}

// wakeChanged wakes the watches of objects that are missing, whose labels or payload have changed, or that
// are read for the first time. The renewal of a lease changes only version and time, so it wakes no watch.
// Uncertain says that it woke a watch of an object that was missing before too: such a watch is for hints
// about other tables, and any change may concern it.
func (w *watches) wakeChanged(ctx context.Context, conn reader, contents map[objects.ID][]byte) (uncertain bool, err error) {
	watched := w.hub.Keys()
	maps.DeleteFunc(contents, func(id objects.ID, _ []byte) bool { return !slices.Contains(watched, id) })
	for _, id := range watched {
		var content []byte
		err := conn.QueryRowContext(ctx, w.content, id.Type, id.ID).Scan(&content)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return uncertain, err
		}
		last, known := contents[id]
		uncertain = uncertain || err != nil && known && last == nil
		if err != nil || !known || !bytes.Equal(content, last) {
			w.hub.Wake(id)
		}
		contents[id] = content
	}
	return uncertain, nil
}
