package claims

import (
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

// PassedOn returns how many claims the session remembers that it has passed on.
func (r *Rows) PassedOn() int {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return len(r.keys.now.passedOn)
}

// NewRowsOver returns the rows of a table that a test has put faults into.
func NewRowsOver(s *Session, cfg RowsConfig, table func(objects.RowsConfig) objects.RowsTable) (*Rows, error) {
	return newRows(s, cfg, func(cfg objects.RowsConfig) (objects.RowsTable, error) { return table(cfg), nil })
}

// LookAtAll compares all rows that name the session with what it knows, and EndDenied each of its
// claims with its row.
func (k *Keys) LookAtAll() error { return k.lookAtAll(k.now) }
func (k *Keys) EndDenied() error { return k.endDenied(k.now) }
