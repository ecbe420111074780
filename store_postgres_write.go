package tenure

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
)

// PutIf implements [Store].
func (s *PostgresStore) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	return s.putIf(ctx, obj, cond, nil)
}

// putIf is PutIf, fenced by a term unless that is nil.
func (s *PostgresStore) putIf(ctx context.Context, obj Object, cond WriteCondition, fence *Term) (Object, error) {
	if err := errors.Join(obj.Validate(), cond.Validate(), fence.fenceFor(obj.Key)); err != nil {
		return Object{}, opError(ctx, "put", obj.Key, err)
	}
	var r objects.Row
	err := s.withSetup(ctx, func(setup *postgresSetup) (err error) {
		r, err = s.put(ctx, setup, obj, cond, fence)
		return err
	})
	if err != nil {
		return Object{}, opError(ctx, "put", obj.Key, s.explain(err))
	}
	return obj.written(r), nil
}

func (s *PostgresStore) put(ctx context.Context, setup *postgresSetup, obj Object, cond WriteCondition, fence *Term) (objects.Row, error) {
	if cond.c.Kind == objects.MatchVersion {
		r, err := s.replace(ctx, obj, cond, fence)
		if !errors.Is(err, pgx.ErrNoRows) {
			return r, err
		}
		current, err := s.version(ctx, obj.Key)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return objects.Row{}, err
		}
		return objects.Row{}, &ConflictError{Key: obj.Key, Wanted: cond.c.Version, Current: current}
	}
	// What was in the way may be gone before we ask for it; three times, and it is
	// others' doing.
	for range 3 {
		if cond.c.Kind == objects.Unconditional {
			if r, err := s.replace(ctx, obj, cond, fence); !errors.Is(err, pgx.ErrNoRows) {
				return r, err
			}
		}
		r, err := s.create(ctx, setup, obj, fence)
		switch {
		case errors.Is(err, ErrExists) && cond.c.Kind == objects.Unconditional:
			continue
		case !errors.Is(err, pgx.ErrNoRows):
			return r, err
		}
		if err := s.inTheWay(ctx, setup, obj, cond); err != nil {
			return objects.Row{}, err
		}
	}
	if cond.c.Kind == objects.MustCreate {
		return objects.Row{}, ErrExists
	}
	return objects.Row{}, &ConflictError{Key: obj.Key}
}

// replace writes an object that exists, in one round trip, or returns
// [pgx.ErrNoRows].
func (s *PostgresStore) replace(ctx context.Context, obj Object, cond WriteCondition, fence *Term) (objects.Row, error) {
	var r objects.Row
	args := []any{obj.Key.Type, obj.Key.ID, objects.EncodeName(obj.Name), objects.EncodeLabels(obj.Labels), objects.EncodePayload(obj.Payload), cond.c.Version}
	dest := []any{&r.Version, &r.Created, &r.Updated}
	alone := func() error { return s.writeInTime(ctx, s.sql.replace, s.sql.replaceInTime, args, fence, dest...) }
	queue := func(batch *pgx.Batch) *pgx.QueuedQuery { return batch.Queue(s.sql.replace, args...) }
	if err := s.grouped(ctx, &s.groups.replace, fence, &groupedWrite{key: obj.Key, size: sizeOf(args), queue: queue, dest: dest, alone: alone}); err != nil {
		return objects.Row{}, err
	}
	return r, nil
}

// grouped does a write, together with others where it is a lease's.
func (s *PostgresStore) grouped(ctx context.Context, g *writeGroup, fence *Term, w *groupedWrite) error {
	if fence != nil || !objects.IsLeaseCall(ctx) || !s.leases.groups {
		return w.alone()
	}
	return g.write(ctx, w)
}

func sizeOf(args []any) (bytes int) {
	for _, arg := range args {
		switch arg := arg.(type) {
		case string:
			bytes += len(arg)
		case sql.NullString:
			bytes += len(arg.String)
		case []byte:
			bytes += len(arg)
		}
	}
	return bytes
}

// create inserts an object, in one round trip, or returns [ErrExists] where there is
// one, or [pgx.ErrNoRows] where something is in its way, it does not know what.
func (s *PostgresStore) create(ctx context.Context, setup *postgresSetup, obj Object, fence *Term) (objects.Row, error) {
	var r objects.Row
	args := []any{obj.Key.Type, obj.Key.ID, objects.EncodeName(obj.Name), objects.EncodeLabels(obj.Labels), objects.EncodePayload(obj.Payload)}
	dest := []any{&r.Version, &r.Created, &r.Updated}
	if setup.tombstones && fence == nil {
		var stands int64
		queue := func(batch *pgx.Batch) *pgx.QueuedQuery {
			stands = 0
			answer := batch.Queue(s.sql.insertNumbered, args...)
			var none error
			batch.Queue(s.sql.checkNumber, obj.Key.Type, obj.Key.ID).QueryRow(scanRow(&none, []any{&stands, nil}))
			return answer
		}
		alone := func() error {
			return s.inTime(ctx, func(pool *pgxpool.Pool, bounded bool) error {
				batch := s.newBatch(ctx, bounded)
				return s.sendWrite(ctx, pool, batch, queue(batch), nil, dest...)
			})
		}
		err := s.grouped(ctx, &s.groups.create, nil, &groupedWrite{key: obj.Key, size: sizeOf(args), queue: queue, dest: dest, alone: alone})
		switch {
		case err == nil:
			return r, nil
		case errors.Is(err, pgx.ErrNoRows) && stands > 0:
			return objects.Row{}, ErrExists
		case sqlState(err) != divisionByZeroState:
			return objects.Row{}, err
		}
	}
	// The insert may have waited for another transaction that deleted the object,
	// and its version, computed before, is below the deleted one's. So the row is
	// numbered by a statement of its own, which sees what was waited for.
	number := s.sql.number
	if !setup.tombstones {
		number = s.sql.numberByClock
	}
	err := s.inTime(ctx, func(pool *pgxpool.Pool, bounded bool) error {
		batch := s.newBatch(ctx, bounded)
		batch.Queue(s.sql.insert, args...)
		answer := batch.Queue(number, obj.Key.Type, obj.Key.ID)
		return s.sendWrite(ctx, pool, batch, answer, fence, dest...)
	})
	return r, err
}

// newBatch returns a batch whose statements wait for locks no longer than ctx
// allows.
func (s *PostgresStore) newBatch(ctx context.Context, bounded bool) *pgx.Batch {
	batch := &pgx.Batch{}
	if !bounded {
		batch.Queue(s.sql.setLockTimeout, lockTimeout(ctx))
	}
	return batch
}

// writeInTime does a write of one statement, which has two forms: the second sets a
// lock_timeout of its own, its last argument.
func (s *PostgresStore) writeInTime(ctx context.Context, plain, inTime string, args []any, fence *Term, dest ...any) error {
	return s.inTime(ctx, func(pool *pgxpool.Pool, bounded bool) error {
		if bounded {
			return s.writeOne(ctx, pool, plain, args, fence, dest...)
		}
		return s.writeOne(ctx, pool, inTime, append(args, lockTimeout(ctx)), fence, dest...)
	})
}

// writeOne is sendWrite for a write of one statement, which by itself needs no
// pipeline.
func (s *PostgresStore) writeOne(ctx context.Context, pool *pgxpool.Pool, statement string, args []any, fence *Term, dest ...any) error {
	if fence == nil {
		return pool.QueryRow(ctx, statement, args...).Scan(dest...)
	}
	batch := &pgx.Batch{}
	return s.sendWrite(ctx, pool, batch, batch.Queue(statement, args...), fence, dest...)
}

// sendWrite sends the statements of one write, which are one transaction, and
// scans the row of one of them, or returns [pgx.ErrNoRows]. A fence is checked
// behind them, before they commit.
func (s *PostgresStore) sendWrite(ctx context.Context, pool *pgxpool.Pool, batch *pgx.Batch, answer *pgx.QueuedQuery, fence *Term, dest ...any) error {
	var noRow error
	answer.QueryRow(scanRow(&noRow, dest))
	if fence != nil {
		s.queueFence(ctx, batch, fence)
		fence.giveWay(ctx)
	}
	err := pool.SendBatch(ctx, batch).Close()
	if fence != nil && sqlState(err) == divisionByZeroState {
		return s.fencedOut(ctx, fence, err)
	}
	return cmp.Or(err, noRow)
}

// scanRow returns a func that scans a row, or notes [pgx.ErrNoRows] where there is
// none: no reason to leave the statements behind it unheard.
func scanRow(noRow *error, dest []any) func(pgx.Row) error {
	return func(row pgx.Row) error {
		err := row.Scan(dest...)
		if errors.Is(err, pgx.ErrNoRows) {
			*noRow, err = err, nil
		}
		return err
	}
}

// inTheWay says why an object could not be created: [ErrExists] or [ErrTaken];
// nil where the reason is gone meanwhile, or is to be replaced.
func (s *PostgresStore) inTheWay(ctx context.Context, setup *postgresSetup, obj Object, cond WriteCondition) error {
	switch _, err := s.version(ctx, obj.Key); {
	case err == nil && cond.c.Kind == objects.MustCreate:
		return ErrExists
	case err == nil:
		return nil
	case !errors.Is(err, pgx.ErrNoRows):
		return err
	}
	var other Key
	err := s.readRow(ctx, s.sql.nameTaken, []any{obj.Key.Type, obj.Key.ID, obj.Name}, &other.Type, &other.ID)
	if errors.Is(err, pgx.ErrNoRows) && setup.idAlone {
		err = s.readRow(ctx, s.sql.idTaken, []any{obj.Key.Type, obj.Key.ID}, &other.Type, &other.ID)
	}
	switch {
	case err == nil:
		return fmt.Errorf("%w: %s", ErrTaken, other)
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	default:
		return err
	}
}

// version returns the object's current version, or [pgx.ErrNoRows].
func (s *PostgresStore) version(ctx context.Context, key Key) (v int64, err error) {
	err = s.readRow(ctx, s.sql.version, []any{key.Type, key.ID}, &v)
	return v, err
}

// DeleteIf implements [Store].
func (s *PostgresStore) DeleteIf(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, nil, false)
}

// DeleteAndWake implements [Notifier].
func (s *PostgresStore) DeleteAndWake(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, nil, true)
}

// deleteIf is DeleteIf or DeleteAndWake, fenced by a term unless that is nil.
func (s *PostgresStore) deleteIf(ctx context.Context, key Key, version int64, fence *Term, wake bool) error {
	if err := errors.Join(key.Validate(), objects.ValidVersion(version), fence.fenceFor(key)); err != nil {
		return opError(ctx, "delete", key, err)
	}
	err := s.withSetup(ctx, func(setup *postgresSetup) error { return s.remove(ctx, setup, key, version, fence, wake) })
	if err != nil {
		return opError(ctx, "delete", key, s.explain(err))
	}
	return nil
}

func (s *PostgresStore) remove(ctx context.Context, setup *postgresSetup, key Key, version int64, fence *Term, wake bool) (err error) {
	var gone int
	args := []any{key.Type, key.ID, version}
	if wake {
		args = append(args, s.watches.channel, setup.hint(key))
	}
	statements := s.sql.remove[removeKind{buries: setup.tombstones, wakes: wake}]
	dest := []any{&gone, nil, nil}
	alone := func() error { return s.writeInTime(ctx, statements.plain, statements.inTime, args, fence, dest...) }
	if wake { // else it must be durable
		queue := func(batch *pgx.Batch) *pgx.QueuedQuery { return batch.Queue(statements.plain, args...) }
		err = s.grouped(ctx, &s.groups.remove, fence, &groupedWrite{key: key, size: sizeOf(args), queue: queue, dest: dest, alone: alone})
	} else {
		err = alone()
	}
	if wake && cannotNotify(err) {
		return s.remove(ctx, setup, key, version, fence, false) // better a standby that looks later than a lease that stands
	}
	if err != nil {
		return err
	}
	if gone == 1 {
		s.prune(ctx, setup, time.Hour)
		return nil
	}
	current, err := s.version(ctx, key)
	if err != nil {
		return err
	}
	return &ConflictError{Key: key, Wanted: version, Current: current}
}

// cannotNotify reports whether a statement may have failed for its notification:
// the queue is full, or the role may not.
func cannotNotify(err error) bool {
	code := sqlState(err)
	return code == "42501" || strings.HasPrefix(code, "54")
}

// prune deletes tombstones that are old enough, unless that was done lately, once
// a delete is done. There is no index that tells which are: it would cost each
// delete more than this search costs all of them.
func (s *PostgresStore) prune(ctx context.Context, setup *postgresSetup, lately time.Duration) {
	last, now := s.pruned.Load(), time.Now().Unix()
	if !setup.tombstones || now-last < int64(lately.Seconds()) || !s.pruned.CompareAndSwap(last, now) {
		return
	}
	pool, _, done, err := s.conns(ctx)
	if err == nil {
		defer done()
		var pruned pgconn.CommandTag
		pruned, err = pool.Exec(ctx, s.sql.prune)
		if pruned.RowsAffected() == pruneAtMost {
			s.pruned.Store(0) // the next delete goes on
		}
	}
	if err != nil {
		s.cfg.Logger.Warn("old tombstones are not deleted; the next try is in an hour", "table", s.tables.tombstones, "error", err)
	}
}

// lockTimeout returns how long a statement may wait for a lock, in
// milliseconds: a little less than ctx allows, so that it is the server that
// ends the wait, which keeps the connection. It is NULL where ctx has no
// deadline.
func lockTimeout(ctx context.Context) sql.NullString {
	deadline, ok := ctx.Deadline()
	if !ok {
		return sql.NullString{}
	}
	left := time.Until(deadline)
	left -= min(left/10, 200*time.Millisecond)
	return sql.NullString{String: strconv.FormatInt(min(max(1, left.Milliseconds()), math.MaxInt32), 10), Valid: true}
}
