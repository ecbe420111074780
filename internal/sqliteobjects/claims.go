package sqliteobjects

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// Claims is the table of claims that belongs to a table of objects. All methods are safe for
// concurrent use.
type Claims struct{ table *Table }

// Claims implements [objects.Backend].
func (t *Table) Claims() objects.ClaimsTable { return &t.claims }

// Renewals implements [objects.Backend].
func (t *Table) Renewals() *objects.Renewals { return &t.renewals }

// Migrate implements [objects.ClaimsTable].
func (c *Claims) Migrate(ctx context.Context) error {
	return c.table.createTables(ctx, objects.SQLiteClaims, true)
}

const (
	claimColumns = `kind, id, coalesce(session, ''), token, `
	// A live session may not have read yet that one of its claims was moved.
	sessionIsGone = `NOT EXISTS (SELECT 1 FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = r.session)`
	hasEnded      = `NOT EXISTS (SELECT 1 FROM {claims} c WHERE (c.kind, c.id, c.session, c.token) = (r.kind, r.id, r.session, r.token))`

	lookAtClaims = `
			SELECT ` + claimColumns + `session IS NOT NULL AND NOT EXISTS (
				SELECT 1 FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = c.session)
			FROM {claims} c WHERE kind = ?1 AND id IN (SELECT value FROM json_each(?2))`
	takeClaims = `
			INSERT INTO {claims} (kind, id, session, token) SELECT ?1, value, ?2, ?3 FROM json_each(?4) WHERE true
			ON CONFLICT (kind, id) DO UPDATE SET session = excluded.session,
				token = max(CASE WHEN token < {version_limit} THEN token + 1 ELSE 0 END, excluded.token)
			WHERE session IS NULL OR CAST(session AS TEXT) IN (SELECT value FROM json_each(?5))
			RETURNING kind, id, session, token, 0`
	takeOneClaim = `
			UPDATE {claims} SET session = ?2, token = max(CASE WHEN token < {version_limit} THEN token + 1 ELSE 0 END, ?3)
			WHERE rowid IN (
				SELECT rowid FROM {claims} WHERE kind = ?1 AND id IN (SELECT value FROM json_each(?4))
					AND (session IS NULL OR CAST(session AS TEXT) IN (SELECT value FROM json_each(?5)))
				ORDER BY token LIMIT 1)
			RETURNING kind, id, session, token, 0`
	seenClaims = `kind = ?1 AND (id, session, token) IN (
				SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]') FROM json_each(?2))`
	tellOwners = `
			INSERT INTO {requests} (session, kind, id, token) SELECT session, kind, id, token FROM {claims} WHERE ` + seenClaims + `
			ON CONFLICT (session, kind, id, token) DO NOTHING`
	moveClaims = `
			UPDATE {claims} SET session = ?3, token = max(CASE WHEN token < {version_limit} THEN token + 1 ELSE 0 END, ?4)
			WHERE ` + seenClaims + `
			RETURNING kind, id, session, token, 0`
	freeClaims = `
			UPDATE {claims} SET session = NULL WHERE kind = ?1 AND +session = ?2 AND (id, token) IN (
				SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?3))`
	// Any column may have a value of any type. A value that is not text differs from its own text,
	// so paging would never end.
	ownedClaims = `
			SELECT ` + claimColumns + `0 FROM {claims} WHERE session = ?1 AND (kind, id) > (?2, ?3) AND typeof(kind) = 'text' AND typeof(id) = 'text' ORDER BY kind, id LIMIT ?4`
	requestClaims = `
			INSERT INTO {requests} (session, kind, id, token)
			SELECT session, kind, id, token FROM {claims} WHERE kind = ?1 AND id IN (SELECT value FROM json_each(?2)) AND session IS NOT NULL
			ON CONFLICT (session, kind, id, token) DO NOTHING`
	claimsToRequest = `
			SELECT kind, id, session, token, 0 FROM {claims}
			WHERE kind = ?1 AND id IN (SELECT value FROM json_each(?2)) AND session IS NOT NULL`
	wantedClaims = `
			SELECT kind, id, session, token, ` + hasEnded + ` FROM {requests} r
			WHERE session = ?1 AND (kind, id, token) > (?2, ?3, ?4) AND typeof(kind) = 'text' AND typeof(id) = 'text' AND typeof(token) = 'integer'
			ORDER BY kind, id, token LIMIT ?5`
	forgetRequests = `
			DELETE FROM {requests} WHERE session = ?1 AND (kind, id, token) IN (
				SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]') FROM json_each(?2))`
	// Looks up the next session in the index instead of visiting each row.
	sessionsOfClaims = `
			WITH RECURSIVE named(session) AS (
				SELECT min(session) FROM {claims}
				UNION ALL
				SELECT (SELECT min(c.session) FROM {claims} c WHERE c.session > named.session) FROM named WHERE named.session IS NOT NULL)
			SELECT session, o.id IS NULL, 1, EXISTS (SELECT 1 FROM {requests} r WHERE r.session = named.session), name, labels, payload, +resource_version, +created_at_ms, +updated_at_ms
			FROM named LEFT JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = session
			WHERE session IS NOT NULL`
	// The next claim of a deleted row still gets a greater token, because tokens follow the time,
	// and the row's was a day behind.
	pruneClaims = `
			DELETE FROM {claims} WHERE rowid IN (SELECT rowid FROM {claims} WHERE session IS NULL AND token < ?1 ORDER BY token LIMIT ?2)`
	pruneRequests = `
			DELETE FROM {requests} WHERE rowid IN (SELECT rowid FROM {requests} r WHERE ` + hasEnded + ` AND ` + sessionIsGone + ` LIMIT ?1)`
	claimFence = `
			SELECT 1 FROM {claims} WHERE kind = ?1 AND id = ?2 AND session = ?3 AND token = ?4`
	// Like the fence of a lease, it writes nothing or fails.
	claimFenceStatement = `
			INSERT INTO {tombstones} (object_type, id, resource_version) SELECT ?1, ?2, ` + refuse + `
			WHERE NOT EXISTS (SELECT 1 FROM {claims} WHERE kind = ?1 AND id = ?2 AND session = ?3 AND token = ?4)`
	// Looks up the next session and kind in the index instead of visiting each row: a comparison
	// of pairs would walk all rows of a session. Only the rows that are counted are read one by
	// one, also in the index.
	countClaims = `
	WITH RECURSIVE named(session, kind) AS (
		SELECT * FROM (SELECT session, kind FROM {claims} WHERE session IS NOT NULL ORDER BY session, kind LIMIT 1)
		UNION ALL
		SELECT next.session, next.kind FROM named CROSS JOIN {claims} next ON next.rowid = coalesce(
			(SELECT c.rowid FROM {claims} c WHERE c.session = named.session AND c.kind > named.kind ORDER BY c.kind LIMIT 1),
			(SELECT c.rowid FROM {claims} c WHERE c.session > named.session ORDER BY c.session, c.kind LIMIT 1)))
	SELECT session, kind, (
		SELECT count(*) FROM (SELECT 1 FROM {claims} c WHERE c.session = named.session AND c.kind = named.kind LIMIT ?1))
	FROM named`
	listClaims = `
		SELECT c.kind, c.id, c.session, c.token, 0
		FROM {claims} c JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = c.session
		WHERE c.kind IN (SELECT value FROM json_each(?1))`
	forgetClaims = `
		DELETE FROM {claims} WHERE rowid IN (SELECT rowid FROM {claims} WHERE kind = ?1 AND session IS NULL LIMIT 1000)`
)

// LongestKey returns 0, because a key may have any length.
func (c *Claims) LongestKey() int { return 0 }

func (c *Claims) Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return c.read(ctx, limit, lookAtClaims, kind, list(ids))
}

func (c *Claims) Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) (taken []objects.Claim, err error) {
	return c.take(ctx, limit, takeClaims, kind, session, slices.Concat(ids, missing), gone)
}

func (c *Claims) TakeOne(ctx context.Context, session, kind string, ids, gone []string, limit time.Duration) ([]objects.Claim, error) {
	return c.take(ctx, limit, takeOneClaim, kind, session, ids, gone)
}

func (c *Claims) take(ctx context.Context, limit time.Duration, statement, kind, session string, ids, gone []string) (taken []objects.Claim, err error) {
	err = c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) (err error) {
		taken, err = all(ctx, tx, scanClaim, c.table.in(statement), kind, session, time.Now().UnixMicro(), list(ids), list(gone))
		return err
	})
	if err != nil {
		return nil, err
	}
	return taken, nil
}

// Move leaves no row, because no row is ever locked for long.
func (c *Claims) Move(ctx context.Context, session, kind string, seen []objects.Claim, limit time.Duration) (moved, _ []objects.Claim, err error) {
	rows := make([][3]any, 0, len(seen))
	for _, s := range seen {
		rows = append(rows, [3]any{s.ID, s.Session, s.Token})
	}
	err = c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) (err error) {
		if _, err := tx.ExecContext(ctx, c.table.in(tellOwners), kind, list(rows)); err != nil {
			return err
		}
		moved, err = all(ctx, tx, scanClaim, c.table.in(moveClaims), kind, list(rows), session, time.Now().UnixMicro())
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	return moved, nil, nil
}

// Free always returns nil, because no row is ever locked for long.
func (c *Claims) Free(ctx context.Context, session, kind string, ids []string, tokens []int64, _ objects.Freeing, limit time.Duration) ([]objects.Claim, error) {
	return nil, c.exec(ctx, limit, freeClaims, kind, session, idsAndTokens(ids, tokens))
}

// idsAndTokens returns pairs of an ID and a token as an argument of json_each.
func idsAndTokens(ids []string, tokens []int64) string {
	rows := make([][2]any, 0, len(ids))
	for i, id := range ids {
		rows = append(rows, [2]any{id, tokens[i]})
	}
	return list(rows)
}

func (c *Claims) Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return c.read(ctx, limit, ownedClaims, session, afterKind, afterID, n)
}

func (c *Claims) Request(ctx context.Context, kind string, ids []string, limit time.Duration) (wanted []objects.Claim, err error) {
	err = c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) (err error) {
		if _, err := tx.ExecContext(ctx, c.table.in(requestClaims), kind, list(ids)); err != nil {
			return err
		}
		wanted, err = all(ctx, tx, scanClaim, c.table.in(claimsToRequest), kind, list(ids))
		return err
	})
	return wanted, err
}

func (c *Claims) Wanted(ctx context.Context, session string, after objects.Claim, n int, limit time.Duration) ([]objects.Claim, error) {
	rows, err := c.read(ctx, limit, wantedClaims, session, after.Kind, after.ID, after.Token, n)
	var ended [][3]any // not all ended ones: a claim that was moved since is not in rows
	for _, r := range rows {
		if r.Gone {
			ended = append(ended, [3]any{r.Kind, r.ID, r.Token})
		}
	}
	if err == nil && len(ended) > 0 {
		_ = c.exec(ctx, limit, forgetRequests, session, list(ended)) // otherwise the next call deletes them
	}
	return rows, err
}

func (c *Claims) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	return allWithin(ctx, c.table, limit, scanSession, c.table.in(sessionsOfClaims))
}

func scanSession(rows *sql.Rows) (s objects.Session, err error) {
	var missing, known bool
	var r objects.Row
	err = rows.Scan(append([]any{&s.ID, &missing, &known, &s.Wanted}, columns(&r)...)...)
	if s.Gone = missing && known; !missing {
		r.ID = objects.ID{Type: objects.SessionType, ID: s.ID}
		r.Age = objects.Age(r.Updated, time.Now())
		s.Record = &r
	}
	return s, err
}

func (c *Claims) OfKinds(ctx context.Context, kinds []string, limit time.Duration) (claims []objects.Claim, at time.Time, err error) {
	claims, err = c.read(ctx, limit, listClaims, list(kinds))
	if err != nil || len(claims) == 0 {
		return nil, time.Time{}, err
	}
	return claims, time.Now(), nil
}

func (c *Claims) Forget(ctx context.Context, kind string, limit time.Duration) error {
	return c.exec(ctx, limit, forgetClaims, kind)
}

func (c *Claims) Counts(ctx context.Context, most int, limit time.Duration) ([]objects.ClaimCount, error) {
	return allWithin(ctx, c.table, limit, func(rows *sql.Rows) (n objects.ClaimCount, err error) {
		return n, rows.Scan(&n.Session, &n.Kind, &n.Claims)
	}, c.table.in(countClaims), most)
}

// Prune always returns 0 as the last token, because SQLite finds the next rows at once.
func (c *Claims) Prune(ctx context.Context, _ int64, n int, limit time.Duration) (last int64, pruned int, err error) {
	err = c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		rows, err := tx.ExecContext(ctx, c.table.in(pruneClaims), time.Now().Add(-objects.TombstoneAge).UnixMicro(), n)
		if err != nil {
			return err
		}
		requests, err := tx.ExecContext(ctx, c.table.in(pruneRequests), n)
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

func (c *Claims) read(ctx context.Context, limit time.Duration, statement string, args ...any) ([]objects.Claim, error) {
	return allWithin(ctx, c.table, limit, scanClaim, c.table.in(statement), args...)
}

func scanClaim(rows *sql.Rows) (c objects.Claim, err error) {
	return c, rows.Scan(&c.Kind, &c.ID, &c.Session, versionColumn{&c.Token}, &c.Gone)
}

func (c *Claims) exec(ctx context.Context, limit time.Duration, statement string, args ...any) error {
	return c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, c.table.in(statement), args...)
		return err
	})
}

// write runs fn in a transaction. SQLite does not queue the calls that wait for its one lock, so
// afterwards the others get as much time as this one took.
func (c *Claims) write(ctx context.Context, limit time.Duration, fn func(context.Context, *sql.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := c.table.fit(ctx, true); err != nil {
		return c.table.explain(err)
	}
	return c.writeAny(ctx, limit, fn)
}

// writeAny is write for tables other than those of the claims.
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
		return &objects.Refused{Cause: c.table.explain(err)}
	}
	return c.table.explain(err)
}
