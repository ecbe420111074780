package tenure

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/listen"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/internal/wake"
)

const longestWakeName = 1000 // bytes; a notification has room for 8000

// postgresWatches listens for all watches of one store. It connects at the first
// watch and stays until the store is closed: a replica that loses the lease shall
// hear of its next release.
type postgresWatches struct {
	hub     *wake.Hub[string]
	listen  listen.Listener
	channel string
	prefix  atomic.Pointer[string] // of this store's hints; set before the listener connects

	mu     sync.Mutex
	cancel context.CancelFunc // nil before the first watch
	closed bool
	done   sync.WaitGroup
}

func (w *postgresWatches) init(s *PostgresStore) {
	w.hub = wake.NewHub[string](false)
	w.channel = "tenure:" + s.cfg.Table
	w.listen = listen.Listener{
		Channel: w.channel,
		Hub:     w.hub,
		Logger:  s.cfg.Logger,
		Connect: func(ctx context.Context) (*pgx.Conn, error) {
			// Hints name the schema, so they can't be recognised until the table is found.
			if _, err := s.setup(objects.WithLeaseCall(ctx)); err != nil {
				return nil, s.explain(err)
			}
			if s.cfg.ListenURL == "" {
				return connect(ctx, s.config)
			}
			config, err := pgconns.ParseURL(s.cfg.ListenURL) // which knows the pool_* parameters
			if err != nil {
				return nil, err
			}
			config.ConnConfig.DialFunc = s.cutter.Dial(config.ConnConfig.DialFunc)
			return connect(ctx, config)
		},
		Notify: s.notify,
		Key: func(payload string) (string, bool) {
			return strings.CutPrefix(payload, *s.watches.prefix.Load())
		},
	}
}

func (s *PostgresStore) notify(ctx context.Context, payload string) error {
	pool, _, done, err := s.conns(objects.WithLeaseCall(ctx))
	if err != nil {
		return err
	}
	defer done()
	// All that notify commit one after another, so none shall wait for the disk.
	_, err = pool.Exec(ctx, `SELECT pg_notify($1, $2), set_config('synchronous_commit', 'off', true)`, s.watches.channel, payload)
	return err
}

// Wake implements [Notifier].
func (s *PostgresStore) Wake(ctx context.Context, key Key) error {
	if err := key.Validate(); err != nil {
		return opError(ctx, "wake", key, err)
	}
	setup, err := s.setup(objects.WithLeaseCall(ctx))
	if err == nil {
		err = s.notify(ctx, setup.hint(key))
	}
	if err != nil {
		return opError(ctx, "wake", key, s.explain(err))
	}
	return nil
}

// Watch implements [Watcher].
func (s *PostgresStore) Watch(key Key) Subscription {
	if s.cfg.PollOnly {
		return noHints{}
	}
	s.watches.start()
	return s.watches.hub.Watch(wakeName(key))
}

func (w *postgresWatches) start() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || w.cancel != nil {
		return
	}
	var ctx context.Context
	ctx, w.cancel = context.WithCancel(context.Background())
	w.done.Go(func() { w.listen.Run(ctx) })
}

func (w *postgresWatches) close() {
	w.mu.Lock()
	w.closed = true
	if w.cancel != nil {
		w.cancel()
	}
	w.mu.Unlock()
	w.done.Wait()
}

// hint is what a notification says of a key. The channel is named after the table
// alone, for a name has little room, and leases of one key may be in many schemas.
func (setup *postgresSetup) hint(key Key) string { return setup.hintPrefix() + wakeName(key) }

func (setup *postgresSetup) hintPrefix() string { return setup.schema + "." }

// wakeName is how a key is called in a notification. Two keys may be called the
// same: then one's hints wake the other's watches in vain.
func wakeName(key Key) string {
	name := key.String()
	return strings.ToValidUTF8(name[:min(len(name), longestWakeName)], "")
}
