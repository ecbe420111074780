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

// QueueConfig configures a [Queue]. Table is required. Names are those of the table and its columns, which
// are quoted; what is said to be SQL is the caller's, and becomes part of statements as it is, so it must never come from a user's
// input. The table must be in the store's database.
type QueueConfig struct {
	Schema string // on Postgres; empty: search_path finds the table
	Table  string

	// ID is a unique column of type text, uuid or an integer type. Default "id".
	ID string
	// Session names the session that owns the row, NULL if the row is free. Default "session".
	Session string
	// Token is the fencing token of the row's last claim, of type bigint. Default "token".
	Token string
	// Attempts counts how often the row was taken. Optional.
	Attempts string
	// NotBefore is when the row may be taken at the earliest; NULL: at once. It is a timestamptz
	// on Postgres, and on SQLite an INTEGER of Unix milliseconds. Optional; [Queue.ReleaseAfter]
	// needs it.
	NotBefore string

	// Ready is the SQL condition on which a free row may be taken, for example
	// "status = 'queued'". Default: always.
	Ready string
	// OrderBy is the SQL order in which rows are taken, for example "priority DESC, id".
	// Default: by ID.
	OrderBy string
	// Done is what the Finish methods set in a row when they free it, in SQL: for example
	// "status = 'done'". Optional.
	Done string

	// MaxAttempts is how often a row is taken to be worked on. It is an error unless Attempts
	// and either Exhausted or OnExhausted are set. Default: any number of times.
	MaxAttempts int
	// Exhausted is what is set, in SQL, in a row that was taken MaxAttempts times without being
	// finished and would be taken again: for example "status = 'failed'".
	Exhausted string
	// OnExhausted is called with the claim of such a row, which it finishes as a worker does:
	// then what it writes is written exactly once. If it does not, it is called again after Backoff,
	// by whatever process takes the row next. A panic is logged, and counts as an error.
	OnExhausted func(context.Context, Claim) error

	// Deadline is the longest time that a claim of a [Worker] lasts, counted from before it was taken.
	// Then the func of [Worker.Do] is told to return, with the cause [ErrOverdue]; Grace later others
	// may take the row even if the func still runs, and a late Finish is refused. Default: as long as
	// the session lives.
	Deadline time.Duration
	// Grace is how long a func may still run after the Deadline. Default: a third of the session's TTL.
	Grace time.Duration

	// PollInterval is the longest time between two looks for rows that are ready. It is what
	// finds rows that were added without [Queue.Wake], or that become ready because time passes.
	// Default 1s.
	PollInterval time.Duration

	// Backoff is how long [Worker.Serve] keeps a row from being taken again after its func has
	// failed. It needs NotBefore. Default: 1s, and twice as long after each further attempt, at most 5 minutes.
	Backoff func(Claim) time.Duration

	Logger *slog.Logger // default slog.Default()
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

// validate returns an [tenure.ErrInvalid] that says everything that is wrong with the config.
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
		{"Ready", cfg.Ready, false}, {"OrderBy", cfg.OrderBy, false}, {"Done", cfg.Done, false}, {"Exhausted", cfg.Exhausted, false},
	} {
		problems.Add(objects.ValidText(c.what, c.text))
		if c.isColumn && c.text != "" {
			problems.If(used[c.text] != "", "%s and %s are both the column %q: each needs its own", used[c.text], c.what, c.text)
			used[c.text] = c.what
		}
	}
	exhausted := cfg.Exhausted != "" || cfg.OnExhausted != nil
	problems.If(cfg.MaxAttempts < 0, "MaxAttempts %d is negative", cfg.MaxAttempts)
	problems.If(cfg.MaxAttempts > 0 && cfg.Attempts == "", "MaxAttempts needs the column that counts them: set Attempts")
	problems.If(cfg.MaxAttempts > 0 && !exhausted, "MaxAttempts needs to know what becomes of the row then: set Exhausted or OnExhausted")
	problems.If(cfg.MaxAttempts == 0 && exhausted, "Exhausted and OnExhausted need MaxAttempts")
	problems.If(cfg.Exhausted != "" && cfg.OnExhausted != nil, "Exhausted and OnExhausted are both set: one of them decides")
	problems.If(cfg.Deadline < 0, "Deadline %v is negative", cfg.Deadline)
	problems.If(cfg.Grace < 0, "Grace %v is negative", cfg.Grace)
	problems.If(cfg.PollInterval < 0, "PollInterval %v is negative", cfg.PollInterval)
	return problems.Err()
}

func (cfg QueueConfig) statements() objects.RowsConfig {
	return objects.RowsConfig{
		Schema: cfg.Schema, Table: cfg.Table, ID: cfg.ID, Session: cfg.Session, Token: cfg.Token, Attempts: cfg.Attempts, NotBefore: cfg.NotBefore,
		Ready: cfg.Ready, OrderBy: cfg.OrderBy, Done: cfg.Done, Exhausted: cfg.Exhausted,
	}
}

// PostgresDDL returns what a migration has to add to the table on Postgres: the columns and the
// partial indexes. Ready becomes part of an index, in which nothing may depend on the time.
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
