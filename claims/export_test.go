package claims

import "github.com/tenurelib/tenure"

// Table is the claims' table of a store.
type Table = table

// TableOf returns it.
func TableOf(store tenure.Store) (Table, error) { return tableOf(store) }

// NewSessionOver returns a session over a store and a table that a test has put faults into.
func NewSessionOver(store tenure.Store, table Table, cfg SessionConfig) (*Session, error) {
	return newSession(store, table, cfg)
}
