//go:build unix

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
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
	Migrate(ctx context.Context) error
	Close() error
}

// scheme is a kind of store that is given by a URL. What is none of these is the path of a SQLite
// file.
type scheme struct {
	names []string // before the URL's ://

	check    func(url string) error  // before any I/O
	describe func(url string) string // without credentials

	// Open waits for a store that is down until ctx is done.
	open func(ctx context.Context, url string, s *storeFlag, log *slog.Logger) (database, error)

	// Another says how to have other leases in the same store, where there are no tables.
	another string
}

// A store of another system is one more entry here, with its funcs in a file of its own.
var schemes = []scheme{
	{names: []string{"postgres", "postgresql"}, check: checkPostgres, describe: describePostgres, open: openPostgres},
	{names: []string{"nats", "tls"}, check: checkNATS, describe: describeNATS, open: openNATS, another: "add ?stream=NAME to the URL"},
	{names: []string{"etcd", "etcds"}, check: checkEtcd, describe: describeEtcd, open: openEtcd, another: "add /PREFIX to the URL"},
}

// schemeOf returns the scheme of a URL, nil for a path.
func schemeOf(name string) *scheme {
	before, _, ok := strings.Cut(name, "://")
	for i := range schemes {
		if ok && slices.Contains(schemes[i].names, before) {
			return &schemes[i]
		}
	}
	return nil
}

// looksLikeURL matches a URL that is mistyped. Taken for a path, each host would have its own
// file, and run the program.
var looksLikeURL = regexp.MustCompile(`(?i)^(postgres|postgresql|nats|tls|etcd|etcds):|^[a-z][a-z0-9+.-]*://`)

// isSQL reports whether a store has tables.
func isSQL(name string) bool {
	scheme := schemeOf(name)
	return scheme == nil || scheme.another == ""
}

// storeFlag is -store, -table and -schema.
type storeFlag struct{ flag, table, schema string }

func (s *storeFlag) define(flags *flag.FlagSet) {
	flags.StringVar(&s.flag, "store", "", "`PATH` of a SQLite file, for the processes of one host, or a postgres://, nats:// or\netcd:// URL; put a URL with a password into $"+storeEnv+" instead")
	flags.StringVar(&s.table, "table", "", "`NAME` of the table of objects, on Postgres and SQLite; all replicas must give the same\n(default objects)")
	flags.StringVar(&s.schema, "schema", "", "`NAME` of the table's schema, on Postgres (default the first schema of the\nsearch_path that has the table)")
}

// name returns the path or URL of the store.
func (s *storeFlag) name() (string, error) {
	name := cmp.Or(s.flag, os.Getenv(storeEnv))
	scheme := schemeOf(name)
	switch {
	case name == "":
		return "", usageError("no store: give -store, or set %s", storeEnv)
	case scheme != nil && scheme.another != "" && s.table != "":
		return "", usageError("-table needs a store on Postgres or SQLite; here, %s", scheme.another)
	case s.schema != "" && !isPostgres(name):
		return "", usageError("-schema needs a store on Postgres")
	case scheme != nil:
		return name, scheme.check(name)
	case looksLikeURL.MatchString(name) && !strings.HasPrefix(name, "sqlite:"):
		return "", usageError("no store: the URL is neither a postgres:, nats: or etcd: URL, with // after it, nor the path of a SQLite file")
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
	if scheme := schemeOf(name); scheme != nil {
		store, err := scheme.open(ctx, name, s, log)
		return store, asUsage(err)
	}
	store, err := tenure.OpenSQLite(ctx, name, tenure.SQLiteConfig{Table: s.table, Shared: true, Logger: log})
	return store, asUsage(err)
}

// openExisting opens the store for commands that ask something of a holder: it doesn't create a file.
func (s *storeFlag) openExisting(ctx context.Context) (database, error) {
	name, err := s.name()
	if err != nil {
		return nil, err
	}
	if schemeOf(name) == nil {
		if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("there is no store %s", name)
		}
	}
	return s.open(ctx, slog.New(slog.DiscardHandler))
}

// openToRead opens the store for commands that only read. They may have to read again, as
// [sqliteobjects.OpenToRead] says, unless what they have read stands.
func (s *storeFlag) openToRead(ctx context.Context) (store database, stands func() bool, done func(), err error) {
	name, err := s.name()
	if err != nil {
		return nil, nil, nil, err
	}
	if schemeOf(name) != nil {
		store, err := s.openExisting(ctx)
		return store, func() bool { return true }, func() { store.Close() }, err
	}
	db, stands, err := sqliteobjects.OpenToRead(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("there is no store %s", name)
	}
	if err != nil {
		return nil, nil, nil, err
	}
	store, err = tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Table: s.table, Shared: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		db.Close()
		return nil, nil, nil, asUsage(err)
	}
	return store, stands, func() { store.Close(); db.Close() }, nil
}

// describeStore names a store without its credentials.
func describeStore(name string) string {
	if scheme := schemeOf(name); scheme != nil {
		return scheme.describe(name)
	}
	return name
}

func isPostgres(name string) bool { return storeurl.IsPostgres(name) }

func openPostgres(ctx context.Context, url string, s *storeFlag, log *slog.Logger) (database, error) {
	return tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{Schema: s.schema, Table: s.table, Logger: log})
}

// checkPostgres rejects a URL that cannot be parsed, or in which a part of the password seems to
// have been parsed as something else.
func checkPostgres(url string) error {
	if _, err := pgconns.ParseURL(url); err != nil {
		return usageError("no store: %v", err)
	}
	return nil
}

func describePostgres(url string) string {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return "postgres"
	}
	return fmt.Sprintf("database %s on %s:%d", cfg.ConnConfig.Database, cfg.ConnConfig.Host, cfg.ConnConfig.Port)
}

// hideURL moves a URL from the arguments to the environment, because everybody on
// the host can read the arguments. To do so it executes this program again, in the same
// process. The last program arguments belong to the program that tenure runs, and stay as
// they are. It returns if there is nothing to hide, or if the exec fails.
func (s *storeFlag) hideURL(program int) {
	if schemeOf(s.flag) == nil {
		return
	}
	args := slices.Clone(os.Args)
	for i, arg := range args[:max(0, len(args)-program)] {
		for _, dash := range []string{"-", "--"} {
			switch {
			case arg == dash+"store" && i+1 < len(args) && schemeOf(args[i+1]) != nil:
				args[i+1] = ""
			case strings.HasPrefix(arg, dash+"store=") && schemeOf(strings.TrimPrefix(arg, dash+"store=")) != nil:
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
