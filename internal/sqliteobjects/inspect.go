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

// ownTable is what one of the library's tables must be like.
type ownTable struct {
	suffix   string
	ofClaims bool     // no lease needs it
	columns  []string // that it must have
	texts    []string // those in which text must stay text
	numbers  []string // those in which numbers must stay numbers
	keys     []string // columns, in the order of their names, of which one list must be unique
	rowID    bool     // statements find its rows by rowid
	harm     string   // what happens if its key is not unique
	other    string   // what to do if the table is another program's
}

// ownTables are the tables that the library keeps promises on. Whatever is asked of one is asked
// of each, so another table is another entry here.
var ownTables = []ownTable{
	{
		columns: []string{"object_type", "id", "name", "labels", "payload", "resource_version", "created_at_ms", "updated_at_ms"},
		texts:   []string{"object_type", "id"},
		keys:    []string{"id,object_type", "id"},
		harm:    "two can hold one lease",
		other:   objects.OtherTable,
	},
	{
		suffix:  objects.TombstonesSuffix,
		columns: []string{"object_type", "id", "resource_version"},
		texts:   []string{"object_type", "id"},
		numbers: []string{"resource_version"},
		keys:    []string{"id,object_type"},
		rowID:   true,
		harm:    "fencing tokens can repeat",
		other:   otherOwnTable,
	},
	{
		suffix:   objects.ClaimsSuffix,
		ofClaims: true,
		columns:  []string{"kind", "id", "session", "token"},
		texts:    []string{"kind", "id", "session"},
		numbers:  []string{"token"},
		keys:     []string{"id,kind"},
		rowID:    true,
		harm:     "two sessions can hold one key",
		other:    otherOwnTable,
	},
	{
		suffix:   objects.RequestsSuffix,
		ofClaims: true,
		columns:  []string{"session", "kind", "id", "token"},
		texts:    []string{"session", "kind", "id"},
		numbers:  []string{"token"},
		keys:     []string{"id,kind,session,token"},
		rowID:    true,
		harm:     "requests for keys can be forgotten",
		other:    otherOwnTable,
	},
}

const otherOwnTable = "drop or rename it, and call Migrate, which makes the right one"

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

// rowsQuerier is a *sql.DB or *sql.Tx.
type rowsQuerier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// inspect returns what is wrong with the tables of objects and of tombstones, and with those of
// claims. Of a table that is missing it says nothing: each statement that needs it does.
func (t *Table) inspect(ctx context.Context, conn rowsQuerier) (unfit, misclaimed error, err error) {
	wanted := make([]string, 0, len(ownTables))
	for _, own := range ownTables {
		wanted = append(wanted, t.name+own.suffix)
	}
	rows, err := conn.QueryContext(ctx, inspectTables, list(wanted))
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close()
	for i := 0; rows.Next(); i++ {
		var is tableState
		var columns, keys string
		if err := rows.Scan(&is.kind, &columns, &keys, &is.withoutRowID); err != nil {
			return nil, nil, err
		}
		if err := errors.Join(json.Unmarshal([]byte(columns), &is.columns), json.Unmarshal([]byte(keys), &is.keys)); err != nil {
			return nil, nil, err
		}
		for _, what := range ownTables[i].wrong(&is, wanted[i]) {
			what := fmt.Errorf("%w: %s", objects.ErrSetup, what)
			if ownTables[i].ofClaims {
				misclaimed = errors.Join(misclaimed, what)
			} else {
				unfit = errors.Join(unfit, what)
			}
		}
	}
	return unfit, misclaimed, rows.Err()
}

// tableState is what was found out about one of the tables.
type tableState struct {
	kind         sql.NullString    // NULL: there is no such table
	columns      map[string]string // declared types
	keys         []string
	withoutRowID bool
}

// wrong returns why promises cannot be kept on a table, with the remedies.
func (want *ownTable) wrong(is *tableState, name string) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	switch is.kind.String {
	case "":
		return nil
	case "view":
		say("%q is a view (drop it, or name the table behind it with Table)", name)
		return wrong
	}
	var lacks, misfits []string
	for _, c := range want.columns {
		declared, ok := is.columns[c]
		affinity := affinityOf(declared)
		switch {
		case !ok:
			lacks = append(lacks, c)
		case slices.Contains(want.texts, c) && affinity != "TEXT" && affinity != "":
			misfits = append(misfits, fmt.Sprintf("its column %s is %s, not TEXT", c, declared))
		case slices.Contains(want.numbers, c) && (affinity == "TEXT" || affinity == "REAL" && want.suffix != ""): // objects are checked at each write
			misfits = append(misfits, fmt.Sprintf("its column %s is %s, not INTEGER", c, declared))
		}
	}
	if len(lacks) > 0 {
		misfits = append(misfits, "it lacks the columns "+strings.Join(lacks, ", "))
	}
	if want.rowID && is.withoutRowID {
		misfits = append(misfits, "it is WITHOUT ROWID")
	}
	if len(misfits) > 0 {
		say("table %q does not fit: %s (%s)", name, strings.Join(misfits, "; "), want.other)
	}
	if len(wrong) == 0 && !slices.ContainsFunc(is.keys, func(k string) bool { return slices.Contains(want.keys, k) }) {
		say("table %q has no unique key on (%s): %s", name, strings.Join(want.keys, "), nor on ("), want.harm)
	}
	return wrong
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

// fit returns an error if the tables cannot be relied on. It looks at them until they can.
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
