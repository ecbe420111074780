package sqliteobjects

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// Claims is the table of claims that belongs to a table of objects. All methods are safe for
// concurrent use.
type Claims struct {
	table *Table
	sql   claimStatements
}

// Claims returns the table of claims.
func (t *Table) Claims() *Claims { return &t.claims }

type claimStatements struct{ look, take, free, owned, request, owners, wanted, forgetRequests, sessions, prune, pruneRequests, fence, fenceStatement, counts, list, forget string }

func newClaimStatements(named func(string) string) claimStatements {
	const columns = `kind, id, coalesce(session, ''), token, `
	const hasEnded = `NOT EXISTS (SELECT 1 FROM {claims} c WHERE (c.kind, c.id, c.session, c.token) = (r.kind, r.id, r.session, r.token))`
	return claimStatements{
		counts: named(claimCounts), list: named(claimList), forget: named(claimForget),
		look: named(`
			SELECT ` + columns + `session IS NOT NULL AND NOT EXISTS (
				SELECT 1 FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = c.session)
			FROM {claims} c WHERE kind = ?1 AND id IN (SELECT value FROM json_each(?2))`),
		take: named(`
			INSERT INTO {claims} (kind, id, session, token) SELECT ?1, value, ?2, ?3 FROM json_each(?4) WHERE true
			ON CONFLICT (kind, id) DO UPDATE SET session = excluded.session,
				token = max(CASE WHEN token < {version_limit} THEN token + 1 ELSE 0 END, excluded.token)
			WHERE session IS NULL OR CAST(session AS TEXT) IN (SELECT value FROM json_each(?5))
			RETURNING kind, id, session, token, 0`),
		free: named(`
			UPDATE {claims} SET session = NULL WHERE kind = ?1 AND +session = ?2 AND (id, token) IN (
				SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?3))`),
		// Any column may have a value of any type. What is no text is not what its text names, so pages
		// would not come to an end.
		owned: named(`
			SELECT ` + columns + `0 FROM {claims} WHERE session = ?1 AND (kind, id) > (?2, ?3) AND typeof(kind) = 'text' AND typeof(id) = 'text' ORDER BY kind, id LIMIT ?4`),
		request: named(`
			INSERT INTO {requests} (session, kind, id, token)
			SELECT session, kind, id, token FROM {claims} WHERE kind = ?1 AND id IN (SELECT value FROM json_each(?2)) AND session IS NOT NULL
			ON CONFLICT (session, kind, id, token) DO NOTHING`),
		owners: named(`
			SELECT kind, id, session, token, 0 FROM {claims}
			WHERE kind = ?1 AND id IN (SELECT value FROM json_each(?2)) AND session IS NOT NULL`),
		wanted: named(`
			SELECT kind, id, session, token, ` + hasEnded + ` FROM {requests} r
			WHERE session = ?1 AND (kind, id, token) > (?2, ?3, ?4) AND typeof(kind) = 'text' AND typeof(id) = 'text' AND typeof(token) = 'integer'
			ORDER BY kind, id, token LIMIT ?5`),
		forgetRequests: named(`
			DELETE FROM {requests} AS r WHERE session = ?1 AND (kind, id, token) <= (?2, ?3, ?4) AND ` + hasEnded),
		// Looks up the next session in the index, and not at each row.
		sessions: named(`
			WITH RECURSIVE named(session) AS (
				SELECT min(session) FROM {claims}
				UNION ALL
				SELECT (SELECT min(c.session) FROM {claims} c WHERE c.session > named.session) FROM named WHERE named.session IS NOT NULL)
			SELECT session, o.id IS NULL, EXISTS (SELECT 1 FROM {requests} r WHERE r.session = named.session), name, labels, payload, +resource_version, +created_at_ms, +updated_at_ms
			FROM named LEFT JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = session
			WHERE session IS NOT NULL`),
		// The next claim of a row that is gone gets a greater token all the same: the time, of
		// which the row's was a day behind.
		prune: named(`
			DELETE FROM {claims} WHERE rowid IN (SELECT rowid FROM {claims} WHERE session IS NULL AND token < ?1 ORDER BY token LIMIT ?2)`),
		pruneRequests: named(`
			DELETE FROM {requests} WHERE rowid IN (SELECT rowid FROM {requests} r WHERE ` + hasEnded + ` LIMIT ?1)`),
		fence: named(`
			SELECT 1 FROM {claims} WHERE kind = ?1 AND id = ?2 AND session = ?3 AND token = ?4`),
		// As the fence of a lease does, it writes nothing or fails.
		fenceStatement: named(`
			INSERT INTO {tombstones} (object_type, id, resource_version) SELECT ?1, ?2, NULL
			WHERE NOT EXISTS (SELECT 1 FROM {claims} WHERE kind = ?1 AND id = ?2 AND session = ?3 AND token = ?4)`),
	}
}

func claimArgs(c *objects.Claim) []any { return []any{c.Kind, c.ID, c.Session, c.Token} }

// LongestKey returns that a key may have any length.
func (c *Claims) LongestKey() int { return 0 }

// Look returns those of the rows that exist.
func (c *Claims) Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return c.read(ctx, limit, c.sql.look, kind, list(ids))
}

// Take makes a session the owner of rows: of those that are free, or whose session is one of
// those that are gone, and of those that are missing. It returns the rows that the session now
// owns and has not owned before.
func (c *Claims) Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) (taken []objects.Claim, err error) {
	err = c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, c.sql.take, kind, session, time.Now().UnixMicro(), list(slices.Concat(ids, missing)), list(gone))
		if err != nil {
			return err
		}
		taken, err = scanClaims(rows)
		return err
	})
	if err != nil {
		return nil, err
	}
	return taken, nil
}

// Free frees the rows that a session owns under these tokens. No row is ever locked for long,
// so it always returns nil.
func (c *Claims) Free(ctx context.Context, session, kind string, ids []string, tokens []int64, limit time.Duration) ([]objects.Claim, error) {
	rows := make([][2]any, 0, len(ids))
	for i, id := range ids {
		rows = append(rows, [2]any{id, tokens[i]})
	}
	return nil, c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, c.sql.free, kind, session, list(rows))
		return err
	})
}

// Owned returns at most n rows that a session owns, those after another row.
func (c *Claims) Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return c.read(ctx, limit, c.sql.owned, session, afterKind, afterID, n)
}

// Request asks the owners of rows to give them back, and returns these rows.
func (c *Claims) Request(ctx context.Context, kind string, ids []string, limit time.Duration) (wanted []objects.Claim, err error) {
	err = c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, c.sql.request, kind, list(ids)); err != nil {
			return err
		}
		rows, err := tx.QueryContext(ctx, c.sql.owners, kind, list(ids))
		if err != nil {
			return err
		}
		wanted, err = scanClaims(rows)
		return err
	})
	return wanted, err
}

// Wanted returns at most n claims of a session that somebody asks for, those after another one.
// Gone says that the claim has ended, and that the request was deleted.
func (c *Claims) Wanted(ctx context.Context, session string, after objects.Claim, n int, limit time.Duration) ([]objects.Claim, error) {
	rows, err := c.read(ctx, limit, c.sql.wanted, session, after.Kind, after.ID, after.Token, n)
	if err != nil || !slices.ContainsFunc(rows, func(r objects.Claim) bool { return r.Gone }) {
		return rows, err
	}
	last := rows[len(rows)-1]
	_ = c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error { // else the next call deletes them
		_, err := tx.ExecContext(ctx, c.sql.forgetRequests, session, last.Kind, last.ID, last.Token)
		return err
	})
	return rows, nil
}

// Sessions returns the sessions that rows name.
func (c *Claims) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	return c.namedBy(ctx, limit, c.sql.sessions)
}

func (c *Claims) namedBy(ctx context.Context, limit time.Duration, statement string) (sessions []objects.Session, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	rows, err := c.table.db.QueryContext(ctx, statement)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	for rows.Next() {
		var s objects.Session
		var gone bool
		var r objects.Row
		if err := rows.Scan(append([]any{&s.ID, &gone, &s.Wanted}, columns(&r)...)...); err != nil {
			return nil, explain(err)
		}
		if !gone {
			r.ID = objects.ID{Type: objects.SessionType, ID: s.ID}
			r.Age = objects.Age(r.Updated, time.Now())
			s.Record = &r
		}
		sessions = append(sessions, s)
	}
	return sessions, explain(rows.Err())
}

// Prune deletes at most n rows that are free and whose last claim is more than a day old, and as
// many requests for claims that have ended. It returns how many. SQLite finds the next ones at
// once, so last is always 0.
func (c *Claims) Prune(ctx context.Context, _ int64, n int, limit time.Duration) (last int64, pruned int, err error) {
	err = c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		rows, err := tx.ExecContext(ctx, c.sql.prune, time.Now().Add(-objects.TombstoneAge).UnixMicro(), n)
		if err != nil {
			return err
		}
		requests, err := tx.ExecContext(ctx, c.sql.pruneRequests, n)
		if err != nil {
			return err
		}
		deleted, err := rows.RowsAffected()
		forgotten, requestsErr := requests.RowsAffected()
		pruned = int(max(deleted, forgotten))
		return cmp.Or(err, requestsErr)
	})
	return 0, pruned, err
}

func (c *Claims) read(ctx context.Context, limit time.Duration, query string, args ...any) ([]objects.Claim, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	rows, err := c.table.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, explain(err)
	}
	claims, err := scanClaims(rows)
	return claims, explain(err)
}

// write runs fn in a transaction. SQLite does not queue those who wait for its one lock, so
// afterwards the others get as much time as it took.
func (c *Claims) write(ctx context.Context, limit time.Duration, fn func(context.Context, *sql.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := c.table.fit(ctx, true); err != nil {
		return explain(err)
	}
	return c.writeAny(ctx, limit, fn)
}

// writeAny is write for tables that are not those of the claims.
func (c *Claims) writeAny(ctx context.Context, limit time.Duration, fn func(context.Context, *sql.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	err := c.table.write(ctx, nil, func(tx *sql.Tx) error {
		began = time.Now()
		return fn(ctx, tx)
	})
	pace.Sleep(ctx, time.Since(began))
	if isConstraint(err) {
		return &objects.Refused{Cause: explain(err)}
	}
	return explain(err)
}

func scanClaims(rows *sql.Rows) (claims []objects.Claim, err error) {
	defer rows.Close()
	for rows.Next() {
		var r objects.Claim
		if err := rows.Scan(&r.Kind, &r.ID, &r.Session, versionColumn{&r.Token}, &r.Gone); err != nil {
			return nil, err
		}
		claims = append(claims, r)
	}
	return claims, rows.Err()
}

// list returns an argument of json_each.
func list[T any](values []T) string {
	if len(values) == 0 {
		return "[]"
	}
	b, _ := json.Marshal(values) // text and numbers always encode
	return string(b)
}

// checkFence returns [objects.FencedOut] unless the row of a claim stands as it is.
func (c *Claims) checkFence(ctx context.Context, tx *sql.Tx, claim *objects.Claim) error {
	var held int
	err := tx.QueryRowContext(ctx, c.sql.fence, claimArgs(claim)...).Scan(&held)
	if errors.Is(err, sql.ErrNoRows) {
		return &objects.FencedOut{}
	}
	return err
}
