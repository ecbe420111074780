package pgobjects

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// Claims is the table of claims that belongs to a table of objects. Its statements have
// connections of their own, so that they don't wait for the application's queries, and no
// renewal waits for them. All methods are safe for concurrent use.
//
// Each statement has a time limit that the server keeps, so that one whose answer was lost has
// ended when the limit has passed.
type Claims struct {
	table  *Table
	others chan struct{} // held by statements on tables of the user
}

// Claims returns the table of claims.
func (t *Table) Claims() *Claims { return &t.claims }

type claimStatements struct{ look, take, free, owned, request, wanted, sessions, prune, fence, counts, list, forget string }

// None of these statements waits for a row that another transaction has locked: a fenced
// write that hangs before its commit holds up its own row, and not a thousand others. Only an
// insert waits, for another of the same key. It names the key, so that it fails if a table was
// created again without it.
//
// IDs are handed on as ARRAY(SELECT …), of which the planner expects few: of an array that it
// knows, or of a join, it may expect so many that it walks all rows of the kind. What is locked is
// updated by its ctid: to look it up by its key again costs a fifth more.
func newClaimStatements(n names) *claimStatements {
	const isGone = `NOT EXISTS (SELECT FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = c.session)`
	const hasEnded = `NOT EXISTS (SELECT FROM {claims} c WHERE (c.kind, c.id, c.session, c.token) = (r.kind, r.id, r.session, r.token))`
	return &claimStatements{
		counts: n.in(claimCounts), list: n.in(claimList), forget: n.in(claimForget),
		look: n.in(`
			SELECT kind, id, coalesce(session, ''), token, session IS NOT NULL AND ` + isGone + `
			FROM {claims} c WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($2::text[])))`),

		// A row whose session changes while the statement runs is judged again, as it is now,
		// when it is locked. The update does not find it by its ctid, so it is left.
		take: n.in(`
			WITH locked AS MATERIALIZED (
				SELECT ctid FROM {claims} WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($3::text[]))) AND (session IS NULL OR session = ANY($4))
				FOR NO KEY UPDATE SKIP LOCKED),
			taken AS (
				UPDATE {claims} SET session = $2,
					token = greatest(CASE WHEN token < {version_limit} THEN token + 1 END, {now_us})
				WHERE ctid = ANY(ARRAY(SELECT ctid FROM locked)) RETURNING kind, id, session, token),
			made AS (
				INSERT INTO {claims} (kind, id, session, token)
				SELECT $1, id, $2, {now_us} FROM unnest($5::text[]) missing(id) ORDER BY id
				ON CONFLICT (kind, id) DO NOTHING RETURNING kind, id, session, token)
			SELECT *, false FROM taken UNION ALL SELECT *, false FROM made`),

		// Returns the rows that should be free and are not, because somebody has locked them.
		// A row that was freed and claimed again since the statement began has another ctid.
		// IS NOT DISTINCT FROM keeps the planner from using the index on the session, where the
		// rows that were just freed are still in the way.
		free: n.in(`
			WITH wanted AS MATERIALIZED (
				SELECT ctid, c.* FROM {claims} c WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($3::text[]))) AND session IS NOT DISTINCT FROM $2
					AND (id, token) IN (SELECT * FROM unnest($3::text[], $4::bigint[]))),
			locked AS MATERIALIZED (
				SELECT ctid FROM {claims} WHERE ctid = ANY(ARRAY(SELECT ctid FROM wanted)) FOR NO KEY UPDATE SKIP LOCKED),
			freed AS (
				UPDATE {claims} SET session = NULL WHERE ctid = ANY(ARRAY(SELECT ctid FROM locked)) RETURNING id)
			SELECT kind, id, session, token, false FROM wanted WHERE id NOT IN (SELECT id FROM freed)`),

		owned: n.in(`
			SELECT kind, id, session, token, false FROM {claims}
			WHERE session = $1 AND (kind, id) > ($2, $3) ORDER BY session, kind, id LIMIT $4`),

		request: n.in(`
			WITH owned AS MATERIALIZED (
				SELECT * FROM {claims} WHERE kind = $1 AND id = ANY(ARRAY(SELECT unnest($2::text[]))) AND session IS NOT NULL),
			asked AS (
				INSERT INTO {requests} (session, kind, id, token)
				SELECT session, kind, id, token FROM owned ORDER BY session, id ON CONFLICT (session, kind, id, token) DO NOTHING)
			SELECT kind, id, session, token, false FROM owned`),

		// Deletes the requests for claims that have ended, and says of each whether it is one. A
		// claim that does not stand when its request is visible never stands again.
		wanted: n.in(`
			WITH page AS MATERIALIZED (
				SELECT r.*, ` + hasEnded + ` AS ended FROM {requests} r
				WHERE session = $1 AND (kind, id, token) > ($2, $3, $4) ORDER BY session, kind, id, token LIMIT $5),
			locked AS MATERIALIZED (
				SELECT kind, id, token FROM {requests}
				WHERE session = $1 AND (kind, id, token) IN (SELECT kind, id, token FROM page WHERE ended) FOR UPDATE SKIP LOCKED),
			deleted AS (
				DELETE FROM {requests} WHERE session = $1 AND (kind, id, token) IN (SELECT * FROM locked))
			SELECT kind, id, session, token, ended FROM page ORDER BY kind, id, token`),

		// Looks up the next session in the index, and not at each row.
		sessions: n.in(`
			WITH RECURSIVE named AS (
				(SELECT session FROM {claims} WHERE session IS NOT NULL ORDER BY session LIMIT 1)
				UNION ALL
				SELECT (SELECT session FROM {claims} c WHERE c.session > named.session ORDER BY session LIMIT 1)
				FROM named WHERE session IS NOT NULL)
			SELECT session, o.id IS NULL, labels, coalesce(payload, ''), coalesce({version}, 0), created_at_ms, updated_at_ms, {now_us},
				EXISTS (SELECT FROM {requests} r WHERE r.session = named.session), {server}
			FROM named LEFT JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = session
			WHERE session IS NOT NULL`),

		// The next claim of a row that is gone gets a greater token all the same: the time, of
		// which the row's was a day behind.
		prune: n.in(`
			WITH old AS MATERIALIZED (
				SELECT ctid, token FROM {claims} WHERE session IS NULL AND token < (SELECT {now_us} - {tombstone_age_us}) AND token >= $1
				ORDER BY token LIMIT $2 FOR UPDATE SKIP LOCKED),
			deleted AS (
				DELETE FROM {claims} WHERE ctid = ANY (ARRAY(SELECT ctid FROM old))),
			ended AS MATERIALIZED (
				SELECT ctid FROM {requests} r WHERE ` + hasEnded + ` LIMIT $2 FOR UPDATE SKIP LOCKED),
			forgotten AS (
				DELETE FROM {requests} WHERE ctid = ANY (ARRAY(SELECT ctid FROM ended)))
			SELECT coalesce(max(token), 0), greatest(count(*), (SELECT count(*) FROM ended)) FROM old`),

		fence: n.in(claimFence),
	}
}

// claimFence locks the row of the claim, which the next owner has to update. All the writers of
// a session would lock the session's record.
const claimFence = failUnlessOne + `(
			SELECT 1 FROM {claims} WHERE kind = $1 AND id = $2 AND session = $3 AND token = $4 FOR SHARE) held`

func claimArgs(c *objects.Claim) []any { return []any{c.Kind, c.ID, c.Session, c.Token} }

// longestKey is how many bytes the columns of a key may have together: an entry of an index has at most
// 2,704, in which an ID of a session and a token must find room as well.
const longestKey = 2600

// LongestKey returns how many bytes a key may have together with its kind.
func (c *Claims) LongestKey() int { return longestKey }

// Look returns those of the rows that exist.
func (c *Claims) Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return c.claims(ctx, limit, func(s *claimStatements) string { return s.look }, kind, ids)
}

// Take makes a session the owner of rows: of those that are free, or whose session is one of
// those that are gone, and of those that are missing. It returns the rows that the session now
// owns and has not owned before. Rows that somebody has locked it leaves.
func (c *Claims) Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) ([]objects.Claim, error) {
	return c.claims(ctx, limit, func(s *claimStatements) string { return s.take }, kind, session, ids, gone, missing)
}

// Free frees the rows that a session owns under these tokens, and returns those that it could
// not free because somebody has locked them.
func (c *Claims) Free(ctx context.Context, session, kind string, ids []string, tokens []int64, limit time.Duration) ([]objects.Claim, error) {
	return c.claims(ctx, limit, func(s *claimStatements) string { return s.free }, kind, session, ids, tokens)
}

// Owned returns at most n rows that a session owns, those after another row.
func (c *Claims) Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return c.claims(ctx, limit, func(s *claimStatements) string { return s.owned }, session, afterKind, afterID, n)
}

// Request asks the owners of rows to give them back, and returns these rows. It waits for no
// fenced write.
func (c *Claims) Request(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return c.claims(ctx, limit, func(s *claimStatements) string { return s.request }, kind, ids)
}

// Wanted returns at most n claims of a session that somebody asks for, those after another one.
// Gone says that the claim has ended, and that the request was deleted.
func (c *Claims) Wanted(ctx context.Context, session string, after objects.Claim, n int, limit time.Duration) ([]objects.Claim, error) {
	return c.claims(ctx, limit, func(s *claimStatements) string { return s.wanted }, session, after.Kind, after.ID, after.Token, n)
}

// Sessions returns the sessions that rows name.
func (c *Claims) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	return namedBy(func(row func(pgx.Rows) error) error {
		return c.query(ctx, limit, func(s *claimStatements) string { return s.sessions }, nil, row)
	})
}

// namedBy returns the sessions that a statement returns.
func namedBy(query func(row func(pgx.Rows) error) error) (sessions []objects.Session, err error) {
	err = query(func(rows pgx.Rows) error {
		var s objects.Session
		var r objects.Row
		var gone bool
		var nowUS int64
		if err := rows.Scan(&s.ID, &gone, &r.Labels, &r.Payload, &r.Version, &r.Created, &r.Updated, &nowUS, &s.Wanted, &s.Server); err != nil {
			return err
		}
		if !gone {
			r.ID = objects.ID{Type: objects.SessionType, ID: s.ID}
			r.Age = objects.Age(r.Updated, time.UnixMicro(nowUS))
			s.Record = &r
		}
		sessions = append(sessions, s)
		return nil
	})
	return sessions, unreadable(err)
}

// Prune deletes at most n rows that are free and whose last claim is more than a day old, and as
// many requests for claims that have ended. It returns how many, and the token behind which the
// next call begins: where the dead rows are that this one leaves in the index.
func (c *Claims) Prune(ctx context.Context, after int64, n int, limit time.Duration) (last int64, pruned int, err error) {
	err = c.query(ctx, limit, func(s *claimStatements) string { return s.prune }, []any{after, n}, func(rows pgx.Rows) error { return rows.Scan(&last, &pruned) })
	return last, pruned, err
}

func (c *Claims) claims(ctx context.Context, limit time.Duration, statement func(*claimStatements) string, args ...any) (claims []objects.Claim, err error) {
	err = c.query(ctx, limit, statement, args, func(rows pgx.Rows) error {
		var r objects.Claim
		err := rows.Scan(&r.Kind, &r.ID, &r.Session, &r.Token, &r.Gone)
		claims = append(claims, r)
		return err
	})
	if err != nil {
		return nil, err
	}
	return claims, nil
}

// query runs one statement in a transaction of its own, which has the settings of the statement.
// A plan that was made while the table had few rows would be wrong for a million, and one that
// gathers and sorts all rows of a session would be wrong for a thousand of them.
//
// The server ends the statement before ctx does, so that there is time for its answer, which says that
// nothing is written.
func (c *Claims) query(ctx context.Context, limit time.Duration, statement func(*claimStatements) string, args []any, row func(pgx.Rows) error) error {
	ctx, cancel := claimCall(ctx, limit)
	defer cancel()
	s, answered := &c.table.setups, false
	send := func(found *setup) error {
		return c.send(ctx, 0, statement(found.claims), args, func() error {
			// The connection may be a new one, by which the tables were looked at again.
			if now := s.found.Load(); now != nil {
				return now.mayClaim()
			}
			return nil
		}, func(rows pgx.Rows) error {
			answered = true
			return row(rows)
		})
	}
	found, err := s.claiming(ctx)
	if err == nil {
		err = send(found)
	}
	if outdated(err) && !answered {
		if again, lookErr := s.look(ctx); errors.Is(lookErr, objects.ErrSetup) {
			err = lookErr
		} else if lookErr == nil && again.mayClaim() != nil {
			err = again.mayClaim()
		} else if lookErr == nil && !again.equal(found) {
			err = send(again)
		}
	}
	return c.explain(err)
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

// send sends a statement as query does, when there is a connection and may returns nil. It waits for
// locks only for a while; 0: for as long as the statement may take. The context is one of claimCall.
func (c *Claims) send(ctx context.Context, lock time.Duration, sql string, args []any, may func() error, row func(pgx.Rows) error) error {
	settings := `SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', $2, true),
				set_config('plan_cache_mode', 'force_custom_plan', true), set_config('random_page_cost', '0.1', true)`
	if objects.IsWithoutSync(ctx) {
		settings += `, set_config('synchronous_commit', 'off', true)`
	}
	millis := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
	return c.table.conns.Call(ctx, func(pool *pgxpool.Pool, _ bool) error {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
		if err := may(); err != nil {
			return err
		}
		deadline, _ := ctx.Deadline()
		left := time.Until(deadline)
		left -= min(left/4, 500*time.Millisecond)
		batch := &pgx.Batch{}
		batch.Queue(settings, millis(max(left, time.Millisecond)), millis(lock))
		batch.Queue(sql, args...).Query(func(rows pgx.Rows) error {
			for rows.Next() {
				if err := row(rows); err != nil {
					return err
				}
			}
			return rows.Err()
		})
		return conn.SendBatch(ctx, batch).Close()
	})
}

// fencedOut explains the failure of a transaction that depended on a claim.
func (c *Claims) fencedOut(ctx context.Context, claim *objects.Claim, cause error) error {
	rows, err := c.Look(ctx, claim.Kind, []string{claim.ID}, time.Minute)
	switch {
	case err == nil && len(rows) == 1 && rows[0].Session == claim.Session && rows[0].Token == claim.Token: // it idled too long
		return cause
	case err == nil:
		return &objects.FencedOut{}
	case isRefusal(cause):
		return &objects.FencedOut{Cause: err}
	default:
		return cause
	}
}
