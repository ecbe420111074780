//go:build unix

package main

import (
	"cmp"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure/claims"
)

func ddlCommand(out *output) *cobra.Command {
	o := &options{}
	var cfg claims.QueueConfig
	var columns string
	c := &cobra.Command{
		Use:   "ddl --store STORE --queue TABLE [--columns LIST] [--ready SQL] [--order SQL]",
		Short: "print the SQL that adds a queue's columns and indexes to a table",
		Long: `Ddl prints the statements that make a table of your own a queue of package claims: the
columns session and token, those of --columns, and indexes. It is what the methods PostgresDDL
and SQLiteDDL of claims.QueueConfig return. It doesn't connect; of --store only the kind
matters:

    tenure ddl --store postgres:// --queue mails --columns attempts --ready "status = 'queued'"

"tenure migrate --print" prints the statements for the library's own tables.`,
		RunE: func(c *cobra.Command, _ []string) error {
			name, err := o.store.name()
			if err != nil {
				return err
			}
			if !isSQL(name) {
				return usageError("a queue is a table: --store has to be Postgres or SQLite")
			}
			if cfg.Table == "" {
				return usageError("no table: give --queue")
			}
			cfg.Schema = o.store.schema
			if err := addColumns(&cfg, columns); err != nil {
				return err
			}
			ddl := cfg.SQLiteDDL
			if isPostgres(name) {
				ddl = cfg.PostgresDDL
			}
			statements, err := ddl()
			if err != nil {
				return asUsage(err)
			}
			_, err = io.WriteString(out.stdout, statements)
			return err
		},
	}
	o.urlAndSchemaFlags(c)
	c.Flags().StringVar(&cfg.Table, "queue", "", "`TABLE` to make a queue of package claims")
	c.Flags().StringVar(&columns, "columns", "", "comma-separated `LIST` of optional columns: attempts, not_before, requested, expires, limit, per_key. Give a column that has another name as in not_before=run_at, also for id, session and token")
	c.Flags().StringVar(&cfg.Ready, "ready", "", "`SQL` condition under which a row may be taken, for the index; without the parts that depend on the time")
	c.Flags().StringVar(&cfg.OrderBy, "order", "", "`SQL` order in which rows are taken, for the index (default: by ID)")
	return c
}

// addColumns adds a list of optional columns to the config of a queue.
func addColumns(cfg *claims.QueueConfig, list string) error {
	columns := map[string]*string{
		"id": &cfg.ID, "session": &cfg.Session, "token": &cfg.Token, "attempts": &cfg.Attempts,
		"not_before": &cfg.NotBefore, "requested": &cfg.Requested, "expires": &cfg.Expires, "limit": &cfg.Limit,
		"per_key": &cfg.PerKey.Column,
	}
	for item := range strings.SplitSeq(list, ",") {
		field, name, _ := strings.Cut(strings.TrimSpace(item), "=")
		switch {
		case columns[field] != nil:
			*columns[field] = cmp.Or(name, field)
		case list != "":
			return usageError("--columns: there is no column %s", quoted(field))
		}
	}
	// These columns need a setting that the statements don't depend on.
	if cfg.Expires != "" {
		cfg.Deadline = time.Second
	}
	if cfg.PerKey.Column != "" {
		cfg.PerKey.Limit = 1
	}
	if cfg.Limit != "" {
		cfg.Exhausted = "any"
	}
	return nil
}
