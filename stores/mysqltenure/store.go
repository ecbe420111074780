package mysqltenure

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// Store keeps objects in a table of MySQL or MariaDB. It implements [tenure.Database]. A call whose context
// has no deadline takes at most 10 s, except for the funcs of Fenced. All methods are safe for concurrent use.
type Store struct {
	*shared
	term *tenure.Term // whose fence the writes have to pass; nil: none
}

var _ tenure.Database = (*Store)(nil)

// shared is shared by a store and the fenced stores made from it.
type shared struct {
	pools  pools
	cfg    Config
	server server
	sql    statements
	bells  *bells

	mu    sync.Mutex
	known map[tenure.Key]state // as this process last saw them
}

// state is what a row has of an object.
type state struct {
	version int64 // 0: there is no object
	created int64
	noRow   bool // there has never been an object
}

// table returns the names of the table's database and of the table.
func (s *shared) table() (database, table string) {
	if database, table, ok := strings.Cut(s.cfg.Table, "."); ok {
		return database, table
	}
	return s.server.database, s.cfg.Table
}

const requestTimeout = 10 * time.Second

// newStore returns a store on a server that is fit.
func newStore(p pools, cfg Config, is server) *Store {
	s := &shared{pools: p, cfg: cfg, server: is, known: make(map[tenure.Key]state)}
	database, table := s.table() // always with the database: a connection of the caller's pool may use another one now
	s.sql = newStatements(quoted(database)+"."+quoted(table), is)
	s.bells = newBells(s)
	return &Store{shared: s}
}

// String names the table and the server.
func (s *Store) String() string {
	database, table := s.table()
	text := "table " + database + "." + table
	if s.pools.address != "" {
		text += " on " + s.pools.address
	}
	return text
}

// DB returns the database for a program's own statements: the caller's, or, after [Open], a pool of its own
// beside the store's connections, which Close closes.
func (s *Store) DB() *sql.DB { return s.pools.app }

// Traits says whether the store is Clockless: it is where several servers accept writes, each with a clock of
// its own.
func (s *Store) Traits() tenure.Traits { return tenure.Traits{Clockless: s.server.hasManyWriters()} }

// Lineage returns the zero Lineage: no client is told of a failover, so one that loses commits goes unnoticed.
func (s *Store) Lineage(context.Context) (tenure.Lineage, error) { return tenure.Lineage{}, nil }

// Close ends the subscriptions, and closes the connections that [Open] has made. Those of the caller's
// database remain open.
func (s *Store) Close() error {
	s.bells.feeds.Close()
	s.pools.close()
	storekit.Flush(s.cfg.Logger)
	return nil
}

// querier is a pool, a connection or a transaction.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Get returns the object, or [tenure.ErrNotFound].
func (s *Store) Get(ctx context.Context, key tenure.Key) (obj tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "mysqltenure: get", key)
	if err := cmp.Or(key.Validate(), ctx.Err()); err != nil {
		return obj, err
	}
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	r := row{obj: tenure.Object{Key: key}}
	err = s.pools.calls.QueryRowContext(ctx, s.sql.get, []byte(key.Type), []byte(key.ID)).Scan(r.columns()...)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		s.saw(key, state{})
		return tenure.Object{}, tenure.ErrNotFound
	case err != nil:
		return tenure.Object{}, explained(err)
	}
	s.saw(key, state{version: r.obj.Version, created: r.created})
	return s.object(r), nil
}

// List returns at most limit objects of a type whose IDs come after the given one, in the order of the IDs'
// bytes.
func (s *Store) List(ctx context.Context, objectType, after string, limit int) (found []tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "mysqltenure: list", objectType)
	if err := cmp.Or(storekit.CheckList(objectType, after, limit), ctx.Err()); err != nil {
		return nil, err
	}
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	err = each(ctx, s.pools.calls, func(rows *sql.Rows) error {
		r := row{obj: tenure.Object{Key: tenure.Key{Type: objectType}}}
		err := rows.Scan(append([]any{&r.obj.Key.ID}, r.columns()...)...)
		found = append(found, s.object(r))
		return err
	}, s.sql.list, []byte(objectType), []byte(after), limit)
	if err != nil {
		return nil, explained(err)
	}
	return found, nil
}

// Types returns at most limit types of the objects in the store, in the order of their bytes. It is safe for
// concurrent use.
func (s *Store) Types(ctx context.Context, limit int) (types []string, err error) {
	defer storekit.OpError(ctx, &err, "mysqltenure: list", "types")
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	types, err = s.strings(ctx, s.sql.types, limit)
	return types, explained(err)
}

// EverExisted reports whether there has ever been an object under the key, which may have been deleted since.
func (s *Store) EverExisted(ctx context.Context, key tenure.Key) (known bool, err error) {
	defer storekit.OpError(ctx, &err, "mysqltenure: get", key)
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	is, err := s.read(ctx, s.pools.calls, key)
	return is.created > 0, explained(err) // otherwise it was only woken
}

// row is an object as it is read.
type row struct {
	obj     tenure.Object
	name    sql.NullString
	labels  []byte
	created int64
	age     int64 // in microseconds
}

// columns returns where the columns of the statement getObject go.
func (r *row) columns() []any {
	return []any{&r.name, &r.labels, &r.obj.Payload, &r.obj.Version, &r.created, &r.age}
}

func (s *shared) object(r row) tenure.Object {
	r.obj.Name = r.name.String
	_ = json.Unmarshal(r.labels, &r.obj.Labels) // another program may have left anything; labels are for people to read
	r.obj.CreatedAt, r.obj.UpdatedAt = time.UnixMicro(r.created).UTC(), time.UnixMicro(r.obj.Version).UTC()
	if !s.server.hasManyWriters() {
		r.obj.Age = time.Duration(r.age) * time.Microsecond
	}
	return r.obj
}

// read returns the state of an object.
func (s *shared) read(ctx context.Context, on querier, key tenure.Key) (is state, err error) {
	err = on.QueryRowContext(ctx, s.sql.state, []byte(key.Type), []byte(key.ID)).Scan(&is.version, &is.created)
	if errors.Is(err, sql.ErrNoRows) {
		is, err = state{noRow: true}, nil
	}
	return is, err
}

// mostKnown limits how many objects a store remembers.
const mostKnown = 4096

// saw remembers the state of an object. What is remembered may be old: a write is conditional on it.
func (s *shared) saw(key tenure.Key, is state) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.known) >= mostKnown { // what is forgotten is read again
		clear(s.known)
	}
	s.known[key] = is
}

// recall returns what is known about an object.
func (s *shared) recall(key tenure.Key) state {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known[key]
}
