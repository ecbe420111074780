//go:build unix

package main

import (
	"context"
	"log/slog"
	"net/url"
	"strings"

	"github.com/tenurelib/tenure"
	_ "modernc.org/sqlite"
)

// database is a store that this program has opened.
type database interface {
	tenure.Store
	Migrate(ctx context.Context) error
	Close() error
}

// openStore opens the store that -store names, and creates its table if it is missing. If
// Postgres is down, openStore waits for it until ctx is done.
func openStore(ctx context.Context, name string, shared bool, log *slog.Logger) (database, error) {
	var db database
	var err error
	if isPostgres(name) {
		db, err = tenure.OpenPostgres(ctx, name, tenure.PostgresConfig{Logger: log})
	} else {
		db, err = tenure.OpenSQLite(ctx, name, tenure.SQLiteConfig{Shared: shared, Logger: log})
	}
	if err != nil {
		return nil, err
	}
	if err := db.Migrate(ctx); err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

func isPostgres(name string) bool {
	return strings.HasPrefix(name, "postgres://") || strings.HasPrefix(name, "postgresql://")
}

// redact returns the part of a store's name that may be shown. Of a URL it leaves out the
// user info and the query, because either may have a password.
func redact(name string) string {
	if !isPostgres(name) {
		return name
	}
	u, err := url.Parse(name)
	if err != nil {
		return "postgres"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}
