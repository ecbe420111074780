package pgobjects

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/internal/report"
)

// Claims is the table of claims that belongs to a table of objects. Its statements have
// connections of their own, so that they don't wait for the application's queries, and no
// renewal waits for them. All methods are safe for concurrent use.
//
// The server enforces a time limit on each statement, so that a statement whose answer was lost
// has ended when the limit has passed.
type Claims struct {
	table  *Table
	others chan struct{} // held by statements on users' tables
}

// Claims implements [objects.Backend].
func (t *Table) Claims() objects.ClaimsTable { return &t.claims }

// Renewals implements [objects.Backend].
func (t *Table) Renewals() *objects.Renewals { return &t.renewals }

// Migrate implements [objects.ClaimsTable].
func (c *Claims) Migrate(ctx context.Context) error {
	t := c.table
	defer report.Flush(t.cfg.Logger)
	return t.setups.explain(t.setups.migrateClaims(ctx))
}

// None of these statements waits for a row that another transaction has locked: a fenced
// write that hangs before its commit delays its own row, and not a thousand others. Only an insert
// waits, for another insert of the same key. It names the key, so that it fails if the table was
// recreated without it.
//
// IDs are passed as ARRAY(SELECT …), from which the planner expects few rows: from a known array,
// or from a join, it may expect so many that it walks all rows of the kind. Locked rows are updated
// by their ctids: looking them up by their keys again would cost a fifth more.
const (
	isGone = `NOT EXISTS (SELECT FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = c.session)`
	// A live session may not have read yet that one of its claims was moved.
	sessionIsGone = `NOT EXISTS (SELECT FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = r.session)`
	hasEnded      = `NOT EXISTS (SELECT FROM {claims} c WHERE (c.kind, c.id, c.session, c.token) = (r.kind, r.id, r.session, r.token))`

	isFree    = `(session IS NULL OR session = ANY($4))`
	nextToken = `greatest(CASE WHEN token < {version_limit} THEN token + 1 END, {now_us})`

	lookAtClaims = `
			SELECT kind, id, coalesce(session, ''), token, session IS NOT NULL AND ` + isGone + `
			FROM {claims} c WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($2::text[])))`

	// A row whose session changes while the statement runs is checked again when it is locked. The
	// update does not find it by its ctid, so it is left.
	takeClaims = `
			WITH locked AS MATERIALIZED (
				SELECT ctid FROM {claims} WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($3::text[]))) AND ` + isFree + `
				FOR NO KEY UPDATE SKIP LOCKED),
			taken AS (
				UPDATE {claims} SET session = $2,
					token = ` + nextToken + `
				WHERE ctid = ANY(ARRAY(SELECT ctid FROM locked)) RETURNING kind, id, session, token),
			made AS (
				INSERT INTO {claims} (kind, id, session, token)
				SELECT $1, id, $2, {now_us} FROM unnest($5::text[]) missing(id) ORDER BY id
				ON CONFLICT (kind, id) DO NOTHING RETURNING kind, id, session, token)
			SELECT *, false FROM taken UNION ALL SELECT *, false FROM made`

	takeOneClaim = `
			WITH locked AS MATERIALIZED (
				SELECT ctid FROM {claims} WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($3::text[]))) AND ` + isFree + `
				ORDER BY token LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED)
			UPDATE {claims} SET session = $2,
				token = ` + nextToken + `
			WHERE ctid = ANY(ARRAY(SELECT ctid FROM locked)) RETURNING kind, id, session, token, false`

	// Returns the rows that it moved and, with true, those that it left although they are as they were
	// seen. Rows of seen that have changed since the statement began have other ctids, so they are left,
	// too.
	moveClaims = `
			WITH seen AS MATERIALIZED (
				SELECT ctid, c.* FROM {claims} c WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($3::text[])))
					AND (id, session, token) IN (SELECT * FROM unnest($3::text[], $4::text[], $5::bigint[]))),
			locked AS MATERIALIZED (
				SELECT ctid FROM {claims} WHERE ctid = ANY(ARRAY(SELECT ctid FROM seen)) FOR NO KEY UPDATE SKIP LOCKED),
			moved AS (
				UPDATE {claims} SET session = $2,
					token = greatest({now_us}, CASE WHEN token < {version_limit} THEN token + 1 END)
				WHERE ctid = ANY(ARRAY(SELECT ctid FROM locked)) RETURNING kind, id, session, token),
			told AS (
				INSERT INTO {requests} (session, kind, id, token)
				SELECT session, kind, id, token FROM seen WHERE id IN (SELECT id FROM moved) ORDER BY session, id
				ON CONFLICT (session, kind, id, token) DO NOTHING)
			SELECT *, false FROM moved UNION ALL
			SELECT kind, id, session, token, true FROM seen WHERE id NOT IN (SELECT id FROM moved)`

	// Returns the rows that it could not free because another transaction has locked them. A row
	// that was freed and claimed again since the statement began has another ctid. IS NOT DISTINCT
	// FROM keeps the planner from using the index on the session, where the rows that were just
	// freed are still in the way.
	freeClaims = `
			WITH wanted AS MATERIALIZED (
				SELECT ctid, c.* FROM {claims} c WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($3::text[]))) AND session IS NOT DISTINCT FROM $2
					AND (id, token) IN (SELECT * FROM unnest($3::text[], $4::bigint[]))),
			locked AS MATERIALIZED (
				SELECT ctid FROM {claims} WHERE ctid = ANY(ARRAY(SELECT ctid FROM wanted)) FOR NO KEY UPDATE SKIP LOCKED),
			freed AS (
				UPDATE {claims} SET session = NULL WHERE ctid = ANY(ARRAY(SELECT ctid FROM locked)) RETURNING id)
			SELECT kind, id, session, token, false FROM wanted WHERE id NOT IN (SELECT id FROM freed)`

	ownedClaims = `
			SELECT kind, id, session, token, false FROM {claims}
			WHERE session = $1 AND (kind, id) > ($2, $3) ORDER BY session, kind, id LIMIT $4`

	requestClaims = `
			WITH owned AS MATERIALIZED (
				SELECT * FROM {claims} WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($2::text[]))) AND session IS NOT NULL),
			asked AS (
				INSERT INTO {requests} (session, kind, id, token)
				SELECT session, kind, id, token FROM owned ORDER BY session, id ON CONFLICT (session, kind, id, token) DO NOTHING)
			SELECT kind, id, session, token, false FROM owned`

	// Deletes the requests for claims that have ended, and returns for each whether it has. A
	// claim that does not stand when its request is visible never stands again.
	wantedClaims = `
			WITH page AS MATERIALIZED (
				SELECT r.*, ` + hasEnded + ` AS ended FROM {requests} r
				WHERE session = $1 AND (kind, id, token) > ($2, $3, $4) ORDER BY session, kind, id, token LIMIT $5),
			locked AS MATERIALIZED (
				SELECT kind, id, token FROM {requests}
				WHERE session = $1 AND (kind, id, token) IN (SELECT kind, id, token FROM page WHERE ended) FOR UPDATE SKIP LOCKED),
			deleted AS (
				DELETE FROM {requests} WHERE session = $1 AND (kind, id, token) IN (SELECT * FROM locked))
			SELECT kind, id, session, token, ended FROM page ORDER BY kind, id, token`

	// Looks up the next session in the index instead of visiting each row.
	sessionsOfClaims = `
			WITH RECURSIVE named AS (
				(SELECT session FROM {claims} WHERE session IS NOT NULL ORDER BY session LIMIT 1)
				UNION ALL
				SELECT (SELECT session FROM {claims} c WHERE c.session > named.session ORDER BY session LIMIT 1)
				FROM named WHERE session IS NOT NULL)
			SELECT session, o.id IS NULL, true, labels, coalesce(payload, ''), coalesce({version}, 0), created_at_ms, updated_at_ms, {now_us},
				EXISTS (SELECT FROM {requests} r WHERE r.session = named.session), {server}
			FROM named LEFT JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = session
			WHERE session IS NOT NULL`

	// The next claim of a deleted row still gets a greater token, because tokens follow the time,
	// and the row's was a day behind.
	pruneClaims = `
			WITH old AS MATERIALIZED (
				SELECT ctid, token FROM {claims} WHERE session IS NULL AND token < (SELECT {now_us} - {tombstone_age_us}) AND token >= $1
				ORDER BY token LIMIT $2 FOR UPDATE SKIP LOCKED),
			deleted AS (
				DELETE FROM {claims} WHERE ctid = ANY (ARRAY(SELECT ctid FROM old))),
			ended AS MATERIALIZED (
				SELECT ctid FROM {requests} r WHERE ` + hasEnded + ` AND ` + sessionIsGone + ` LIMIT $2 FOR UPDATE SKIP LOCKED),
			forgotten AS (
				DELETE FROM {requests} WHERE ctid = ANY (ARRAY(SELECT ctid FROM ended)))
			SELECT coalesce(max(token), 0), greatest(count(*), (SELECT count(*) FROM ended)) FROM old`

	// Looks up the next session and kind in the index instead of visiting each row. Only the rows
	// that are counted are read one by one, also in the index.
	countClaims = `
	WITH RECURSIVE named AS (
		(SELECT session, kind FROM {claims} WHERE session IS NOT NULL ORDER BY session, kind LIMIT 1)
		UNION ALL
		SELECT next.session, next.kind FROM named CROSS JOIN LATERAL (
			SELECT c.session, c.kind FROM {claims} c WHERE (c.session, c.kind) > (named.session, named.kind)
			ORDER BY c.session, c.kind LIMIT 1) next)
	SELECT session, kind, (
		SELECT count(*) FROM (SELECT FROM {claims} c WHERE c.session = named.session AND c.kind = named.kind LIMIT $1) counted)
	FROM named`

	// One plain SELECT has one snapshot, so a session without a record is gone: see [objects.Claim].
	// A row for each claim would take a third longer.
	listClaims = `
	SELECT c.kind, c.session, array_agg(c.id), array_agg(c.token), {now_us}
	FROM {claims} c JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = c.session
	WHERE c.kind = ANY($1) GROUP BY c.kind, c.session`

	forgetClaims = `
	DELETE FROM {claims} WHERE ctid = ANY (ARRAY(
		SELECT ctid FROM {claims} WHERE kind = $1 AND session IS NULL LIMIT {prune_at_most} FOR UPDATE SKIP LOCKED))`

	// claimFence locks the row of the claim, which the next owner has to update. All the writers of
	// a session would otherwise lock the session's record.
	claimFence = failUnlessHere + `(
			SELECT ` + sessionIsHere + `$3) AS here FROM {claims} WHERE kind = $1 AND id = $2 AND session = $3 AND token = $4 FOR SHARE) held`
)

// longestKey is the most bytes that the columns of a key may have together: an index entry has at most
// 2,704, which must also have room for a session's ID and a token.
const longestKey = 2600

func (c *Claims) LongestKey() int { return longestKey }

func (c *Claims) Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return query(ctx, c, limit, scanClaim, lookAtClaims, kind, ids)
}

func (c *Claims) Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) ([]objects.Claim, error) {
	return query(ctx, c, limit, scanClaim, takeClaims, kind, session, ids, gone, missing)
}

func (c *Claims) TakeOne(ctx context.Context, session, kind string, ids, gone []string, limit time.Duration) ([]objects.Claim, error) {
	return query(ctx, c, limit, scanClaim, takeOneClaim, kind, session, ids, gone)
}

func (c *Claims) Free(ctx context.Context, session, kind string, ids []string, tokens []int64, _ objects.Freeing, limit time.Duration) ([]objects.Claim, error) {
	return query(ctx, c, limit, scanClaim, freeClaims, kind, session, ids, tokens)
}

func (c *Claims) Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return query(ctx, c, limit, scanClaim, ownedClaims, session, afterKind, afterID, n)
}

func (c *Claims) Move(ctx context.Context, session, kind string, seen []objects.Claim, limit time.Duration) (moved, locked []objects.Claim, err error) {
	var ids, sessions []string
	var tokens []int64
	for _, s := range seen {
		ids, sessions, tokens = append(ids, s.ID), append(sessions, s.Session), append(tokens, s.Token)
	}
	rows, err := query(ctx, c, limit, scanClaim, moveClaims, kind, session, ids, sessions, tokens)
	for _, r := range rows {
		if r.Gone {
			r.Gone = false
			locked = append(locked, r)
		} else {
			moved = append(moved, r)
		}
	}
	return moved, locked, err
}

// Request waits for no fenced write.
func (c *Claims) Request(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return query(ctx, c, limit, scanClaim, requestClaims, kind, ids)
}

func (c *Claims) Wanted(ctx context.Context, session string, after objects.Claim, n int, limit time.Duration) ([]objects.Claim, error) {
	return query(ctx, c, limit, scanClaim, wantedClaims, session, after.Kind, after.ID, after.Token, n)
}

func (c *Claims) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	sessions, err := query(ctx, c, limit, scanSession, sessionsOfClaims)
	return sessions, unreadable(err)
}

// OfKinds returns the time by the server's clock.
func (c *Claims) OfKinds(ctx context.Context, kinds []string, limit time.Duration) (claims []objects.Claim, at time.Time, err error) {
	var nowUS int64
	bySession, err := query(ctx, c, limit, func(row pgx.CollectableRow) (owned []objects.Claim, err error) {
		var kind, session string
		var ids []string
		var tokens []int64
		err = row.Scan(&kind, &session, &ids, &tokens, &nowUS)
		for i, id := range ids {
			owned = append(owned, objects.Claim{Kind: kind, ID: id, Session: session, Token: tokens[i]})
		}
		return owned, err
	}, listClaims, kinds)
	if err != nil || len(bySession) == 0 {
		return nil, time.Time{}, err
	}
	return slices.Concat(bySession...), time.UnixMicro(nowUS), nil
}

func (c *Claims) Forget(ctx context.Context, kind string, limit time.Duration) error {
	_, err := query(ctx, c, limit, scanClaim, forgetClaims, kind)
	return err
}

func (c *Claims) Counts(ctx context.Context, most int, limit time.Duration) ([]objects.ClaimCount, error) {
	return query(ctx, c, limit, func(row pgx.CollectableRow) (n objects.ClaimCount, err error) {
		return n, row.Scan(&n.Session, &n.Kind, &n.Claims)
	}, countClaims, most)
}

// Prune returns the token after which the next call begins, because dead rows stay in the index.
func (c *Claims) Prune(ctx context.Context, after int64, n int, limit time.Duration) (last int64, pruned int, err error) {
	type result struct {
		last   int64
		pruned int
	}
	found, err := query(ctx, c, limit, func(row pgx.CollectableRow) (r result, err error) {
		return r, row.Scan(&r.last, &r.pruned)
	}, pruneClaims, after, n)
	if err != nil || len(found) == 0 {
		return 0, 0, err
	}
	return found[0].last, found[0].pruned, nil
}

func scanClaim(row pgx.CollectableRow) (c objects.Claim, err error) {
	return c, row.Scan(&c.Kind, &c.ID, &c.Session, &c.Token, &c.Gone)
}

func scanSession(row pgx.CollectableRow) (s objects.Session, err error) {
	var r objects.Row
	var missing, known bool
	var nowUS int64
	err = row.Scan(&s.ID, &missing, &known, &r.Labels, &r.Payload, &r.Version, &r.Created, &r.Updated, &nowUS, &s.Wanted, &s.Server)
	if s.Gone = missing && known; !missing {
		r.ID = objects.ID{Type: objects.SessionType, ID: s.ID}
		r.Age = objects.Age(r.Updated, time.UnixMicro(nowUS))
		s.Record = &r
	}
	return s, err
}

// query returns what scan makes of the rows that a statement returns. The statement runs in a
// transaction of its own, which has the statement's settings. A plan made while the table had few rows
// would be wrong for a million, and one that gathers and sorts all rows of a session would be wrong for
// a thousand of them.
//
// The server ends the statement before ctx does, so that there is time for the answer that nothing was
// written.
func query[T any](ctx context.Context, c *Claims, limit time.Duration, scan pgx.RowToFunc[T], text string, args ...any) (found []T, err error) {
	ctx, cancel := claimCall(ctx, limit)
	defer cancel()
	s := &c.table.setups
	_, err = s.call(ctx, (*setup).mayClaim, func(set *setup) (err error) {
		found, err = send(ctx, c, 0, func(*pgx.Batch) error {
			// The connection may be a new one, on which the tables were inspected again.
			if now := s.found.Load(); now != nil {
				return now.mayClaim()
			}
			return nil
		}, scan, set.in(text), args)
		return err
	})
	return found, c.explain(err)
}

// claimCall returns the context of a call that may take limit.
func claimCall(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(objects.WithClaimCall(ctx), limit)
}

func (c *Claims) explain(err error) error {
	switch explained := c.table.setups.explain(err); {
	case pgconns.MayBeOfOneRow(err):
		return &objects.Refused{Cause: explained}
	case pgconns.IsCanceled(err):
		return &objects.TooSlow{Cause: explained}
	default:
		return explained
	}
}

// send sends a statement as query does, once there is a connection and may returns nil. What may adds to the batch is sent
// first, in the same transaction. The statement waits for locks for at most lock; 0: for as long as the statement may
// take. The context comes from claimCall.
func send[T any](ctx context.Context, c *Claims, lock time.Duration, may func(*pgx.Batch) error, scan pgx.RowToFunc[T], sql string, args []any) (_ []T, err error) {
	settings := `SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', $2, true),
				set_config('plan_cache_mode', 'force_custom_plan', true), set_config('random_page_cost', '0.1', true)`
	if objects.IsWithoutSync(ctx) {
		settings += `, set_config('synchronous_commit', 'off', true)`
	} else {
		settings += `, ` + pgconns.Durably
	}
	millis := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
	var server []any
	if name := objects.ServerOf(ctx); name != "" {
		settings, server = settings+elseMoved, []any{serverOf(name)}
	}
	var answered []T // may still be written after an error
	err = c.table.conns.Call(ctx, func(pool *pgxpool.Pool, _ bool) error {
		return pgconns.Send(ctx, pool, func(ctx context.Context, conn *pgxpool.Conn) error {
			deadline, _ := ctx.Deadline()
			left := time.Until(deadline)
			left -= min(left/4, 500*time.Millisecond)
			batch := &pgx.Batch{}
			batch.Queue(settings, append([]any{millis(max(left, time.Millisecond)), millis(lock)}, server...)...)
			if err := may(batch); err != nil {
				return err
			}
			batch.Queue(sql, args...).Query(func(rows pgx.Rows) (err error) {
				answered, err = pgx.AppendRows([]T(nil), rows, scan)
				return err
			})
			return conn.SendBatch(ctx, batch).Close()
		})
	})
	if isMoved(err) {
		c.table.lineages.isNot(objects.ServerOf(ctx))
		return nil, objects.ErrMoved
	}
	if err != nil {
		return nil, err
	}
	return answered, nil
}

// elseMoved fails on any server other than the one that it names, with a text that [isMoved]
// recognises. It is part of the statement before the one that must not run there, in the same
// transaction.
const elseMoved = `, CASE ` + server + ` WHEN $3 THEN 0 ELSE ('` + objects.Moved + `' || ` + server + `)::bigint END`

func isMoved(err error) bool {
	var refused *pgconn.PgError
	return errors.As(err, &refused) && objects.IsMoved(refused)
}
