package claims

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
)

// QueueConfig configures a [Queue]. Table is required. The table must be in the store's database. The names
// of the table and its columns are quoted. Fields that contain SQL become part of statements as they are,
// so they must never come from user input.
type QueueConfig struct {
	// Schema is the table's schema on Postgres. Default: the one in which search_path finds the table when
	// rows are first used or checked, until that table is moved or dropped. All statements name it.
	Schema string
	Table  string

	// ID is a unique column of type text, uuid or an integer type. Default "id".
	ID string
	// Session is a column that names the session that owns the row; NULL if the row is free. Default "session".
	Session string
	// Token is a column of type bigint: the fencing token of the row's last claim. Default "token".
	Token string
	// Attempts is a column that counts how often the row was taken. Optional.
	Attempts string
	// NotBefore is a column with the earliest time at which the row may be taken; NULL: at once. On
	// Postgres it is a timestamptz, on SQLite an INTEGER of Unix milliseconds. Optional, but
	// [Queue.ReleaseAfter] needs it.
	NotBefore string
	// Requested is a column of type bigint with the token of the last claim whose release was requested.
	// Optional, but [Queue.RequestRelease] needs it.
	Requested string

	// Expires is a column with the time until which a claim of [Queue.TryTakeFor] stands. It is set to the
	// database's time plus [TakeOptions.Lasts], or else Deadline, and [Queue.Extend] sets it later. A row whose time has passed is freed
	// within two PollIntervals while a session with a [Worker] of the queue runs, or calls wait in AwaitReady. In rows
	// that a Worker takes it is NULL. The type is that of NotBefore. Optional; it needs Deadline.
	Expires string
	// Limit is a column with the row's own MaxAttempts; NULL: that of the config. Optional; it needs
	// Attempts.
	Limit string

	// PerKey limits how many rows with the same key are claimed at once, for example at most 2 per customer. Optional.
	PerKey PerKey

	// Ready is the SQL condition under which a free row may be taken, for example
	// "status = 'queued'". It is evaluated when a row is taken, not while the row is claimed. Default: always.
	Ready string
	// OrderBy is the SQL order in which rows are taken, for example "priority DESC, id".
	// Default: by ID.
	OrderBy string
	// Done is the SQL assignment that the Finish methods make in a row when they free it, for example
	// "status = 'done'". Optional.
	Done string
	// Taken is the SQL assignment that is made in a row when it is taken, for example
	// "status = 'running', seq = nextval('seqs')". Optional.
	Taken string
	// Released is the SQL assignment that is made in a row when it is freed without being finished, even when
	// its session is gone, for example "status = 'queued'". It must not set a column of this config. Optional.
	Released string
	// Canceled is the SQL condition under which the application has canceled a row, for example "status = 'canceled'".
	// Such a row is not ready. If it is claimed, neither Done, Exhausted nor Released is set in it: what ends its
	// claim frees it and says [ErrCanceled], and the func of [Worker.Do] is told to return within a PollInterval.
	// While a session has rows, it reads once per PollInterval which are canceled.
	//
	// It may only use the row's own columns, without a name of the table. Let Ready exclude such rows, too, so that the
	// index does. All processes need the same Canceled before the application cancels a row: others would queue it
	// again. Optional.
	Canceled string

	// MaxAttempts is how often workers may try a row. It needs Attempts, and either Exhausted or
	// OnExhausted. Default: any number of times. An attempt is taken back if its row is freed in an orderly
	// way: it is released, the session closes, the context of [Worker.Do] is canceled, or the func returns nil
	// without ending its claim. A func that returned an error of its own, panicked or was overdue has used its
	// attempt. [Queue.ReleaseAfter] uses it as well, and so does a session that is lost.
	MaxAttempts int
	// Exhausted is the SQL assignment that is made in a row that has no attempts left, for example "status = 'failed'":
	// when the func of the last one has failed in [Worker.Serve], or else, as after a crash, when the row is ready once
	// more, whose attempts are then MaxAttempts + 1.
	Exhausted string
	// OnExhausted is called with the claim of such a row. It finishes the claim as a worker does, so that
	// what it writes is written exactly once. If it does not finish the claim, the process that takes the
	// row next calls it again, after Backoff. A panic is logged and counts as an error.
	OnExhausted func(context.Context, Claim) error

	// LostBackoff is how long a row is held back after its session was lost or its claim has expired. It
	// doubles with each further attempt, up to ten times LostBackoff, and is up to a quarter shorter at random. It
	// needs NotBefore. Default: none.
	LostBackoff time.Duration

	// Deadline is the longest time that a claim of a [Worker] lasts, counted from just before it was taken. For
	// claims of [Queue.TryTakeFor] see Expires. At the deadline the func of [Worker.Do] is told to return, with
	// the cause [ErrOverdue]. A third of the session's TTL later, other sessions may take the row even if the func still
	// runs; its Finish is then refused. Default: no deadline.
	Deadline time.Duration

	// PollInterval is the longest time between two looks for ready rows. These looks find rows that were
	// added without [Queue.Wake], and rows that become ready because time passes. Default 1s.
	PollInterval time.Duration

	// Backoff returns how long a row is held back after its func has failed in [Worker.Serve]. It uses
	// NotBefore; without that column, the session keeps the row meanwhile, until its Deadline at most.
	// Default: 1s, doubled with each further attempt, at most 5 minutes. Without a column Attempts, Claim.Attempt is
	// here the number of times in a row that it has failed in this process.
	Backoff func(Claim) time.Duration

	Logger *slog.Logger // default slog.Default()
}

// PerKey limits the claims on rows with the same value in Column: no more than Limit are claimed at any moment,
// in all processes together. Rows with other values are taken meanwhile, in their order. The rows of a dead
// worker count until they are freed. All processes need the same Limit; with different ones, the greatest
// applies.
//
// Column is a column of the application. It must be NOT NULL, have one of the types that ID may have, and not
// change while the row is claimed. The table needs two more indexes, which [QueueConfig.PostgresDDL] and
// [QueueConfig.SQLiteDDL] contain. On Postgres, a statement that takes rows holds advisory locks with the keys
// hashtextextended(value, OID of the table) until it commits.
type PerKey struct {
	Column string
	Limit  int
}

func (cfg QueueConfig) withDefaults() QueueConfig {
	cfg.ID, cfg.Session, cfg.Token = cmp.Or(cfg.ID, "id"), cmp.Or(cfg.Session, "session"), cmp.Or(cfg.Token, "token")
	cfg.PollInterval = cmp.Or(cfg.PollInterval, time.Second)
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, slog.Default()))
	if cfg.Backoff == nil {
		cfg.Backoff = backoff
	}
	return cfg
}

func backoff(c Claim) time.Duration {
	return min(time.Second<<min(max(c.Attempt-1, 0), 10), 5*time.Minute)
}

// validate returns a [tenure.ErrInvalid] that names everything that is wrong with the config.
func (cfg QueueConfig) validate() error {
	var problems objects.Problems
	problems.If(cfg.Table == "", "Table is empty: name the table whose rows are claimed")
	used := make(map[string]string)
	for _, c := range []struct {
		what, text string
		isColumn   bool
	}{
		{"Schema", cfg.Schema, false}, {"Table", cfg.Table, false},
		{"ID", cfg.ID, true}, {"Session", cfg.Session, true}, {"Token", cfg.Token, true}, {"Attempts", cfg.Attempts, true}, {"NotBefore", cfg.NotBefore, true},
		{"Requested", cfg.Requested, true}, {"Expires", cfg.Expires, true}, {"Limit", cfg.Limit, true}, {"PerKey.Column", cfg.PerKey.Column, true},
		{"Ready", cfg.Ready, false}, {"OrderBy", cfg.OrderBy, false}, {"Done", cfg.Done, false}, {"Exhausted", cfg.Exhausted, false},
		{"Taken", cfg.Taken, false}, {"Released", cfg.Released, false}, {"Canceled", cfg.Canceled, false},
	} {
		problems.Add(objects.ValidText(c.what, c.text))
		if c.isColumn && c.text != "" {
			problems.If(used[c.text] != "", "%s and %s are both the column %q: each needs its own", used[c.text], c.what, c.text)
			used[c.text] = c.what
		}
	}
	exhausted := cfg.Exhausted != "" || cfg.OnExhausted != nil
	problems.If(cfg.MaxAttempts < 0, "MaxAttempts %d is negative", cfg.MaxAttempts)
	limited := cfg.MaxAttempts > 0 || cfg.Limit != ""
	problems.If(limited && cfg.Attempts == "", "MaxAttempts and Limit need the column that counts them: set Attempts")
	problems.If(limited && !exhausted, "MaxAttempts and Limit need to know what becomes of the row then: set Exhausted or OnExhausted")
	problems.If(!limited && exhausted, "Exhausted and OnExhausted need MaxAttempts or Limit")
	problems.If(cfg.Exhausted != "" && cfg.OnExhausted != nil, "Exhausted and OnExhausted are both set: one of them decides")
	problems.If(cfg.PerKey.Limit < 0, "PerKey.Limit %d is negative", cfg.PerKey.Limit)
	problems.If(cfg.PerKey.Limit > 0 && cfg.PerKey.Column == "", "PerKey.Limit needs the column whose values it counts: set PerKey.Column")
	problems.If(cfg.PerKey.Limit == 0 && cfg.PerKey.Column != "", "PerKey.Column needs to know how many rows may be claimed at once: set PerKey.Limit")
	problems.Duration("Deadline", cfg.Deadline)
	problems.If(cfg.Expires != "" && cfg.Deadline == 0, "Expires needs to know how long a claim lasts: set Deadline")
	problems.Duration("LostBackoff", cfg.LostBackoff)
	problems.If(cfg.LostBackoff > 0 && cfg.NotBefore == "", "LostBackoff needs a column that keeps the time: set NotBefore")
	problems.Duration("PollInterval", cfg.PollInterval)
	return problems.Err()
}

func (cfg QueueConfig) statements() objects.RowsConfig {
	return objects.RowsConfig{
		Schema: cfg.Schema, Table: cfg.Table, ID: cfg.ID, Session: cfg.Session, Token: cfg.Token, Attempts: cfg.Attempts, NotBefore: cfg.NotBefore, Requested: cfg.Requested,
		Ready: cfg.Ready, OrderBy: cfg.OrderBy, Done: cfg.Done, Exhausted: cfg.Exhausted,
		Expires: cfg.Expires, Limit: cfg.Limit, Taken: cfg.Taken, Released: cfg.Released, Canceled: cfg.Canceled,
		PerKey: cfg.PerKey.Column, KeyLimit: cfg.PerKey.Limit,
		MaxAttempts: cfg.MaxAttempts, LostBackoff: cfg.LostBackoff,
	}
}

// PostgresDDL returns the statements that add the columns and the partial indexes to the table on Postgres, for
// a migration. Ready becomes part of an index, so it must not depend on the time. A [tenure.ErrInvalid] names
// everything that is wrong with the config.
func (cfg QueueConfig) PostgresDDL() (string, error) {
	return cfg.ddl(pgobjects.RowsDDL)
}

// SQLiteDDL is PostgresDDL for SQLite.
func (cfg QueueConfig) SQLiteDDL() (string, error) {
	return cfg.ddl(sqliteobjects.RowsDDL)
}

func (cfg QueueConfig) ddl(of func(objects.RowsConfig) string) (string, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return "", opError("queue", err)
	}
	return of(cfg.statements()), nil
}
