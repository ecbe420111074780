//go:build unix

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/spf13/pflag"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
	"github.com/tenurelib/tenure/internal/storeurl"
	"github.com/tenurelib/tenure/stores/etcdtenure"
	"github.com/tenurelib/tenure/stores/natstenure"
)

const (
	storeEnv  = "TENURE_STORE"
	schemaEnv = "TENURE_SCHEMA"

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

// scheme is a kind of store that a URL names. A name that is not a URL is the path of a SQLite file.
type scheme struct {
	names []string // before the URL's ://

	// Open refuses a URL that can't be right before any I/O.
	open func(ctx context.Context, url string, s *storeFlag, log *slog.Logger) (database, error)

	// Another says how to keep separate leases in one server, where claims have no tables.
	another string

	table bool // leases have one, which --table names, although claims have none
}

// A store of another system is one more entry here, with its own func to open it.
var schemes = []scheme{
	{names: []string{"postgres", "postgresql"}, open: openPostgres},
	{names: []string{"nats", "tls"}, open: openNATS, another: "add ?stream=NAME to the URL"},
	{names: []string{"etcd", "etcds"}, open: openEtcd, another: "add /PREFIX to the URL"},
	{names: []string{"kube"}, open: openKube, another: "use another namespace"},
	{names: []string{"mysql"}, open: openMySQL, another: "use another --table", table: true},
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

// isSQL reports whether a store has tables for leases and claims.
func isSQL(name string) bool {
	scheme := schemeOf(name)
	return scheme == nil || scheme.another == ""
}

// storeFlag is --store, --table, --schema and --lossless.
type storeFlag struct {
	flag, table, schema string
	lossless            bool
	flags               *pflag.FlagSet // which tell whether --store was given, though its URL may have been moved to the environment
}

// source says where the name of the store comes from. Errors name that, because the name may have a password anywhere.
func (s *storeFlag) source() string {
	if s.flags != nil && s.flags.Changed("store") {
		return "--store"
	}
	return storeEnv
}

// name returns the path or URL of the store.
func (s *storeFlag) name() (string, error) {
	name := cmp.Or(s.flag, os.Getenv(storeEnv))
	scheme := schemeOf(name)
	switch {
	case name == "":
		return "", usageError("no store: give --store, or set %s", storeEnv)
	case scheme != nil && scheme.another != "" && !scheme.table && s.table != "":
		return "", usageError("--table needs a store on Postgres, MySQL or SQLite; here, %s", scheme.another)
	case s.schema != "" && !isPostgres(name):
		return "", usageError("--schema needs a store on Postgres")
	case s.lossless && !isPostgres(name):
		return "", usageError("--lossless needs a store on Postgres")
	case scheme != nil:
		if isPostgres(name) {
			s.schema = cmp.Or(s.schema, os.Getenv(schemaEnv))
		}
		return name, nil
	}
	path, _, err := storeurl.Path(name) // this program always shares the file
	if err != nil && !strings.HasPrefix(name, "sqlite:") && name != ":memory:" {
		err = errors.New("it is neither a postgres:, mysql:, nats:, etcd: or kube: URL, with // after it, nor the path of a SQLite file; " + storeurl.Remedy)
	}
	if err != nil {
		return "", usageError("no store in %s: %v", s.source(), err)
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
		if errors.Is(err, tenure.ErrInvalid) {
			err = errUsage{fmt.Errorf("%w (the URL in %s)", err, s.source())}
		}
		return store, err
	}
	store, err := tenure.OpenSQLite(ctx, name, tenure.SQLiteConfig{Table: s.table, Shared: true, Logger: log})
	return store, asUsage(fileError(name, err))
}

// fileError names the file at path if it can't be a database.
func fileError(path string, err error) error {
	if info, failed := os.Stat(path); err != nil && failed == nil && info.IsDir() {
		return fmt.Errorf("%s is a directory", path)
	}
	if err != nil && strings.Contains(err.Error(), "file is not a database") {
		return fmt.Errorf("%s is not a SQLite database", path)
	}
	return err
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
		return nil, nil, nil, fileError(name, err)
	}
	store, err = tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Table: s.table, Shared: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		db.Close()
		return nil, nil, nil, asUsage(err)
	}
	return store, stands, func() { store.Close(); db.Close() }, nil
}

// with opens a store, which must exist, and calls fn with it. All of that must take
// less than storeTimeout.
func (s *storeFlag) with(ctx context.Context, fn func(context.Context, database) error) error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	store, err := s.openExisting(ctx)
	if err == nil {
		defer store.Close()
		err = s.elsewhere(ctx, store, fn(ctx, store))
	}
	return answered(ctx, err)
}

// tableID returns the OID of the table of a store on Postgres, and 0 for other stores.
func (s *storeFlag) tableID(ctx context.Context, store database) (id uint32, err error) {
	if p, ok := store.(*tenure.PostgresStore); ok {
		err = p.Pool().QueryRow(ctx, `SELECT coalesce(to_regclass($1)::oid, 0)`, s.quotedTable("")).Scan(&id)
	}
	return id, err
}

// isHidden reports whether a table still exists, although the role can't see it or it has another name.
func (s *storeFlag) isHidden(ctx context.Context, store database, table uint32) (hidden bool, err error) {
	if p, ok := store.(*tenure.PostgresStore); ok {
		err = p.Pool().QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_class WHERE oid = $1 AND oid IS DISTINCT FROM to_regclass($2)::oid)`,
			table, s.quotedTable("")).Scan(&hidden)
	}
	return hidden, err
}

// elsewhere explains a missing table of a store on Postgres if other schemas have one: to create a second table would not help.
func (s *storeFlag) elsewhere(ctx context.Context, store database, err error) error {
	p, ok := store.(*tenure.PostgresStore)
	if !ok || !errors.As(err, new(*objects.NoTable)) {
		return err
	}
	var schemas []string
	table := cmp.Or(s.table, "objects")
	failed := p.Pool().QueryRow(ctx, `SELECT coalesce(array_agg(quote_ident(nspname) ORDER BY nspname), '{}') FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid
		WHERE relname = $1 AND EXISTS (SELECT 1 FROM pg_catalog.pg_attribute WHERE attrelid = c.oid AND attname = 'resource_version')`, table).Scan(&schemas)
	if failed != nil || len(schemas) == 0 {
		return err
	}
	in := "the search_path"
	if s.schema != "" {
		in = "schema " + s.schema
	}
	return fmt.Errorf("%s has no table %s, but other schemas have one: give --schema %s, or set %s", in, table, strings.Join(schemas, " or "), schemaEnv)
}

// answered adds to a command's error that the store did not answer in time, if that is the reason.
func answered(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("the store does not answer: %w", err)
	}
	return err
}

// reading is like with, for a command that only reads. The user may lack the right to write. The
// output of fn is shown once it is known to be consistent.
func (s *storeFlag) reading(ctx context.Context, out *output, fn func(context.Context, database, *output) error) error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	for {
		var stdout, stderr bytes.Buffer
		store, stands, done, err := s.openToRead(ctx)
		if err != nil {
			return answered(ctx, err)
		}
		err = s.elsewhere(ctx, store, fn(ctx, store, &output{stdout: &stdout, stderr: &stderr}))
		whole := stands()
		done()
		if !whole && ctx.Err() == nil {
			continue // another process has written meanwhile
		}
		_, failed := out.stdout.Write(stdout.Bytes())
		out.stderr.Write(stderr.Bytes())
		return cmp.Or(answered(ctx, err), failed)
	}
}

// describe names an open store without its credentials.
func (s *storeFlag) describe(store database) string {
	switch store := store.(type) {
	case fmt.Stringer:
		return store.String()
	case *tenure.PostgresStore:
		at := store.Pool().Config().ConnConfig
		return fmt.Sprintf("database %s on %s:%d", at.Database, at.Host, at.Port)
	}
	name, _ := s.name() // which has opened the store
	return name
}

// quotedTable returns the quoted name of a table of the store, which is that of the objects' table with a suffix.
func (s *storeFlag) quotedTable(suffix string) string {
	name := pgx.Identifier{cmp.Or(s.table, "objects") + suffix}
	if s.schema != "" {
		name = append(pgx.Identifier{s.schema}, name...)
	}
	return name.Sanitize()
}

func isPostgres(name string) bool { return storeurl.IsPostgres(name) }

func openPostgres(ctx context.Context, url string, s *storeFlag, log *slog.Logger) (database, error) {
	return tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{Schema: s.schema, Table: s.table, Lossless: s.lossless, Logger: log})
}

func openNATS(ctx context.Context, url string, _ *storeFlag, log *slog.Logger) (database, error) {
	return whenUp(ctx, "NATS", log, func() (database, error) {
		store, err := natstenure.Open(ctx, url, natstenure.Config{Logger: log}, nats.Name("tenure"))
		if err != nil {
			return nil, err
		}
		return awaitAnswer(ctx, "NATS", store) // a cluster without a majority accepts connections
	})
}

func openEtcd(ctx context.Context, url string, _ *storeFlag, log *slog.Logger) (database, error) {
	return whenAnswered(ctx, "etcd", log, func(ctx context.Context) (database, error) {
		return etcdtenure.Open(ctx, url, clientv3.Config{Logger: zap.NewNop()}, etcdtenure.Config{Logger: log}) // what goes wrong is in the errors
	})
}

// whenAnswered is whenUp for a store that is opened without an answer of its server: each try asks for one.
func whenAnswered(ctx context.Context, what string, log *slog.Logger, open func(context.Context) (database, error)) (database, error) {
	return whenUp(ctx, what, log, func() (database, error) {
		opening, cancel := context.WithTimeout(ctx, attempt)
		defer cancel()
		store, err := open(opening)
		if err != nil {
			return nil, err
		}
		return awaitAnswer(opening, what, store)
	})
}

// attempt is how long a store may take to answer, before it is opened again.
const attempt = 2 * time.Second

// awaitAnswer returns a store that has answered. It closes one that does not answer in time.
func awaitAnswer(ctx context.Context, what string, store database) (database, error) {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	_, err := store.Get(ctx, tenure.Key{Type: defaultType, ID: "any"})
	if err == nil || errors.Is(err, tenure.ErrNotFound) || errors.Is(err, tenure.ErrSetup) {
		return store, nil
	}
	store.Close()
	return nil, fmt.Errorf("no answer from %s (%v): %w", what, store, err)
}

// whenUp opens a store. It tries again while the store is down, until ctx is done.
func whenUp(ctx context.Context, what string, log *slog.Logger, open func() (database, error)) (database, error) {
	waiting := false
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		store, err := open()
		if err == nil {
			return store, nil
		}
		if errors.Is(err, tenure.ErrSetup) || errors.Is(err, tenure.ErrInvalid) {
			return nil, err
		}
		if !waiting {
			log.Warn("waiting for "+what, "error", oneLine(err))
			waiting = true
		}
		select {
		case <-ctx.Done():
			if cause := context.Cause(ctx); !errors.Is(err, cause) {
				err = fmt.Errorf("%w (%w)", err, cause)
			}
			return nil, err
		case <-time.After(pause):
		}
	}
}

// hideURL moves a URL from the arguments to the environment, because every user of
// the host can read the arguments. It executes this program again, in the same
// process. The last program arguments belong to the program that tenure runs, and stay as
// they are. It returns nil if there is nothing to hide, and an error if the exec fails. It is
// called for every command, before that does anything.
func hideURL(flags *pflag.FlagSet, program int) error {
	url, _ := flags.GetString("store")
	if schemeOf(url) == nil {
		return nil
	}
	args := slices.Clone(os.Args)
	for i, arg := range args[:max(0, len(args)-program)] {
		given, ok := strings.CutPrefix(arg, "--store=")
		switch {
		case ok && schemeOf(given) != nil:
			args[i] = "--store="
		case arg == "--store" && i+1 < len(args) && schemeOf(args[i+1]) != nil:
			args[i+1] = ""
		}
	}
	if slices.Equal(args, os.Args) {
		return nil
	}
	err := syscall.Exec(self(), args, append(environ(), storeEnv+"="+url))
	return fmt.Errorf("every user of this host can read the URL in --store: put it into %s (%w)", storeEnv, err)
}

// environ returns the environment for other programs, without the store's URL.
func environ() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, storeEnv+"=") })
}
