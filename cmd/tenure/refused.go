//go:build unix

package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// refusedConnection explains why a Postgres server does not let this program in, in one line
// with the remedy; it returns "" for any other error. The driver's own text has a line for
// each address and kind of connection that it has tried, and the cause behind them.
func refusedConnection(err error) string {
	var connecting *pgconn.ConnectError
	var answer *pgconn.PgError
	if !errors.As(err, &connecting) || !errors.As(err, &answer) {
		return ""
	}
	remedy := ""
	switch {
	case answer.Code == "28P01":
		remedy = "correct the user and the password in the store's URL"
	case strings.HasPrefix(answer.Code, "28"): // no such role, or no such entry in pg_hba.conf
		remedy = "correct the user in the store's URL, or let it in on the server (pg_hba.conf)"
	case answer.Code == "3D000":
		remedy = "create the database, or correct its name in the store's URL"
	default:
		return ""
	}
	cfg := connecting.Config
	return fmt.Sprintf("%s (database %s on %s:%d): %s", answer.Message, cfg.Database, cfg.Host, cfg.Port, remedy)
}
