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
	"github.com/tenurelib/tenure/internal/pgconns"
)

// Rows is a user's table with claims on its rows. It sends statements as [Claims] does. All methods are safe
// for concurrent use.
type Rows struct {
	claims *Claims
	cfg    objects.RowsConfig
	logger *slog.Logger
	placed atomic.Pointer[string] // the schema in which the table was found last

	remembered[rowSetup]
}

// Rows implements [objects.Backend].
func (t *Table) Rows(cfg objects.RowsConfig, logger *slog.Logger) objects.RowsTable {
	r := &Rows{claims: &t.claims, cfg: cfg, logger: logger}
	r.looking = newGate()
	t.rows.Add(cfg, r)
	return r
}

// rowSetup is what was found out about a user's table.
type rowSetup struct {
	rowFacts
	own   *setup         // where the statements expect the library's tables
	texts *objects.Texts // make the statements
}

// rowFacts has the facts that the statements depend on.
type rowFacts struct {
	schema, objects string // of the table; the quoted name of the library's table of objects
	tombstones      string // the same of tombstones; empty: they don't say which sessions there were
	id, attempts    string // types of columns
	key             string // type of the column of PerKey
	sessionLength   int    // how many characters the session's column holds; 0: any number
}

// newRowTexts returns the texts that make statements on rows.
func newRowTexts(cfg objects.RowsConfig, found rowFacts) *objects.Texts {
	d := objects.RowsDialect{
		Now: "statement_timestamp()", Attempts: "coalesce({}, 0)", Next: "{} + 1", Back: "greatest({}, 1) - 1",
		Lasts: "$5::bigint",
		In:    func(us string) string { return "clock_timestamp() + " + us + " * interval '1 microsecond'" },
		Rest: func(first, most time.Duration) string {
			return fmt.Sprintf("least(%d * power(2, least(greatest({} - 1, 0), 60)), %d) * (1 - random() / 4)", first.Microseconds(), most.Microseconds())
		},
	}
	if most := map[string]string{"smallint": "32767", "integer": "2147483647", "bigint": "9223372036854775807"}[found.attempts]; most != "" {
		d.Next = "least({}, " + most + " - 1) + 1" // a row at the limit must not block all others
	}
	if found.id == "text" { // an empty key is not a key
		d.Ready = " AND " + objects.Quoted(cfg.ID) + " <> ''"
	}
	known := "true"
	if found.tombstones != "" {
		known = "EXISTS (SELECT FROM " + found.tombstones + " d WHERE d.object_type = '" + objects.SessionType + "' AND d.id = tenure_named.session)"
	}
	return objects.NewTexts(slices.Concat(words(), cfg.Words(d), []string{
		"{known}", known,
		"{rows}", quoted(found.schema, cfg.Table), "{rows_literal}", literal(quoted(found.schema, cfg.Table)), "{objects}", found.objects, "{type}", found.id,
		"{key_type}", found.key, "{more}", "",
	})...)
}

// The comments about plans in the statements for claims also hold here: rows are locked in one step and
// written by their IDs in the next, and IS NOT DISTINCT FROM keeps the planner away from the index on the
// session.
const (
	readyRows    = `FROM {rows} WHERE {session} IS NULL{and_ready}{where} AND {id} <> ALL($3::text[]::{type}[])`
	nextRowToken = `greatest(CASE WHEN {token} < {version_limit} THEN {token} + 1 END, {now_us})`
	rowColumns   = `{id}::text, coalesce({session}, ''), coalesce({token}, 0), {attempts}`
	givenRows    = `{id} = ANY(ARRAY(SELECT unnest($1::text[]::{type}[]))) AND EXISTS (
					SELECT FROM unnest($1::text[]::{type}[], $2::text[], $3::bigint[]) tenure_given(id, session, token)
					WHERE tenure_given.id = r.{id} AND r.{session} IS NOT DISTINCT FROM tenure_given.session AND tenure_given.token = r.{token}
						AND tenure_given.session = ANY(` + sessionsHere + `)){uncanceled}`

	// An UPDATE returns its rows in any order. If a column of the result had the same name as
	// one of the table, ORDER BY would mean the result's.
	takeRows = `
			WITH tenure_ready AS MATERIALIZED (
				SELECT {id} AS tenure_id ` + readyRows + onlyThese + `
				ORDER BY {order} LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED),` + takeReady
	onlyThese = ` AND ($4::text[] IS NULL OR {id} = ANY($4::text[]::{type}[]))`
	takeReady = `
			tenure_numbered AS (SELECT tenure_id AS id, row_number() OVER () AS number FROM tenure_ready),
			tenure_taken AS (
				UPDATE {rows} SET {session} = $1, {token} = ` + nextRowToken + `{count}
				WHERE {id} = ANY(ARRAY(SELECT tenure_id FROM tenure_ready)) RETURNING {id} AS id, {token} AS token, {attempts} AS attempts)
			SELECT id::text, $1, coalesce(token, 0), coalesce(attempts, 0) FROM tenure_taken RIGHT JOIN tenure_numbered USING (id) ORDER BY number`
	moveRow = `
			WITH tenure_locked AS MATERIALIZED (
				SELECT {id} AS id FROM {rows} WHERE {id} = $2::text::{type} AND {session} IS NOT DISTINCT FROM $3 AND {token} = $4{uncanceled}
				FOR NO KEY UPDATE SKIP LOCKED)
			UPDATE {rows} SET {session} = $1, {token} = ` + nextRowToken + `{taken}
			WHERE {id} = ANY(ARRAY(SELECT id FROM tenure_locked)) RETURNING {id}::text, {session}, {token}, {attempts}`
	whichAreReady = `
			SELECT {id}::text AS tenure_id, $1::text, 0::bigint, 0 ` + readyRows + ` ORDER BY {order} LIMIT $2`
	skipLocked = ` FOR NO KEY UPDATE SKIP LOCKED`
	freeRows   = `
			WITH tenure_locked AS MATERIALIZED (
				SELECT {id} AS id FROM {rows} WHERE {id} = ANY(ARRAY(SELECT unnest($2::text[]::{type}[]))) AND {session} IS NOT DISTINCT FROM $1
					AND ({id}, coalesce({token}, 0)) IN (SELECT * FROM unnest($2::text[]::{type}[], $3::bigint[])){uncanceled}
				FOR NO KEY UPDATE SKIP LOCKED)
			UPDATE {rows} SET {set} WHERE {id} = ANY(ARRAY(SELECT id FROM tenure_locked)) RETURNING {id}::text, '', coalesce({token}, 0), 0`
	// The time is one for which the index can be searched.
	firstExpired = `FROM {rows} WHERE {session} IS NOT NULL AND {expires} <= statement_timestamp() ORDER BY {expires} LIMIT `
	expiredRows  = `
			SELECT {id}::text, '', 0::bigint, 0 ` + firstExpired + `$1`
	// Postgres would drop ORDER BY, and with it the index, from within EXISTS.
	anyExpired = `
			SELECT (SELECT true ` + firstExpired + `1) IS NOT NULL`
	freeExpiredRows = `
			WITH tenure_locked AS MATERIALIZED (
				SELECT {id} AS id FROM {rows} WHERE {id} = ANY(ARRAY(SELECT unnest($1::text[]::{type}[]))) AND {session} IS NOT NULL AND {expires} <= clock_timestamp(){uncanceled}
				FOR NO KEY UPDATE SKIP LOCKED)
			UPDATE {rows} SET {set} WHERE {id} = ANY(ARRAY(SELECT id FROM tenure_locked)) RETURNING {id}::text, '', 0::bigint, 0`
	// changedOrFail returns the ID of a row that was locked, and fails if the row was not updated then. The cast fails with
	// a code that no ID of a wrong type has.
	changedOrFail = `CASE WHEN tenure_id IS NULL THEN ('nothing is updated, a trigger prevents that: row ' || id::text)::date::text ELSE id::text END`
	// Without the name of the table, ORDER BY would mean the ID as text.
	ownedRows = `
			SELECT ` + rowColumns + ` FROM {rows} r
			WHERE {session} = $1 AND ($2 = '' OR {id} > nullif($2, '')::{type}) ORDER BY r.{session}, r.{id} LIMIT $3`
	// Looks up the next session in the index instead of visiting each row.
	sessionsOfRows = `
			WITH RECURSIVE tenure_named(session) AS (
				(SELECT {session} FROM {rows} WHERE {session} IS NOT NULL ORDER BY {session} LIMIT 1)
				UNION ALL
				SELECT (SELECT {session} FROM {rows} r WHERE r.{session} > tenure_named.session ORDER BY {session} LIMIT 1)
				FROM tenure_named WHERE tenure_named.session IS NOT NULL)
			SELECT tenure_named.session, o.id IS NULL, {known}, labels, coalesce(payload, ''), coalesce({version}, 0), created_at_ms, updated_at_ms, {now_us}, false, {server}
			FROM tenure_named LEFT JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = tenure_named.session
			WHERE tenure_named.session IS NOT NULL`
	lookAtRows = `
			SELECT ` + rowColumns + ` FROM {rows} WHERE {id} = ANY(ARRAY(SELECT unnest($1::text[]::{type}[])))`
	// The planner would walk the table in the order of its IDs to find the few rows that are owned.
	listRows = `
			WITH tenure_owned AS MATERIALIZED (
				SELECT {id} AS tenure_id, ` + rowColumns + ` FROM {rows} WHERE {session} IS NOT NULL AND ($1 = '' OR {id} > nullif($1, '')::{type}))
			SELECT id, session, token, attempts FROM tenure_owned t(tenure_id, id, session, token, attempts) ORDER BY tenure_id LIMIT $2`
	countRows = `
			SELECT {session}, least(count(*), $1) FROM {rows} WHERE {session} IS NOT NULL GROUP BY 1 ORDER BY 1`
	requestRows = `
			WITH tenure_owned AS MATERIALIZED (
				SELECT {id} AS id FROM {rows} WHERE {id} = ANY(ARRAY(SELECT unnest($1::text[]::{type}[]))) AND {session} IS NOT NULL
				ORDER BY {id} FOR NO KEY UPDATE)
			UPDATE {rows} SET {requested} = {token} WHERE {id} = ANY(ARRAY(SELECT id FROM tenure_owned)) AND {session} IS NOT NULL
			RETURNING ` + rowColumns
	// rowFence locks the row, which any session that frees or takes it has to update.
	rowFence = failUnlessHere + `(
			SELECT ` + sessionIsHere + `$2) AS here FROM {rows} WHERE {id} = $1::text::{type} AND {session} IS NOT DISTINCT FROM $2 AND {token} = $3 FOR SHARE) held`
	// The sessions, not those of the rows, because the planner evaluates this once, and no index on the session can serve it.
	sessionsHere = `ARRAY(SELECT o.id FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = ANY($2::text[])
					AND CASE WHEN ` + isHere + ` THEN true ELSE ('` + objects.Moved + `' || {server})::int = 0 END)`
	endRow = `
				UPDATE {rows} SET {set}
				WHERE {id} = $1::text::{type} AND {session} IS NOT DISTINCT FROM $2 AND {token} = $3
					AND CASE ` + sessionIsHere + `$2) WHEN true THEN true WHEN false THEN ('` + objects.Moved + `' || {server})::int = 0 ELSE false END{uncanceled}
				RETURNING {id}::text, '', {token}, 0{more}`
	endRows = `
				UPDATE {rows} r SET {set}
				WHERE ` + givenRows + `
				RETURNING {id}::text, '', {token}, 0{more}`
	endUnlockedRows = `
				WITH tenure_locked AS MATERIALIZED (SELECT {id} AS id FROM {rows} r WHERE ` + givenRows + ` FOR NO KEY UPDATE SKIP LOCKED),
				tenure_ended AS (
					UPDATE {rows} SET {set} WHERE {id} = ANY(ARRAY(SELECT id FROM tenure_locked)) RETURNING {id} AS tenure_id, {token} AS token)
				SELECT ` + changedOrFail + `, '', token, 0{more} FROM tenure_locked LEFT JOIN tenure_ended ON tenure_id = id`
)

// takeRowsFor is takeRows for a session that may have no record; if it has none, the statement returns a
// row with the token -1.
var takeRowsFor = forRemote(takeRows)

func forRemote(take string) string {
	return strings.NewReplacer(
		"{where}", " AND "+isBegun+"{where}", "{count}", "{count_for}", "SELECT id::text", "(SELECT id::text",
	).Replace(take) + `) UNION ALL SELECT '', $1, -1, 0 WHERE NOT ` + isBegun
}

const isBegun = `EXISTS (SELECT FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = $1)`

// wantedRows returns the rows of ownedRows whose claims were requested.
var wantedRows = strings.Replace(ownedRows, "{session} = $1", "{session} = $1 AND {requested} = {token}", 1)

// canceledRows returns the rows of ownedRows that are canceled.
var canceledRows = strings.Replace(ownedRows, "{session} = $1", "{session} = $1{canceled}", 1)

// ready returns what was found about the table. It checks the table on the first call, and again after each
// new look at the library's own tables.
func (r *Rows) ready(ctx context.Context, limit time.Duration) (*rowSetup, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	own, err := r.claims.table.setups.get(ctx)
	if err != nil {
		if found := r.found.Load(); found != nil && !errors.Is(err, objects.ErrSetup) { // nothing was found out
			return found, nil
		}
		return nil, r.claims.table.setups.explain(err)
	}
	return r.recall(ctx, func(found *rowSetup) bool { return found.own != own }, func() (*rowSetup, error) { return r.check(ctx, own) })
}

func (r *Rows) TakeReady(ctx context.Context, take objects.Taking, limit time.Duration) ([]objects.Claim, error) {
	args := takeArgs(take)
	if take.Remote && r.cfg.Expires != "" {
		args = append(args, take.Lasts.Microseconds())
	}
	where, err := take.In("$", len(args))
	if err != nil {
		return nil, err
	}
	s, err := r.ready(ctx, limit)
	if err != nil {
		return nil, err
	}
	if n := utf8.RuneCountInString(take.Session); s.sessionLength > 0 && n > s.sessionLength {
		return nil, fmt.Errorf("%w: session %q has %d characters, and column %q of table %q holds %d (ALTER TABLE … ALTER COLUMN … TYPE text)",
			objects.ErrInvalid, take.Session, n, r.cfg.Session, r.cfg.Table, s.sessionLength)
	}
	args = append(args, take.Args...)
	perKey, text := r.cfg.PerKey != "", takeRows
	switch {
	case perKey && take.Remote:
		text = takeRowsPerKeyFor
	case perKey:
		text = takeRowsPerKey
	case take.Remote:
		text = takeRowsFor
	}
	var found []objects.Claim
	if perKey {
		found, err = r.takePerKey(ctx, limit, s, text, where, args, take)
	} else {
		found, err = r.sendWhere(ctx, limit, 0, s, text, where, args, nil)
	}
	if take.Remote && slices.ContainsFunc(found, func(c objects.Claim) bool { return c.Token < 0 }) {
		return nil, objects.ErrEnded
	}
	taken := slices.DeleteFunc(found, func(c objects.Claim) bool { return c.Token == 0 })
	if err == nil && len(taken) == 0 && len(found) > 0 {
		return nil, &objects.Refused{Cause: errUntaken}
	}
	return taken, err
}

func (r *Rows) Move(ctx context.Context, session string, seen objects.Claim, limit time.Duration) ([]objects.Claim, error) {
	return r.query(ctx, limit, 0, moveRow, session, seen.ID, seen.Session, seen.Token)
}

var errUntaken = errors.New("nothing is updated: a trigger prevents that")

// takeArgs returns the first arguments of the statements that take rows.
func takeArgs(take objects.Taking) []any {
	return []any{take.Session, take.N, given(take.Skip), take.Only}
}

// given returns IDs as an argument that is never NULL.
func given(ids []string) []string { return append([]string{}, ids...) }

func (r *Rows) Ready(ctx context.Context, take objects.Taking, limit time.Duration) (sight objects.Sight, err error) {
	text, args := whichAreReady, []any{"", take.N, given(take.Skip)}
	if !take.Looking {
		text += skipLocked
	}
	if r.cfg.PerKey != "" {
		text, args = whichAreReadyPerKey, append(args, take.Only)
	}
	where, err := take.In("$", len(args))
	if err != nil {
		return sight, err
	}
	s, err := r.ready(ctx, limit)
	if err != nil {
		return sight, err
	}
	var expired bool
	sight.IDs, err = idsOf(r.sendWhere(ctx, limit, 0, s, text, where, append(args, take.Args...), func(s *rowSetup, batch *pgx.Batch) {
		if take.Looking && r.cfg.Expires != "" { // in the same transaction, because servers without work do hardly anything else
			batch.Queue(s.texts.In(anyExpired)).QueryRow(func(row pgx.Row) error { return row.Scan(&expired) })
		}
	}))
	if err == nil { // otherwise the call may still run
		sight.Expired = expired
	}
	return sight, err
}

func idsOf(rows []objects.Claim, err error) (ids []string, _ error) {
	for _, row := range rows {
		ids = append(ids, row.ID)
	}
	return ids, err
}

// LongestKey is that of the claims' table, which holds the names of sessions.
func (r *Rows) LongestKey() int { return longestKey }

func (r *Rows) Look(ctx context.Context, _ string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	rows, err := r.query(ctx, limit, 0, lookAtRows, ids)
	return rows, invalidID(err)
}

func (r *Rows) List(ctx context.Context, after string, n int, limit time.Duration) ([]objects.Claim, error) {
	rows, err := r.query(ctx, limit, 0, listRows, after, n)
	return rows, invalidID(err)
}

// Counts reads all owned rows, in their index.
func (r *Rows) Counts(ctx context.Context, most int, limit time.Duration) ([]objects.ClaimCount, error) {
	s, err := r.ready(ctx, limit)
	if err != nil {
		return nil, err
	}
	return queryRows(ctx, r, limit, lockWait(limit), s, nil, func(row pgx.CollectableRow) (objects.ClaimCount, error) {
		n := objects.ClaimCount{Kind: r.cfg.Table}
		return n, row.Scan(&n.Session, &n.Claims)
	}, countRows, "", most)
}

func (r *Rows) Request(ctx context.Context, _ string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	rows, err := r.query(ctx, limit, 0, requestRows, ids)
	return rows, invalidID(err)
}

func (r *Rows) Wanted(ctx context.Context, session string, after objects.Claim, n int, limit time.Duration) ([]objects.Claim, error) {
	return r.query(ctx, limit, lockWait(limit), wantedRows, session, after.ID, n)
}

func (r *Rows) Canceled(ctx context.Context, session, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return r.query(ctx, limit, lockWait(limit), canceledRows, session, afterID, n)
}

func (r *Rows) FreeCanceled(ctx context.Context, claims []objects.Claim, limit time.Duration) ([]objects.Claim, error) {
	_, args := endingSQL(objects.Ending{Unlocked: true}, claims)
	return r.query(ctx, limit, 0, objects.OfCanceled(endUnlockedRows), args...)
}

func (r *Rows) Owned(ctx context.Context, session, _, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return r.query(ctx, limit, lockWait(limit), ownedRows, session, afterID, n)
}

func (r *Rows) Free(ctx context.Context, session, _ string, ids []string, tokens []int64, how objects.Freeing, limit time.Duration) ([]objects.Claim, error) {
	freed, err := r.query(ctx, limit, 0, setting(freeRows, how.Set()), session, ids, tokens)
	if err == nil && len(freed) < len(ids) && r.cfg.Canceled != "" {
		var canceled []objects.Claim
		canceled, err = r.query(ctx, limit, 0, objects.OfCanceled(freeRows), session, ids, tokens)
		freed = append(freed, canceled...)
	}
	if err != nil || len(freed) == len(ids) {
		return nil, err
	}
	given := make([]objects.Claim, len(ids))
	for i, id := range ids {
		given[i] = objects.Claim{Kind: r.cfg.Table, ID: id, Session: session, Token: tokens[i]}
	}
	var rest []string
	for _, c := range objects.Subtract(given, freed) {
		rest = append(rest, c.ID)
	}
	stand, err := r.Look(ctx, r.cfg.Table, rest, limit)
	return slices.DeleteFunc(stand, func(c objects.Claim) bool {
		c.Attempts, c.Exhausted = 0, false
		return !slices.Contains(given, c)
	}), err
}

// setting returns the text of a statement with these assignments to columns.
func setting(text, set string) string { return strings.Replace(text, "{set}", set, 1) }

func (r *Rows) Expired(ctx context.Context, n int, limit time.Duration) ([]string, error) {
	return idsOf(r.query(ctx, limit, lockWait(limit), expiredRows, n))
}

func (r *Rows) FreeExpired(ctx context.Context, ids []string, limit time.Duration) (int, error) {
	freed, err := r.query(ctx, limit, 0, setting(freeExpiredRows, objects.Freeing{Lost: true}.Set()), ids)
	if err == nil && r.cfg.Canceled != "" {
		var canceled []objects.Claim
		canceled, err = r.query(ctx, limit, 0, objects.OfCanceled(freeExpiredRows), ids)
		freed = append(freed, canceled...)
	}
	return len(freed), err
}

func (r *Rows) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	s, err := r.ready(ctx, limit)
	if err != nil {
		return nil, err
	}
	sessions, err := queryRows(ctx, r, limit, lockWait(limit), s, nil, scanSession, sessionsOfRows, "")
	return sessions, unreadable(err)
}

// lockWait is how long statements that search for the rows of sessions wait for a locked table. They are
// repeated anyway, and other statements need their connections.
func lockWait(limit time.Duration) time.Duration { return max(limit/8, time.Millisecond) }

// other waits until a statement on a user's table may be sent. It leaves a connection for the table of
// claims, however many of the users' tables are locked or slow.
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

// query checks the table if necessary, and returns the rows that a statement returns. It waits for locks as
// send does.
func (r *Rows) query(ctx context.Context, limit, lock time.Duration, text string, args ...any) ([]objects.Claim, error) {
	s, err := r.ready(ctx, limit)
	if err != nil {
		return nil, err
	}
	return r.send(ctx, limit, lock, s, text, args...)
}

func (r *Rows) send(ctx context.Context, limit, lock time.Duration, s *rowSetup, text string, args ...any) ([]objects.Claim, error) {
	return r.sendWhere(ctx, limit, lock, s, text, "", args, nil)
}

// sendWhere is send for a text with {where}. What first adds, unless it is nil, is sent before the statement in the
// same transaction.
func (r *Rows) sendWhere(ctx context.Context, limit, lock time.Duration, s *rowSetup, text, where string, args []any, first func(*rowSetup, *pgx.Batch)) ([]objects.Claim, error) {
	return queryRows(ctx, r, limit, lock, s, first, func(row pgx.CollectableRow) (objects.Claim, error) {
		c := objects.Claim{Kind: r.cfg.Table}
		err := row.Scan(&c.ID, &c.Session, &c.Token, &c.Attempts)
		r.cfg.Counted(&c)
		return c, err
	}, text, where, args...)
}

func queryRows[T any](ctx context.Context, r *Rows, limit, lock time.Duration, s *rowSetup, first func(*rowSetup, *pgx.Batch), scan pgx.RowToFunc[T], text, where string, args ...any) (found []T, err error) {
	ctx, cancel := claimCall(ctx, limit)
	defer cancel()
	for ; s != nil; s = r.changed(ctx, s, limit, err) {
		found, err = queryRowsAs(ctx, r, limit, lock, s, first, scan, text, where, args)
	}
	return found, r.claims.explain(err)
}

// queryRowsAs sends a statement for the table as it was found.
func queryRowsAs[T any](ctx context.Context, r *Rows, limit, lock time.Duration, s *rowSetup, first func(*rowSetup, *pgx.Batch), scan pgx.RowToFunc[T], text, where string, args []any) ([]T, error) {
	done, err := r.claims.other(ctx, limit)
	if err != nil {
		return nil, err
	}
	defer done()
	begin := func(batch *pgx.Batch) error {
		if first != nil {
			first(s, batch)
		}
		return nil
	}
	return send(ctx, r.claims, lock, begin, scan, s.texts.Where(text, where), args)
}

// changed returns the table as it is now if a statement was rejected because the table has changed since it
// was checked. The statement, which has changed nothing, can then be sent again. A widened ID column rejects
// nothing itself, but statements convert IDs to the type that it had.
func (r *Rows) changed(ctx context.Context, s *rowSetup, limit time.Duration, err error) *rowSetup {
	if outdated(err) {
		r.found.CompareAndSwap(s, nil)
	} else if pgconns.SQLState(err) != stateOutOfRange {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	now, lookErr := r.check(ctx, s.own)
	if lookErr != nil || now.rowFacts == s.rowFacts {
		return nil
	}
	return now
}
