package claims

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// ending is a row that is to be finished on its own.
type ending struct {
	claim objects.Claim
	done  chan endingResult // receives once
}

type endingResult struct {
	lost []objects.Claim
	err  error
}

// FinishPostgres finishes rows, and what fn writes is written with it: in one transaction of the
// store's pool the rows are freed and [QueueConfig.Done] is set, and then fn is called. If one of
// the claims has ended, it returns an [*EndedError] that lists them, fn is not called and nothing is
// written. What [tenure.PostgresStore.Fenced] says of fn holds here as well. fn may delete the
// rows, which are locked until it returns.
//
// Claims are finished by value, whichever session they are of. A func of [Worker.Do] does it last,
// because others may take the row from then on.
//
// If the connection breaks during COMMIT, the database is asked what became of the transaction.
// If that fails too, or the server may have crashed meanwhile, the error says "unknown". Then
// another call returns an [*EndedError] if the first one was written, or if the claim has ended.
func (q *Queue) FinishPostgres(ctx context.Context, claims []Claim, fn func(tx pgx.Tx) error) error {
	table, ok := q.table.(interface {
		Finish(ctx context.Context, claims []objects.Claim, idle time.Duration, fn func(pgx.Tx) error) (lost []objects.Claim, fnErr, err error)
	})
	if err := q.mayFinish(claims, ok, fn != nil); err != nil {
		return q.failed("finish", err)
	}
	lost, fnErr, err := table.Finish(ctx, rowsOf(claims), q.idle(claims), fn)
	return q.finished(claims, lost, fnErr, err)
}

// FinishSQLite is FinishPostgres on SQLite. Nothing else can write to the database while fn runs,
// so it must be short beside the TTL.
func (q *Queue) FinishSQLite(ctx context.Context, claims []Claim, fn func(tx *sql.Tx) error) error {
	table, ok := q.table.(interface {
		Finish(ctx context.Context, claims []objects.Claim, fn func(*sql.Tx) error) (lost []objects.Claim, fnErr, err error)
	})
	if err := q.mayFinish(claims, ok, fn != nil); err != nil {
		return q.failed("finish", err)
	}
	lost, fnErr, err := table.Finish(ctx, rowsOf(claims), fn)
	return q.finished(claims, lost, fnErr, err)
}

// FinishTx is FinishPostgres in a transaction of db, by whatever driver. db must be the database
// of the store. Above READ COMMITTED, Postgres may refuse to free a row that has just changed; that
// is retried, before fn is called.
func (q *Queue) FinishTx(ctx context.Context, claims []Claim, db *sql.DB, opts *sql.TxOptions, fn func(tx *sql.Tx) error) error {
	if err := q.mayFinish(claims, db != nil, fn != nil); err != nil {
		return q.failed("finish", err)
	}
	fnErr, begun, err := q.finishTx(ctx, claims, db, opts, fn)
	for tries := 0; !begun && isSerialization(err) && tries < 10; tries++ {
		fnErr, begun, err = q.finishTx(ctx, claims, db, opts, fn)
	}
	if err = tenure.FenceError(err); errors.Is(err, tenure.ErrLost) {
		lost, _, standsErr := q.rows.standing(ctx, q.cfg.Table, rowsOf(claims))
		if standsErr == nil && len(lost) > 0 {
			return q.finished(claims, lost, nil, nil)
		}
	}
	return q.finished(claims, nil, fnErr, err)
}

// isSerialization reports whether an error of any driver says that a transaction was refused
// because of a concurrent one.
func isSerialization(err error) bool {
	var coded interface{ SQLState() string }
	return errors.As(err, &coded) && coded.SQLState() == "40001"
}

// finishTx also reports whether fn was called.
func (q *Queue) finishTx(ctx context.Context, claims []Claim, db *sql.DB, opts *sql.TxOptions, fn func(tx *sql.Tx) error) (fnErr error, begun bool, err error) {
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return nil, false, err
	}
	defer tx.Rollback() // also after a panic
	for _, c := range claims {
		query, args, err := q.FinishStatement(c)
		if err == nil {
			err = execLimited(ctx, tx, query, args)
		}
		if err != nil {
			return nil, false, err
		}
	}
	if fnErr, err := objects.InOneTx(ctx, tx, fn); fnErr != nil || err != nil {
		return fnErr, true, err
	}
	return nil, true, tx.Commit()
}

// execLimited waits for a row that another transaction has locked no longer than any call does.
func execLimited(ctx context.Context, tx *sql.Tx, query string, args []any) error {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	_, err := tx.ExecContext(ctx, query, args...)
	return err
}

// FinishStatement returns a statement that finishes a row, or fails and its transaction with it: for
// transactions by an ORM or another driver. [tenure.FenceError] makes its failure
// [tenure.ErrLost]. It should come first, in a short transaction: it keeps the row locked until
// COMMIT. The session learns of it when the func of [Worker.Do] returns, the claim is released, or it
// compares its claims with their rows; then a func that still runs is told of the loss. It does no
// I/O, unless [QueueConfig.Schema] is empty and nothing has used the rows yet: then it looks up, for
// up to 5 s, which schema has the table.
func (q *Queue) FinishStatement(c Claim) (query string, args []any, err error) {
	if err := q.valid([]Claim{c}); err != nil {
		return "", nil, q.failed("finish", err)
	}
	query, args, err = q.table.EndStatement(c.row())
	return query, args, q.failed("finish", err)
}

// Finish is FinishPostgres and FinishSQLite with nothing to write but [QueueConfig.Done]. Calls for
// one row that come at the same time share a statement.
func (q *Queue) Finish(ctx context.Context, claims ...Claim) error {
	err := q.valid(claims)
	switch {
	case err != nil:
	case len(claims) == 1:
		lost, failed := q.endOne(ctx, claims[0])
		err = q.finished(claims, lost, nil, failed)
	default:
		err = q.end(ctx, objects.Ending{Done: true}, claims)
	}
	return q.failed("finish", err)
}

// endOne finishes a row together with others.
func (q *Queue) endOne(ctx context.Context, c Claim) (lost []objects.Claim, err error) {
	e := &ending{claim: c.row(), done: make(chan endingResult, 1)}
	q.mu.Lock()
	q.ends = append(q.ends, e)
	if !q.busy {
		q.busy = true
		go q.endTogether(context.WithoutCancel(ctx))
	}
	q.mu.Unlock()
	result := <-e.done // a statement that was sent may land even if ctx is done
	return result.lost, result.err
}

func (q *Queue) endTogether(ctx context.Context) {
	for {
		q.mu.Lock()
		some := q.ends[:min(len(q.ends), perStatement)]
		q.ends = q.ends[len(some):]
		q.busy = len(some) > 0
		q.mu.Unlock()
		if len(some) == 0 {
			return
		}
		batch, rows := make(map[objects.Claim]*ending), []objects.Claim(nil)
		for _, e := range some {
			if batch[e.claim] != nil { // the same row twice would be one too many for either
				q.mu.Lock()
				q.ends = append(q.ends, e)
				q.mu.Unlock()
				continue
			}
			batch[e.claim] = e
			rows = append(rows, e.claim)
		}
		q.endBatch(ctx, batch, rows)
	}
}

// endBatch finishes rows in one statement, except those that another transaction has locked, for which
// the others don't wait.
func (q *Queue) endBatch(ctx context.Context, batch map[objects.Claim]*ending, rows []objects.Claim) {
	answer := func(row objects.Claim, result endingResult) {
		batch[row].done <- result
		delete(batch, row)
	}
	err := inGroups(q.rows.groups, rows, func(rows []objects.Claim) error {
		left, err := q.table.End(ctx, objects.Ending{Done: true, Unlocked: true}, rows, q.rows.limit)
		if err != nil {
			return err
		}
		lost, locked := q.left(ctx, left)
		for _, row := range locked {
			go q.endLocked(ctx, batch[row])
			delete(batch, row)
		}
		for _, row := range lost {
			answer(row, endingResult{lost: []objects.Claim{row}})
		}
		for _, row := range rows {
			if batch[row] != nil {
				answer(row, endingResult{})
			}
		}
		return nil
	}, func(row objects.Claim, err error) { answer(row, endingResult{err: err}) })
	for row := range batch {
		answer(row, endingResult{err: err})
	}
}

// left returns which of the claims that a statement has left had ended, and whose rows are locked. As
// long as it does not know better, they are locked.
func (q *Queue) left(ctx context.Context, left []objects.Claim) (lost, locked []objects.Claim) {
	if len(left) == 0 {
		return nil, nil
	}
	lost, locked, err := q.rows.standing(ctx, q.cfg.Table, left)
	if err != nil {
		return nil, left
	}
	return lost, locked
}

// errLocked is why a row is not finished, so its claim still stands.
var errLocked = errors.New("another transaction keeps the row locked")

// endLocked finishes a row as soon as no other transaction locks it.
func (q *Queue) endLocked(ctx context.Context, e *ending) {
	lost, err := q.endAll(ctx, objects.Ending{Done: true}, []objects.Claim{e.claim})
	e.done <- endingResult{lost, err}
}

// end ends claims in one statement, all or none.
func (q *Queue) end(ctx context.Context, how objects.Ending, claims []Claim) error {
	lost, err := q.endAll(ctx, how, rowsOf(claims))
	return q.finished(claims, lost, nil, err)
}

// endAll ends claims in one statement, all or none, and returns those that had ended before. It waits
// for rows that another transaction has locked without a connection, of which there are few.
func (q *Queue) endAll(ctx context.Context, how objects.Ending, rows []objects.Claim) (lost []objects.Claim, err error) {
	how.All, how.Unlocked = true, true
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), q.rows.limit)
	defer cancel()
	for tries := 0; ; tries++ {
		left, err := q.table.End(ctx, how, rows, q.rows.limit)
		if err == nil && len(left) > 0 {
			lost, _, err = q.rows.standing(ctx, q.cfg.Table, left)
		}
		if err != nil || len(left) == 0 || len(lost) > 0 {
			return lost, err
		}
		if !awaitUnlocked(ctx, tries) {
			return nil, errLocked
		}
	}
}

// finished makes the error of claims that were to be ended, and notes those that have.
func (q *Queue) finished(claims []Claim, lost []objects.Claim, fnErr, err error) error {
	switch {
	case fnErr != nil:
		return fnErr
	case err != nil:
		return err
	case len(lost) > 0:
		return q.endedError(claims, lost)
	}
	q.ended(nil, claims...)
	return nil
}

func (q *Queue) mayFinish(claims []Claim, database, fn bool) error {
	err := q.valid(claims)
	switch {
	case !database:
		err = errors.Join(err, fmt.Errorf("%w: the queue's store is another database's, or db is nil", tenure.ErrInvalid))
	case !fn:
		err = errors.Join(err, fmt.Errorf("%w: fn is nil: Finish needs none", tenure.ErrInvalid))
	}
	return err
}

// idle is how long a transaction that finishes rows may idle: no longer than the session is trusted, if
// it is one of this process.
func (q *Queue) idle(claims []Claim) time.Duration {
	for _, w := range q.allWorkers() {
		if left, ok := w.s.trustLeft(claims[0].Session); ok {
			return min(longestIdle, max(left, time.Second))
		}
	}
	return longestIdle
}

// endedError makes the error of claims that had ended, which this process may believe it has.
func (q *Queue) endedError(given []Claim, rows []objects.Claim) error {
	if len(rows) == 0 {
		return nil
	}
	var ended []Claim
	for _, row := range rows {
		i := slices.IndexFunc(given, func(c Claim) bool { return c.Key.ID == row.ID })
		ended = append(ended, given[i])
	}
	err := &EndedError{ended}
	q.ended(err, ended...)
	return err
}
