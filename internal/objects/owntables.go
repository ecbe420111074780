package objects

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
)

// The tables as SQL. {objects}, {tombstones}, {claims}, {requests} and the indexes
// {tombstones_by_age}, {claims_by_session} and {claims_by_age} stand for quoted names. On SQLite
// these have a schema, except {tombstones_table} and {claims_table}.
var (
	//go:embed postgres_objects.sql
	PostgresObjects string

	//go:embed postgres_tombstones.sql
	PostgresTombstones string

	//go:embed postgres_claims.sql
	PostgresClaims string

	//go:embed sqlite.sql
	SQLite string

	//go:embed sqlite_claims.sql
	SQLiteClaims string
)

// Each other table is named after the table of objects, with one of these suffixes.
const (
	TombstonesSuffix = "_tombstones"
	ClaimsSuffix     = "_claims"
	RequestsSuffix   = "_requests"
)

// The library's tables, as indexes of [OwnTables].
const (
	TableOfObjects = iota
	TableOfTombstones
	TableOfClaims
	TableOfRequests
	TableCount
)

// OwnTable describes what one of the library's tables must be like.
type OwnTable struct {
	Suffix  string
	columns []ownColumn
	keys    [][]string // one of them must be unique
	Whole   bool       // statements find its rows by ctid or rowid, so it must be one table that has these
	harm    string     // what happens if it loses rows in a crash, or if its key is not unique
	other   string     // what to do if the table is another program's
}

type ownColumn struct {
	name string
	kind ColumnKind
}

// ColumnKind is what a column must be able to store.
type ColumnKind int

// The kinds of columns.
const (
	KeyText ColumnKind = iota // text that must stay as it is
	Token                     // a number that must stay as it is
	Text
	JSON
	Bytes
	Number // checked at each write
)

// OwnTables has the tables that the library's promises depend on. All requirements apply to each of them,
// so a new table needs only an entry here.
var OwnTables = [TableCount]OwnTable{
	TableOfObjects: {
		columns: []ownColumn{
			{"object_type", KeyText}, {"id", KeyText}, {"name", Text}, {"labels", JSON}, {"payload", Bytes},
			{"resource_version", Number}, {"created_at_ms", Number}, {"updated_at_ms", Number},
		},
		keys:  [][]string{{"object_type", "id"}, {"id"}},
		harm:  "two can hold one lease",
		other: OtherTable,
	},
	TableOfTombstones: {
		Suffix:  TombstonesSuffix,
		columns: []ownColumn{{"object_type", KeyText}, {"id", KeyText}, {"resource_version", Token}},
		keys:    [][]string{{"object_type", "id"}},
		Whole:   true,
		harm:    "fencing tokens can repeat",
		other:   otherOwnTable,
	},
	TableOfClaims: {
		Suffix:  ClaimsSuffix,
		columns: []ownColumn{{"kind", KeyText}, {"id", KeyText}, {"session", KeyText}, {"token", Token}},
		keys:    [][]string{{"kind", "id"}},
		Whole:   true,
		harm:    "two sessions can hold one key",
		other:   otherClaimsTable,
	},
	TableOfRequests: {
		Suffix:  RequestsSuffix,
		columns: []ownColumn{{"session", KeyText}, {"kind", KeyText}, {"id", KeyText}, {"token", Token}},
		keys:    [][]string{{"session", "kind", "id", "token"}},
		Whole:   true,
		harm:    "requests for keys can be forgotten",
		other:   otherClaimsTable,
	},
}

// OtherTable is the remedy for a table that does not fit because it is another program's.
const OtherTable = "if it is another program's table, choose another name with Table or Schema, or with the command's --table or --schema"

const (
	otherOwnTable    = "drop or rename it, and call Migrate, which creates the right one"
	otherClaimsTable = "drop or rename it, and call claims.Migrate, which creates the right one"
)

// FoundTable describes one of the library's tables as a database has it.
type FoundTable struct {
	Name    string            // quoted
	Columns map[string]string // their declared types
	Keys    [][]string        // columns of unique indexes that cover all rows and are checked at once
	NoTable bool              // it is a view, or something else
	Misfits []string          // why it does not fit, for reasons that only this database knows
	Wrong   []string          // what else is wrong with it, with the remedies; {harm} stands for the consequence
}

// Wrong returns why promises cannot be kept on a table, with the remedies. mustBe returns the type that a
// column must have, or "" if its declared type fits.
func (want *OwnTable) Wrong(is FoundTable, mustBe func(kind ColumnKind, declared string) string) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	if is.NoTable {
		say("%s is a view, or something else that is not a table (drop it, or configure the name of the table behind it)", is.Name)
		return wrong
	}
	for _, what := range is.Wrong {
		say("%s", strings.ReplaceAll(what, "{harm}", want.harm))
	}
	var lacks, misfits []string
	for _, c := range want.columns {
		if declared, ok := is.Columns[c.name]; !ok {
			lacks = append(lacks, c.name)
		} else if must := mustBe(c.kind, declared); must != "" {
			misfits = append(misfits, fmt.Sprintf("its column %s is %s, not %s", c.name, declared, must))
		}
	}
	if len(lacks) > 0 {
		misfits = append(misfits, "it lacks the columns "+strings.Join(lacks, ", "))
	}
	if misfits = append(misfits, is.Misfits...); len(misfits) > 0 {
		say("table %s does not fit: %s (%s)", is.Name, strings.Join(misfits, "; "), want.other)
	}
	unique := slices.ContainsFunc(is.Keys, func(found []string) bool {
		return slices.ContainsFunc(want.keys, func(key []string) bool { return SameColumns(found, key) })
	})
	if len(wrong) == 0 && !unique {
		var keys []string
		for _, key := range want.keys {
			keys = append(keys, "("+strings.Join(key, ", ")+")")
		}
		say("table %s has no unique key on %s: %s (it must be valid, not DEFERRABLE and without WHERE)", is.Name, strings.Join(keys, ", nor on "), want.harm)
	}
	return wrong
}

// SameColumns reports whether two lists name the same columns, in any order.
func SameColumns(a, b []string) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(c string) bool { return !slices.Contains(b, c) })
}
