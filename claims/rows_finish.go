package claims

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
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
// store's pool the rows are freed and [RowsConfig.Done] is set, and then fn is called. If one of
// the claims has ended, it returns a [*LostError] that lists them, fn is not called and nothing is
// written. What [tenure.PostgresStore.Fenced] says of fn holds here as well. fn may delete the
// rows, which are locked until it returns.
//
// It goes by the database alone, so it also finishes claims by value: those that were passed on,
// or are another session's. A func of [Rows.Do] does it last, because others may take the row
// from then on. It needs no session.
//
// If the connection breaks during COMMIT, the database is asked what became of the transaction.
// If that fails too, or the server may have crashed meanwhile, the error says "unknown". Then
// another call returns a [*LostError] if the first one was written, or if the claim has ended.
func (r *Rows) FinishPostgres(ctx context.Context, claims []Claim, fn func(tx pgx.Tx) error) error {
	table, ok := r.table.(interface {
		Finish(ctx context.Context, claims []objects.Claim, idle time.Duration, fn func(pgx.Tx) error) (lost []objects.Claim, fnErr, err error)
	})
	if err := r.mayFinish(claims, ok, fn != nil); err != nil {
		return r.failed("finish", err)
	}
	lost, fnErr, err := table.Finish(ctx, rowsOf(claims), r.idle(claims), fn)
	return r.finished(claims, lost, fnErr, err)
}

// FinishSQLite is FinishPostgres on SQLite. Nobody else can write to the database while fn runs,
// so it must be short beside the TTL.
func (r *Rows) FinishSQLite(ctx context.Context, claims []Claim, fn func(tx *sql.Tx) error) error {
	table, ok := r.table.(interface {
		Finish(ctx context.Context, claims []objects.Claim, fn func(*sql.Tx) error) (lost []objects.Claim, fnErr, err error)
	})
	if err := r.mayFinish(claims, ok, fn != nil); err != nil {
		return r.failed("finish", err)
	}
	lost, fnErr, err := table.Finish(ctx, rowsOf(claims), fn)
	return r.finished(claims, lost, fnErr, err)
}

// FinishTx is FinishPostgres in a transaction of db, by whatever driver. db must be the database
// of the store. Above READ COMMITTED, Postgres may refuse to free a row that has just changed; that
// is tried again, before fn is called.
func (r *Rows) FinishTx(ctx context.Context, claims []Claim, db *sql.DB, opts *sql.TxOptions, fn func(tx *sql.Tx) error) error {
	if err := r.mayFinish(claims, db != nil, fn != nil); err != nil {
		return r.failed("finish", err)
	}
	fnErr, begun, err := r.finishTx(ctx, claims, db, opts, fn)
	for tries := 0; !begun && isSerialization(err) && tries < 10; tries++ {
		fnErr, begun, err = r.finishTx(ctx, claims, db, opts, fn)
	}
	if err = tenure.FenceError(err); errors.Is(err, tenure.ErrLost) {
		lost, _, standsErr := r.keys.standing(ctx, rowsOf(claims))
		if standsErr == nil && len(lost) > 0 {
			return r.finished(claims, lost, nil, nil)
		}
	}
	return r.finished(claims, nil, fnErr, err)
}

// isSerialization reports whether an error of any driver says that a transaction was refused
// because of a concurrent one.
func isSerialization(err error) bool {
	var coded interface{ SQLState() string }
	return errors.As(err, &coded) && coded.SQLState() == "40001"
}

// finishTx also reports whether fn was called.
func (r *Rows) finishTx(ctx context.Context, claims []Claim, db *sql.DB, opts *sql.TxOptions, fn func(tx *sql.Tx) error) (fnErr error, begun bool, err error) {
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return nil, false, err
	}
	defer tx.Rollback() // also after a panic
	for _, c := range claims {
		query, args, err := r.FinishStatement(c)
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

// execLimited waits for a row that somebody has locked no longer than any call does.
func execLimited(ctx context.Context, tx *sql.Tx, query string, args []any) error {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	_, err := tx.ExecContext(ctx, query, args...)
	return err
}

// FinishStatement returns a statement that finishes a row, or fails and its transaction with it: for
// transactions by an ORM or another driver. [tenure.FenceError] makes its failure
// [tenure.ErrLost]. It should come first, in a short transaction: it keeps the row locked until
// COMMIT. The session hears of it when the func of [Rows.Do] returns, the claim is released, or it
// compares its claims with their rows; then a func that still runs is told of the loss. It does no
// I/O, unless [RowsConfig.Schema] is empty and nothing has used the rows yet: then it looks up, for
// up to 5 s, which schema has the table.
func (r *Rows) FinishStatement(c Claim) (query string, args []any, err error) {
	if err := r.valid([]Claim{c}); err != nil {
		return "", nil, r.failed("finish", err)
	}
	query, args, err = r.table.EndStatement(c.row())
	return query, args, r.failed("finish", err)
}

// Finish is FinishPostgres and FinishSQLite with nothing to write but [RowsConfig.Done]. Calls for
// one row that come at the same time share a statement.
func (r *Rows) Finish(ctx context.Context, claims ...Claim) error {
	err := r.valid(claims)
	switch {
	case err != nil:
	case len(claims) == 1:
		lost, failed := r.endOne(ctx, claims[0])
		err = r.finished(claims, lost, nil, failed)
	default:
		err = r.end(ctx, objects.Ending{Done: true, All: true}, claims)
	}
	return r.failed("finish", err)
}

// endOne finishes a row together with others.
func (r *Rows) endOne(ctx context.Context, c Claim) (lost []objects.Claim, err error) {
	e := &ending{claim: c.row(), done: make(chan endingResult, 1)}
	r.mu.Lock()
	r.ends = append(r.ends, e)
	if !r.busy {
		r.busy = true
		go r.endTogether(context.WithoutCancel(ctx))
	}
	r.mu.Unlock()
	result := <-e.done // a statement that was sent may land even if ctx is done
	return result.lost, result.err
}

func (r *Rows) endTogether(ctx context.Context) {
	for {
		r.mu.Lock()
		some := r.ends[:min(len(r.ends), perStatement)]
		r.ends = r.ends[len(some):]
		r.busy = len(some) > 0
		r.mu.Unlock()
		if len(some) == 0 {
			return
		}
		batch, rows := make(map[objects.Claim]*ending), []objects.Claim(nil)
		for _, e := range some {
			if batch[e.claim] != nil { // the same row twice would be one too many for either
				r.mu.Lock()
				r.ends = append(r.ends, e)
				r.mu.Unlock()
				continue
			}
			batch[e.claim] = e
			rows = append(rows, e.claim)
		}
		r.endBatch(ctx, batch, rows)
	}
}

// endBatch finishes rows in one statement, except those that somebody has locked: the others don't
// wait for them.
func (r *Rows) endBatch(ctx context.Context, batch map[objects.Claim]*ending, rows []objects.Claim) {
	answer := func(row objects.Claim, result endingResult) {
		batch[row].done <- result
		delete(batch, row)
	}
	err := inGroups(r.keys.groups, rows, func(rows []objects.Claim) error {
		left, err := r.table.End(ctx, objects.Ending{Done: true, Unlocked: true}, rows, r.s.limit)
		if err != nil {
			return err
		}
		lost, locked := r.left(ctx, left)
		for _, row := range locked {
			go r.endLocked(ctx, batch[row])
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
func (r *Rows) left(ctx context.Context, left []objects.Claim) (lost, locked []objects.Claim) {
	if len(left) == 0 {
		return nil, nil
	}
	lost, locked, err := r.keys.standing(ctx, left)
	if err != nil {
		return nil, left
	}
	return lost, locked
}

// errLocked is why a row is not finished, so its claim still stands.
var errLocked = errors.New("somebody keeps the row locked")

// endLocked finishes a row as soon as nobody locks it any more. It waits for that without a
// connection, of which there are few.
func (r *Rows) endLocked(ctx context.Context, e *ending) {
	waiting, cancel := context.WithTimeout(ctx, r.s.limit)
	defer cancel()
	result := endingResult{err: errLocked}
	for tries := 0; errors.Is(result.err, errLocked) && pace.Sleep(waiting, 5*time.Millisecond<<min(tries, 7)); tries++ {
		rows := []objects.Claim{e.claim}
		left, err := r.table.End(ctx, objects.Ending{Done: true, Unlocked: true}, rows, r.s.limit)
		var locked []objects.Claim
		if len(left) > 0 {
			left, locked, err = r.keys.standing(ctx, left)
		}
		if len(locked) == 0 {
			result = endingResult{left, err}
		}
	}
	e.done <- result
}

// end ends claims in one statement, all or none. It waits for rows that somebody has locked without a
// connection, of which there are few.
func (r *Rows) end(ctx context.Context, how objects.Ending, claims []Claim) error {
	how.All, how.Unlocked = true, true
	ctx, cancel := r.s.uncut(ctx)
	defer cancel()
	for tries := 0; ; tries++ {
		left, err := r.table.End(ctx, how, rowsOf(claims), r.s.limit)
		var lost []objects.Claim
		if err == nil && len(left) > 0 {
			lost, _, err = r.keys.standing(ctx, left)
		}
		if err != nil || len(left) == 0 || len(lost) > 0 {
			return r.finished(claims, lost, nil, err)
		}
		if !pace.Sleep(ctx, 5*time.Millisecond<<min(tries, 7)) {
			return errLocked
		}
	}
}

// finished makes the error of claims that were to be ended, and notes those that have.
func (r *Rows) finished(claims []Claim, lost []objects.Claim, fnErr, err error) error {
	switch {
	case fnErr != nil:
		return fnErr
	case err != nil:
		return err
	case len(lost) > 0:
		return r.lost(claims, lost)
	}
	r.ended(nil, claims...)
	return nil
}

func (r *Rows) mayFinish(claims []Claim, database, fn bool) error {
	err := r.valid(claims)
	switch {
	case !database:
		err = errors.Join(err, fmt.Errorf("%w: the session's store is another database's, or db is nil", tenure.ErrInvalid))
	case !fn:
		err = errors.Join(err, fmt.Errorf("%w: fn is nil: Finish needs none", tenure.ErrInvalid))
	}
	return err
}

// idle is how long a transaction that finishes rows may idle: no longer than the session is
// trusted, if it is this one's.
func (r *Rows) idle(claims []Claim) time.Duration {
	s := r.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term == nil || claims[0].Session != s.term.id {
		return longestIdle
	}
	return min(longestIdle, max(s.term.Remaining(), time.Second))
}

func rowsOf(claims []Claim) []objects.Claim {
	rows := make([]objects.Claim, 0, len(claims))
	for _, c := range claims {
		rows = append(rows, c.row())
	}
	return rows
}
