package pgobjects

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// endingSQL returns the text of the statement that ends claims, and its arguments.
func endingSQL(how objects.Ending, claims []objects.Claim) (text string, args []any) {
	if len(claims) == 1 && !how.Unlocked {
		c := claims[0]
		text, args = endRow, []any{c.ID, c.Session, c.Token}
	} else {
		ids, sessions, tokens := make([]string, len(claims)), make([]string, len(claims)), make([]int64, len(claims))
		for i, c := range claims {
			ids[i], sessions[i], tokens[i] = c.ID, c.Session, c.Token
		}
		if text, args = endRows, []any{ids, sessions, tokens}; how.Unlocked {
			text = endUnlockedRows
		}
	}
	if how.Timed() {
		args = append(args, how.After.Microseconds())
	}
	return setting(text, how.Set(`clock_timestamp() + $4 * interval '1 microsecond'`)), args
}

func (r *Rows) End(ctx context.Context, how objects.Ending, claims []objects.Claim, limit time.Duration) (lost []objects.Claim, err error) {
	if how.All && len(claims) > 1 {
		ctx, cancel := context.WithTimeout(objects.WithClaimCall(ctx), limit)
		defer cancel()
		lost, _, err = r.end(ctx, how, claims, limit, nil)
		if how.Unlocked && pgconns.SQLState(err) == pgconns.StateLockNotAvailable { // a trigger or a foreign key needs the lock
			return claims, nil
		}
		return lost, err
	}
	s, err := r.ready(ctx, limit)
	if err != nil {
		return nil, err
	}
	text, args := endingSQL(how, claims)
	ended, err := r.send(ctx, limit, 0, s, text, args...)
	if errors.Is(err, objects.ErrMoved) {
		err = &objects.Refused{Cause: err} // the sessions of other rows may be renewed here
	}
	if err != nil {
		return nil, invalidID(err)
	}
	return objects.Subtract(claims, ended), nil
}

// FinishWith is End for calls with a func: it ends the claims of rows, and commits what fn writes in the
// same transaction. If some claims had ended before, it returns these, writes nothing and does not
// call fn. The transaction may idle for at most idle.
func (r *Rows) FinishWith(ctx context.Context, claims []objects.Claim, idle time.Duration, fn func(pgx.Tx) error) (lost []objects.Claim, fnErr, err error) {
	return r.end(ctx, objects.Ending{Done: true}, claims, idle, fn)
}

func (r *Rows) end(ctx context.Context, how objects.Ending, claims []objects.Claim, idle time.Duration, fn func(pgx.Tx) error) (lost []objects.Claim, fnErr, err error) {
	s, err := r.ready(ctx, idle)
	if err != nil {
		return nil, nil, err
	}
	for sent := false; s != nil; s = r.changed(ctx, s, idle, err) {
		lost, fnErr, sent, err = r.endAs(ctx, s, how, claims, idle, fn)
		if sent || fnErr != nil { // fn was called
			break
		}
	}
	if isMoved(err) {
		err = objects.ErrMoved
	}
	return lost, fnErr, r.claims.table.setups.explain(invalidID(err))
}

// endAs ends claims in the table as it was found. It also reports whether COMMIT was sent.
func (r *Rows) endAs(ctx context.Context, s *rowSetup, how objects.Ending, claims []objects.Claim, idle time.Duration, fn func(pgx.Tx) error) (lost []objects.Claim, fnErr error, sent bool, err error) {
	t := r.claims.table
	idle = max(min(idle, math.MaxInt32*time.Millisecond), time.Millisecond)
	if s.own.idleTimeout > 0 {
		idle = min(idle, s.own.idleTimeout)
	}
	var id txID
	guard, args := endingSQL(how, claims)
	begin := func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, s.texts.In(strings.Replace(guard, "{more}", selectTxID, 1)), append([]any{replanned(tx.Conn())}, args...)...)
		if err != nil {
			return err
		}
		ended, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c objects.Claim, err error) {
			return c, row.Scan(&c.ID, &c.Session, &c.Token, &c.Attempts, &id.xid, &id.server, &id.began)
		})
		if lost = objects.Subtract(claims, ended); err == nil && len(lost) > 0 {
			err = objects.ErrEnded
		}
		return err
	}
	write := fn
	if fn == nil {
		write = func(pgx.Tx) error { return nil }
	}
	send := func(pool *pgxpool.Pool, _ bool) error {
		conn, err := pool.Acquire(ctx)
		if err == nil {
			fnErr, sent, err = funcTx(ctx, conn, idle, begin, write, nil)
		}
		if errors.Is(err, objects.ErrEnded) {
			return nil
		}
		lost = nil
		return err
	}
	if fn != nil {
		err = send(t.conns.Pool, false)
		t.conns.LeaveReadOnly(err, fnErr)
	} else if done, noTurn := r.claims.other(ctx, idle); noTurn != nil {
		err = noTurn
	} else { // the caller may have all of the application's connections
		defer done()
		err = t.conns.Call(ctx, send)
	}
	if sent && err != nil && pgconns.SQLState(err) == "" {
		err = r.outcome(ctx, id, err)
	}
	return lost, fnErr, sent, err
}

// txID names a transaction. Its xid alone is not enough: after a crash, or on a promoted standby,
// the server may assign the same xid again, if nothing that the transaction wrote was kept.
type txID struct {
	xid    string
	server int64 // when the server was started, in microseconds
	began  int64 // when the transaction began, by the same clock
}

const selectTxID = `, pg_current_xact_id()::text,
	(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint, (extract(epoch FROM now()) * 1000000)::bigint`

// replanned returns how to send a statement that is planned each time. The plan of a prepared
// statement, made while the table was small, would read the whole table long after it has grown.
func replanned(conn *pgx.Conn) pgx.QueryExecMode {
	if mode := conn.Config().DefaultQueryExecMode; mode != pgx.QueryExecModeCacheStatement {
		return mode // which prepares nothing, perhaps for a pooler
	}
	return pgx.QueryExecModeCacheDescribe
}

// outcome determines whether a transaction whose COMMIT was not answered has committed. A committed
// xid proves that only if the server has not crashed since. A crash ends all sessions, so a session
// from that time must be left. Only sessions of the same role can be seen.
func (r *Rows) outcome(ctx context.Context, id txID, cause error) error {
	ctx, cancel := context.WithTimeout(objects.WithClaimCall(context.WithoutCancel(ctx)), 10*time.Second)
	defer cancel()
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		var status string
		err := r.claims.table.conns.QueryRow(ctx, `
			SELECT CASE WHEN status = 'committed' AND NOT (
				(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint = $2::bigint
				AND EXISTS (SELECT FROM pg_catalog.pg_stat_activity WHERE (extract(epoch FROM backend_start) * 1000000)::bigint < $3::bigint)
			) THEN 'unknown' ELSE coalesce(status, 'unknown') END
			FROM pg_xact_status($1::text::xid8) status`, []any{id.xid, id.server, id.began}, &status)
		switch {
		case err == nil && status == "committed":
			return nil
		case err == nil && status == "aborted":
			return fmt.Errorf("nothing is written: %w", cause)
		case err == nil && status == "unknown" || !pace.Sleep(ctx, pause):
			return fmt.Errorf("unknown whether it is written: %w", errors.Join(cause, err))
		}
	}
}

const stateInvalidText = "22P02"

// invalidID marks the error of an ID that does not have the column's type.
func invalidID(err error) error {
	if code := pgconns.SQLState(err); code == stateInvalidText || code == stateOutOfRange {
		return fmt.Errorf("%w: %w", objects.ErrInvalid, err)
	}
	return err
}

// EndStatement returns a statement that ends the claim of a row as Finish does, or fails. It does I/O only if
// it is not yet known in which schema the table is.
func (r *Rows) EndStatement(c objects.Claim) (query string, args []any, err error) {
	texts, err := r.placedTexts()
	if err != nil {
		return "", nil, err
	}
	return texts.In(`
		WITH tenure_ended AS (
			UPDATE {rows} SET {session} = NULL{unexpired}{done}
			WHERE {id} = $1 AND {session} IS NOT DISTINCT FROM $2 AND {token} = $3{uncanceled} RETURNING ` + sessionIsHere + `$2) AS here)` + failUnlessHere + `tenure_ended`),
		rowArgs(&c), nil
}

// FenceStatement returns a statement that fails unless a claim stands. It does I/O only where EndStatement
// does.
func (r *Rows) FenceStatement(c *objects.Claim) (query string, args []any, err error) {
	texts, err := r.placedTexts()
	if err != nil {
		return "", nil, err
	}
	return texts.In(strings.Replace(rowFence, "::text::{type}", "", 1)), rowArgs(c), nil
}

// placedTexts returns the texts of statements for transactions of the caller's.
func (r *Rows) placedTexts() (*objects.Texts, error) {
	schema, err := r.place(context.Background())
	if err != nil {
		return nil, err
	}
	own, err := r.claims.table.placed()
	if err != nil {
		return nil, err
	}
	return newRowTexts(r.cfg, rowFacts{schema: schema, objects: own.tables[objects.TableOfObjects]}), nil
}

func rowArgs(c *objects.Claim) []any { return []any{c.ID, c.Session, c.Token} }

// place returns the schema of the table. If it is not yet known, place finds out, for at most lookAtMost.
func (r *Rows) place(ctx context.Context) (schema string, err error) {
	if r.cfg.Schema != "" {
		return r.cfg.Schema, nil
	}
	if r.placed.Load() == nil {
		if err := r.Check(ctx, lookAtMost); err != nil {
			return "", err
		}
	}
	return *r.placed.Load(), nil
}
