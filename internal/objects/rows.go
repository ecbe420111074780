package objects

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// RowsConfig is the part of claims.QueueConfig from which statements are made, with its defaults.
type RowsConfig struct {
	Schema, Table                   string
	ID, Session, Token              string // columns
	Attempts, NotBefore, Requested  string // columns that may be missing
	Expires, Limit                  string // columns that may be missing
	Ready, OrderBy, Done, Exhausted string // SQL
	Taken, Released, Canceled       string // SQL
	PerKey                          string // a column that may be missing
	ReadOnly                        bool   // the table is only read, so the privilege to write is not needed

	KeyLimit int // at most this many rows with the same value in PerKey are claimed at once

	MaxAttempts int // of a row whose Limit is NULL
	LostBackoff time.Duration
}

// Freed returns the part of the config that decides what becomes of a freed row whose work has not ended.
func (cfg RowsConfig) Freed() RowsConfig {
	cfg.Limit, cfg.Ready, cfg.OrderBy, cfg.Done, cfg.Exhausted, cfg.Taken, cfg.MaxAttempts = "", "", "", "", "", "", 0
	cfg.PerKey, cfg.KeyLimit = "", 0
	return cfg
}

// Taking says which rows a statement takes for a session.
type Taking struct {
	Session    string
	N          int      // at most this many
	Skip, Only []string // IDs; a nil Only is all rows
	Filter

	// Looking makes Ready only look: it locks no row, so that no statement that takes rows at that moment skips any because of
	// it, and returns rows, too, that other transactions have locked. In the same look it sees whether claims have expired.
	Looking bool

	// Remote is set if this process doesn't know whether the session still has a record. If it has no
	// record, the statement takes nothing and fails with [ErrEnded]. The claims expire after Lasts.
	Remote bool
	Lasts  time.Duration
}

// Sight is what a look for ready rows has found.
type Sight struct {
	IDs     []string
	Expired bool // there is a row whose claim has expired; only [Taking.Looking] asks for that
}

// Filter is a further condition for the rows to take. Its arguments are $1, $2, …
type Filter struct {
	Where string // SQL; empty: there is none
	Args  []any
}

// parameter finds the parameters in SQL. It also matches strings, names and comments, which may
// contain the text of one.
var parameter = regexp.MustCompile(`(?s)'[^']*'|"[^"]*"|--[^\n]*|/\*.*?\*/|\$(\d+)`)

// In returns the filter for a statement that has n parameters of its own, marked with SQLite's or
// Postgres's mark. It fails unless the filter uses exactly the arguments that it has.
func (f Filter) In(mark string, n int) (sql string, err error) {
	used := make(map[int]bool)
	sql = parameter.ReplaceAllStringFunc(f.Where, func(found string) string {
		if found[0] != '$' {
			return found
		}
		i, _ := strconv.Atoi(found[1:])
		used[i] = true
		return mark + strconv.Itoa(n+i)
	})
	ok := len(used) == len(f.Args)
	for i := range used {
		ok = ok && 1 <= i && i <= len(f.Args)
	}
	switch {
	case !ok:
		return "", fmt.Errorf("%w: Where must use each of its %d arguments, $1 and so on, and no other: %q", ErrInvalid, len(f.Args), f.Where)
	case sql == "":
		return "", nil
	}
	return " AND (" + line(sql) + ")", ValidText("Where", sql)
}

// Ending is what a statement does with rows whose claims end, in addition to freeing them.
type Ending struct {
	Done, Exhausted bool          // sets what the config says
	After           time.Duration // keeps them from being taken for this long
	Unused          bool          // takes back the attempts that were counted
	Extend          bool          // frees nothing: the claims expire after After, unless they would expire later

	// All says that none of the rows is freed if one of the claims has ended.
	All bool

	// Unlocked says that only unlocked rows are freed. It leaves the claims on rows that another
	// transaction has locked.
	Unlocked bool
}

// Set returns what the statement assigns, with words of [RowsConfig.Words]. after is the time at which
// After has passed.
func (how Ending) Set(after string) string {
	switch {
	case how.Extend:
		return "{expires} = CASE WHEN {expires} > " + after + " THEN {expires} ELSE " + after + " END"
	case how.Done:
		return "{session} = NULL{unexpired}{done}"
	case how.Exhausted:
		return "{session} = NULL{unexpired}{exhausted}"
	case how.After > 0:
		return "{session} = NULL{unexpired}, {not_before} = " + after + "{released}"
	}
	return Freeing{Unused: how.Unused}.Set()
}

// Timed reports whether After is an argument of the statement.
func (how Ending) Timed() bool { return how.After > 0 && !how.Done && !how.Exhausted }

// Freeing says why rows are freed although their work has not ended. At most one field is set.
type Freeing struct {
	Unused bool // no worker has worked on them, or one was stopped through no fault of theirs: the attempts that were counted are taken back
	Lost   bool // their owner is gone, so they rest for as long as the config says
}

// Set returns what the statement assigns, with words of [RowsConfig.Words].
func (how Freeing) Set() string {
	switch {
	case how.Unused:
		return "{session} = NULL{unexpired}{uncount}{released}"
	case how.Lost:
		return "{session} = NULL{unexpired}{rest}{released}"
	}
	return "{session} = NULL{unexpired}{released}"
}

// OfCanceled returns the text of a statement that frees rows, for those that are canceled: it sets nothing else in them.
func OfCanceled(text string) string {
	return strings.NewReplacer("{uncanceled}", "{canceled}", "{set}", "{session} = NULL{unexpired}").Replace(text)
}

// RowsTable is a user's table, in either database, with claims on its rows. The kind of the claims is the
// name of the table.
type RowsTable interface {
	ClaimStore

	// Check returns an [ErrSetup] that names everything that is wrong with the table.
	Check(ctx context.Context, limit time.Duration) error
	// TakeReady makes a session the owner of rows that are ready, in their order. It leaves locked rows.
	TakeReady(ctx context.Context, take Taking, limit time.Duration) ([]Claim, error)
	// Ready looks for the rows that TakeReady would take.
	Ready(ctx context.Context, take Taking, limit time.Duration) (Sight, error)
	// Move makes a session the owner of another's row, if the claim on it is the one that was seen, and counts no attempt.
	// It leaves a row that is canceled, or that another transaction has locked.
	Move(ctx context.Context, session string, seen Claim, limit time.Duration) ([]Claim, error)
	// List returns the claims on at most n rows, in the order of their IDs, beginning after the
	// given ID.
	List(ctx context.Context, after string, n int, limit time.Duration) ([]Claim, error)
	// End frees rows, and returns the claims that had ended before.
	End(ctx context.Context, how Ending, claims []Claim, limit time.Duration) (lost []Claim, err error)
	// Expired returns the IDs of at most n rows whose claims have expired.
	Expired(ctx context.Context, n int, limit time.Duration) ([]string, error)
	// Canceled returns at most n rows of a session that are canceled, in the order of their IDs, after a given one.
	Canceled(ctx context.Context, session, afterID string, n int, limit time.Duration) ([]Claim, error)
	// FreeCanceled frees the canceled rows among those whose claims stand, and returns their claims.
	FreeCanceled(ctx context.Context, claims []Claim, limit time.Duration) ([]Claim, error)
	// FreeExpired frees those of the rows whose claims have expired, and returns how many it has freed.
	FreeExpired(ctx context.Context, ids []string, limit time.Duration) (int, error)
	// EndStatement returns a statement that ends a claim as Done says, or fails.
	EndStatement(claim Claim) (query string, args []any, err error)
}

// ErrEnded rolls back a transaction because a claim, or the session for which rows are taken, has
// ended.
var ErrEnded = errors.New("a claim has ended")

// Subtract returns the claims that are not in ended.
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
	Back     string // one less than the attempts {}, but not less than 0
	Ready    string // a further condition of a ready row

	Lasts string // the parameter of a statement that takes rows, for how long their claims stand, in microseconds

	// In returns the time at which a duration will have passed. us is SQL, in microseconds.
	In func(us string) string
	// Rest returns the duration for which a row with the attempts {} rests: first, doubled with each
	// further attempt, but not more than most, and up to a quarter less, at random.
	Rest func(first, most time.Duration) string
}

// Words returns the replacements of words in the texts of statements: names, and the user's SQL.
func (cfg RowsConfig) Words(d RowsDialect) []string {
	assign := func(sql string) string {
		if sql == "" {
			return ""
		}
		return ", " + line(sql)
	}
	ready, attempts, count, uncount, rest := "", "0", "", "", ""
	if cfg.Ready != "" {
		ready += " AND (" + line(cfg.Ready) + ")"
	}
	canceled, uncanceled := "", ""
	if cfg.Canceled != "" {
		// With IS TRUE, no index on the application's columns finds all rows that were ever canceled.
		canceled, uncanceled = " AND ("+line(cfg.Canceled)+") IS TRUE", " AND ("+line(cfg.Canceled)+") IS NOT TRUE"
		ready += uncanceled
	}
	andReadyWhenDue := ready
	notBefore := Quoted(cfg.NotBefore)
	if cfg.NotBefore != "" {
		ready += " AND (" + notBefore + " IS NULL OR " + notBefore + " <= " + d.Now + ")"
	}
	if cfg.Attempts != "" {
		attempts = strings.ReplaceAll(d.Attempts, "{}", Quoted(cfg.Attempts))
		count = ", " + Quoted(cfg.Attempts) + " = " + strings.ReplaceAll(d.Next, "{}", attempts)
		uncount = ", " + Quoted(cfg.Attempts) + " = " + strings.ReplaceAll(d.Back, "{}", attempts)
	}
	if cfg.LostBackoff > 0 {
		rest = ", " + notBefore + " = " + d.In(strings.ReplaceAll(d.Rest(cfg.LostBackoff, 10*cfg.LostBackoff), "{}", attempts))
	}
	if cfg.Limit != "" { // see [RowsConfig.Counted]
		most := Quoted(cfg.Limit)
		if cfg.MaxAttempts > 0 {
			most = fmt.Sprintf("coalesce(%s, %d)", most, cfg.MaxAttempts)
		}
		attempts = strings.NewReplacer("{}", attempts, "{most}", most).Replace("CASE WHEN {} < 0 THEN 0 WHEN {} > {most} THEN -{} ELSE {} END")
	}
	taken := assign(cfg.Taken)
	count += taken
	countFor := count
	unexpired := ""
	if cfg.Expires != "" { // also when a row is freed: a worker whose config lacks the column may take it next
		unexpired = ", " + Quoted(cfg.Expires) + " = NULL"
		count += unexpired
		taken += unexpired
		countFor += ", " + Quoted(cfg.Expires) + " = " + d.In(d.Lasts)
	}
	order := Quoted(cfg.ID)
	if cfg.OrderBy != "" {
		order = line(cfg.OrderBy)
	}
	return []string{
		"{id}", Quoted(cfg.ID), "{session}", Quoted(cfg.Session), "{token}", Quoted(cfg.Token), "{not_before}", notBefore, "{requested}", Quoted(cfg.Requested),
		"{attempts}", attempts, "{count}", count, "{and_ready}", ready + d.Ready, "{and_ready_when_due}", andReadyWhenDue, "{order}", order,
		"{done}", assign(cfg.Done), "{exhausted}", assign(cfg.Exhausted), "{canceled}", canceled, "{uncanceled}", uncanceled,
		"{count_for}", countFor, "{taken}", taken, "{uncount}", uncount, "{rest}", rest, "{released}", assign(cfg.Released), "{expires}", Quoted(cfg.Expires), "{unexpired}", unexpired,
		"{key}", Quoted(cfg.PerKey), "{key_limit}", strconv.Itoa(cfg.KeyLimit),
	}
}

// Counted notes in a claim that was read whether its row has an attempt left. If rows have limits of their
// own, statements return the attempts of a row above its limit as a negative number.
func (cfg RowsConfig) Counted(c *Claim) {
	c.Exhausted = cfg.MaxAttempts > 0 && c.Attempts > cfg.MaxAttempts
	if cfg.Limit != "" {
		c.Exhausted, c.Attempts = c.Attempts < 0, max(c.Attempts, -c.Attempts)
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

// MoreIndexes returns the statements that create the index of rows that are due later, that of expiring claims, and the
// indexes by PerKey; empty: none is needed.
func (cfg RowsConfig) MoreIndexes(table string, name func(suffix string) string) (ddl string) {
	if due := cfg.DueIndex(table, name); due != "" {
		ddl += due + ";\n"
	}
	if cfg.Expires != "" {
		ddl += fmt.Sprintf("CREATE INDEX IF NOT EXISTS %s ON %s (%s) WHERE %[3]s IS NOT NULL AND %s IS NOT NULL;\n",
			name("_expires"), table, Quoted(cfg.Expires), Quoted(cfg.Session))
	}
	if cfg.PerKey != "" {
		byKey := cfg
		byKey.OrderBy = Quoted(cfg.PerKey) + ", " + cmp.Or(cfg.OrderBy, Quoted(cfg.ID))
		_, ready := byKey.Indexes(table, func(suffix string) string { return name(suffix + "_per_key") })
		ddl += cfg.PerKeyIndex(table, name) + ";\n" + ready + ";\n"
	}
	return ddl
}

// DueIndex returns the statement that creates the index of rows that are due later; empty: none is needed.
func (cfg RowsConfig) DueIndex(table string, name func(suffix string) string) (ddl string) {
	if first, _, _ := strings.Cut(cfg.OrderBy, ","); cfg.NotBefore != "" && strings.Trim(first, ` "`) != cfg.NotBefore {
		byTime := cfg
		byTime.OrderBy = Quoted(cfg.NotBefore)
		_, ddl = byTime.Indexes(table, func(string) string { return name("_due") })
	}
	return ddl
}

// NoDueIndex is logged with the statement that creates the index if a table lacks it. The table can be used all the same.
const NoDueIndex = "no index finds the rows of the table that are due later; each look for rows reads all of them: create the index"

// PerKeyIndex returns the statement that creates the index of claimed rows by PerKey.
func (cfg RowsConfig) PerKeyIndex(table string, name func(suffix string) string) string {
	return fmt.Sprintf("CREATE INDEX IF NOT EXISTS %s ON %s (%s) WHERE %s IS NOT NULL", name("_claimed_per_key"), table, Quoted(cfg.PerKey), Quoted(cfg.Session))
}

// FoundRows describes a user's table as found in a database.
type FoundRows struct {
	Types     map[string]string // of its columns
	NotNull   []string          // columns
	Unique    bool              // the ID identifies a row
	BySession bool              // an index finds the rows of a session
	PerKey    bool              // an index finds the claimed rows with a value in the column PerKey
	Wrong     []string          // what else is wrong with it
}

// RowsTypes has the types that the columns of a user's table may have.
type RowsTypes struct{ ID, Session, Token, Attempts, NotBefore []string }

// Wrong returns why a table can't have claims on its rows. ddl adds what is missing, bySession creates the index on the
// session, and perKey that of PerKey.
func (cfg RowsConfig) Wrong(is FoundRows, may RowsTypes, ddl, bySession, perKey string) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	missing := false
	for _, c := range []struct {
		name, what string
		types      []string
	}{
		{cfg.ID, "ID", may.ID}, {cfg.Session, "session", may.Session}, {cfg.Token, "token", may.Token},
		{cfg.Attempts, "attempts", may.Attempts}, {cfg.NotBefore, "time before which a row is not ready", may.NotBefore},
		{cfg.Requested, "requested token", may.Token},
		{cfg.Expires, "time at which a claim expires", may.NotBefore}, {cfg.Limit, "most attempts", may.Attempts},
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
	if cfg.PerKey != "" {
		switch declared, exists := is.Types[cfg.PerKey]; {
		case !exists:
			say("column %q for PerKey is missing (it is one of your own)", cfg.PerKey)
		case !slices.Contains(may.ID, declared):
			say("column %q for PerKey is of type %q (it must be %s)", cfg.PerKey, declared, strings.Join(may.ID, " or "))
		case !slices.Contains(is.NotNull, cfg.PerKey):
			say("column %q for PerKey may be NULL, and such rows would never be taken (make it NOT NULL)", cfg.PerKey)
		case !missing && !is.PerKey:
			say("no index finds the claimed rows with a value of column %q (%s)", cfg.PerKey, perKey)
		}
	}
	wrong = append(wrong, is.Wrong...)
	if missing {
		say("this adds what is missing:\n%s", ddl)
	}
	return wrong
}

// RefusedRows returns an [ErrSetup] that says what is wrong with a user's table, or nil if nothing is.
func RefusedRows(table string, wrong []string) error {
	if len(wrong) == 0 {
		return nil
	}
	return SetupError(fmt.Errorf("%w: table %s can't have claims on its rows: %s", ErrSetup, table, strings.Join(wrong, "; ")))
}
