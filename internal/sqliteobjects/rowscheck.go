package sqliteobjects

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// RowsDDL returns what a table lacks for claims on its rows.
func RowsDDL(cfg objects.RowsConfig) string {
	n := rowNames(cfg)
	add := func(column, definition string) string {
		return n.Replace("ALTER TABLE {rows_table} ADD COLUMN ") + quoted(column) + " " + definition + ";\n"
	}
	ddl := add(cfg.Session, "TEXT") + add(cfg.Token, "INTEGER NOT NULL DEFAULT 0")
	if cfg.Attempts != "" {
		ddl += add(cfg.Attempts, "INTEGER NOT NULL DEFAULT 0")
	}
	if cfg.NotBefore != "" {
		ddl += add(cfg.NotBefore, "INTEGER")
	}
	ready := ""
	if cfg.Ready != "" {
		ready = " AND (" + objects.Commented(cfg.Ready) + ")"
	}
	return ddl + bySession(cfg) + ";\n-- If Ready depends on the time, leave that part of it out here.\n" +
		"CREATE INDEX IF NOT EXISTS " + quoted(cfg.Table+"_ready") + n.Replace(" ON {rows_table} (") + objects.Commented(strings.TrimSuffix(n.Replace("{order}"), "\n")) +
		n.Replace(") WHERE {session} IS NULL") + ready + ";\n"
}

func bySession(cfg objects.RowsConfig) string {
	return "CREATE INDEX IF NOT EXISTS " + quoted(cfg.Table+"_by_session") + rowNames(cfg).Replace(" ON {rows_table} ({session}, {id}) WHERE {session} IS NOT NULL")
}

// rowColumn is a column of a table of the user.
type rowColumn struct {
	affinity string
	notNull  bool
	alone    bool // it is the primary key
}

// rowKey is an index of such a table.
type rowKey struct {
	unique    bool
	columns   []string
	predicate string
}

// Check returns an [objects.ErrSetup] that names everything that is wrong with the table.
func (r *Rows) Check(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	wrong, err := r.wrong(ctx)
	if err != nil {
		return explain(err)
	}
	if len(wrong) > 0 {
		return objects.SetupError(fmt.Errorf("%w: table %q can't have claims on its rows: %s", objects.ErrSetup, r.cfg.Table, strings.Join(wrong, "; ")))
	}
	for _, part := range []struct{ what, sql string }{{"Ready and OrderBy", r.sql.ready}, {"Done", r.sql.done}, {"Exhausted", r.sql.exhausted}} {
		statement, err := r.claims.table.db.PrepareContext(ctx, part.sql)
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
	columns, keys, err := r.inspect(ctx)
	if err != nil {
		return nil, err
	}
	missing := false
	column := func(name, what string, affinities ...string) {
		if name == "" {
			return
		}
		is, exists := columns[name]
		if !exists {
			missing = true
			wrong = append(wrong, fmt.Sprintf("column %q for the %s is missing", name, what))
			return
		}
		for _, affinity := range affinities {
			if is.affinity == affinity {
				return
			}
		}
		wrong = append(wrong, fmt.Sprintf("column %q for the %s has another type (it must be %s)", name, what, strings.Join(affinities, " or ")))
	}
	column(cfg.ID, "ID", "TEXT", "INTEGER")
	column(cfg.Session, "session", "TEXT")
	column(cfg.Token, "token", "INTEGER")
	column(cfg.Attempts, "attempts", "INTEGER")
	column(cfg.NotBefore, "time before which a row is not ready", "INTEGER")
	if missing {
		return append(wrong, "this adds what is missing:\n"+RowsDDL(cfg)), nil
	}
	unique, indexed := columns[cfg.ID].alone, false
	ownedOnly := regexp.MustCompile(`(?i)^"?` + regexp.QuoteMeta(cfg.Session) + `"?\s+IS\s+NOT\s+NULL$`)
	for _, k := range keys {
		unique = unique || k.unique && k.predicate == "" && len(k.columns) == 1 && k.columns[0] == cfg.ID && columns[cfg.ID].notNull
		indexed = indexed || len(k.columns) >= 2 && k.columns[0] == cfg.Session && k.columns[1] == cfg.ID && (k.predicate == "" || ownedOnly.MatchString(k.predicate))
	}
	if !unique {
		wrong = append(wrong, fmt.Sprintf("column %q does not identify a row (it must be the primary key, or NOT NULL and alone in a unique index)", cfg.ID))
	}
	if columns[cfg.Session].notNull {
		wrong = append(wrong, fmt.Sprintf("column %q is NOT NULL (NULL is a free row)", cfg.Session))
	}
	if !indexed {
		wrong = append(wrong, fmt.Sprintf("no index finds the rows of a session (%s)", bySession(cfg)))
	}
	return wrong, nil
}

func (r *Rows) inspect(ctx context.Context) (columns map[string]rowColumn, keys map[string]*rowKey, err error) {
	db := r.claims.table.db
	rows, err := db.QueryContext(ctx, `SELECT name, upper(type), "notnull", pk, (SELECT count(*) FROM pragma_table_info(?1, 'main') WHERE pk > 0) FROM pragma_table_info(?1, 'main')`, r.cfg.Table)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close()
	columns, keys = make(map[string]rowColumn), make(map[string]*rowKey)
	for rows.Next() {
		var name, declared string
		var notNull bool
		var pk, pks int
		if err := rows.Scan(&name, &declared, &notNull, &pk, &pks); err != nil {
			return nil, nil, err
		}
		affinity := affinityOf(declared)
		if affinity != "INTEGER" && affinity != "TEXT" {
			affinity = ""
		}
		columns[name] = rowColumn{affinity: affinity, notNull: notNull, alone: pk == 1 && pks == 1}
	}
	if err := rows.Err(); err != nil {
		return nil, nil, err
	}
	rows.Close() // it may be the only connection
	indexes, err := db.QueryContext(ctx, `
		SELECT l.name, l."unique", coalesce(i.name, ''), CASE WHEN l.partial THEN coalesce(s.sql, '') ELSE '' END
		FROM pragma_index_list(?1, 'main') l JOIN pragma_index_info(l.name, 'main') i LEFT JOIN main.sqlite_schema s ON s.name = l.name AND s.type = 'index'
		ORDER BY l.name, i.seqno`, r.cfg.Table)
	if err != nil {
		return nil, nil, err
	}
	defer indexes.Close()
	where := regexp.MustCompile(`(?is)\)\s*WHERE\s+(.*)$`)
	for indexes.Next() {
		var name, column, ddl string
		var unique bool
		if err := indexes.Scan(&name, &unique, &column, &ddl); err != nil {
			return nil, nil, err
		}
		k := keys[name]
		if k == nil {
			k = &rowKey{unique: unique}
			if found := where.FindStringSubmatch(ddl); found != nil {
				k.predicate = strings.TrimSpace(found[1])
			}
			keys[name] = k
		}
		k.columns = append(k.columns, column)
	}
	return columns, keys, indexes.Err()
}
