package objects

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// RowsConfig is the part of claims.QueueConfig that statements are made of, with its defaults.
type RowsConfig struct {
	Schema, Table                   string
	ID, Session, Token              string // columns
	Attempts, NotBefore, Requested  string // columns that may be missing
	Ready, OrderBy, Done, Exhausted string // SQL
	ReadOnly                        bool   // the table is only read, so the privilege to write is not needed
}

// Ending is what a statement does with rows whose claims end, in addition to freeing them.
type Ending struct {
	Done, Exhausted bool          // sets what the config says
	After           time.Duration // keeps them from being taken for so long

	// All frees none of the rows if one of the claims has ended.
	All bool

	// Unlocked leaves rows that another transaction has locked. Their claims are not ended.
	Unlocked bool
}

// Set returns what the statement assigns in addition to the session: a word of [RowsConfig.Words], or
// after if only After is set.
func (how Ending) Set(after string) string {
	switch {
	case how.Done:
		return "{done}"
	case how.Exhausted:
		return "{exhausted}"
	case how.After > 0:
		return after
	}
	return ""
}

// RowsTable is a table of the user, in either database, with claims on its rows. The kind of the claims is
// the name of the table.
type RowsTable interface {
	ClaimStore

	// Check returns an [ErrSetup] that names everything that is wrong with the table.
	Check(ctx context.Context, limit time.Duration) error
	// TakeReady makes a session the owner of at most n rows that are ready, in their order,
	// except those to skip; of the rows in only, if that is not nil. It leaves locked rows.
	TakeReady(ctx context.Context, session string, n int, skip, only []string, limit time.Duration) ([]Claim, error)
	// Ready returns the IDs of the rows that TakeReady would take.
	Ready(ctx context.Context, n int, skip []string, limit time.Duration) ([]string, error)
	// List returns the claims on at most n rows in the order of their IDs, those after an ID.
	List(ctx context.Context, after string, n int, limit time.Duration) ([]Claim, error)
	// End frees rows, and returns the claims that had ended before.
	End(ctx context.Context, how Ending, claims []Claim, limit time.Duration) (lost []Claim, err error)
	// EndStatement returns a statement that ends a claim as Done says, or fails.
	EndStatement(claim Claim) (query string, args []any, err error)
}

// ErrEnded rolls a transaction back because a claim has ended.
var ErrEnded = errors.New("a claim has ended")

// Subtract returns the claims that are not among the ended ones.
func Subtract(claims, ended []Claim) (lost []Claim) {
	if len(claims) == len(ended) {
		return nil
	}
	type row struct {
		id    string
		token int64
	}
	among := make(map[row]bool, len(ended))
	for _, c := range ended {
		among[row{c.ID, c.Token}] = true
	}
	for _, c := range claims {
		if !among[row{c.ID, c.Token}] {
			lost = append(lost, c)
		}
	}
	return lost
}

// RowsDialect is the SQL in which databases differ.
type RowsDialect struct {
	Now      string // the current time, to compare with the column NotBefore
	Attempts string // the number of attempts in the column {}, whatever that contains
	Next     string // one more than the attempts {}, without overflow
	Ready    string // a further condition of a ready row
}

// Words returns the replacements of words in the texts of statements: names, and the user's SQL.
func (cfg RowsConfig) Words(d RowsDialect) []string {
	assign := func(sql string) string {
		if sql == "" {
			return ""
		}
		return ", " + line(sql)
	}
	ready, attempts, count := "", "0", ""
	if cfg.Ready != "" {
		ready += " AND (" + line(cfg.Ready) + ")"
	}
	notBefore := Quoted(cfg.NotBefore)
	if cfg.NotBefore != "" {
		ready += " AND (" + notBefore + " IS NULL OR " + notBefore + " <= " + d.Now + ")"
	}
	if cfg.Attempts != "" {
		attempts = strings.ReplaceAll(d.Attempts, "{}", Quoted(cfg.Attempts))
		count = ", " + Quoted(cfg.Attempts) + " = " + strings.ReplaceAll(d.Next, "{}", attempts)
	}
	order := Quoted(cfg.ID)
	if cfg.OrderBy != "" {
		order = line(cfg.OrderBy)
	}
	return []string{
		"{id}", Quoted(cfg.ID), "{session}", Quoted(cfg.Session), "{token}", Quoted(cfg.Token), "{not_before}", notBefore, "{requested}", Quoted(cfg.Requested),
		"{attempts}", attempts, "{count}", count, "{and_ready}", ready + d.Ready, "{order}", order,
		"{done}", assign(cfg.Done), "{exhausted}", assign(cfg.Exhausted),
	}
}

// line ends the user's SQL, which may end in a comment.
func line(sql string) string { return sql + "\n" }

// Indexes returns the statements that create the indexes of a table, whose name is quoted. name returns the
// quoted name of an index with a suffix.
func (cfg RowsConfig) Indexes(table string, name func(suffix string) string) (bySession, ready string) {
	commented := func(sql string) string {
		if strings.Contains(sql, "--") {
			return line(sql)
		}
		return sql
	}
	where := ""
	if cfg.Ready != "" {
		where = " AND (" + commented(cfg.Ready) + ")"
	}
	session := Quoted(cfg.Session)
	return fmt.Sprintf("CREATE INDEX IF NOT EXISTS %s ON %s (%s, %s) WHERE %[3]s IS NOT NULL", name("_by_session"), table, session, Quoted(cfg.ID)),
		"-- If Ready depends on the time, leave that part of it out here.\n" +
			fmt.Sprintf("CREATE INDEX IF NOT EXISTS %s ON %s (%s) WHERE %s IS NULL%s",
				name("_ready"), table, commented(cmp.Or(cfg.OrderBy, Quoted(cfg.ID))), session, where)
}

// FoundRows describes a table of the user as a database has it.
type FoundRows struct {
	Types     map[string]string // of its columns
	NotNull   []string          // columns
	Unique    bool              // the ID identifies a row
	BySession bool              // an index finds the rows of a session
	Wrong     []string          // what else is wrong with it
}

// RowsTypes are the types that the columns of a table of the user may have.
type RowsTypes struct{ ID, Session, Token, Attempts, NotBefore []string }

// Wrong returns why a table can't have claims on its rows. ddl adds what is missing, and bySession creates
// the index on the session.
func (cfg RowsConfig) Wrong(is FoundRows, may RowsTypes, ddl, bySession string) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	missing := false
	for _, c := range []struct {
		name, what string
		types      []string
	}{
		{cfg.ID, "ID", may.ID}, {cfg.Session, "session", may.Session}, {cfg.Token, "token", may.Token},
		{cfg.Attempts, "attempts", may.Attempts}, {cfg.NotBefore, "time before which a row is not ready", may.NotBefore},
		{cfg.Requested, "requested token", may.Token},
	} {
		switch declared, exists := is.Types[c.name]; {
		case c.name == "":
		case !exists:
			missing = true
			say("column %q for the %s is missing", c.name, c.what)
		case !slices.Contains(c.types, declared):
			say("column %q for the %s is of type %q (it must be %s)", c.name, c.what, declared, strings.Join(c.types, " or "))
		}
	}
	if !missing && !is.Unique {
		say("column %q does not identify a row (it must be the primary key, or NOT NULL and alone in a unique index)", cfg.ID)
	}
	if !missing && slices.Contains(is.NotNull, cfg.Session) {
		say("column %q is NOT NULL (NULL is a free row: drop NOT NULL)", cfg.Session)
	}
	if !missing && !is.BySession {
		say("no index finds the rows of a session (%s)", bySession)
	}
	wrong = append(wrong, is.Wrong...)
	if missing {
		say("this adds what is missing:\n%s", ddl)
	}
	return wrong
}

// RefusedRows returns an [ErrSetup] that says what is wrong with a table of the user; nil if nothing is.
func RefusedRows(table string, wrong []string) error {
	if len(wrong) == 0 {
		return nil
	}
	return SetupError(fmt.Errorf("%w: table %s can't have claims on its rows: %s", ErrSetup, table, strings.Join(wrong, "; ")))
}
