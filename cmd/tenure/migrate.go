//go:build unix

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
)

func migrateCommand(out *output) *cobra.Command {
	o := &options{}
	print := false
	c := &cobra.Command{
		Use:   "migrate --store STORE [--print | --json]",
		Short: "create what is missing in the store, or print the SQL that does",
		Long: `Migrate creates what is missing in the store: the file, the table of objects, the table of
the versions of deleted objects, and the tables of package claims; on NATS the stream, and on
etcd a key. On Kubernetes it only checks whether the store can work. It doesn't change
anything that exists. Run does the same, except for the tables of package claims, so for
leases you need migrate only if run's role may not create tables.

With --print it prints the SQL statements and doesn't connect, for databases that another
tool or another person changes.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if print {
				return o.store.printDDL(out.stdout)
			}
			return o.migrate(c.Context(), out)
		},
	}
	o.storeFlags(c)
	c.Flags().BoolVar(&print, "print", false, "print the SQL statements instead of running them")
	o.jsonFlag(c)
	c.MarkFlagsMutuallyExclusive("print", "json")
	return c
}

// printDDL prints the statements that create the tables. It does not open the store.
func (s *storeFlag) printDDL(w io.Writer) error {
	name, err := s.name()
	if err != nil {
		return err
	}
	if !isSQL(name) {
		return usageError("--print needs a store on Postgres or SQLite; here, run migrate once as a user who may set the store up")
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

func (o *options) migrate(ctx context.Context, out *output) error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	store, err := o.store.open(ctx, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	if b, err := backendOf(store); err == nil { // on Postgres and SQLite
		if err := b.Claims().Migrate(ctx); err != nil {
			return err
		}
	}
	return o.show(out, migrated{o.store.describe(store)})
}

// migrated is what migrate prints.
type migrated struct {
	Store string `json:"migrated"`
}

func (m migrated) print(w io.Writer) error {
	_, err := fmt.Fprintln(w, m.Store+" is ready")
	return err
}
