package objects

import (
	"fmt"
	"sync"
)

// RowTables has the user's tables for which queues were made with one store, so that the fence of a claim
// finds the table of its row. The zero value is ready to use. All methods are safe for concurrent use.
type RowTables[T any] struct {
	mu     sync.Mutex
	byName map[string]rowTable[T]
}

type rowTable[T any] struct {
	cfg   RowsConfig
	table T
	other *RowsConfig // of another queue on a table of that name that keeps its claims elsewhere; nil: none
}

// Add adds a table. Of several with the same name it keeps the first, because queues are made again
// and again.
func (r *RowTables[T]) Add(cfg RowsConfig, table T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byName == nil {
		r.byName = make(map[string]rowTable[T])
	}
	switch first, known := r.byName[cfg.Table]; {
	case !known:
		r.byName[cfg.Table] = rowTable[T]{cfg: cfg, table: table}
	case first.cfg.place() != cfg.place():
		first.other = &cfg
		r.byName[cfg.Table] = first
	}
}

// Of returns the table of a claim's row. It returns an [ErrInvalid] if there is none, or more than one.
func (r *RowTables[T]) Of(claim *Claim) (table T, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	found, known := r.byName[claim.Kind]
	switch {
	case !known:
		return table, fmt.Errorf("%w: this store knows no queue of table %q (call claims.NewQueue with this store before rows of the table fence its writes)", ErrInvalid, claim.Kind)
	case found.other != nil:
		return table, fmt.Errorf("%w: this store has two queues of tables named %q, which differ in Schema or columns: %v and %v (open a store for each)",
			ErrInvalid, claim.Kind, found.cfg.place(), found.other.place())
	}
	return found.table, nil
}

// All returns the tables.
func (r *RowTables[T]) All() (tables []T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.byName {
		tables = append(tables, t.table)
	}
	return tables
}

// place returns where the claims on rows are kept: the schema, and the columns of ID, session and
// token.
func (cfg RowsConfig) place() [4]string { return [4]string{cfg.Schema, cfg.ID, cfg.Session, cfg.Token} }
