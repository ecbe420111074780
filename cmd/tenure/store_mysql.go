//go:build unix

package main

import (
	"context"
	"database/sql"
	"log/slog"
	"strings"

	"github.com/tenurelib/tenure/stores/mysqltenure"
)

// productOf names the server's product and version.
func productOf(ctx context.Context, db *sql.DB) string {
	var version string
	if err := db.QueryRowContext(ctx, "SELECT VERSION()").Scan(&version); err != nil {
		return "MySQL or MariaDB"
	}
	if version, _, ok := strings.Cut(version, "-MariaDB"); ok {
		return "MariaDB " + version
	}
	return "MySQL " + version
}

// openMySQL opens the store of a URL mysql://user:password@host:3306/database. It waits for a server that is down.
func openMySQL(ctx context.Context, url string, s *storeFlag, log *slog.Logger) (database, error) {
	return whenAnswered(ctx, "MySQL", log, func(ctx context.Context) (database, error) {
		store, err := mysqltenure.Open(ctx, url, mysqltenure.Config{Table: s.table, Logger: log})
		if err != nil {
			return nil, err
		}
		return store, nil
	})
}
