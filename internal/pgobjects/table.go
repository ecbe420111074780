// Package pgobjects keeps objects in a table on PostgreSQL. The root package's
// PostgresStore is built on it.
package pgobjects

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/internal/wake"
)

// Config is the root package's PostgresConfig, with its defaults filled in.
type Config struct {
	Schema, Table string
	Logger        *slog.Logger
	PollOnly      bool
	ListenURL     string
	Lossless      bool
}

// Validate returns an [objects.ErrInvalid] for a config that can't work on any database.
func (cfg Config) Validate() error {
	const longest = 63 // bytes; Postgres truncates longer names
	errs := []error{objects.ValidTable(cfg.Table), objects.ValidText("Schema", cfg.Schema)}
	if more := len(cfg.Table+objects.TombstonesSuffix) - longest; more > 0 {
		errs = append(errs, fmt.Errorf("%w: Table %q is too long by %d bytes: with the suffix %q Postgres would truncate it",
			objects.ErrInvalid, cfg.Table, more, objects.TombstonesSuffix))
	}
	if more := len(cfg.Schema) - longest; more > 0 {
		errs = append(errs, fmt.Errorf("%w: Schema %q is too long by %d bytes: Postgres would truncate it", objects.ErrInvalid, cfg.Schema, more))
	}
	if cfg.ListenURL != "" {
		if _, err := pgconns.ParseURL(cfg.ListenURL); err != nil {
			errs = append(errs, fmt.Errorf("%w: ListenURL: %w", objects.ErrInvalid, err))
		}
	}
	return errors.Join(errs...)
}

// DDL returns the statements that create everything that [Table.Migrate] and [Claims.Migrate] create.
func (cfg Config) DDL() string {
	n := cfg.names()
	ddl := n.in(objects.PostgresObjects) + n.in(objects.PostgresTombstones) + n.in(objects.PostgresClaims)
	if cfg.Schema != "" {
		ddl = "CREATE SCHEMA IF NOT EXISTS " + objects.Quoted(cfg.Schema) + ";\n" + ddl
	}
	return ddl
}

// names returns the names of the tables as far as the config says where they are.
func (cfg Config) names() names {
	return newNames(cfg.Table, [objects.TableCount]string{cfg.Schema, cfg.Schema, cfg.Schema, cfg.Schema})
}

// Table is a table of objects, and the table of tombstones that belongs to it. All
// methods are safe for concurrent use.
type Table struct {
	conns    *pgconns.Conns
	cfg      Config
	setups   setups
	watches  watches
	lineages lineages
	groups   writeGroups
	claims   Claims
	rows     objects.RowTables[*Rows]
	renewals objects.Renewals
	locker   atomic.Pointer[locker]
	pruned   atomic.Int64 // when tombstones were last pruned, in Unix seconds
}

// New returns the table for a valid config. It does no I/O.
func New(conns *pgconns.Conns, cfg Config) *Table {
	cfg.Logger, _ = report.Logger(cfg.Logger)
	t := &Table{conns: conns, cfg: cfg}
	t.pruned.Store(time.Now().Unix())
	t.setups.conns, t.setups.cfg, t.setups.names, t.setups.logger = conns, cfg, cfg.names(), cfg.Logger
	t.setups.looking, t.setups.connecting = newGate(), newGate()
	conns.OnConnect(t.setups.connected)
	t.watches.init(t)
	t.lineages.looking = make(chan struct{}, 1)
	t.claims = Claims{table: t, others: make(chan struct{}, pgconns.ClaimConns-1)}
	for _, g := range t.groups.all() {
		g.table = t
	}
	return t
}

// String is the quoted name of the table.
func (t *Table) String() string { return t.setups.names.tables[objects.TableOfObjects] }

// Close closes the connections.
func (t *Table) Close() {
	t.conns.Close(t.watches.close)
	report.Flush(t.cfg.Logger)
}

// AwaitServer waits for a database that is down, until ctx ends. A table that does not
// exist yet is no error.
func (t *Table) AwaitServer(ctx context.Context) error {
	defer report.Flush(t.cfg.Logger)
	return t.setups.whenUp(ctx, func() error {
		found, err := t.setups.inspect(ctx, t.setups.query) // on a connection that will be needed anyway
		switch {
		case errors.Is(err, errNoTable):
			return nil // Migrate creates it
		case err == nil && found.exists[objects.TableOfTombstones]:
			t.setups.believe(found)
		}
		return err // if nil, Migrate may create the tombstones; the next look warns if they are still missing
	})
}

// Migrate creates the tables of objects and tombstones if they are missing. It returns [objects.ErrSetup] if the role may not do
// that, or if what exists is unsuitable.
func (t *Table) Migrate(ctx context.Context) error {
	defer report.Flush(t.cfg.Logger)
	found, isNew, err := t.setups.migrate(ctx)
	if err != nil {
		return t.setups.explain(err)
	}
	if isNew {
		t.markNew(ctx)
	}
	t.prune(ctx, found, 0) // for programs that never run for an hour
	return nil
}

// Get returns the object, or [objects.ErrNotFound].
func (t *Table) Get(ctx context.Context, id objects.ID) (objects.Row, error) {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	r := objects.Row{ID: id}
	var nowUS, server int64
	var version sql.NullInt64
	if objects.IsLeaseCall(ctx) && t.lineages.told.Load() != nil { // so that the answer can be compared
		if _, err := t.Lineage(ctx); err != nil {
			return r, err
		}
	}
	for tries, again := 0, true; again; tries++ {
		_, err := t.setups.call(ctx, mayRead, func(found *setup) error {
			return t.conns.QueryRow(ctx, found.in(getObject), []any{id.Type, id.ID},
				&server, &nowUS, &r.Name, &r.Labels, &r.Payload, &version, &r.Created, &r.Updated)
		})
		if err != nil {
			return r, t.setups.explain(unreadable(err))
		}
		// A lease must decide by an answer from the server whose lineage is known.
		if again = t.lineages.isElsewhere(strconv.FormatInt(server, 10)) && objects.IsLeaseCall(ctx); again {
			if _, err := t.Lineage(ctx); err != nil {
				return r, err
			}
			if tries == 2 {
				return r, objects.ErrMoved
			}
		}
	}
	if !version.Valid {
		return r, objects.ErrNotFound
	}
	r.Version, r.Age = version.Int64, objects.Age(r.Updated, time.UnixMicro(nowUS))
	return r, nil
}

// List returns at most limit objects of a type whose IDs come after the given one, ordered by ID.
func (t *Table) List(ctx context.Context, objectType, after string, limit int) (listed []objects.Row, err error) {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	_, err = t.setups.call(ctx, mayRead, func(found *setup) error {
		return t.conns.Call(ctx, func(pool *pgxpool.Pool, _ bool) error {
			rows, err := pool.Query(ctx, found.in(listObjects), objectType, after, limit)
			if err != nil {
				return err
			}
			listed, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (objects.Row, error) {
				r := objects.Row{ID: objects.ID{Type: objectType}}
				var nowUS int64
				err := row.Scan(&r.ID.ID, &r.Name, &r.Labels, &r.Payload, &r.Version, &r.Created, &r.Updated, &nowUS)
				r.Age = objects.Age(r.Updated, time.UnixMicro(nowUS))
				return r, err
			})
			return err
		})
	})
	return listed, t.setups.explain(unreadable(err))
}

// Watch returns a watch of an object, or nil if the config is PollOnly.
func (t *Table) Watch(id objects.ID) *wake.Watch[string] {
	if t.cfg.PollOnly {
		return nil
	}
	return t.watches.watch(id)
}

// Wake wakes every watch of an object, in other processes too.
func (t *Table) Wake(ctx context.Context, id objects.ID) error {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	found, err := t.setups.get(objects.WithLeaseCall(ctx))
	if err == nil {
		err = t.notify(ctx, found.hint(id))
	}
	return t.setups.explain(err)
}

func (t *Table) notify(ctx context.Context, hint string) error {
	ctx = objects.WithLeaseCall(ctx)
	return t.conns.Call(ctx, func(pool *pgxpool.Pool, _ bool) error {
		// Transactions that notify commit one after another, so none should wait for the disk.
		_, err := pool.Exec(ctx, `SELECT pg_notify($1, $2), set_config('synchronous_commit', 'off', true)`, t.watches.channel, hint)
		return err
	})
}
