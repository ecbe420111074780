//go:build unix

package main

import (
	"context"
	"log/slog"

	"github.com/tenurelib/tenure/stores/mysqltenure"
)

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
