//go:build unix

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/storeurl"
	_ "modernc.org/sqlite"
)

const (
	storeEnv = "TENURE_STORE"

	// storeTimeout bounds every command except run and watch.
	storeTimeout = 5 * time.Second
)

// database is a store that this program has opened.
type database interface {
	tenure.Store
	tenure.Watcher
	tenure.Notifier
	Migrate(ctx context.Context) error
	Close() error
}

// storeFlag is -store, -table and -schema.
type storeFlag struct{ flag, table, schema string }

func (s *storeFlag) define(flags *flag.FlagSet) {
	flags.StringVar(&s.flag, "store", "", "`PATH` of a SQLite file, for the processes of one host, or a postgres:// URL; put a URL\nwith a password into $"+storeEnv+" instead")
	flags.StringVar(&s.table, "table", "", "`NAME` of the table of objects; all replicas must give the same (default objects)")
	flags.StringVar(&s.schema, "schema", "", "`NAME` of the table's schema, on Postgres (default the first schema of the\nsearch_path that has the table)")
}

// name returns the path or URL of the store.
func (s *storeFlag) name() (string, error) {
	name := cmp.Or(s.flag, os.Getenv(storeEnv))
	switch {
	case name == "":
		return "", usageError("no store: give -store, or set %s", storeEnv)
	case isPostgres(name):
		return name, checkURL(name)
	case s.schema != "":
		return "", usageError("-schema needs a store on Postgres")
	}
	path, err := storeurl.Path(name)
	if err != nil {
		return "", usageError("no store: %v", err)
	}
	return path, nil
}

// open opens the store. Closing it twice is allowed.
func (s *storeFlag) open(ctx context.Context, log *slog.Logger) (database, error) {
	name, err := s.name()
	if err != nil {
		return nil, err
	}
	if isPostgres(name) {
		store, err := tenure.OpenPostgres(ctx, name, tenure.PostgresConfig{Schema: s.schema, Table: s.table, Logger: log})
		return store, asUsage(err)
	}
	store, err := tenure.OpenSQLite(ctx, name, tenure.SQLiteConfig{Table: s.table, Shared: true, Logger: log})
	return store, asUsage(err)
}

// openExisting opens the store for commands that only read: it doesn't create a file.
func (s *storeFlag) openExisting(ctx context.Context) (database, error) {
	name, err := s.name()
	if err != nil {
		return nil, err
	}
	if !isPostgres(name) {
		if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("there is no store %s", name)
		}
	}
	return s.open(ctx, slog.New(slog.NewTextHandler(io.Discard, nil)))
}

func isPostgres(name string) bool { return storeurl.IsPostgres(name) }

// checkURL rejects a URL that cannot be parsed, or in which a part of the password seems to
// have been parsed as something else. Its errors don't quote the URL, because the faulty
// part may be the password.
func checkURL(url string) error {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return usageError("the store's URL cannot be parsed: write special characters in user and password as %%XX")
	}
	parts := []string{cfg.ConnConfig.Host, cfg.ConnConfig.Database}
	for name := range cfg.ConnConfig.RuntimeParams {
		parts = append(parts, name)
	}
	if slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(part, "@") }) {
		return usageError("the store's URL has an @ after the host: write special characters in user and password as %%XX")
	}
	return nil
}

// describeStore names a store without its credentials.
func describeStore(name string) string {
	if !isPostgres(name) {
		return name
	}
	cfg, err := pgxpool.ParseConfig(name)
	if err != nil {
		return "postgres"
	}
	return fmt.Sprintf("database %s on %s:%d", cfg.ConnConfig.Database, cfg.ConnConfig.Host, cfg.ConnConfig.Port)
}

// hideURL moves a Postgres URL from the arguments to the environment, because everybody on
// the host can read the arguments. To do so it executes this program again, in the same
// process. The last program arguments belong to the program that tenure runs, and stay as
// they are. It returns if there is nothing to hide, or if the exec fails.
func (s *storeFlag) hideURL(program int) {
	if !isPostgres(s.flag) {
		return
	}
	args := slices.Clone(os.Args)
	for i, arg := range args[:max(0, len(args)-program)] {
		for _, dash := range []string{"-", "--"} {
			switch {
			case arg == dash+"store" && i+1 < len(args) && isPostgres(args[i+1]):
				args[i+1] = ""
			case strings.HasPrefix(arg, dash+"store=postgres"):
				args[i] = dash + "store="
			}
		}
	}
	if !slices.Equal(args, os.Args) {
		syscall.Exec(self(), args, append(environ(), storeEnv+"="+s.flag))
	}
}

// environ returns the environment for other programs, without the store's URL.
func environ() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, storeEnv+"=") })
}
