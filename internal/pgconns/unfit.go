package pgconns

import (
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
)

// Unfit returns an [objects.ErrSetup] for a server that speaks the Postgres protocol but on which no promise can
// be kept. It goes by what the connection has already shown, and sends nothing.
func Unfit(conn *pgx.Conn) error {
	switch {
	case conn.PgConn().ParameterStatus("crdb_version") != "":
		return fmt.Errorf("%w: this server is CockroachDB, which has neither the notifications nor the locks that leases and fences rely on: keep them in PostgreSQL", objects.ErrSetup)
	case hostOfDSQL.MatchString(conn.Config().Host):
		return fmt.Errorf("%w: this server is Aurora DSQL, which has neither READ COMMITTED nor the locks that leases and fences rely on: keep them in PostgreSQL", objects.ErrSetup)
	}
	return nil
}

// Clients find a cluster of Aurora DSQL only by a name in its domain.
var hostOfDSQL = regexp.MustCompile(`\.dsql(-[a-z0-9]+)?\.[a-z0-9-]+\.on\.aws\.?$`)
