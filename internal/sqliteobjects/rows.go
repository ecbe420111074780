package sqliteobjects

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// Rows is a table of the user with claims on its rows. All methods are safe for concurrent use.
type Rows struct {
	claims  *Claims
	cfg     objects.RowsConfig
	logger  *slog.Logger
	sql     rowStatements
	checked atomic.Bool
}

// Rows returns the table of a valid config. It does no I/O.
func (t *Table) Rows(cfg objects.RowsConfig, logger *slog.Logger) *Rows {
	return &Rows{claims: &t.claims, cfg: cfg, logger: logger, sql: newRowStatements(cfg, t.name)}
}

type rowStatements struct{ ready, take, free, owned, ownedAfter, sessions, stand, done, exhausted, after, release, statement string }

func quoted(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

// rowNames returns what puts names and the user's SQL into a statement.
func rowNames(cfg objects.RowsConfig) *strings.Replacer {
	line := func(sql string) string { return sql + "\n" } // it may end in a comment
	ready, attempts, count, order := "", "0", "", quoted(cfg.ID)
	if cfg.Ready != "" {
		ready += " AND (" + line(cfg.Ready) + ")"
	}
	if cfg.NotBefore != "" {
		ready += " AND (" + quoted(cfg.NotBefore) + " IS NULL OR " + quoted(cfg.NotBefore) + " <= ?3)"
	}
	if cfg.OrderBy != "" {
		order = line(cfg.OrderBy)
	}
	if cfg.Attempts != "" {
		// The column may have a value of any type, or the most attempts.
		attempts = "coalesce(CAST(" + quoted(cfg.Attempts) + " AS INTEGER), 0)"
		count = ", " + quoted(cfg.Attempts) + " = min(" + attempts + ", 9223372036854775806) + 1"
	}
	set := func(sql string) string {
		if sql == "" {
			return ""
		}
		return ", " + line(sql)
	}
	return strings.NewReplacer(
		"{rows}", "main."+quoted(cfg.Table), "{rows_table}", quoted(cfg.Table), "{id}", quoted(cfg.ID), "{session}", quoted(cfg.Session), "{token}", quoted(cfg.Token),
		"{attempts}", attempts, "{count}", count, "{and_ready}", ready, "{order}", order, "{not_before}", quoted(cfg.NotBefore),
		"{done}", set(cfg.Done), "{exhausted}", set(cfg.Exhausted),
	)
}

// newRowStatements returns the statements. An ID is text in all of them: where it meets a column
// of integers, SQLite compares it as a number.
func newRowStatements(cfg objects.RowsConfig, table string) rowStatements {
	own, rows := newNames(table), rowNames(cfg)
	in := func(sql string) string { return rows.Replace(own.Replace(sql)) }
	const columns = `CAST({id} AS TEXT), coalesce({session}, ''), {token}, {attempts}`
	end := func(set string) string {
		return in(`
			UPDATE {rows} SET {session} = NULL` + set + `
			WHERE {id} IN (SELECT json_extract(value, '$[0]') FROM json_each(?1)) AND ({id}, +{session}, {token}) IN (
				SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]') FROM json_each(?1))
			RETURNING CAST({id} AS TEXT), '', {token}, 0`)
	}
	return rowStatements{
		ready: in(`
			SELECT CAST({id} AS TEXT) FROM {rows}
			WHERE {session} IS NULL{and_ready} AND hex({id}) NOT IN (SELECT value FROM json_each(?2)) AND CAST({id} AS TEXT) <> ''
				AND (?4 IS NULL OR hex({id}) IN (SELECT value FROM json_each(?4)))
			ORDER BY {order} LIMIT ?1`),
		take: in(`
			UPDATE {rows} SET {session} = ?1, {token} = max(CASE WHEN {token} < {version_limit} THEN {token} + 1 ELSE 0 END, ?2){count}
			WHERE {id} IN (SELECT value FROM json_each(?3)) AND {session} IS NULL RETURNING ` + columns),
		// The + keeps it from the index on the session.
		free: in(`
			UPDATE {rows} SET {session} = NULL WHERE +{session} = ?1 AND ({id}, coalesce({token}, 0)) IN (
				SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?2))`),
		// An ID of another type is not the one that its text names: pages would not come to an end.
		owned:      in(`SELECT ` + columns + ` FROM {rows} WHERE {session} = ?1 AND typeof({id}) IN ('integer', 'text') ORDER BY {id} LIMIT ?2`),
		ownedAfter: in(`SELECT ` + columns + ` FROM {rows} WHERE {session} = ?1 AND typeof({id}) IN ('integer', 'text') AND {id} > ?3 ORDER BY {id} LIMIT ?2`),
		// Looks up the next session in the index, and not at each row.
		sessions: in(`
			WITH RECURSIVE tenure_named(session) AS (
				SELECT min({session}) FROM {rows} WHERE {session} IS NOT NULL
				UNION ALL
				SELECT (SELECT min(r.{session}) FROM {rows} r WHERE r.{session} > tenure_named.session) FROM tenure_named WHERE tenure_named.session IS NOT NULL)
			SELECT tenure_named.session, o.id IS NULL, 0, name, labels, payload, +resource_version, +created_at_ms, +updated_at_ms
			FROM tenure_named LEFT JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = tenure_named.session
			WHERE tenure_named.session IS NOT NULL`),
		stand:     in(`SELECT ` + columns + ` FROM {rows} WHERE {id} IN (SELECT value FROM json_each(?1))`),
		done:      end(`{done}`),
		exhausted: end(`{exhausted}`),
		after:     end(`, {not_before} = ?2`),
		release:   end(``),
		// Nothing is a path of JSON that does not begin with $, so this fails, with a text that says why.
		statement: in(`
			UPDATE {rows} SET {session} = NULL{done} WHERE {id} = (
				SELECT CASE (SELECT count(*) FROM {rows} WHERE {id} = ?1 AND +{session} = ?2 AND {token} = ?3)
					WHEN 1 THEN ?1 ELSE json_extract('{}', '` + objects.FenceLost + `' || '0' || substr(?1, 1, 0)) END)`),
	}
}

// ready checks the table unless that was done.
func (r *Rows) ready(ctx context.Context, limit time.Duration) error {
	if r.checked.Load() {
		return nil
	}
	return r.Check(ctx, limit)
}

func (r *Rows) read(ctx context.Context, limit time.Duration, query string, args ...any) ([]objects.Claim, error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	rows, err := r.claims.table.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, explain(err)
	}
	claims, err := r.scan(rows)
	return claims, explain(err)
}

func (r *Rows) scan(rows *sql.Rows) (claims []objects.Claim, err error) {
	defer rows.Close()
	for rows.Next() {
		c := objects.Claim{Kind: r.cfg.Table}
		var token any // NULL and 0 are read alike, and freed alike
		if err := rows.Scan(&c.ID, &c.Session, &token, &c.Attempts); err != nil {
			return nil, err
		}
		c.Token = integer(token).Int64
		claims = append(claims, c)
	}
	return claims, rows.Err()
}

// readyIDs returns the IDs of the rows that may be taken.
func (r *Rows) readyIDs(ctx context.Context, conn interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}, n int, skip, only []string) (ids []string, err error) {
	var among any
	if only != nil {
		among = list(hexed(only))
	}
	rows, err := conn.QueryContext(ctx, r.sql.ready, n, list(hexed(skip)), time.Now().UnixMilli(), among)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}

// hexed returns the bytes of IDs, which JSON can't name if they are no text.
func hexed(ids []string) []string {
	all := make([]string, len(ids))
	for i, id := range ids {
		all[i] = fmt.Sprintf("%X", id)
	}
	return all
}

// TakeReady makes a session the owner of at most n rows that are ready, in their order, except
// those to skip; of the rows in only, if that is not nil. It takes the write lock only if there
// are any.
func (r *Rows) TakeReady(ctx context.Context, session string, n int, skip, only []string, limit time.Duration) (taken []objects.Claim, err error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	ids, err := r.readyIDs(ctx, r.claims.table.db, 1, skip, only)
	if err != nil || len(ids) == 0 {
		return nil, explain(err)
	}
	err = r.claims.writeAny(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		if ids, err = r.readyIDs(ctx, tx, n, skip, only); err != nil {
			return err
		}
		valid := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return objects.ValidText("ID", id) != nil })
		rows, err := tx.QueryContext(ctx, r.sql.take, session, time.Now().UnixMicro(), list(valid))
		if err != nil {
			return err
		}
		if taken, err = r.scan(rows); err == nil && len(taken) == 0 && len(ids) > 0 {
			return errUntaken
		}
		return err
	})
	if errors.Is(err, errUntaken) {
		return nil, &objects.Refused{Cause: err}
	}
	if err != nil {
		return nil, err
	}
	at := make(map[string]int, len(ids))
	for i, id := range ids {
		at[id] = i
	}
	slices.SortFunc(taken, func(a, b objects.Claim) int { return cmp.Compare(at[a.ID], at[b.ID]) })
	return taken, nil
}

// Ready returns the IDs of the rows that TakeReady would take.
func (r *Rows) Ready(ctx context.Context, n int, skip []string, limit time.Duration) ([]string, error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ids, err := r.readyIDs(ctx, r.claims.table.db, n, skip, nil)
	return ids, explain(err)
}

// Look returns those of the rows that exist.
func (r *Rows) Look(ctx context.Context, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return r.read(ctx, limit, r.sql.stand, list(ids))
}

// Owned returns at most n rows that a session owns, those after another row.
func (r *Rows) Owned(ctx context.Context, session, _, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	if afterID == "" {
		return r.read(ctx, limit, r.sql.owned, session, n)
	}
	return r.read(ctx, limit, r.sql.ownedAfter, session, n, afterID)
}

// Free frees the rows that a session owns under these tokens. No row is ever locked for long, so
// it always returns none.
func (r *Rows) Free(ctx context.Context, session, _ string, ids []string, tokens []int64, limit time.Duration) ([]objects.Claim, error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	rows := make([][2]any, 0, len(ids))
	for i, id := range ids {
		rows = append(rows, [2]any{id, tokens[i]})
	}
	return nil, r.claims.writeAny(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, r.sql.free, session, list(rows))
		return err
	})
}

// Sessions returns the sessions that rows name.
func (r *Rows) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	return r.claims.namedBy(ctx, limit, r.sql.sessions)
}

var errUntaken = errors.New("nothing is updated: a trigger ignores that, or the ID is none of the column's type")

var errEnded = errors.New("a claim has ended")

// End frees rows, and returns the claims that had ended before.
func (r *Rows) End(ctx context.Context, how objects.Ending, claims []objects.Claim, limit time.Duration) (lost []objects.Claim, err error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	err = r.claims.writeAny(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		if lost, err = r.end(ctx, tx, how, claims); err == nil && how.All && len(lost) > 0 {
			return errEnded
		}
		return err
	})
	if errors.Is(err, errEnded) {
		return lost, nil
	}
	return lost, err
}

func (r *Rows) end(ctx context.Context, tx *sql.Tx, how objects.Ending, claims []objects.Claim) (lost []objects.Claim, err error) {
	given := make([][3]any, 0, len(claims))
	for _, c := range claims {
		given = append(given, [3]any{c.ID, c.Session, c.Token})
	}
	query, args := r.sql.release, []any{list(given)}
	switch {
	case how.Done:
		query = r.sql.done
	case how.Exhausted:
		query = r.sql.exhausted
	case how.After > 0:
		query, args = r.sql.after, append(args, time.Now().Add(how.After).UnixMilli())
	}
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	ended, err := r.scan(rows)
	return objects.Without(claims, ended), err
}

// Finish ends the claims of rows, and what fn writes is written with it, in one transaction.
// It returns the claims that had ended before: then nothing is written and fn is not called.
func (r *Rows) Finish(ctx context.Context, claims []objects.Claim, fn func(*sql.Tx) error) (lost []objects.Claim, fnErr, err error) {
	if err := r.ready(ctx, time.Minute); err != nil {
		return nil, nil, err
	}
	err = r.claims.table.write(ctx, nil, func(tx *sql.Tx) error {
		if lost, err = r.end(ctx, tx, objects.Ending{Done: true}, claims); err != nil {
			return err
		}
		if len(lost) > 0 {
			return errEnded
		}
		fnErr, err = objects.InOneTx(ctx, tx, fn)
		return cmp.Or(fnErr, err)
	})
	switch {
	case fnErr != nil:
		return nil, fnErr, nil
	case errors.Is(err, errEnded):
		return lost, nil, nil
	}
	return nil, nil, explain(err)
}

// EndStatement returns a statement that ends the claim of a row as Finish does, or fails.
func (r *Rows) EndStatement(c objects.Claim) (query string, args []any, err error) {
	return r.sql.statement, []any{c.ID, c.Session, c.Token}, nil
}
