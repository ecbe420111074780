package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	clockMoved       = "clock moved"
	stoppedImmediate = "server stopped (immediate)"
	serverFull       = "server full"
)

func (db *postgres) kinds() []faultKind {
	kinds := append(networkKinds(), []faultKind{
		{name: stoppedImmediate, group: "server", weight: 2, begin: db.stop("immediate")},
		{name: "server stopped (fast)", group: "server", weight: 2, begin: db.stop("fast")},
		{name: "lease locked by somebody", group: "server", weight: 4, begin: db.lock},
		{name: serverFull, group: "server", weight: 4, longer: 2, begin: db.fill},
		{name: renewedByCopy, group: "server", weight: 3, begin: renewByCopy(db.renewAsCopy)},
	}...)
	switch db.theme {
	case movesClock:
		kinds = append(kinds, faultKind{name: clockMoved, group: "server", weight: 4, begin: db.moveClock})
	case spoilsTombstones:
		kinds = append(kinds, db.tombstoneKinds()...)
	}
	return kinds
}

func (db *postgres) stop(mode string) func(context.Context, *phase) (string, ending, error) {
	return func(context.Context, *phase) (string, ending, error) {
		if err := db.server.Stop(mode); err != nil {
			return "", nil, err
		}
		return "all", func() (time.Duration, error) { return 0, db.server.Start() }, nil
	}
}

// moveClock sets the clock forward or back, and right again at its end.
func (db *postgres) moveClock(ctx context.Context, p *phase) (string, ending, error) {
	ahead := time.Second + p.upTo(12*time.Hour)
	if p.rand.IntN(2) == 0 {
		ahead = -ahead
	}
	err := db.setClock(ctx, ahead)
	return fmt.Sprintf("all, by %v", ahead.Round(time.Minute)), func() (time.Duration, error) {
		return 0, db.setClock(ctx, 0)
	}, err
}

// lock locks the lease's row, or the table.
func (db *postgres) lock(ctx context.Context, p *phase) (string, ending, error) {
	conn, err := db.connect(ctx)
	if err != nil {
		return "", nil, err
	}
	tx, err := conn.Begin(ctx)
	if err != nil {
		return "", nil, errors.Join(err, conn.Close(ctx))
	}
	what, sql := "its row", `SELECT FROM objects WHERE object_type = 'reconciler_lease' FOR UPDATE`
	if p.rand.IntN(3) == 0 {
		what, sql = "the table", `LOCK TABLE objects`
	}
	_, err = tx.Exec(ctx, sql)
	return what, func() (time.Duration, error) {
		return 0, errors.Join(tx.Rollback(ctx), conn.Close(ctx))
	}, err
}

// renewAsCopy renews the lease's record without changing its payload, and returns its term and version.
func (db *postgres) renewAsCopy(ctx context.Context) (term string, version int64, err error) {
	conn, err := db.connect(ctx)
	if err != nil {
		return "", 0, err
	}
	defer conn.Close(ctx)
	err = conn.QueryRow(ctx, renewAsCopy).Scan(&term, &version)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return term, version, err
}

// fill takes all connections that the server has left, and breaks the connections of some replicas.
// The other replicas can't open new connections when their old ones exceed their lifetime.
func (db *postgres) fill(ctx context.Context, p *phase) (string, ending, error) {
	filling, stop := context.WithCancel(ctx)
	filled := make(chan error, 1)
	go func() {
		var conns []*pgx.Conn
		for filling.Err() == nil {
			conn, err := pgx.Connect(filling, db.app.String())
			if err == nil {
				conns = append(conns, conn)
				continue
			}
			pause(filling, 30*time.Millisecond)
		}
		var err error
		for _, conn := range conns {
			err = errors.Join(err, conn.Close(ctx))
		}
		filled <- err
	}()
	pause(ctx, 300*time.Millisecond)
	victims := p.victims(1 + p.rand.IntN(replicas))
	if p.rand.IntN(2) == 0 {
		holders := p.record.holders()
		victims = slices.DeleteFunc(victims, func(v *process) bool { return holds(holders, v) == 1 })
	}
	for _, v := range victims {
		v.proxy.Cut()
	}
	return names(victims), func() (time.Duration, error) {
		stop()
		return 0, <-filled
	}, nil
}
