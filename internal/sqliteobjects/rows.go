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

// Rows is a user's table with claims on its rows. All methods are safe for concurrent use.
type Rows struct {
	claims  *Claims
	cfg     objects.RowsConfig
	texts   *objects.Texts
	logger  *slog.Logger
	checked atomic.Bool
	check   atomic.Pointer[sql.Stmt] // of fences; nil until it is needed
}

// Rows implements [objects.Backend].
func (t *Table) Rows(cfg objects.RowsConfig, logger *slog.Logger) objects.RowsTable {
	r := &Rows{claims: &t.claims, cfg: cfg, logger: logger, texts: newRowTexts(cfg, t.name)}
	t.rows.Add(cfg, r)
	return r
}

// newRowTexts returns the texts that make statements on rows. The column of the attempts may have a
// value of any type, or the greatest number.
func newRowTexts(cfg objects.RowsConfig, table string) *objects.Texts {
	return objects.NewTexts(slices.Concat([]string{"{rows}", "main." + objects.Quoted(cfg.Table)}, tableWords("main.", table), cfg.Words(objects.RowsDialect{
		Now: "?3", Attempts: "coalesce(CAST({} AS INTEGER), 0)", Next: "min({}, 9223372036854775806) + 1", Back: "max({}, 1) - 1",
		Lasts: "?5",
		In:    func(us string) string { return "?4 + " + us + " / 1000" },
		Rest: func(first, most time.Duration) string {
			return fmt.Sprintf("min(%d << min(max({} - 1, 0), 30), %d) * (1000 - abs(random() %% 251))", max(first.Milliseconds(), 1), most.Milliseconds())
		},
	}))...)
}

// An ID is text in all statements; SQLite converts it to a number to compare it with a column of
// integers.
const (
	nextRowToken = `max(CASE WHEN {token} < {version_limit} THEN {token} + 1 ELSE 0 END, ?2)`
	rowColumns   = `CAST({id} AS TEXT), coalesce({session}, ''), {token}, {attempts}`

	readyRows = `
			SELECT CAST({id} AS TEXT) ` + whichAreReady + `
			ORDER BY {order} LIMIT ?1`
	whichAreReady = `FROM {rows}
			WHERE {session} IS NULL{and_ready}{where} AND hex({id}) NOT IN (SELECT value FROM json_each(?2)) AND CAST({id} AS TEXT) <> ''
				AND ` + ofThese
	// Each half finds its rows in the index of rows by time; readyRows walks all ready rows in their order.
	anyDue = `
			SELECT EXISTS (SELECT 1 FROM {rows} WHERE {session} IS NULL{and_ready_when_due} AND {not_before} <= ?1)
				OR EXISTS (SELECT 1 FROM {rows} WHERE {session} IS NULL{and_ready_when_due} AND {not_before} IS NULL)`
	ofThese       = `(?4 IS NULL OR hex({id}) IN (SELECT value FROM json_each(?4)))`
	ofTheseByText = `{id} IN (SELECT value FROM json_each(?4))` // finds them in the index
	// A row whose ID is a blob was found by a text that may be another row's ID, and that row may be
	// claimed.
	takeRows = `
			UPDATE {rows} SET {session} = ?1, {token} = ` + nextRowToken + `{count}
			WHERE {id} IN (SELECT value FROM json_each(?3)) AND {session} IS NULL RETURNING ` + rowColumns
	moveRow = `
			UPDATE {rows} SET {session} = ?1, {token} = ` + nextRowToken + `{taken}
			WHERE {id} = ?3 AND +{session} = ?4 AND {token} = ?5{uncanceled} RETURNING ` + rowColumns
	// The + keeps it from using the index on the session.
	freeRows = `
			UPDATE {rows} SET {set} WHERE +{session} = ?1 AND ({id}, coalesce({token}, 0)) IN (
				SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?2)){uncanceled}`
	expiredRows     = `SELECT CAST({id} AS TEXT) FROM {rows} WHERE {session} IS NOT NULL AND {expires} <= ?1 ORDER BY {expires} LIMIT ?2`
	freeExpiredRows = `UPDATE {rows} SET {set} WHERE {id} IN (SELECT value FROM json_each(?1)) AND +{session} IS NOT NULL AND +{expires} <= ?4{uncanceled}`
	// An ID of another type differs from its own text, so paging would never end.
	ownedRows      = `SELECT ` + rowColumns + ` FROM {rows} WHERE {session} = ?1 AND typeof({id}) IN ('integer', 'text') ORDER BY {id} LIMIT ?2`
	ownedRowsAfter = `SELECT ` + rowColumns + ` FROM {rows} WHERE {session} = ?1 AND typeof({id}) IN ('integer', 'text') AND {id} > ?3 ORDER BY {id} LIMIT ?2`
	// Looks up the next session in the index instead of visiting each row.
	sessionsOfRows = `
			WITH RECURSIVE tenure_named(session) AS (
				SELECT min({session}) FROM {rows} WHERE {session} IS NOT NULL
				UNION ALL
				SELECT (SELECT min(r.{session}) FROM {rows} r WHERE r.{session} > tenure_named.session) FROM tenure_named WHERE tenure_named.session IS NOT NULL)
			SELECT tenure_named.session, o.id IS NULL,
				EXISTS (SELECT 1 FROM {tombstones} d WHERE d.object_type = '` + objects.SessionType + `' AND d.id = tenure_named.session), 0, name, labels, payload, +resource_version, +created_at_ms, +updated_at_ms
			FROM tenure_named LEFT JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = tenure_named.session
			WHERE tenure_named.session IS NOT NULL`
	lookAtRows = `SELECT ` + rowColumns + ` FROM {rows} WHERE {id} IN (SELECT value FROM json_each(?1))`
	endRows    = `
			UPDATE {rows} SET {set}
			WHERE {id} IN (SELECT json_extract(value, '$[0]') FROM json_each(?1)) AND ({id}, +{session}, {token}) IN (
				SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]') FROM json_each(?1)){uncanceled}
			RETURNING CAST({id} AS TEXT), '', {token}, 0`
	countRows   = `SELECT {session}, min(count(*), ?1) FROM {rows} WHERE {session} IS NOT NULL GROUP BY 1 ORDER BY 1`
	requestRows = `
			UPDATE {rows} SET {requested} = {token} WHERE {id} IN (SELECT value FROM json_each(?1)) AND {session} IS NOT NULL RETURNING ` + rowColumns
	// An ID of another type has no place in the order: see ownedRows.
	listRows      = `SELECT ` + rowColumns + ` FROM {rows} WHERE {session} IS NOT NULL AND typeof({id}) IN ('integer', 'text') ORDER BY {id} LIMIT ?1`
	listRowsAfter = `SELECT ` + rowColumns + ` FROM {rows} WHERE {session} IS NOT NULL AND typeof({id}) IN ('integer', 'text') AND {id} > ?2 ORDER BY {id} LIMIT ?1`
	rowFence      = `
			SELECT 1 FROM {rows} WHERE {id} = ?1 AND +{session} = ?2 AND {token} = ?3`
	// Like the fence of a lease, it writes nothing or fails.
	rowFenceStatement = `
			INSERT INTO {tombstones} (object_type, id, resource_version) SELECT 'row', ?1, ` + refuse + ` WHERE NOT EXISTS (` + rowFence + `)`
	endRowOrFail = `
			UPDATE {rows} SET {session} = NULL{unexpired}{done} WHERE {id} = (
				SELECT CASE (SELECT count(*) FROM {rows} WHERE {id} = ?1 AND +{session} = ?2 AND {token} = ?3{uncanceled})
					WHEN 1 THEN ?1 ELSE ` + refuse + ` END)`
)

// takeRowsFor is takeRows for claims that expire.
var takeRowsFor = strings.Replace(takeRows, "{count}", "{count_for}", 1)

// forRemote returns readyRows for a session that may have no record. It then also returns a NULL.
func forRemote(ready string) string {
	return `
			SELECT * FROM (` + ready + `)
			UNION ALL SELECT NULL WHERE NOT EXISTS (SELECT 1 FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = ?5)`
}

// setting returns the text of a statement with these assignments to columns.
func setting(text, set string) string { return strings.Replace(text, "{set}", set, 1) }

// ready checks the table, unless that was done before.
func (r *Rows) ready(ctx context.Context, limit time.Duration) error {
	if r.checked.Load() {
		return nil
	}
	return r.Check(ctx, limit)
}

// write runs fn in a transaction when the table is ready.
func (r *Rows) write(ctx context.Context, limit time.Duration, fn func(context.Context, *sql.Tx) error) error {
	if err := r.ready(ctx, limit); err != nil {
		return err
	}
	return r.claims.writeAny(ctx, limit, fn)
}

func (r *Rows) read(ctx context.Context, limit time.Duration, text string, args ...any) ([]objects.Claim, error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	return allWithin(ctx, r.claims.table, limit, r.scan, r.texts.In(text), args...)
}

func (r *Rows) scan(rows *sql.Rows) (objects.Claim, error) {
	c := objects.Claim{Kind: r.cfg.Table}
	var token any // NULL and 0 are read alike and freed alike
	err := rows.Scan(&c.ID, &c.Session, &token, &c.Attempts)
	c.Token = integer(token).Int64
	r.cfg.Counted(&c)
	return c, err
}

// mayTake returns the IDs of the rows that may be taken.
func (r *Rows) mayTake(ctx context.Context, db reader, n int, take objects.Taking) ([]string, error) {
	if r.cfg.NotBefore != "" && !take.Remote { // of a remote session, readyRows also finds out whether it has ended
		due, err := all(ctx, db, func(rows *sql.Rows) (due bool, err error) { return due, rows.Scan(&due) }, r.texts.In(anyDue), time.Now().UnixMilli())
		if err != nil || !due[0] {
			return nil, err
		}
	}
	if r.cfg.PerKey != "" {
		return r.openIDs(ctx, db, n, take)
	}
	return r.readyIDs(ctx, db, readyRows, n, take)
}

func (r *Rows) readyIDs(ctx context.Context, db reader, text string, n int, take objects.Taking) ([]string, error) {
	args := []any{n, list(hexed(take.Skip)), time.Now().UnixMilli(), nil}
	if take.Remote {
		text, args = forRemote(text), append(args, take.Session)
	}
	switch {
	case take.Only == nil:
	case slices.ContainsFunc(take.Only, func(id string) bool { return objects.ValidText("ID", id) != nil }):
		args[3] = list(hexed(take.Only))
	default:
		text, args[3] = strings.ReplaceAll(text, ofThese, ofTheseByText), list(take.Only)
	}
	where, err := take.In("?", len(args))
	if err != nil {
		return nil, err
	}
	ids, err := all(ctx, db, func(rows *sql.Rows) (id sql.NullString, err error) { return id, rows.Scan(&id) },
		r.texts.Where(text, where), append(args, take.Args...)...)
	if err != nil {
		return nil, err
	}
	ready := make([]string, 0, len(ids))
	for _, id := range ids {
		if !id.Valid {
			return nil, objects.ErrEnded
		}
		ready = append(ready, id.String)
	}
	return ready, nil
}

// hexed returns the bytes of IDs in hexadecimal, because JSON can't contain an ID that is not text.
func hexed(ids []string) []string {
	all := make([]string, len(ids))
	for i, id := range ids {
		all[i] = fmt.Sprintf("%X", id)
	}
	return all
}

// TakeReady takes the write lock only if there are rows to take.
func (r *Rows) TakeReady(ctx context.Context, take objects.Taking, limit time.Duration) (taken []objects.Claim, err error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	ids, err := r.mayTake(ctx, r.claims.table.db, 1, take)
	if err != nil || len(ids) == 0 {
		return nil, explain(err)
	}
	err = r.claims.writeAny(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		if ids, err = r.mayTake(ctx, tx, take.N, take); err != nil {
			return err
		}
		valid := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return objects.ValidText("ID", id) != nil })
		text, now := takeRows, time.Now()
		args := []any{take.Session, now.UnixMicro(), list(valid)}
		if take.Remote && r.cfg.Expires != "" {
			text, args = takeRowsFor, append(args, now.UnixMilli(), take.Lasts.Microseconds())
		}
		taken, err = all(ctx, tx, r.scan, r.texts.In(text), args...)
		if err == nil && len(taken) == 0 && len(ids) > 0 {
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

func (r *Rows) Move(ctx context.Context, session string, seen objects.Claim, limit time.Duration) (moved []objects.Claim, err error) {
	err = r.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) (err error) {
		moved, err = all(ctx, tx, r.scan, r.texts.In(moveRow), session, time.Now().UnixMicro(), seen.ID, seen.Session, seen.Token)
		return err
	})
	return moved, err
}

var errUntaken = errors.New("nothing is updated: a trigger ignores that, or the ID does not have the column's type")

func (r *Rows) Ready(ctx context.Context, take objects.Taking, limit time.Duration) (sight objects.Sight, err error) {
	if err := r.ready(ctx, limit); err != nil {
		return sight, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	sight.IDs, err = r.mayTake(ctx, r.claims.table.db, take.N, take)
	if err == nil && take.Looking && r.cfg.Expires != "" {
		var expired []string
		expired, err = r.Expired(ctx, 1, limit)
		sight.Expired = len(expired) > 0
	}
	return sight, explain(err)
}

// LongestKey is that of the claims' table, which holds the names of sessions.
func (r *Rows) LongestKey() int { return 0 }

func (r *Rows) Look(ctx context.Context, _ string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return r.read(ctx, limit, lookAtRows, list(ids))
}

func (r *Rows) Canceled(ctx context.Context, session, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return r.ofSession(ctx, session, afterID, n, limit, "{canceled}")
}

func (r *Rows) FreeCanceled(ctx context.Context, claims []objects.Claim, limit time.Duration) (freed []objects.Claim, err error) {
	err = r.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) (err error) {
		freed, err = all(ctx, tx, r.scan, r.texts.In(objects.OfCanceled(endRows)), list(givenRows(claims)))
		return err
	})
	return freed, err
}

func (r *Rows) Owned(ctx context.Context, session, _, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return r.ofSession(ctx, session, afterID, n, limit, "")
}

// ofSession returns rows that a session owns, after a given one, for which a further condition is true.
func (r *Rows) ofSession(ctx context.Context, session, afterID string, n int, limit time.Duration, condition string) ([]objects.Claim, error) {
	text, args := ownedRows, []any{session, n}
	if afterID != "" {
		text, args = ownedRowsAfter, append(args, afterID)
	}
	return r.read(ctx, limit, strings.Replace(text, "{session} = ?1", "{session} = ?1"+condition, 1), args...)
}

func (r *Rows) List(ctx context.Context, after string, n int, limit time.Duration) ([]objects.Claim, error) {
	if after == "" {
		return r.read(ctx, limit, listRows, n)
	}
	return r.read(ctx, limit, listRowsAfter, n, after)
}

// Counts reads all owned rows, in their index.
func (r *Rows) Counts(ctx context.Context, most int, limit time.Duration) ([]objects.ClaimCount, error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	return allWithin(ctx, r.claims.table, limit, func(rows *sql.Rows) (objects.ClaimCount, error) {
		n := objects.ClaimCount{Kind: r.cfg.Table}
		return n, rows.Scan(&n.Session, &n.Claims)
	}, r.texts.In(countRows), most)
}

func (r *Rows) Request(ctx context.Context, _ string, ids []string, limit time.Duration) (requested []objects.Claim, err error) {
	err = r.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) (err error) {
		requested, err = all(ctx, tx, r.scan, r.texts.In(requestRows), list(ids))
		return err
	})
	return requested, err
}

func (r *Rows) Wanted(ctx context.Context, session string, after objects.Claim, n int, limit time.Duration) ([]objects.Claim, error) {
	return r.ofSession(ctx, session, after.ID, n, limit, " AND {requested} = {token}")
}

// Free always returns nil, because no row is ever locked for long.
func (r *Rows) Free(ctx context.Context, session, _ string, ids []string, tokens []int64, how objects.Freeing, limit time.Duration) ([]objects.Claim, error) {
	args := []any{session, idsAndTokens(ids, tokens)}
	if how.Lost && r.cfg.LostBackoff > 0 {
		args = append(args, nil, time.Now().UnixMilli())
	}
	_, err := r.free(ctx, limit, freeRows, how, args...)
	return nil, err
}

// free sends a statement that frees rows, and then one that frees those of them that are canceled. It returns how many it has
// freed.
func (r *Rows) free(ctx context.Context, limit time.Duration, text string, how objects.Freeing, args ...any) (freed int, err error) {
	texts := []string{setting(text, how.Set())}
	if r.cfg.Canceled != "" {
		texts = append(texts, objects.OfCanceled(text))
	}
	err = r.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		freed = 0 // it may be called again
		for _, text := range texts {
			done, err := tx.ExecContext(ctx, r.texts.In(text), args...)
			if err != nil {
				return err
			}
			n, err := done.RowsAffected()
			if err != nil {
				return err
			}
			freed += int(n)
		}
		return nil
	})
	if err != nil { // it was rolled back
		return 0, err
	}
	return freed, nil
}

func (r *Rows) Expired(ctx context.Context, n int, limit time.Duration) ([]string, error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	return allWithin(ctx, r.claims.table, limit, func(rows *sql.Rows) (id string, err error) { return id, rows.Scan(&id) },
		r.texts.In(expiredRows), time.Now().UnixMilli(), n)
}

func (r *Rows) FreeExpired(ctx context.Context, ids []string, limit time.Duration) (int, error) {
	return r.free(ctx, limit, freeExpiredRows, objects.Freeing{Lost: true}, list(ids), nil, nil, time.Now().UnixMilli())
}

func (r *Rows) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	if err := r.ready(ctx, limit); err != nil {
		return nil, err
	}
	return allWithin(ctx, r.claims.table, limit, scanSession, r.texts.In(sessionsOfRows))
}

func (r *Rows) End(ctx context.Context, how objects.Ending, claims []objects.Claim, limit time.Duration) (lost []objects.Claim, err error) {
	err = r.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		if lost, err = r.end(ctx, tx, how, claims); err == nil && how.All && len(lost) > 0 {
			return objects.ErrEnded
		}
		return err
	})
	if errors.Is(err, objects.ErrEnded) {
		return lost, nil
	}
	return lost, err
}

func (r *Rows) end(ctx context.Context, tx *sql.Tx, how objects.Ending, claims []objects.Claim) (lost []objects.Claim, err error) {
	args := []any{list(givenRows(claims))}
	if how.Timed() {
		args = append(args, time.Now().Add(how.After).UnixMilli())
	}
	ended, err := all(ctx, tx, r.scan, r.texts.In(setting(endRows, how.Set("?2"))), args...)
	if lost = objects.Subtract(claims, ended); err != nil || len(lost) == 0 {
		return lost, err
	}
	rows, err := all(ctx, tx, r.scan, r.texts.In(lookAtRows+"{uncanceled}"), list(idsOf(lost)))
	for _, row := range rows {
		if slices.ContainsFunc(lost, func(c objects.Claim) bool { return c.ID == row.ID && c.Session == row.Session && c.Token == row.Token }) {
			return nil, &objects.Refused{Cause: fmt.Errorf("%w: row %s", errUnchanged, row.ID)}
		}
	}
	return lost, err
}

// givenRows returns claims as endRows expects them.
func givenRows(claims []objects.Claim) (given [][3]any) {
	for _, c := range claims {
		given = append(given, [3]any{c.ID, c.Session, c.Token})
	}
	return given
}

var errUnchanged = errors.New("nothing is updated, a trigger ignores that")

func idsOf(rows []objects.Claim) (ids []string) {
	for _, row := range rows {
		ids = append(ids, row.ID)
	}
	return ids
}

// FinishWith ends the claims of rows, and commits what fn writes in the same transaction. If some
// claims had ended before, it returns these, writes nothing and does not call fn.
func (r *Rows) FinishWith(ctx context.Context, claims []objects.Claim, fn func(*sql.Tx) error) (lost []objects.Claim, fnErr, err error) {
	if err := r.ready(ctx, time.Minute); err != nil {
		return nil, nil, err
	}
	err = r.claims.table.write(ctx, nil, func(tx *sql.Tx) error {
		if lost, err = r.end(ctx, tx, objects.Ending{Done: true}, claims); err != nil {
			return err
		}
		if len(lost) > 0 {
			return objects.ErrEnded
		}
		fnErr, err = objects.InOneTx(ctx, tx, fn)
		return cmp.Or(fnErr, err)
	})
	switch {
	case fnErr != nil:
		return nil, fnErr, nil
	case errors.Is(err, objects.ErrEnded):
		return lost, nil, nil
	}
	return nil, nil, explain(err)
}

func (r *Rows) EndStatement(c objects.Claim) (query string, args []any, err error) {
	return r.texts.In(endRowOrFail), []any{c.ID, c.Session, c.Token}, nil
}
