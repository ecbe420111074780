package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// tombstonesSpoilt is the prefix of the names of faults that make the table of
	// tombstones unusable while the replicas run. They must notice and go on without it.
	tombstonesSpoilt = "tombstones "

	tombstonesCrashed = tombstonesSpoilt + "unlogged, and a crash"
)

func (db *postgres) tombstoneKinds() []faultKind {
	const table = "objects_tombstones"
	kind := func(name string, spoil, mend func(context.Context) error) faultKind {
		return faultKind{name: name, group: "server", weight: 4, longer: 2, begin: func(ctx context.Context, p *phase) (string, ending, error) {
			return spoilTombstones(ctx, p, spoil, mend)
		}}
	}
	sql := func(sql string) func(context.Context) error {
		return func(ctx context.Context) error { return db.alter(ctx, table, sql) }
	}
	migrate := func(ctx context.Context) error {
		store, err := db.open(ctx, db.admin)
		if err != nil {
			return err
		}
		return errors.Join(store.Migrate(ctx), store.Close(), db.exec(ctx, `GRANT SELECT, INSERT, UPDATE, DELETE ON `+table+` TO app`))
	}
	crash := func(ctx context.Context) error {
		if err := sql(`ALTER TABLE ` + table + ` SET UNLOGGED`)(ctx); err != nil {
			return err
		}
		return db.server.Restart("immediate")
	}
	return []faultKind{
		kind(tombstonesSpoilt+"dropped", sql(`DROP TABLE `+table), migrate),
		kind(tombstonesSpoilt+"revoked", sql(`REVOKE ALL ON `+table+` FROM app`), sql(`GRANT SELECT, INSERT, UPDATE, DELETE ON `+table+` TO app`)),
		kind(tombstonesSpoilt+"under row-level security", sql(`ALTER TABLE `+table+` ENABLE ROW LEVEL SECURITY`), sql(`ALTER TABLE `+table+` DISABLE ROW LEVEL SECURITY`)),
		kind(tombstonesCrashed, crash, sql(`ALTER TABLE `+table+` SET LOGGED`)),
	}
}

// spoilTombstones makes the table unusable until it is repaired. Half of the time the lease
// is free at that moment, and one of the replicas, which have all seen the table, must
// acquire the lease without it; otherwise the holder must release the lease without it.
func spoilTombstones(ctx context.Context, p *phase, spoil, mend func(context.Context) error) (string, ending, error) {
	before := p.rand.IntN(2) == 0
	goOn, start := func() error { return nil }, func() error { return nil }
	if before {
		var err error
		if goOn, start, err = leaveFree(p); err != nil {
			return "", nil, err
		}
	}
	err := errors.Join(spoil(ctx), goOn())
	target := "all, with no holder"
	if !before {
		target = "all"
		for _, v := range p.victims(1) {
			err = errors.Join(err, v.resign())
		}
	}
	at := monotonic()
	return target, func() (time.Duration, error) { return at, errors.Join(mend(ctx), start()) }, err
}

// leaveFree terminates the holder while all other replicas are stopped, so that none takes
// the lease until goOn is called. start restarts the terminated one.
func leaveFree(p *phase) (goOn, start func() error, err error) {
	var holders, others []*process
	running := p.record.holders()
	for _, v := range p.victims(replicas) {
		if holds(running, v) == 1 {
			holders = append(holders, v)
		} else {
			others = append(others, v)
		}
	}
	pause := &fault{kind: paused, target: names(others), from: monotonic(), episode: p.episodes}
	unfreeze, err := freeze(p, others)
	if err != nil {
		return nil, nil, err
	}
	goOn = func() (err error) {
		pause.to, err = unfreeze()
		p.note([]*fault{pause})
		return err
	}
	for _, v := range holders {
		err = errors.Join(err, v.terminate())
	}
	return goOn, func() error { return startAll(holders) }, err
}

// alter changes a table. It terminates sessions that keep a lock on it for more than a
// second because another fault keeps them from ending their transaction.
func (db *postgres) alter(ctx context.Context, table, sql string) error {
	for {
		err := db.exec(ctx, `SET lock_timeout = '1s'; `+sql)
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.Code != "55P03" {
			return err
		}
		err = db.exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE relation = '`+table+`'::regclass AND pid <> pg_backend_pid()`)
		if err != nil {
			return err
		}
	}
}
