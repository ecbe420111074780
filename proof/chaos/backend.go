package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// backend is a replica's access to its database: the store and the ledger, a table
// in which each write records the term or the claim that it belongs to.
type backend interface {
	store() tenure.Store

	// fenced writes to the ledger in a fenced transaction, which it keeps open for a while.
	fenced(ctx context.Context, guard tenure.Guard, e entry, delay time.Duration) error

	// unfenced writes to the ledger in an ordinary transaction.
	unfenced(ctx context.Context, e entry) error

	// addRows adds rows to work on.
	addRows(ctx context.Context, n int) error

	// finish finishes a row, and writes to the ledger with it.
	finish(ctx context.Context, queue *claims.Queue, c claims.Claim, e entry, delay time.Duration) error

	// lastNote returns the greatest note of fenced writes by claims whose names are like that.
	lastNote(ctx context.Context, like string) (string, error)

	close() error
}

func openBackend(ctx context.Context, cfg replicaConfig) (backend, error) {
	switch scheme, _, _ := strings.Cut(cfg.URL, ":"); scheme {
	case "":
		return openSQLite(ctx, cfg)
	case "nats":
		return openNATS(ctx, cfg)
	case "etcd":
		return openEtcd(ctx, cfg)
	case mysqlScheme:
		return openMySQL(ctx, cfg)
	}
	return openPostgres(ctx, cfg)
}

type postgresBackend struct {
	*tenure.PostgresStore
	pool *pgxpool.Pool
}

// openPostgres gives the store either a pool of its own or that of the ledger, to test
// both ways of using it.
func openPostgres(ctx context.Context, cfg replicaConfig) (backend, error) {
	pool, err := pgxpool.New(ctx, cfg.URL)
	if err != nil {
		return nil, err
	}
	if cfg.SharePool {
		store, err := tenure.NewPostgresStore(pool, tenure.PostgresConfig{})
		return &postgresBackend{store, pool}, err
	}
	store, err := tenure.OpenPostgres(ctx, cfg.URL, tenure.PostgresConfig{})
	if err != nil {
		pool.Close()
		return nil, err
	}
	return &postgresBackend{store, pool}, nil
}

const ledgerInsert = `INSERT INTO ledger (kind, term, token, note) VALUES ($1, $2, $3, $4)`

func (b *postgresBackend) store() tenure.Store { return b.PostgresStore }

// adding returns a func that writes to the ledger and keeps the transaction open for a while.
func (b *postgresBackend) adding(ctx context.Context, e entry, delay time.Duration) func(pgx.Tx) error {
	return func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, ledgerInsert, e.kind, e.term, e.token, e.note); err != nil {
			return err
		}
		time.Sleep(delay)
		return nil
	}
}

func (b *postgresBackend) fenced(ctx context.Context, guard tenure.Guard, e entry, delay time.Duration) error {
	return b.Fenced(ctx, guard, b.adding(ctx, e, delay))
}

func (b *postgresBackend) unfenced(ctx context.Context, e entry) error {
	_, err := b.pool.Exec(ctx, ledgerInsert, e.kind, e.term, e.token, e.note)
	return err
}

func (b *postgresBackend) addRows(ctx context.Context, n int) error {
	_, err := b.pool.Exec(ctx, `INSERT INTO work (status) SELECT 'queued' FROM generate_series(1, $1)`, n)
	return err
}

func (b *postgresBackend) finish(ctx context.Context, queue *claims.Queue, c claims.Claim, e entry, delay time.Duration) error {
	return queue.FinishPostgres(ctx, []claims.Claim{c}, b.adding(ctx, e, delay))
}

const lastNote = `SELECT coalesce(max(note), '') FROM ledger WHERE kind = '` + ledgerClaimFenced + `' AND term LIKE $1`

func (b *postgresBackend) lastNote(ctx context.Context, like string) (note string, err error) {
	err = b.pool.QueryRow(ctx, lastNote, like).Scan(&note)
	return note, err
}

func (b *postgresBackend) close() error {
	err := b.PostgresStore.Close()
	b.pool.Close()
	return err
}

type sqliteBackend struct {
	*tenure.SQLiteStore
	db *sql.DB
}

// migrate makes the tables of leases and those of claims.
func migrate(ctx context.Context, store tenure.Database) error {
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	return claims.Migrate(ctx, store)
}

func openSQLite(ctx context.Context, cfg replicaConfig) (backend, error) {
	store, err := tenure.OpenSQLite(ctx, cfg.File, tenure.SQLiteConfig{Shared: true})
	if err != nil {
		return nil, err
	}
	if err := migrate(ctx, store); err != nil {
		store.Close()
		return nil, err
	}
	db, err := sql.Open("sqlite", sqliteDSN(cfg.File, 20*time.Millisecond))
	if err != nil {
		store.Close()
		return nil, err
	}
	return &sqliteBackend{store, db}, nil
}

// sqliteDSN opens a file as the library does. It needs a busy timeout of its own: a wait
// for a lock does not end with its context.
func sqliteDSN(file string, wait time.Duration) string {
	return fmt.Sprintf("file:%s?_txlock=immediate&_pragma=busy_timeout(%d)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)",
		file, wait.Milliseconds())
}

func (b *sqliteBackend) store() tenure.Store { return b.SQLiteStore }

// adding keeps the transaction open only briefly, because it holds the file's only write lock.
func (b *sqliteBackend) adding(ctx context.Context, e entry, delay time.Duration) func(*sql.Tx) error {
	return func(tx *sql.Tx) error {
		time.Sleep(delay / 20)
		_, err := tx.ExecContext(ctx, ledgerInsert, e.kind, e.term, e.token, e.note)
		return err
	}
}

func (b *sqliteBackend) fenced(ctx context.Context, guard tenure.Guard, e entry, delay time.Duration) error {
	return b.Fenced(ctx, guard, b.adding(ctx, e, delay))
}

func (b *sqliteBackend) unfenced(ctx context.Context, e entry) error {
	_, err := b.db.ExecContext(ctx, ledgerInsert, e.kind, e.term, e.token, e.note)
	return err
}

func (b *sqliteBackend) addRows(ctx context.Context, n int) error {
	_, err := b.db.ExecContext(ctx, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < $1) INSERT INTO work (status) SELECT 'queued' FROM n`, n)
	return err
}

func (b *sqliteBackend) finish(ctx context.Context, queue *claims.Queue, c claims.Claim, e entry, delay time.Duration) error {
	return queue.FinishSQLite(ctx, []claims.Claim{c}, b.adding(ctx, e, delay))
}

func (b *sqliteBackend) lastNote(ctx context.Context, like string) (note string, err error) {
	err = b.db.QueryRowContext(ctx, lastNote, like).Scan(&note)
	return note, err
}

func (b *sqliteBackend) close() error {
	err := b.SQLiteStore.Close()
	return errors.Join(err, b.db.Close())
}
