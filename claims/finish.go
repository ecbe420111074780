package claims

import (
	"cmp"
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

// finishing is a call that finishes one row.
type finishing struct {
	claim objects.Claim
	done  chan endingResult // receives once
}

type endingResult struct {
	lost []objects.Claim
	err  error
}

// FinishPostgres finishes rows together with what fn writes. In one transaction of the store's pool, it frees
// the rows, sets [QueueConfig.Done], and calls fn. If one of the claims has ended, it returns an [*EndedError]
// that lists those that have; then fn is not called and nothing is written. The rules that
// [tenure.PostgresStore.Fenced] states for fn apply here as well. fn may delete the rows, which are locked
// until it returns.
//
// The claims may be those of any session. A func of [Worker.Do] must finish its row last, because other
// sessions may take the row from then on.
//
// If the connection breaks during COMMIT, FinishPostgres asks the database for the outcome of the
// transaction. If that fails too, or the server may have crashed meanwhile, the error says "unknown".
// Another call then returns an [*EndedError] if the first one was written, or if the claim has ended.
func (q *Queue) FinishPostgres(ctx context.Context, claims []Claim, fn func(tx pgx.Tx) error) error {
	table, ok := q.table.(interface {
		FinishWith(ctx context.Context, claims []objects.Claim, idle time.Duration, fn func(pgx.Tx) error) (lost []objects.Claim, fnErr, err error)
	})
	if err := q.mayFinish(claims, ok, fn != nil); err != nil {
		return q.opError("finish", err)
	}
	return q.finishWith(ctx, claims, func() (lost []objects.Claim, fnErr, err error) {
		return table.FinishWith(ctx, rowsOf(claims), q.idle(claims), fn)
	})
}

// finishWith calls a transaction that finishes rows. It calls it again if the first one has called no func, although the
// claims stand.
func (q *Queue) finishWith(ctx context.Context, claims []Claim, finish func() (lost []objects.Claim, fnErr, err error)) error {
	lost, fnErr, err := finish()
	again := fnErr == nil && errors.Is(err, tenure.ErrMoved) && q.renewedHere(ctx, rowsOf(claims))
	if len(lost) > 0 { // fn was not called
		lost, _, err = q.standing(ctx, lost)
		again = err == nil && len(lost) == 0
	}
	if again {
		if lost, fnErr, err = finish(); len(lost) > 0 {
			lost, err = q.endedOrUnchanged(ctx, lost)
		}
	}
	return q.finished(claims, lost, fnErr, err)
}

// errUnchanged is the reason why a row is not finished that no other transaction keeps locked. Its claim still stands.
var errUnchanged = errors.New("nothing is updated: a trigger prevents that")

// endedOrUnchanged returns which claims have ended, of those that a statement that waits for locks has not ended.
func (q *Queue) endedOrUnchanged(ctx context.Context, left []objects.Claim) (lost []objects.Claim, err error) {
	if lost, _, err = q.standing(ctx, left); err == nil && len(lost) == 0 {
		err = errUnchanged
	}
	return lost, err
}

// FinishSQLite is FinishPostgres for SQLite. Nothing else can write to the database while fn runs, so fn
// must be short compared to the TTL.
func (q *Queue) FinishSQLite(ctx context.Context, claims []Claim, fn func(tx *sql.Tx) error) error {
	table, ok := q.table.(interface {
		FinishWith(ctx context.Context, claims []objects.Claim, fn func(*sql.Tx) error) (lost []objects.Claim, fnErr, err error)
	})
	if err := q.mayFinish(claims, ok, fn != nil); err != nil {
		return q.opError("finish", err)
	}
	return q.finishWith(ctx, claims, func() (lost []objects.Claim, fnErr, err error) {
		return table.FinishWith(ctx, rowsOf(claims), fn)
	})
}

// FinishStatement returns a statement that finishes a row, for transactions of database/sql, an ORM or another driver.
// If the claim has ended, the statement fails, and its transaction with it. [tenure.FenceError] turns
// that failure into [tenure.ErrLost]. The statement should come first in a short transaction, because it
// keeps the row locked until COMMIT. It also fails if the row is canceled, see [QueueConfig.Canceled], but then frees
// nothing: that is done when the func returns, or by [Queue.Release].
//
// The session learns of this only when the func of [Worker.Do] or [Worker.Serve] returns, when the claim is released, or
// when it compares its claims with their rows. A func that still runs then is told that the claim is lost.
//
// FinishStatement does no I/O, except if [QueueConfig.Schema] is empty and the table has not been used
// yet. Then it looks up which schema has the table, for up to 5 s.
func (q *Queue) FinishStatement(c Claim) (query string, args []any, err error) {
	if err := q.valid([]Claim{c}); err != nil {
		return "", nil, q.opError("finish", err)
	}
	for _, w := range q.allWorkers() {
		w.kind.noteStatement(c)
	}
	query, args, err = q.table.EndStatement(c.row())
	return query, args, q.opError("finish", err)
}

// Finish is FinishPostgres or FinishSQLite with nothing to write but [QueueConfig.Done]. Concurrent calls for
// single rows share a statement. The statement is sent even if ctx is done, and the rows decide whether it
// comes too late.
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
	return q.opError("finish", err)
}

// FinishEach finishes each row whose claim stands, whereas Finish finishes all or none. If some have ended, it
// returns an [*EndedError] that lists them. If others could not be finished, the error says so as well. Some of
// those may have been finished although the answer was lost: another call lists them as ended.
func (q *Queue) FinishEach(ctx context.Context, claims ...Claim) error {
	if err := q.valid(claims); err != nil {
		return q.opError("finish", err)
	}
	var lost []objects.Claim
	var failed error
	failures := 0
	for i, e := range q.startEnding(ctx, claims) {
		switch result := <-e.done; {
		case result.err != nil:
			failed = cmp.Or(failed, fmt.Errorf("%s: %w", claims[i], result.err))
			failures++
		case len(result.lost) > 0:
			lost = append(lost, result.lost...)
		default:
			q.ended(nil, claims[i])
		}
	}
	q.madeRoom()
	if failures > 1 {
		failed = fmt.Errorf("%d rows are not finished, the first is %w", failures, failed)
	}
	return q.opError("finish", errors.Join(q.endedError(claims, lost), failed))
}

// endOne finishes a row, in one statement with those of concurrent calls.
func (q *Queue) endOne(ctx context.Context, c Claim) (lost []objects.Claim, err error) {
	result := <-q.startEnding(ctx, []Claim{c})[0].done // a statement that was sent may land even if ctx is done
	return result.lost, result.err
}

// startEnding has rows finished, in one statement with those of concurrent calls.
func (q *Queue) startEnding(ctx context.Context, claims []Claim) (ends []*finishing) {
	for _, c := range claims {
		ends = append(ends, &finishing{claim: c.row(), done: make(chan endingResult, 1)})
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ends = append(q.ends, ends...)
	if !q.busy {
		q.busy = true
		go q.endTogether(context.WithoutCancel(ctx))
	}
	return ends
}

// endTogether finishes the rows of startEnding, until there are none.
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
		batch, rows := make(map[objects.Claim]*finishing), []objects.Claim(nil)
		for _, e := range some {
			if batch[e.claim] != nil { // a row that is given twice needs two statements
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

// endBatch finishes rows in one statement. The rows that another transaction has locked are left to
// endLocked, so that the other rows need not wait.
func (q *Queue) endBatch(ctx context.Context, batch map[objects.Claim]*finishing, rows []objects.Claim) {
	answer := func(row objects.Claim, result endingResult) {
		batch[row].done <- result
		delete(batch, row)
	}
	err := inGroups(q.rows.groups, rows, func(rows []objects.Claim) error {
		left, err := q.table.End(ctx, objects.Ending{Done: true, Unlocked: true}, rows, q.limit())
		if err != nil {
			return err
		}
		lost, locked := q.left(ctx, left)
		for _, row := range locked {
			go q.endLocked(ctx, batch[row])
			delete(batch, row)
		}
		for _, row := range lost {
			given := row
			given.Canceled = false
			answer(given, endingResult{lost: []objects.Claim{row}})
		}
		for _, row := range rows {
			if batch[row] != nil {
				answer(row, endingResult{})
			}
		}
		return nil
	}, func(row objects.Claim, err error) {
		if errors.Is(err, tenure.ErrMoved) { // endLocked has its session renewed
			go q.endLocked(ctx, batch[row])
			delete(batch, row)
			return
		}
		answer(row, endingResult{err: err})
	})
	for row := range batch {
		answer(row, endingResult{err: err})
	}
}

// left divides the claims that a statement has not ended: some had ended before, and the rows of others are
// locked. If it can't tell, it returns all as locked.
func (q *Queue) left(ctx context.Context, left []objects.Claim) (lost, locked []objects.Claim) {
	if len(left) == 0 {
		return nil, nil
	}
	if lost, locked, err := q.standing(ctx, left); err == nil {
		return lost, locked
	}
	return nil, left
}

// errLocked is the reason why a row is not finished. Its claim still stands.
var errLocked = errors.New("another transaction keeps the row locked")

// endLocked finishes a row once no other transaction locks it.
func (q *Queue) endLocked(ctx context.Context, e *finishing) {
	lost, err := q.endAll(ctx, objects.Ending{Done: true}, []objects.Claim{e.claim})
	e.done <- endingResult{lost, err}
}

// end ends claims in one statement: all of them, or none.
func (q *Queue) end(ctx context.Context, how objects.Ending, claims []Claim) error {
	lost, err := q.endAll(ctx, how, rowsOf(claims))
	return q.finished(claims, lost, nil, err)
}

// endAll ends claims in one statement: all of them, or none if some had ended before, which it returns.
// While another transaction has locked a row, it waits without a connection, because there are few.
func (q *Queue) endAll(ctx context.Context, how objects.Ending, rows []objects.Claim) (lost []objects.Claim, err error) {
	how.All, how.Unlocked = true, true
	limit := q.limit()
	ctx = context.WithoutCancel(ctx)
	waiting, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for tries := 0; ; tries++ {
		left, err := q.table.End(ctx, how, rows, limit) // with the full limit: a statement that is cut short might have ended the claims
		if errors.Is(err, tenure.ErrMoved) && tries == 0 && q.renewedHere(ctx, rows) {
			continue
		}
		if err == nil && len(left) > 0 {
			lost, _, err = q.standing(ctx, left)
		}
		if err != nil || len(left) == 0 || len(lost) > 0 {
			return lost, err
		}
		if !awaitUnlocked(waiting, tries) && tries > 0 { // the first try may have waited for a failover
			return nil, errLocked
		}
	}
}

// finished turns the outcome of a statement into an error, and notes which claims have ended.
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
	q.madeRoom()
	return nil
}

// mayFinish rejects claims that can't be finished, a missing database and a missing fn.
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

// idle returns how long a transaction that finishes rows may idle. If the session is one of this process, that is for as
// long as it is trusted, but at least a second and at most longestIdle; otherwise it is longestIdle.
func (q *Queue) idle(claims []Claim) time.Duration {
	for _, w := range q.allWorkers() {
		if left, ok := w.s.trustLeft(claims[0].Session); ok {
			return min(longestIdle, max(left, time.Second))
		}
	}
	return longestIdle
}

// endedError returns the error for claims that had ended. It tells the workers, which may still believe
// that they hold them.
func (q *Queue) endedError(given []Claim, rows []objects.Claim) error {
	if len(rows) == 0 {
		return nil
	}
	err := new(EndedError)
	for _, row := range rows {
		i := slices.IndexFunc(given, func(c Claim) bool { return c.Key.ID == row.ID })
		err.Claims = append(err.Claims, given[i])
		err.canceled = err.canceled || row.Canceled
	}
	q.ended(err, err.Claims...)
	return err
}
