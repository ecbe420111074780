package pgobjects

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// write has the statements that write one object.
type write struct {
	found      *setup
	id         objects.ID
	size       int // approximate, in bytes
	fence      *objects.Fence
	statements []pgconns.Statement
}

// Put writes an object if the condition holds, and returns its new version and times. It
// returns [objects.ErrExists], an [*objects.Conflict], [objects.ErrTaken], or the
// fence's error.
func (t *Table) Put(ctx context.Context, obj objects.Row, cond objects.Condition, fence *objects.Fence) (r objects.Row, err error) {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	err = t.setups.write(ctx, func(found *setup) (err error) {
		r, err = t.put(ctx, found, obj, cond, fence)
		return err
	})
	return r, t.setups.explain(t.explainLocked(ctx, obj.ID, err))
}

func (t *Table) put(ctx context.Context, found *setup, obj objects.Row, cond objects.Condition, fence *objects.Fence) (objects.Row, error) {
	if cond.Kind == objects.IfVersion {
		r, err := t.replace(ctx, found, obj, cond, fence)
		if !errors.Is(err, pgx.ErrNoRows) {
			return r, err
		}
		current, err := t.version(ctx, found, obj.ID, cond)
		if err != nil {
			return r, err
		}
		return r, &objects.Conflict{ID: obj.ID, Wanted: cond.Version, Current: current}
	}
	if objects.IsLeaseCall(ctx) {
		if _, err := t.setups.which(ctx, (*setup).mayHold); err != nil {
			return objects.Row{}, err
		}
	}
	// The object that was in the way may be gone before we look for it. If that happens
	// three times, other clients keep creating and deleting it.
	for range 3 {
		if cond.Kind == objects.Unconditional {
			if r, err := t.replace(ctx, found, obj, cond, fence); !errors.Is(err, pgx.ErrNoRows) {
				return r, err
			}
		}
		r, err := t.create(ctx, found, obj, cond, fence)
		switch {
		case errors.Is(err, objects.ErrExists) && cond.Kind == objects.Unconditional:
			continue
		case !errors.Is(err, pgx.ErrNoRows):
			return r, err
		}
		if err := t.inTheWay(ctx, found, obj, cond); err != nil {
			return r, err
		}
	}
	if cond.Kind == objects.IfAbsent {
		return objects.Row{}, objects.ErrExists
	}
	return objects.Row{}, &objects.Conflict{ID: obj.ID}
}

// replace writes an object that exists, in one round trip, or returns
// [pgx.ErrNoRows].
//
// After an error neither it nor create touches the row: if ctx has ended, the answer to the
// group may still be scanned into it.
func (t *Table) replace(ctx context.Context, found *setup, obj objects.Row, cond objects.Condition, fence *objects.Fence) (objects.Row, error) {
	var r objects.Row
	err := t.write(ctx, &t.groups.replace, &write{found: found, id: obj.ID, size: sizeOf(obj), fence: fence, statements: []pgconns.Statement{
		{SQL: found.in(replaceObject), Args: append(columns(obj), cond.Version, serverOf(cond.Server), cond.Least), Dest: []any{&r.Version, &r.Created, &r.Updated}},
	}})
	if err != nil {
		return objects.Row{}, err
	}
	return r, nil
}

// Resume renews an object unchanged, in one round trip, if its payload contains part, and if it has the first label, none
// of the others, and if lineageLabel contains lineage. Otherwise it returns [objects.ErrNotFound].
func (t *Table) Resume(ctx context.Context, id objects.ID, part []byte, label string, others []string, lineageLabel, lineage, server string) (objects.Row, error) {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	r := objects.Row{ID: id}
	err := t.setups.write(ctx, func(found *setup) error {
		return t.write(ctx, &t.groups.replace, &write{found: found, id: id, statements: []pgconns.Statement{{
			SQL: found.in(resumeObject), Args: []any{id.Type, id.ID, part, label, others, lineage, lineageLabel, serverOf(server)},
			Dest: []any{&r.Name, &r.Labels, &r.Payload, &r.Version, &r.Created, &r.Updated},
		}}})
	})
	if err != nil {
		return objects.Row{}, t.setups.explain(t.explainLocked(ctx, id, err))
	}
	return r, nil
}

// create inserts an object, in one round trip, or returns [objects.ErrExists] if there is
// one, or [pgx.ErrNoRows] if something else is in its way.
func (t *Table) create(ctx context.Context, found *setup, obj objects.Row, cond objects.Condition, fence *objects.Fence) (objects.Row, error) {
	var r objects.Row
	id, args, dest := obj.ID, append(columns(obj), serverOf(cond.Server)), []any{&r.Version, &r.Created, &r.Updated}
	if found.tombstones && fence == nil {
		var stands int64
		err := t.write(ctx, &t.groups.create, &write{found: found, id: id, size: sizeOf(obj), statements: []pgconns.Statement{
			{SQL: found.in(insertNumbered), Args: append(args, cond.Least, cond.Again), Dest: dest},
			{SQL: found.in(checkNumber), Args: []any{id.Type, id.ID}, Dest: []any{&stands, nil}},
		}})
		switch {
		case err == nil:
			return r, nil
		case errors.Is(err, pgx.ErrNoRows) && stands > 0:
			return objects.Row{}, objects.ErrExists
		case pgconns.SQLState(err) != pgconns.StateDivisionByZero:
			return objects.Row{}, err
		}
	}
	// The insert may have waited for another transaction that deleted the object, and then
	// its version, computed before the wait, is below the deleted one's. So a separate
	// statement, which sees that deletion, assigns the version.
	number := numberObject
	if !found.tombstones {
		number = numberByClock
	}
	err := t.alone(ctx, &write{found: found, id: id, fence: fence, statements: []pgconns.Statement{
		{SQL: found.in(insertObject), Args: args},
		{SQL: found.in(number), Args: []any{id.Type, id.ID, cond.Least}, Dest: dest},
	}})
	return r, err
}

// columns are the first arguments of a statement that writes an object. The payload is copied,
// because a caller that has given up may reuse it before its group is sent.
func columns(obj objects.Row) []any {
	return []any{obj.ID.Type, obj.ID.ID, obj.Name, string(obj.Labels), bytes.Clone(obj.Payload)}
}

func sizeOf(obj objects.Row) int {
	return len(obj.ID.Type) + len(obj.ID.ID) + len(obj.Name.String) + len(obj.Labels) + len(obj.Payload)
}

// write does a write, which may join a group if it is a lease's.
func (t *Table) write(ctx context.Context, g *writeGroup, w *write) error {
	if w.fence != nil || !objects.IsLeaseCall(ctx) || !t.conns.MayGroup() {
		return t.alone(ctx, w)
	}
	return g.write(ctx, w)
}

// alone does a write in a transaction of its own. The fence is checked after the write's
// statements and before the commit.
func (t *Table) alone(ctx context.Context, w *write) error {
	if w.fence == nil {
		return t.conns.Write(ctx, w.statements...)
	}
	check, err := t.checkOf(ctx, w.found, w.fence)
	if err != nil {
		return err
	}
	w.fence.Yield(ctx)
	for tries := 0; ; tries++ {
		for again := true; again; again = check.renewed(ctx, err) {
			err = t.conns.Write(ctx, append(w.statements, check.Statement)...)
		}
		if isRefusal(err) {
			err = t.fencedOut(ctx, w.fence, err)
		}
		if tries > 0 || !errors.Is(err, objects.ErrMoved) { // else the right stands again
			return err
		}
	}
}

// inTheWay returns why an object could not be created: [objects.ErrExists] or
// [objects.ErrTaken]. It returns nil if the other object is gone or may be replaced.
func (t *Table) inTheWay(ctx context.Context, found *setup, obj objects.Row, cond objects.Condition) error {
	switch current, err := t.version(ctx, found, obj.ID, cond); {
	case err != nil:
		return err
	case current != 0 && cond.Kind == objects.IfAbsent:
		return objects.ErrExists
	case current != 0:
		return nil
	}
	var other objects.ID
	err := t.conns.QueryRow(ctx, found.in(whoHasName), []any{obj.ID.Type, obj.ID.ID, obj.Name.String}, &other.Type, &other.ID)
	if errors.Is(err, pgx.ErrNoRows) && found.idAlone {
		err = t.conns.QueryRow(ctx, found.in(whoHasID), []any{obj.ID.Type, obj.ID.ID}, &other.Type, &other.ID)
	}
	switch {
	case err == nil:
		return fmt.Errorf("%w: %s", objects.ErrTaken, other)
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	default:
		return err
	}
}

// version returns the object's current version, 0 if there is none, or [objects.ErrMoved] if the condition of a
// write names another server.
func (t *Table) version(ctx context.Context, found *setup, id objects.ID, cond objects.Condition) (int64, error) {
	var server int64
	var current sql.NullInt64
	err := t.conns.QueryRow(ctx, found.in(objectVersion), []any{id.Type, id.ID}, &server, &current)
	if err == nil {
		err = t.lineages.checkServer(cond, strconv.FormatInt(server, 10))
	}
	return current.Int64, err
}

// serverOf returns the server that a write names as a number for statements; 0: none.
func serverOf(name string) int64 {
	server, _ := strconv.ParseInt(name, 10, 64)
	return server
}

// Delete deletes an object if it is at the condition's version. If wake is set, it wakes every watch
// of the object, and the deletion need not be durable. It returns [objects.ErrNotFound], an
// [*objects.Conflict] or the fence's error.
func (t *Table) Delete(ctx context.Context, id objects.ID, cond objects.Condition, fence *objects.Fence, wake bool) error {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	err := t.setups.write(ctx, func(found *setup) error { return t.remove(ctx, found, id, cond, fence, wake) })
	return t.setups.explain(t.explainLocked(ctx, id, err))
}

func (t *Table) remove(ctx context.Context, found *setup, id objects.ID, cond objects.Condition, fence *objects.Fence, wake bool) (err error) {
	var gone int
	args := []any{id.Type, id.ID, cond.Version, serverOf(cond.Server)}
	text := removeObject
	if found.tombstones {
		text += andTombstone
	}
	if wake {
		text += andNotify
		args = append(args, t.watches.channel, found.hint(id))
	} else {
		text += andCount
	}
	w := &write{found: found, id: id, fence: fence, statements: []pgconns.Statement{{SQL: found.in(text), Args: args, Dest: []any{&gone, nil, nil}}}}
	if wake {
		err = t.write(ctx, &t.groups.remove, w)
	} else { // this one must be durable, unlike deletions in a group
		err = t.alone(ctx, w)
	}
	if wake && cannotNotify(err) {
		return t.remove(ctx, found, id, cond, fence, false) // a standby that notices late is better than a lease that is not released
	}
	if err != nil {
		return err
	}
	if gone == 1 {
		t.prune(ctx, found, time.Hour)
		return nil
	}
	switch current, err := t.version(ctx, found, id, cond); {
	case err != nil:
		return err
	case current == 0:
		return pgx.ErrNoRows
	default:
		return &objects.Conflict{ID: id, Wanted: cond.Version, Current: current}
	}
}

// cannotNotify reports whether a statement may have failed because of its notification:
// the queue may be full, or the role may lack the right to notify.
func cannotNotify(err error) bool {
	code := pgconns.SQLState(err)
	return code == pgconns.StateDenied || strings.HasPrefix(code, "54")
}

// prune deletes tombstones that are old enough, unless it did so recently. Tombstones have no
// index by age, because each delete would pay more for it than all together pay for this search.
func (t *Table) prune(ctx context.Context, found *setup, lately time.Duration) {
	last, now := t.pruned.Load(), time.Now().Unix()
	if !found.tombstones || now-last < int64(lately.Seconds()) || !t.pruned.CompareAndSwap(last, now) {
		return
	}
	err := t.conns.Call(ctx, func(pool *pgxpool.Pool, _ bool) error {
		pruned, err := pool.Exec(ctx, found.in(pruneTombstones))
		if pruned.RowsAffected() == pruneAtMost {
			t.pruned.Store(0) // the next delete continues
		}
		return err
	})
	if err != nil {
		t.cfg.Logger.Warn("old tombstones are not deleted; the next attempt is in an hour", "table", t.setups.names.tables[objects.TableOfTombstones], "error", logtext.OneLine(err))
	}
}
