package pgobjects

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
)

// Rows is a table of the user with claims on its rows. It sends statements as [Claims] does,
// and all its methods are safe for concurrent use.
type Rows struct {
	claims *Claims
	cfg    objects.RowsConfig
	logger *slog.Logger
	found  atomic.Pointer[rowStatements]
	placed atomic.Pointer[string] // the schema in which the table was found last

	checking atomic.Bool // a call is checking again what was found
}

// Rows returns the table of a valid config. It does no I/O.
func (t *Table) Rows(cfg objects.RowsConfig, logger *slog.Logger) *Rows {
	return &Rows{claims: &t.claims, cfg: cfg, logger: logger}
}

// rowNames returns what puts names and the user's SQL into a statement.
func rowNames(cfg objects.RowsConfig, idType, attemptsType string, own names) *strings.Replacer {
	quote := func(name string) string { return pgx.Identifier{name}.Sanitize() }
	table := pgx.Identifier{cfg.Table}
	if cfg.Schema != "" {
		table = pgx.Identifier{cfg.Schema, cfg.Table}
	}
	line := func(sql string) string { return sql + "\n" } // it may end in a comment
	ready, attempts, count := "", "0", ""
	if cfg.Ready != "" {
		ready += " AND (" + line(cfg.Ready) + ")"
	}
	if cfg.NotBefore != "" {
		ready += " AND (" + quote(cfg.NotBefore) + " IS NULL OR " + quote(cfg.NotBefore) + " <= clock_timestamp())"
	}
	if idType == "text" { // an empty key is none
		ready += " AND " + quote(cfg.ID) + " <> ''"
	}
	order := quote(cfg.ID)
	if cfg.OrderBy != "" {
		order = line(cfg.OrderBy)
	}
	if cfg.Attempts != "" {
		attempts = "coalesce(" + quote(cfg.Attempts) + ", 0)"
		next := attempts
		if most := map[string]string{"smallint": "32767", "integer": "2147483647", "bigint": "9223372036854775807"}[attemptsType]; most != "" {
			next = "least(" + attempts + ", " + most + " - 1)" // one row that has the most must not keep all others
		}
		count = ", " + quote(cfg.Attempts) + " = " + next + " + 1"
	}
	return strings.NewReplacer(
		"{rows}", table.Sanitize(), "{objects}", own.objects,
		"{id}", quote(cfg.ID), "{session}", quote(cfg.Session), "{token}", quote(cfg.Token),
		"{attempts}", attempts, "{count}", count, "{and_ready}", ready, "{order}", order, "{type}", idType,
		"{done}", assignment(cfg.Done), "{exhausted}", assignment(cfg.Exhausted), "{not_before}", quote(cfg.NotBefore),
		"{next_token}", own.in("greatest(CASE WHEN "+quote(cfg.Token)+" < {version_limit} THEN "+quote(cfg.Token)+" + 1 END, {now_us})"),
		"{now_us}", own.in("{now_us}"), "{server}", own.in("{server}"),
	)
}

func assignment(sql string) string {
	if sql == "" {
		return ""
	}
	return ", " + sql + "\n"
}

type rowStatements struct {
	own *setup // where the statements expect the library's tables

	take, ready, free, owned, sessions, stand string
	done, exhausted, after, release           endStatements

	sessionLength int // how many characters the session's column holds; 0: any number
}

// endStatements end claims: one, or any number.
type endStatements struct{ one, any, unlocked string }

// newRowStatements returns the statements for IDs of a type. What [newClaimStatements] says of
// plans holds here as well: rows are locked in one step and written by their IDs in the next, and
// IS NOT DISTINCT FROM keeps the planner from the index on the session.
func newRowStatements(cfg objects.RowsConfig, idType, attemptsType string, own names) rowStatements {
	in := rowNames(cfg, idType, attemptsType, own).Replace
	const ready = `FROM {rows} WHERE {session} IS NULL{and_ready} AND {id} <> ALL($3::text[]::{type}[])`
	const columns = `{id}::text, coalesce({session}, ''), coalesce({token}, 0), {attempts}`
	const given = `{id} = ANY(ARRAY(SELECT unnest($1::text[]::{type}[]))) AND EXISTS (
					SELECT FROM unnest($1::text[]::{type}[], $2::text[], $3::bigint[]) tenure_given(id, session, token)
					WHERE tenure_given.id = r.{id} AND r.{session} IS NOT DISTINCT FROM tenure_given.session AND tenure_given.token = r.{token})`
	end := func(set string) endStatements {
		return endStatements{
			one: in(`
				UPDATE {rows} SET {session} = NULL` + set + `
				WHERE {id} = $1::text::{type} AND {session} IS NOT DISTINCT FROM $2 AND {token} = $3
				RETURNING {id}::text, '', {token}, 0`),
			any: in(`
				UPDATE {rows} r SET {session} = NULL` + set + `
				WHERE ` + given + `
				RETURNING {id}::text, '', {token}, 0`),
			unlocked: in(`
				WITH tenure_locked AS MATERIALIZED (SELECT {id} AS id FROM {rows} r WHERE ` + given + ` FOR NO KEY UPDATE SKIP LOCKED)
				UPDATE {rows} SET {session} = NULL` + set + ` WHERE {id} = ANY(ARRAY(SELECT id FROM tenure_locked))
				RETURNING {id}::text, '', {token}, 0`),
		}
	}
	return rowStatements{
		// The order of the rows that an UPDATE returns is any. ORDER BY would mean the column of
		// the result rather than the table's if the two had the same name.
		take: in(`
			WITH tenure_ready AS MATERIALIZED (
				SELECT {id} AS tenure_id ` + ready + ` AND ($4::text[] IS NULL OR {id} = ANY($4::text[]::{type}[]))
				ORDER BY {order} LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED),
			tenure_numbered AS (SELECT tenure_id AS id, row_number() OVER () AS number FROM tenure_ready),
			tenure_taken AS (
				UPDATE {rows} SET {session} = $1, {token} = {next_token}{count}
				WHERE {id} = ANY(ARRAY(SELECT tenure_id FROM tenure_ready)) RETURNING {id} AS id, {token} AS token, {attempts} AS attempts)
			SELECT id::text, $1, coalesce(token, 0), coalesce(attempts, 0) FROM tenure_taken RIGHT JOIN tenure_numbered USING (id) ORDER BY number`),
		ready: in(`
			SELECT {id}::text AS tenure_id, $1::text, 0::bigint, 0 ` + ready + ` ORDER BY {order} LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED`),
		free: in(`
			WITH tenure_locked AS MATERIALIZED (
				SELECT {id} AS id FROM {rows} WHERE {id} = ANY(ARRAY(SELECT unnest($2::text[]::{type}[]))) AND {session} IS NOT DISTINCT FROM $1
					AND ({id}, coalesce({token}, 0)) IN (SELECT * FROM unnest($2::text[]::{type}[], $3::bigint[]))
				FOR NO KEY UPDATE SKIP LOCKED)
			UPDATE {rows} SET {session} = NULL WHERE {id} = ANY(ARRAY(SELECT id FROM tenure_locked)) RETURNING {id}::text, '', coalesce({token}, 0), 0`),
		// Without the name of the table, ORDER BY would mean the ID as text.
		owned: in(`
			SELECT ` + columns + ` FROM {rows} r
			WHERE {session} = $1 AND ($2 = '' OR {id} > nullif($2, '')::{type}) ORDER BY r.{session}, r.{id} LIMIT $3`),
		// Looks up the next session in the index, and not at each row.
		sessions: in(`
			WITH RECURSIVE tenure_named(session) AS (
				(SELECT {session} FROM {rows} WHERE {session} IS NOT NULL ORDER BY {session} LIMIT 1)
				UNION ALL
				SELECT (SELECT {session} FROM {rows} r WHERE r.{session} > tenure_named.session ORDER BY {session} LIMIT 1)
				FROM tenure_named WHERE tenure_named.session IS NOT NULL)
			SELECT tenure_named.session, o.id IS NULL, labels, coalesce(payload, ''), coalesce(` + own.in("{version}") + `, 0), created_at_ms, updated_at_ms, {now_us}, false, {server}
			FROM tenure_named LEFT JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = tenure_named.session
			WHERE tenure_named.session IS NOT NULL`),
		stand: in(`
			SELECT ` + columns + ` FROM {rows} WHERE {id} = ANY(ARRAY(SELECT unnest($1::text[]::{type}[])))`),
		done:      end(`{done}`),
		exhausted: end(`{exhausted}`),
		after:     end(`, {not_before} = clock_timestamp() + $4 * interval '1 microsecond'`),
		release:   end(``),
	}
}

// ready returns the statements, after the table was checked: at first, and again whenever the
// library's own tables were looked at again.
func (r *Rows) ready(ctx context.Context, limit time.Duration) (*rowStatements, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	own, err := r.claims.table.setups.get(ctx)
	found := r.found.Load()
	switch {
	case err != nil && (found == nil || errors.Is(err, objects.ErrSetup)):
		return nil, r.claims.table.setups.explain(err)
	case err != nil: // nothing was found out
		return found, nil
	case found == nil:
		return r.check(ctx, own)
	case found.own == own || !r.checking.CompareAndSwap(false, true):
		return found, nil
	}
	defer r.checking.Store(false)
	again, err := r.check(ctx, own)
	if err != nil && !errors.Is(err, objects.ErrSetup) {
		return found, nil
	}
	return again, err
}

// TakeReady makes a session the owner of at most n rows that are ready, in their order, except
// those to skip; of the rows in only, if that is not nil. Rows that somebody has locked it leaves.
func (r *Rows) TakeReady(ctx context.Context, session string, n int, skip, only []string, limit time.Duration) ([]objects.Claim, error) {
	if skip == nil {
		skip = []string{}
	}
	s, err := r.ready(ctx, limit)
	if err != nil {
		return nil, err
	}
	if n := utf8.RuneCountInString(session); s.sessionLength > 0 && n > s.sessionLength {
		return nil, fmt.Errorf("%w: session %q has %d characters, and column %q of table %q holds %d (ALTER TABLE … ALTER COLUMN … TYPE text)",
			objects.ErrInvalid, session, n, r.cfg.Session, r.cfg.Table, s.sessionLength)
	}
	found, err := r.send(ctx, limit, 0, s, s.take, session, n, skip, only)
	taken := slices.DeleteFunc(found, func(c objects.Claim) bool { return c.Token == 0 })
	if err == nil && len(taken) == 0 && len(found) > 0 {
		return nil, &objects.Refused{Cause: errUntaken}
	}
	return taken, err
}

var errUntaken = errors.New("nothing is updated: a trigger prevents that")

// Ready returns the IDs of the rows that TakeReady would take.
func (r *Rows) Ready(ctx context.Context, n int, skip []string, limit time.Duration) (ids []string, err error) {
	if skip == nil {
		skip = []string{}
	}
	rows, err := r.query(ctx, limit, func(s *rowStatements) string { return s.ready }, "", n, skip)
	for _, row := range rows {
		ids = append(ids, row.ID)
	}
	return ids, err
}

// Look returns those of the rows that exist.
func (r *Rows) Look(ctx context.Context, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return r.query(ctx, limit, func(s *rowStatements) string { return s.stand }, ids)
}

// Owned returns at most n rows that a session owns, those after another row.
func (r *Rows) Owned(ctx context.Context, session, _, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	s, err := r.ready(ctx, limit)
	if err != nil {
		return nil, err
	}
	return r.send(ctx, limit, lockWait(limit), s, s.owned, session, afterID, n)
}

// Free frees the rows that a session owns under these tokens, and returns those that it could
// not free because somebody has locked them.
func (r *Rows) Free(ctx context.Context, session, _ string, ids []string, tokens []int64, limit time.Duration) ([]objects.Claim, error) {
	freed, err := r.query(ctx, limit, func(s *rowStatements) string { return s.free }, session, ids, tokens)
	if err != nil || len(freed) == len(ids) {
		return nil, err
	}
	given := make([]objects.Claim, len(ids))
	for i, id := range ids {
		given[i] = objects.Claim{Kind: r.cfg.Table, ID: id, Session: session, Token: tokens[i]}
	}
	var rest []string
	for _, c := range objects.Without(given, freed) {
		rest = append(rest, c.ID)
	}
	stand, err := r.Look(ctx, rest, limit)
	return slices.DeleteFunc(stand, func(c objects.Claim) bool {
		c.Attempts = 0
		return !slices.Contains(given, c)
	}), err
}

// Sessions returns the sessions that rows name.
func (r *Rows) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	s, err := r.ready(ctx, limit)
	if err != nil {
		return nil, err
	}
	return namedBy(func(row func(pgx.Rows) error) error {
		return r.run(ctx, limit, lockWait(limit), s, s.sessions, nil, row)
	})
}

// lockWait is how long the statements that look for the rows of sessions wait for a table that somebody
// has locked. They are repeated anyway, and others need their connections.
func lockWait(limit time.Duration) time.Duration { return max(limit/8, time.Millisecond) }

// other waits until a statement on a table of the user may be sent. However many such tables are locked
// or slow, a connection is left for the table of claims.
func (c *Claims) other(ctx context.Context, limit time.Duration) (done func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	select {
	case c.others <- struct{}{}:
		return func() { <-c.others }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for other statements on tables with claims on their rows: %w", ctx.Err())
	}
}

func (r *Rows) query(ctx context.Context, limit time.Duration, statement func(*rowStatements) string, args ...any) (claims []objects.Claim, err error) {
	s, err := r.ready(ctx, limit)
	if err != nil {
		return nil, err
	}
	return r.send(ctx, limit, 0, s, statement(s), args...)
}

func (r *Rows) send(ctx context.Context, limit, lock time.Duration, s *rowStatements, sql string, args ...any) (claims []objects.Claim, err error) {
	err = r.run(ctx, limit, lock, s, sql, args, func(rows pgx.Rows) error {
		c := objects.Claim{Kind: r.cfg.Table}
		err := rows.Scan(&c.ID, &c.Session, &c.Token, &c.Attempts)
		claims = append(claims, c)
		return err
	})
	if err != nil {
		return nil, err
	}
	return claims, nil
}

func (r *Rows) run(ctx context.Context, limit, lock time.Duration, s *rowStatements, sql string, args []any, row func(pgx.Rows) error) error {
	done, err := r.claims.other(ctx, limit)
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := claimCall(ctx, limit)
	defer cancel()
	err = r.claims.send(ctx, lock, sql, args, func() error { return nil }, row)
	if outdated(err) { // the table may have changed since it was checked
		r.found.CompareAndSwap(s, nil)
	}
	return r.claims.explain(err)
}
