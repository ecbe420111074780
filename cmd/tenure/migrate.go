//go:build unix

package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
)

var migrateCommand = command{
	name:     "migrate",
	synopsis: "-store STORE [-print | -json]",
	summary:  "create what is missing in the store, or print the SQL that does",
	about: `
Migrate creates what is missing in the store: the file, the table of objects, and the
table of the versions of deleted objects; on NATS the stream, and on etcd a key. It doesn't
change anything that exists. Run does the same, so you need migrate only if run's role may
not do it.

With -print it prints the SQL statements and doesn't connect, for those who let another
tool or another person change their databases.`,
	define: func(flags *flag.FlagSet) action {
		var store storeFlag
		store.define(flags)
		asJSON := flags.Bool("json", false, "print JSON")
		printOnly := flags.Bool("print", false, "print the SQL statements instead of running them")
		return func(ctx context.Context, out *output, args []string) error {
			if len(args) > 0 {
				return unexpected(args[0])
			}
			if *printOnly && *asJSON {
				return usageError("give either -print or -json")
			}
			if *printOnly {
				return store.printDDL(out.stdout)
			}
			return store.migrate(ctx, out, *asJSON)
		}
	},
}

// printDDL prints the statements that create the tables. It does not open the store.
func (s *storeFlag) printDDL(w io.Writer) error {
	name, err := s.name()
	if err != nil {
		return err
	}
	if !isSQL(name) {
		return usageError("-print needs a store on Postgres or SQLite; here, run migrate once as a user who may set the store up")
	}
	table := cmp.Or(s.table, "objects")
	ddl := sqliteobjects.DDL(table)
	if isPostgres(name) {
		cfg := pgobjects.Config{Schema: s.schema, Table: table}
		if err := cfg.Validate(); err != nil {
			return asUsage(err)
		}
		ddl = cfg.DDL()
	} else if err := objects.ValidTable(table); err != nil {
		return asUsage(err)
	}
	_, err = io.WriteString(w, ddl)
	return err
}

func (s *storeFlag) migrate(ctx context.Context, out *output, asJSON bool) error {
	name, err := s.name()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	store, err := s.open(ctx, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		return explain(store, err)
	}
	if asJSON {
		return writeJSON(out.stdout, map[string]string{"migrated": describeStore(name)})
	}
	_, err = fmt.Fprintln(out.stdout, describeStore(name)+" is ready")
	return err
}
