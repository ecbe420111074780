package claims

import (
	"log/slog"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Table is the claims' table of a store.
type Table = table

// TableOf returns it.
func TableOf(store tenure.Store) (Table, error) { return tableOf(store) }

// NewSessionOver returns a session over a store and a table that a test has put faults into.
func NewSessionOver(store tenure.Store, table Table, cfg SessionConfig) (*Session, error) {
	return newSession(store, table, cfg)
}

// Detached returns how many claims the session remembers that it has detached.
func (w *Worker) Detached() int {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	return len(w.kind.ledger.detached)
}

// StoreOf returns the store of a session.
func StoreOf(s *Session) tenure.Store { return s.store }

// NewQueueOver returns a queue over a table that a test has put faults into.
func NewQueueOver(store tenure.Store, cfg QueueConfig, table func(objects.RowsConfig) objects.RowsTable) (*Queue, error) {
	return newQueue(store, cfg, func(cfg objects.RowsConfig, _ *slog.Logger) (objects.RowsTable, error) { return table(cfg), nil })
}

// LookAtAll compares all rows that name the session with what it knows, and EndDenied each of its
// claims with its row.
func (k *Keys) LookAtAll() error { return k.kind.lookAtAll(k.kind.ledger) }
func (k *Keys) EndDenied() error { return k.kind.endDenied(k.kind.ledger) }
