//go:build unix

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
)

var migrateCommand = command{
	name:     "migrate",
	synopsis: "-store STORE [-json]",
	summary:  "create missing tables",
	about: `
Migrate creates what is missing in the store: the file, the table of objects, and the
table of the versions of deleted objects. It doesn't change anything that exists. Run does
the same, so you need migrate only if run's database role may not create tables.`,
	define: func(flags *flag.FlagSet) action {
		var store storeFlag
		store.define(flags)
		asJSON := flags.Bool("json", false, "print JSON")
		return func(ctx context.Context, out *output, args []string) error {
			if len(args) > 0 {
				return usageError("unexpected argument %q", args[0])
			}
			return store.migrate(ctx, out, *asJSON)
		}
	},
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
		return err
	}
	if asJSON {
		return writeJSON(out.stdout, map[string]string{"migrated": describeStore(name)})
	}
	_, err = fmt.Fprintln(out.stdout, describeStore(name)+" is ready")
	return err
}
