package sqliteobjects

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tenurelib/tenure/internal/objects"
)

// inspectTables asks for the state of each table of the main database: whether it is a table, its
// columns and their types, the columns of its unique keys, and whether it is WITHOUT ROWID.
const inspectTables = `
	SELECT s.type,
		(SELECT json_group_object(lower(c.name), upper(c.type)) FROM pragma_table_info(w.value, 'main') c),
		(SELECT json_group_array(k.columns) FROM (
			SELECT (SELECT group_concat(n) FROM (SELECT coalesce(lower(name), '?') AS n FROM pragma_index_info(i.name, 'main') ORDER BY n)) AS columns
			FROM pragma_index_list(w.value, 'main') AS i WHERE i."unique" AND NOT i.partial) k),
		EXISTS (SELECT 1 FROM pragma_index_list(w.value, 'main') AS i
			WHERE i.origin = 'pk' AND NOT EXISTS (SELECT 1 FROM pragma_index_xinfo(i.name, 'main') WHERE cid = -1))
	FROM json_each(?1) w LEFT JOIN main.sqlite_schema s ON s.name = w.value COLLATE NOCASE AND s.type IN ('table', 'view')
	ORDER BY w.key`

// inspect returns what is wrong with the tables of objects and of tombstones, and with the tables
// of claims. It does not report a missing table: each statement that needs the table does.
func (t *Table) inspect(ctx context.Context, db reader) (unfit, misclaimed error, err error) {
	var names []string
	for _, own := range objects.OwnTables {
		names = append(names, t.name+own.Suffix)
	}
	type state struct {
		kind          sql.NullString // NULL: there is no such table
		columns, keys string         // JSON
		withoutRowID  bool
	}
	tables, err := all(ctx, db, func(rows *sql.Rows) (is state, err error) {
		return is, rows.Scan(&is.kind, &is.columns, &is.keys, &is.withoutRowID)
	}, inspectTables, list(names))
	if err != nil {
		return nil, nil, err
	}
	for i, is := range tables {
		if !is.kind.Valid {
			continue
		}
		own, keys := &objects.OwnTables[i], []string(nil)
		found := objects.FoundTable{Name: fmt.Sprintf("%q", names[i]), NoTable: is.kind.String == "view"}
		if err := errors.Join(json.Unmarshal([]byte(is.columns), &found.Columns), json.Unmarshal([]byte(is.keys), &keys)); err != nil {
			return nil, nil, err
		}
		for _, key := range keys {
			found.Keys = append(found.Keys, strings.Split(key, ","))
		}
		if own.Whole && is.withoutRowID {
			found.Misfits = []string{"it is WITHOUT ROWID"}
		}
		for _, wrong := range own.Wrong(found, mustBe) {
			what := fmt.Errorf("%w: %s", objects.ErrSetup, wrong)
			if i == objects.TableOfClaims || i == objects.TableOfRequests {
				misclaimed = errors.Join(misclaimed, what)
			} else {
				unfit = errors.Join(unfit, what)
			}
		}
	}
	return unfit, misclaimed, nil
}

// mustBe returns the type that a column must have, or "" if its declared one fits.
func mustBe(kind objects.ColumnKind, declared string) string {
	affinity := affinityOf(declared)
	switch {
	case kind == objects.KeyText && affinity != "TEXT" && affinity != "":
		return "TEXT"
	case kind == objects.Token && (affinity == "TEXT" || affinity == "REAL"):
		return "INTEGER"
	}
	return ""
}

// affinityOf returns the affinity of a column by its declared type, by the rules of SQLite and in
// their order. It is empty if the column stores any value as it is.
func affinityOf(declared string) string {
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(strings.ToUpper(declared), p) })
	}
	switch {
	case has("INT"):
		return "INTEGER"
	case has("CHAR", "CLOB", "TEXT"):
		return "TEXT"
	case declared == "", has("BLOB"):
		return ""
	case has("REAL", "FLOA", "DOUB"):
		return "REAL"
	}
	return "NUMERIC"
}

// fit returns an error if the store cannot rely on the tables. It inspects them until it can.
func (t *Table) fit(ctx context.Context, forClaims bool) error {
	if t.fits.Load() && (t.fitsClaims.Load() || !forClaims) {
		return nil
	}
	var unfit, misclaimed error
	err := whenFree(ctx, func() (err error) {
		unfit, misclaimed, err = t.inspect(ctx, t.db)
		return err
	})
	if err != nil {
		return err
	}
	t.fits.Store(unfit == nil)
	t.fitsClaims.Store(misclaimed == nil)
	if forClaims {
		return errors.Join(unfit, misclaimed)
	}
	return unfit
}
