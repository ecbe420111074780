package pgconns

import (
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ReadOnlyRemedy explains why a write was rejected as read-only.
const ReadOnlyRemedy = "the server is read-only, such as a standby, or default_transaction_read_only is on for the role or the database; if the connection string of the pool names several hosts, add target_session_attrs=read-write to it"

// choosesServer reports whether a connection string says which of several servers to use.
func choosesServer(url string) bool {
	return strings.Contains(url, "target_session_attrs") || os.Getenv("PGTARGETSESSIONATTRS") != ""
}

// findPrimary makes connections go to the first of several hosts that accepts writes, unless the
// config has a rule of its own. The first host of all may be a standby.
func findPrimary(config *pgx.ConnConfig) {
	first := net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	for _, next := range config.Fallbacks { // repeats the host for each kind of connection
		if config.ValidateConnect == nil && net.JoinHostPort(next.Host, strconv.Itoa(int(next.Port))) != first {
			config.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
		}
	}
}
