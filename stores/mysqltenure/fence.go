package mysqltenure

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// fenceArgs returns the arguments of either statement of a fence.
func fenceArgs(term *tenure.Term) []any {
	return []any{[]byte(term.Key().Type), []byte(term.Key().ID), term.Record()}
}

// Fence returns the store with its writes fenced by a term: each one is a statement that writes to
// the term's record too, or a transaction that ends with the statement of FenceStatement. Fence does no I/O.
func (s *Store) Fence(guard tenure.Guard) (tenure.Store, error) {
	term, err := storekit.FenceTerm(s.term, guard)
	if err != nil {
		return nil, fmt.Errorf("mysqltenure: fence: %w", err)
	}
	if term == nil {
		return s, nil
	}
	return &Store{shared: s.shared, term: term}, nil
}

// Fenced runs fn in a transaction of [Store.DB], at READ COMMITTED, whose writes, to any tables of the server,
// commit only if the term is still the lease's. A nil guard is the term for which the func runs that ctx comes from; it must be in this
// store. If it does not stand, Fenced returns [tenure.ErrLost] and nothing is written. An error or panic of fn
// rolls back and is passed on. If the connection fails during the commit, the writes may have been committed or
// not, but never after another term began.
//
// The lease's record is locked only at the end of the transaction, after fn. In a Galera cluster the commit may
// fail with a deadlock (error 1213), and nothing is written: try again.
//
// fn must use tx, write only to tables of InnoDB, and return the first error of a statement. It must not end the transaction,
// also not by a statement such as CREATE TABLE: Fenced then fails, and what fn wrote before is committed without the fence.
//
// The driver's COMMIT and ROLLBACK, also those of a store that [Store.Fence] returns, have no context: if the network swallows
// them, they last until the operating system gives the connection up, or for the DSN's readTimeout.
func (s *Store) Fenced(ctx context.Context, guard tenure.Guard, fn func(tx *sql.Tx) error) error {
	return tenure.FencedTx(ctx, s, guard, s.DB(), &sql.TxOptions{Isolation: sql.LevelReadCommitted}, fn)
}

// FenceStatement implements [tenure.SQLStore]. The statement locks the lease's record, or, where several servers accept
// writes, writes to it, and until the transaction ends, neither a renewal nor a takeover passes: it must be the last one
// before COMMIT. XA PREPARE must not follow it: MariaDB gives up the lock there. It fails with error 1690. With
// innodb_snapshot_isolation, above READ COMMITTED, it fails with error 1020 if the lease was renewed in the meantime: then
// try again. FenceStatement does no I/O.
func (s *Store) FenceStatement(guard tenure.Guard) (query string, args []any, err error) {
	term, err := storekit.FenceTerm(nil, guard)
	if err == nil && term != nil {
		_, err = term.Fence() // which knows whether the term is over
	}
	switch {
	case err != nil:
		return "", nil, fmt.Errorf("mysqltenure: fence statement: %w", err)
	case term == nil:
		return "DO 1", nil, nil
	}
	return s.sql.fence, fenceArgs(term), nil
}

// PutStatement implements [tenure.SQLStore]. If the object has another version, the statement fails with error 1690.
// PutStatement does no I/O.
func (s *Store) PutStatement(obj tenure.Object, version int64) (query string, args []any, err error) {
	err = errors.Join(obj.Validate(), tenure.IfVersion(version).Validate(), s.checkLengths(obj))
	if s.term != nil { // the statement would not be fenced
		err = fmt.Errorf("%w: the store is fenced; add FenceStatement to the transaction", errors.ErrUnsupported)
	}
	if err != nil {
		return "", nil, fmt.Errorf("mysqltenure: put statement: %w", err)
	}
	return s.sql.put, append([]any{[]byte(obj.Key.Type), []byte(obj.Key.ID), version}, content(obj)...), nil
}
