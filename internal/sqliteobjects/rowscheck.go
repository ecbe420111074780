package sqliteobjects

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// RowsDDL returns what a table lacks for claims on its rows.
func RowsDDL(cfg objects.RowsConfig) string {
	ddl := ""
	for _, column := range []struct{ name, definition string }{
		{cfg.Session, "TEXT"}, {cfg.Token, "INTEGER NOT NULL DEFAULT 0"}, {cfg.Attempts, "INTEGER NOT NULL DEFAULT 0"}, {cfg.NotBefore, "INTEGER"},
		{cfg.Requested, "INTEGER"}, {cfg.Expires, "INTEGER"}, {cfg.Limit, "INTEGER"},
	} {
		if column.name != "" {
			ddl += fmt.Sprintf("ALTER TABLE %s ADD COLUMN %s %s;\n", objects.Quoted(cfg.Table), objects.Quoted(column.name), column.definition)
		}
	}
	bySession, ready := rowIndexes(cfg)
	return ddl + bySession + ";\n" + ready + ";\n" +
		cfg.MoreIndexes(objects.Quoted(cfg.Table), func(suffix string) string { return objects.Quoted(cfg.Table + suffix) })
}

func rowIndexes(cfg objects.RowsConfig) (bySession, ready string) {
	return cfg.Indexes(objects.Quoted(cfg.Table), func(suffix string) string { return objects.Quoted(cfg.Table + suffix) })
}

// Check returns an [objects.ErrSetup] that names everything that is wrong with the table.
func (r *Rows) Check(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	wrong, err := r.wrong(ctx)
	if err != nil {
		return explain(err)
	}
	if err := objects.RefusedRows(objects.Quoted(r.cfg.Table), wrong); err != nil {
		return err
	}
	end := func(how objects.Ending) string { return setting(endRows, how.Set("")) }
	parts := []struct{ what, text string }{{"Ready and OrderBy", readyRows}, {"Done", end(objects.Ending{Done: true})}, {"Exhausted", end(objects.Ending{Exhausted: true})}}
	if r.cfg.Taken != "" {
		parts = append(parts, struct{ what, text string }{"Taken", takeRows})
	}
	if r.cfg.Released != "" {
		parts = append(parts, struct{ what, text string }{"Released", end(objects.Ending{})})
	}
	if r.cfg.Canceled != "" {
		parts = slices.Insert(parts, 0, struct{ what, text string }{"Canceled", objects.OfCanceled(endRows)}) // first: the others contain it
	}
	if r.cfg.PerKey != "" {
		parts = append(parts, struct{ what, text string }{"PerKey", openRows}, struct{ what, text string }{"PerKey", openRowsOfAll})
	}
	for _, part := range parts {
		statement, err := r.claims.table.db.PrepareContext(ctx, r.texts.Where(part.text, ""))
		if err != nil {
			if ctx.Err() != nil || isBusy(err) {
				return explain(err)
			}
			return fmt.Errorf("%w: the statement with the SQL of %s: %w", objects.ErrSetup, part.what, err)
		}
		statement.Close()
	}
	r.checked.Store(true)
	return nil
}

var rowTypes = objects.RowsTypes{
	ID: []string{"TEXT", "INTEGER"}, Session: []string{"TEXT"}, Token: []string{"INTEGER"}, Attempts: []string{"INTEGER"}, NotBefore: []string{"INTEGER"},
}

// hasOwned reports whether an index has all rows that are owned. SQLite itself decides that: its text may quote the
// session's column in several ways.
func (r *Rows) hasOwned(ctx context.Context, index string) (bool, error) {
	if _, err := all(ctx, r.claims.table.db, func(rows *sql.Rows) (detail string, err error) {
		var ignored int
		return detail, rows.Scan(&ignored, &ignored, &ignored, &detail)
	}, r.texts.In(`EXPLAIN QUERY PLAN SELECT 1 FROM {rows} INDEXED BY `)+objects.Quoted(index)+r.texts.In(` WHERE {session} IS NOT NULL`)); err == nil {
		return true, nil
	} else if ctx.Err() != nil || isBusy(err) {
		return false, err
	}
	return false, nil // no query solution
}

func (r *Rows) wrong(ctx context.Context) (wrong []string, err error) {
	cfg, db := r.cfg, r.claims.table.db
	var kind string
	err = db.QueryRowContext(ctx, `SELECT type FROM main.sqlite_schema WHERE name = ?1 COLLATE NOCASE AND type IN ('table', 'view')`, cfg.Table).Scan(&kind)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return []string{"it does not exist"}, nil
	case err != nil:
		return nil, err
	case kind != "table":
		return []string{"it is a view (name the table behind it)"}, nil
	}
	type column struct {
		name, declared string
		notNull        bool
		pk, pks        int
	}
	columns, err := all(ctx, db, func(rows *sql.Rows) (c column, err error) {
		return c, rows.Scan(&c.name, &c.declared, &c.notNull, &c.pk, &c.pks)
	}, `SELECT name, upper(type), "notnull", pk, (SELECT count(*) FROM pragma_table_info(?1, 'main') WHERE pk > 0) FROM pragma_table_info(?1, 'main')`, cfg.Table)
	if err != nil {
		return nil, err
	}
	type index struct {
		name            string
		unique, partial bool
	}
	columnsOf := make(map[index][]string)
	_, err = all(ctx, db, func(rows *sql.Rows) (i index, err error) {
		var column string
		err = rows.Scan(&i.name, &i.unique, &i.partial, &column)
		columnsOf[i] = append(columnsOf[i], column)
		return i, err
	}, `
		SELECT l.name, l."unique", l.partial, coalesce(i.name, '')
		FROM pragma_index_list(?1, 'main') l JOIN pragma_index_info(l.name, 'main') i ORDER BY l.name, i.seqno`, cfg.Table)
	if err != nil {
		return nil, err
	}
	found := objects.FoundRows{Types: make(map[string]string)}
	for _, c := range columns {
		found.Types[c.name] = c.declared
		if affinity := affinityOf(c.declared); affinity == "INTEGER" || affinity == "TEXT" {
			found.Types[c.name] = affinity
		}
		if c.notNull {
			found.NotNull = append(found.NotNull, c.name)
		}
		found.Unique = found.Unique || c.name == cfg.ID && c.pk == 1 && c.pks == 1
	}
	hasDue := false
	for i, columns := range columnsOf {
		hasDue = hasDue || columns[0] == cfg.NotBefore
		found.Unique = found.Unique || i.unique && !i.partial && slices.Equal(columns, []string{cfg.ID}) && slices.Contains(found.NotNull, cfg.ID)
		if bySession := len(columns) >= 2 && slices.Equal(columns[:2], []string{cfg.Session, cfg.ID}); bySession || i.partial && columns[0] == cfg.PerKey {
			hasOwned, err := r.hasOwned(ctx, i.name)
			if err != nil {
				return nil, err
			}
			found.BySession = found.BySession || bySession && hasOwned
			found.PerKey = found.PerKey || !bySession && hasOwned
		}
	}
	bySession, _ := rowIndexes(cfg)
	table, name := objects.Quoted(cfg.Table), func(suffix string) string { return objects.Quoted(cfg.Table + suffix) }
	wrong = cfg.Wrong(found, rowTypes, RowsDDL(cfg), bySession, cfg.PerKeyIndex(table, name))
	if due := cfg.DueIndex(table, name); due != "" && !hasDue && len(wrong) == 0 && !r.checked.Load() {
		r.logger.Warn(objects.NoDueIndex, "table", cfg.Table, "ddl", due)
	}
	return wrong, nil
}
