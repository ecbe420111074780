package storetest

import (
	"cmp"
	"context"
	"database/sql"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Backend is the store's Backend, behind the same hook, for package claims. It is nil if the store
// has none.
func (f *FaultyStore) Backend() objects.Backend {
	store, ok := objects.As[interface{ Backend() objects.Backend }](f.store)
	if !ok {
		return nil
	}
	backend := store.Backend()
	if backend == nil {
		return nil
	}
	return faultyBackend{f, backend}
}

type faultyBackend struct {
	f       *FaultyStore
	backend objects.Backend
}

func (b faultyBackend) Renewals() *objects.Renewals { return b.backend.Renewals() }

func (b faultyBackend) Claims() objects.ClaimsTable {
	table := b.backend.Claims()
	return faultyClaims{faultyOwners{b.f, "claims.", "", table}, table}
}

func (b faultyBackend) Rows(cfg objects.RowsConfig, logger *slog.Logger) objects.RowsTable {
	table := b.backend.Rows(cfg, logger)
	rows := faultyRows{faultyOwners{b.f, "queue.", cfg.Table, table}, table}
	switch table := table.(type) { // their transactions differ
	case postgresFinisher:
		return faultyPostgresRows{rows, table}
	case sqliteFinisher:
		return faultySQLiteRows{rows, table}
	}
	return rows
}

// within is through for a statement, which the server ends after limit.
func within[T any](ctx context.Context, f *FaultyStore, limit time.Duration, call Call, send func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return through(ctx, f, call, send)
}

// faultyOwners sends the statements that both kinds of tables have through the hook.
type faultyOwners struct {
	f      *FaultyStore
	prefix string // of the ops
	kind   string // of all calls; empty: each has its own
	table  objects.ClaimStore
}

func (o faultyOwners) call(op, kind, session string, ids []string) Call {
	return Call{Op: o.prefix + op, Key: tenure.Key{Type: cmp.Or(o.kind, kind)}, Session: session, IDs: ids}
}

func (o faultyOwners) LongestKey() int { return o.table.LongestKey() }

func (o faultyOwners) Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, o.f, limit, o.call("look", kind, "", ids), func(ctx context.Context) ([]objects.Claim, error) {
		return o.table.Look(ctx, kind, ids, limit)
	})
}

func (o faultyOwners) Free(ctx context.Context, session, kind string, ids []string, tokens []int64, how objects.Freeing, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, o.f, limit, o.call("free", kind, session, ids), func(ctx context.Context) ([]objects.Claim, error) {
		return o.table.Free(ctx, session, kind, ids, tokens, how, limit)
	})
}

func (o faultyOwners) Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, o.f, limit, o.call("owned", afterKind, session, nil), func(ctx context.Context) ([]objects.Claim, error) {
		return o.table.Owned(ctx, session, afterKind, afterID, n, limit)
	})
}

func (o faultyOwners) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	return within(ctx, o.f, limit, o.call("sessions", "", "", nil), func(ctx context.Context) ([]objects.Session, error) {
		return o.table.Sessions(ctx, limit)
	})
}

func (o faultyOwners) Request(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, o.f, limit, o.call("request", kind, "", ids), func(ctx context.Context) ([]objects.Claim, error) {
		return o.table.Request(ctx, kind, ids, limit)
	})
}

func (o faultyOwners) Wanted(ctx context.Context, session string, after objects.Claim, n int, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, o.f, limit, o.call("requested", "", session, nil), func(ctx context.Context) ([]objects.Claim, error) {
		return o.table.Wanted(ctx, session, after, n, limit)
	})
}

func (o faultyOwners) Counts(ctx context.Context, most int, limit time.Duration) ([]objects.ClaimCount, error) {
	return within(ctx, o.f, limit, o.call("count", "", "", nil), func(ctx context.Context) ([]objects.ClaimCount, error) {
		return o.table.Counts(ctx, most, limit)
	})
}

type faultyClaims struct {
	faultyOwners
	table objects.ClaimsTable
}

func (c faultyClaims) Migrate(ctx context.Context) error {
	_, err := through(ctx, c.f, c.call("migrate", "", "", nil), func(ctx context.Context) (struct{}, error) {
		return struct{}{}, c.table.Migrate(ctx)
	})
	return err
}

func (c faultyClaims) Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) ([]objects.Claim, error) {
	all := append(append([]string(nil), ids...), missing...)
	return within(ctx, c.f, limit, c.call("take", kind, session, all), func(ctx context.Context) ([]objects.Claim, error) {
		return c.table.Take(ctx, session, kind, ids, gone, missing, limit)
	})
}

func (c faultyClaims) TakeOne(ctx context.Context, session, kind string, ids, gone []string, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, c.f, limit, c.call("take", kind, session, ids), func(ctx context.Context) ([]objects.Claim, error) {
		return c.table.TakeOne(ctx, session, kind, ids, gone, limit)
	})
}

func (c faultyClaims) Move(ctx context.Context, session, kind string, seen []objects.Claim, limit time.Duration) (moved, locked []objects.Claim, err error) {
	type answer struct{ moved, locked []objects.Claim }
	a, err := within(ctx, c.f, limit, c.call("move", kind, session, idsOf(seen)), func(ctx context.Context) (a answer, err error) {
		a.moved, a.locked, err = c.table.Move(ctx, session, kind, seen, limit)
		return a, err
	})
	return a.moved, a.locked, err
}

func (c faultyClaims) OfKinds(ctx context.Context, kinds []string, limit time.Duration) ([]objects.Claim, time.Time, error) {
	type listing struct {
		claims []objects.Claim
		at     time.Time
	}
	l, err := within(ctx, c.f, limit, c.call("list", "", "", nil), func(ctx context.Context) (l listing, err error) {
		l.claims, l.at, err = c.table.OfKinds(ctx, kinds, limit)
		return l, err
	})
	return l.claims, l.at, err
}

func (c faultyClaims) Forget(ctx context.Context, kind string, limit time.Duration) error {
	_, err := within(ctx, c.f, limit, c.call("forget", kind, "", nil), func(ctx context.Context) (struct{}, error) {
		return struct{}{}, c.table.Forget(ctx, kind, limit)
	})
	return err
}

func (c faultyClaims) Prune(ctx context.Context, after int64, n int, limit time.Duration) (last int64, pruned int, err error) {
	type answer struct {
		last   int64
		pruned int
	}
	a, err := within(ctx, c.f, limit, c.call("prune", "", "", nil), func(ctx context.Context) (a answer, err error) {
		a.last, a.pruned, err = c.table.Prune(ctx, after, n, limit)
		return a, err
	})
	return a.last, a.pruned, err
}

type faultyRows struct {
	faultyOwners
	table objects.RowsTable
}

func (r faultyRows) Check(ctx context.Context, limit time.Duration) error {
	_, err := within(ctx, r.f, limit, r.call("check", "", "", nil), func(ctx context.Context) (struct{}, error) {
		return struct{}{}, r.table.Check(ctx, limit)
	})
	return err
}

func (r faultyRows) TakeReady(ctx context.Context, take objects.Taking, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, r.f, limit, r.call("take", "", take.Session, take.Only), func(ctx context.Context) ([]objects.Claim, error) {
		return r.table.TakeReady(ctx, take, limit)
	})
}

func (r faultyRows) Move(ctx context.Context, session string, seen objects.Claim, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, r.f, limit, r.call("move", "", session, []string{seen.ID}), func(ctx context.Context) ([]objects.Claim, error) {
		return r.table.Move(ctx, session, seen, limit)
	})
}

func (r faultyRows) Ready(ctx context.Context, take objects.Taking, limit time.Duration) (objects.Sight, error) {
	return within(ctx, r.f, limit, r.call("ready", "", "", nil), func(ctx context.Context) (objects.Sight, error) {
		return r.table.Ready(ctx, take, limit)
	})
}

func (r faultyRows) Expired(ctx context.Context, n int, limit time.Duration) ([]string, error) {
	return within(ctx, r.f, limit, r.call("expired", "", "", nil), func(ctx context.Context) ([]string, error) {
		return r.table.Expired(ctx, n, limit)
	})
}

func (r faultyRows) Canceled(ctx context.Context, session, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, r.f, limit, r.call("canceled", session, "", nil), func(ctx context.Context) ([]objects.Claim, error) {
		return r.table.Canceled(ctx, session, afterID, n, limit)
	})
}

func (r faultyRows) FreeCanceled(ctx context.Context, claims []objects.Claim, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, r.f, limit, r.ending("cancel", claims), func(ctx context.Context) ([]objects.Claim, error) {
		return r.table.FreeCanceled(ctx, claims, limit)
	})
}

func (r faultyRows) FreeExpired(ctx context.Context, ids []string, limit time.Duration) (int, error) {
	return within(ctx, r.f, limit, r.call("expire", "", "", ids), func(ctx context.Context) (int, error) {
		return r.table.FreeExpired(ctx, ids, limit)
	})
}

func (r faultyRows) List(ctx context.Context, after string, n int, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, r.f, limit, r.call("list", "", "", nil), func(ctx context.Context) ([]objects.Claim, error) {
		return r.table.List(ctx, after, n, limit)
	})
}

func (r faultyRows) End(ctx context.Context, how objects.Ending, claims []objects.Claim, limit time.Duration) ([]objects.Claim, error) {
	return within(ctx, r.f, limit, r.ending("end", claims), func(ctx context.Context) ([]objects.Claim, error) {
		return r.table.End(ctx, how, claims, limit)
	})
}

// EndStatement sends no statement of its own, so it calls no hook.
func (r faultyRows) EndStatement(claim objects.Claim) (query string, args []any, err error) {
	return r.table.EndStatement(claim)
}

func (r faultyRows) ending(op string, claims []objects.Claim) Call {
	return r.call(op, "", "", idsOf(claims))
}

func idsOf(claims []objects.Claim) (ids []string) {
	for _, c := range claims {
		ids = append(ids, c.ID)
	}
	return ids
}

// outcome is the result of a transaction in which rows are finished.
type outcome struct {
	lost  []objects.Claim
	fnErr error
}

type postgresFinisher interface {
	FinishWith(ctx context.Context, claims []objects.Claim, idle time.Duration, fn func(pgx.Tx) error) (lost []objects.Claim, fnErr, err error)
}

type faultyPostgresRows struct {
	faultyRows
	finisher postgresFinisher
}

func (r faultyPostgresRows) FinishWith(ctx context.Context, claims []objects.Claim, idle time.Duration, fn func(pgx.Tx) error) (lost []objects.Claim, fnErr, err error) {
	o, err := through(ctx, r.f, r.ending("finish", claims), func(ctx context.Context) (o outcome, err error) {
		o.lost, o.fnErr, err = r.finisher.FinishWith(ctx, claims, idle, fn)
		return o, err
	})
	return o.lost, o.fnErr, err
}

type sqliteFinisher interface {
	FinishWith(ctx context.Context, claims []objects.Claim, fn func(*sql.Tx) error) (lost []objects.Claim, fnErr, err error)
}

type faultySQLiteRows struct {
	faultyRows
	finisher sqliteFinisher
}

func (r faultySQLiteRows) FinishWith(ctx context.Context, claims []objects.Claim, fn func(*sql.Tx) error) (lost []objects.Claim, fnErr, err error) {
	o, err := through(ctx, r.f, r.ending("finish", claims), func(ctx context.Context) (o outcome, err error) {
		o.lost, o.fnErr, err = r.finisher.FinishWith(ctx, claims, fn)
		return o, err
	})
	return o.lost, o.fnErr, err
}
