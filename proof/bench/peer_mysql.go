package main

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"net/url"
	"time"

	_ "github.com/go-sql-driver/mysql"

	"github.com/tenurelib/tenure/stores/mysqltenure"
)

var (
	tenureMySQLPeer = storePeer("tenure-mysql", "this library, on MariaDB", onMySQL, 0, func(ctx context.Context, url string) (database, error) {
		return mysqltenure.Open(ctx, url, mysqltenure.Config{Logger: slog.New(slog.DiscardHandler)})
	})
	mysqlFloorPeer = mysqlPeer("mysql-floor", "a row of MariaDB by hand: one bare statement creates it, and one deletes it; a standby polls", mysqlPolls, func(db *sql.DB, lease string) (key, error) {
		_, err := db.Exec(`INSERT IGNORE INTO floor (id, version) VALUES (?, 0)`, lease)
		return &mysqlRow{db, lease}, err
	})
	getLockPeer = mysqlPeer("get-lock", "GET_LOCK of MariaDB, with a standby that waits for it", 0, func(db *sql.DB, lease string) (key, error) {
		conn, err := db.Conn(context.Background()) // each lease has its own, which a standby keeps busy
		return &getLock{conn, lease}, err
	})
)

const mysqlPolls = fastTTL / 6

// mysqlPeer is an election by hand on MariaDB. Nothing expires.
func mysqlPeer(name, about string, polls time.Duration, keyOf func(db *sql.DB, lease string) (key, error)) peer {
	return peer{
		name:  name,
		about: about,
		on:    onMySQL,
		polls: polls,
		prepare: func(ctx context.Context, url string) error {
			db, err := openMySQL(url)
			if err != nil {
				return err
			}
			defer db.Close()
			_, err = db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS floor (id VARBINARY(100) PRIMARY KEY, payload BLOB, version BIGINT NOT NULL)`)
			return err
		},
		open: func(ctx context.Context, o options) (*replica, error) {
			db, err := openMySQL(o.url)
			if err != nil {
				return nil, err
			}
			db.SetMaxIdleConns(acquireWorkers)
			return &replica{
				contender: func(lease string) (contender, error) {
					k, err := keyOf(db, lease)
					return &handContender{key: k}, err
				},
				close: func() { db.Close() },
			}, nil
		},
	}
}

func openMySQL(at string) (*sql.DB, error) {
	u, err := url.Parse(at)
	if err != nil {
		return nil, err
	}
	return sql.Open("mysql", fmt.Sprintf("%s@tcp(%s)%s?interpolateParams=true", u.User, u.Host, u.Path))
}

// mysqlRow is held while it has a payload.
type mysqlRow struct {
	db *sql.DB
	id string
}

func (r *mysqlRow) create(ctx context.Context) (bool, error) {
	done, err := r.db.ExecContext(ctx, `UPDATE floor SET payload = ?, version = LAST_INSERT_ID(version + 1) WHERE id = ? AND payload IS NULL`, floorPayload, r.id)
	if err != nil {
		return false, err
	}
	n, err := done.RowsAffected()
	return n == 1, err
}

func (r *mysqlRow) awaitDeleted(ctx context.Context) error { return pause(ctx, mysqlPolls) }

func (r *mysqlRow) delete(ctx context.Context) error {
	_, err := r.db.ExecContext(ctx, `UPDATE floor SET payload = NULL WHERE id = ?`, r.id)
	return err
}

type getLock struct {
	conn *sql.Conn
	name string
}

// create waits until no other replica has the lock.
func (l *getLock) create(ctx context.Context) (got bool, err error) {
	err = l.conn.QueryRowContext(ctx, `SELECT GET_LOCK(?, 3600)`, l.name).Scan(&got)
	return got, err
}

func (l *getLock) awaitDeleted(context.Context) error { return nil }

func (l *getLock) delete(ctx context.Context) error {
	_, err := l.conn.ExecContext(ctx, `DO RELEASE_LOCK(?)`, l.name)
	return err
}
