package sqliteobjects

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// Put writes an object if the condition holds, and returns it with its new version and
// times.
func (t *Table) Put(ctx context.Context, r objects.Row, cond objects.Condition, fence *objects.Fence) (objects.Row, error) {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	if cond.Kind == objects.IfAbsent && fence == nil {
		// Most attempts to acquire a lease find it held. They don't need the write lock to
		// see that, but the holder needs it to renew.
		if _, err := t.version(ctx, t.db, r.ID); err == nil {
			return r, objects.ErrExists
		}
	}
	err := t.write(ctx, fence, func(tx *sql.Tx) error {
		if cond.Kind != objects.IfVersion {
			return t.create(ctx, tx, &r, cond)
		}
		err := t.replace(ctx, tx, &r, cond.Version)
		if errors.Is(err, sql.ErrNoRows) {
			return &objects.Conflict{ID: r.ID, Wanted: cond.Version}
		}
		return err
	})
	return r, t.explain(err)
}

// create inserts an object, or replaces an existing one if that is allowed.
func (t *Table) create(ctx context.Context, tx *sql.Tx, r *objects.Row, cond objects.Condition) error {
	done, err := tx.ExecContext(ctx, t.in(insertObject), r.ID.Type, r.ID.ID, r.Name, string(r.Labels), r.Payload)
	if err != nil {
		return err
	}
	if n, err := done.RowsAffected(); err != nil {
		return err
	} else if n == 0 {
		switch current, err := t.version(ctx, tx, r.ID); {
		case errors.Is(err, sql.ErrNoRows):
			return t.takenBy(ctx, tx, r)
		case err != nil:
			return err
		case cond.Kind == objects.IfAbsent:
			return objects.ErrExists
		default:
			return t.replace(ctx, tx, r, current)
		}
	}
	now := time.Now()
	r.Created = sql.NullInt64{Int64: now.UnixMilli(), Valid: true}
	r.Updated = r.Created
	return tx.QueryRowContext(ctx, t.in(numberObject), r.ID.Type, r.ID.ID, r.Created, now.UnixMicro()).Scan(versionColumn{&r.Version})
}

// replace writes an object that exists at a version. It returns [sql.ErrNoRows] if there is
// none. Time and version are determined under the transaction's write lock.
func (t *Table) replace(ctx context.Context, tx *sql.Tx, r *objects.Row, version int64) error {
	next := stamp(r, version)
	err := t.atVersion(ctx, tx, r.ID, version, func(version int64) error {
		return tx.QueryRowContext(ctx, t.in(replaceObject), r.ID.Type, r.ID.ID, r.Name, string(r.Labels),
			r.Payload, r.Updated, next, version).Scan(versionColumn{&r.Version}, millisColumn{&r.Created})
	})
	if err == nil && r.Version != next {
		return fmt.Errorf("%w: the column resource_version of table %q stores %d as %d", objects.ErrSetup, t.name, next, r.Version)
	}
	return err
}

// stamp sets the time of a write and returns the version that follows another.
func stamp(r *objects.Row, version int64) (next int64) {
	now := time.Now()
	r.Updated = sql.NullInt64{Int64: now.UnixMilli(), Valid: true}
	next = now.UnixMicro()
	if version < objects.VersionLimit {
		next = max(next, version+1)
	}
	return next
}

// PutStatement returns a statement that replaces an object, or fails unless it is at a
// version.
func (t *Table) PutStatement(r objects.Row, version int64) (query string, args []any, err error) {
	next := stamp(&r, version)
	return t.in(putStatement), []any{r.ID.Type, r.ID.ID, r.Name, string(r.Labels), r.Payload, r.Updated, next, version}, nil
}

// takenBy returns an error that names the object that has this one's name or, in another program's
// table, its ID.
func (t *Table) takenBy(ctx context.Context, tx *sql.Tx, r *objects.Row) error {
	var other objects.ID
	err := tx.QueryRowContext(ctx, t.in(whoIsInTheWay), r.ID.Type, r.ID.ID, r.Name.String).Scan(&other.Type, &other.ID)
	switch {
	case err == nil:
		return fmt.Errorf("%w: %s", objects.ErrTaken, other)
	case errors.Is(err, sql.ErrNoRows):
		return fmt.Errorf("%w: by a unique key that only table %s has", objects.ErrTaken, t.name)
	default:
		return err
	}
}

// Delete deletes an object if it is at that version, and then wakes every watch of it if
// wake is set.
func (t *Table) Delete(ctx context.Context, id objects.ID, cond objects.Condition, fence *objects.Fence, wake bool) error {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	err := t.write(ctx, fence, func(tx *sql.Tx) error {
		err := t.atVersion(ctx, tx, id, cond.Version, func(version int64) error {
			done, err := tx.ExecContext(ctx, t.in(removeObject), id.Type, id.ID, version)
			if err != nil {
				return err
			}
			if n, err := done.RowsAffected(); n > 0 || err != nil {
				return err
			}
			return sql.ErrNoRows
		})
		if err != nil {
			return err
		}
		version := cond.Version
		if id.Type == objects.SessionType { // the tombstone says for a while that there was such a session
			version = max(version, time.Now().UnixMicro())
		}
		if _, err := tx.ExecContext(ctx, t.in(putTombstone), id.Type, id.ID, version); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, t.in(pruneTombstones), time.Now().Add(-objects.TombstoneAge).UnixMicro(),
			time.Now().Add(-objects.SessionTombstoneAge).UnixMicro())
		return err
	})
	if err == nil && wake {
		t.watches.hub.Wake(id)
	}
	return t.explain(err)
}

// atVersion runs a write that needs the object to be at a version, and that returns
// [sql.ErrNoRows] if the database finds no such row. If the row is another program's,
// whose version merely reads as this one, the write is run again without the condition.
// That is safe because the transaction has the write lock.
func (t *Table) atVersion(ctx context.Context, tx *sql.Tx, id objects.ID, version int64, write func(version int64) error) error {
	if err := write(version); !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	current, err := t.version(ctx, tx, id)
	if err != nil {
		return err
	}
	if current != version {
		return &objects.Conflict{ID: id, Wanted: version, Current: current}
	}
	return write(0)
}

// Fenced runs fn in a transaction of the caller's database. Without a fence it needs no
// table.
func (t *Table) Fenced(ctx context.Context, fence *objects.Fence, fn func(*sql.Tx) error) error {
	if fence == nil {
		return t.transact(ctx, "", fn)
	}
	return t.explain(t.write(ctx, fence, func(tx *sql.Tx) error {
		fnErr, err := objects.InOneTx(ctx, tx, fn) // the caller's func must not end the transaction
		return cmp.Or(fnErr, err)
	}))
}

// FenceStatement returns a statement that fails unless the fence holds; for a nil fence it always
// succeeds.
func (t *Table) FenceStatement(fence *objects.Fence) (query string, args []any, err error) {
	if fence == nil {
		return "SELECT 1", nil, nil
	}
	if fence.OfRow() {
		r, err := t.rows.Of(fence.Claim)
		if err != nil {
			return "", nil, err
		}
		return r.texts.In(rowFenceStatement), rowArgs(fence.Claim), nil
	}
	query, args = fence.Statement(recordFenceStatement, claimFenceStatement, recordArgs)
	return t.in(query), args, nil
}

// write runs fn in a transaction that has the write lock, if the fence holds or is nil.
// No other client can write until the transaction ends, so the fence holds until then.
func (t *Table) write(ctx context.Context, fence *objects.Fence, fn func(*sql.Tx) error) error {
	if err := t.fit(ctx, fence.OfKey()); err != nil {
		return err
	}
	if fence == nil {
		return t.transact(ctx, t.takeLock, fn)
	}
	check, args, err := t.checkOf(ctx, fence) // before the transaction, which may use the only connection
	if err != nil {
		return err
	}
	return t.transact(ctx, t.takeLock, func(tx *sql.Tx) error {
		var held int
		err := tx.StmtContext(ctx, check).QueryRowContext(ctx, args...).Scan(&held)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return t.fencedOut(ctx, tx, fence)
		case err != nil:
			return err
		}
		return fn(tx)
	})
}

// checkOf returns the statement that checks a fence, and its arguments. It checks the table of a row first,
// unless that was done before.
func (t *Table) checkOf(ctx context.Context, fence *objects.Fence) (check *sql.Stmt, args []any, err error) {
	if !fence.OfRow() {
		query, args := fence.Statement(recordFence, claimFence, recordArgs)
		kept := &t.check
		if fence.OfKey() {
			kept = &t.checkClaim
		}
		check, err = t.prepared(ctx, kept, t.in(query))
		return check, args, err
	}
	r, err := t.rows.Of(fence.Claim)
	if err == nil {
		err = r.ready(ctx, time.Minute)
	}
	if err == nil {
		check, err = t.prepared(ctx, &r.check, r.texts.In(rowFence))
	}
	return check, rowArgs(fence.Claim), err
}

func recordArgs(fence *objects.Fence) []any { return []any{fence.ID.Type, fence.ID.ID, fence.Record} }

func rowArgs(c *objects.Claim) []any { return []any{c.ID, c.Session, c.Token} }

// fencedOut returns the error of a fence that does not hold.
func (t *Table) fencedOut(ctx context.Context, tx *sql.Tx, fence *objects.Fence) error {
	if fence.Claim != nil {
		return refusal{fence.Refused(nil, nil)}
	}
	switch now, err := t.get(ctx, tx, fence.ID); {
	case err == nil:
		return refusal{fence.Refused(&now, nil)}
	case errors.Is(err, sql.ErrNoRows):
		return refusal{fence.Refused(nil, nil)}
	default:
		return err
	}
}

// refusal is a fence's own error. Its text may have any content, such as the name of a holder, so explain
// must not take it for a driver's error.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

// prepared returns a statement that checks fences. It is prepared once, because parsing
// it takes longer than running it. Calls that need it at the same moment each prepare one,
// and the first is kept: a call must not wait for another whose context allows more time.
func (t *Table) prepared(ctx context.Context, kept *atomic.Pointer[sql.Stmt], query string) (*sql.Stmt, error) {
	if check := kept.Load(); check != nil {
		return check, nil
	}
	var check *sql.Stmt
	err := whenFree(ctx, func() (err error) {
		check, err = t.db.PrepareContext(ctx, query)
		return err
	})
	if err != nil {
		return nil, err
	}
	if !kept.CompareAndSwap(nil, check) {
		check.Close()
	}
	return kept.Load(), nil
}

// transact runs fn in a transaction, after a first statement unless that is empty, when the
// table's earlier writes are done. It rolls back if fn fails or panics.
//
// No write is a transaction by itself. While the row that it returns is scanned,
// database/sql may close the rows because ctx has ended; it then drops the error of the
// commit that closing them entails, and the scan succeeds.
func (t *Table) transact(ctx context.Context, first string, fn func(*sql.Tx) error) error {
	waiting, cancel := objects.Limited(ctx) // not fn, which may be the caller's
	defer cancel()
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
	case <-waiting.Done():
		return waiting.Err()
	}
	var tx *sql.Tx
	err := whenFree(ctx, func() (err error) {
		if tx, err = t.db.BeginTx(ctx, nil); err != nil || first == "" {
			return err
		}
		if _, err = tx.ExecContext(ctx, first); err != nil {
			tx.Rollback()
		}
		return err
	})
	if err != nil {
		return err
	}
	// After a commit this does nothing. If ctx has ended, database/sql rolls back too, and
	// it makes no difference which of the two does.
	defer tx.Rollback()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}
