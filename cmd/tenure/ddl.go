//go:build unix

package main

import (
	"cmp"
	"context"
	"io"
	"strings"
	"time"

	"github.com/tenurelib/tenure/claims"
)

var ddlCommand = command{
	name:     "ddl",
	synopsis: "-store STORE -queue TABLE [-columns LIST] [-ready SQL] [-order SQL]",
	summary:  "print the SQL that adds a queue's columns and indexes to a table",
	about: `
Ddl prints the statements that make a table of your own a queue of package claims: the
columns session and token, those of -columns, and indexes. It is what the methods PostgresDDL
and SQLiteDDL of claims.QueueConfig return. It doesn't connect; of -store only the kind
matters:

  tenure ddl -store postgres:// -queue mails -columns attempts -ready "status = 'queued'"

"tenure migrate -print" prints the statements for the library's own tables.`,
	flags: "store schema queue columns ready order",
	act: func(_ context.Context, o *options, out *output, _ []string) error {
		name, err := o.store.name()
		if err != nil {
			return err
		}
		if !isSQL(name) {
			return usageError("a queue is a table: -store has to be Postgres or SQLite")
		}
		cfg, err := o.queueConfig()
		if err != nil {
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

// queueConfig returns the part of a queue's config that its statements depend on.
func (o *options) queueConfig() (claims.QueueConfig, error) {
	cfg := claims.QueueConfig{Schema: o.store.schema, Table: o.queue, Ready: o.ready, OrderBy: o.order}
	columns := map[string]*string{
		"id": &cfg.ID, "session": &cfg.Session, "token": &cfg.Token, "attempts": &cfg.Attempts,
		"not_before": &cfg.NotBefore, "requested": &cfg.Requested, "expires": &cfg.Expires, "limit": &cfg.Limit,
		"per_key": &cfg.PerKey.Column,
	}
	if o.queue == "" {
		return cfg, usageError("no table: give -queue")
	}
	for item := range strings.SplitSeq(o.columns, ",") {
		field, name, _ := strings.Cut(strings.TrimSpace(item), "=")
		switch {
		case columns[field] != nil:
			*columns[field] = cmp.Or(name, field)
		case o.columns != "":
			return cfg, usageError("-columns: there is no column %q", field)
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
	return cfg, nil
}
