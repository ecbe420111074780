package pgobjects

import (
	"context"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/listen"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/wake"
)

const longestWakeName = 1000 // bytes; a notification has room for 8000

// watches listens on behalf of all watches of one table. It connects at the first watch and stays connected
// until the table is closed, because a replica that loses the lease needs the hint of its next release.
type watches struct {
	hub     *wake.Hub[string]
	listen  listen.Listener
	channel string

	mu     sync.Mutex
	cancel context.CancelFunc // nil before the first watch
	closed bool
	done   sync.WaitGroup
}

func (w *watches) init(t *Table) {
	w.hub = wake.NewHub[string](false)
	w.channel = channelOf(t.cfg.Table)
	w.listen = listen.Listener{
		Channel: w.channel,
		Hub:     w.hub,
		Logger:  t.cfg.Logger,
		Connect: func(ctx context.Context) (*pgx.Conn, error) {
			// Hints name the schema, so they can't be recognized before the table is found.
			if _, err := t.setups.get(objects.WithLeaseCall(ctx)); err != nil {
				return nil, t.setups.explain(err)
			}
			return t.conns.Connect(ctx, t.cfg.ListenURL)
		},
		Notify: t.notify,
		Key: func(payload string) (string, bool) {
			return strings.CutPrefix(payload, t.setups.told.Load().hintPrefix())
		},
	}
}

// channelOf names the channel of a table.
func channelOf(table string) string { return "tenure:" + table }

func (w *watches) watch(id objects.ID) *wake.Watch[string] {
	w.mu.Lock()
	if !w.closed && w.cancel == nil {
		var ctx context.Context
		ctx, w.cancel = context.WithCancel(context.Background())
		w.done.Go(func() { w.listen.Run(ctx) })
	}
	w.mu.Unlock()
	return w.hub.Watch(wakeName(id))
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

// hint is the payload of a notification about an object. The channel is named after the
// table alone, because its name has little room, and leases of one key may be in many
// schemas.
func (s *setup) hint(id objects.ID) string { return s.hintPrefix() + wakeName(id) }

func (s *setup) hintPrefix() string { return s.schemas[objects.TableOfObjects] + "." }

// wakeName is an object's name in a notification. If two objects have the same name, a hint for one
// needlessly wakes the watches of the other.
func wakeName(id objects.ID) string {
	name := id.String()
	return strings.ToValidUTF8(name[:min(len(name), longestWakeName)], "")
}
