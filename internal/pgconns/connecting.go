package pgconns

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// ExplainConnecting gives the error of an attempt to connect a one-line text that begins with the cause,
// and returns any other error as it is. The driver's own text has a line for each address and kind of
// connection that was tried, followed by the cause. The result wraps the driver's error.
func ExplainConnecting(err error) error {
	var failed *pgconn.ConnectError
	if errors.As(err, new(*connectingError)) || !errors.As(err, &failed) {
		return err
	}
	where := fmt.Sprintf("database %s on %s", failed.Config.Database, strings.Join(addresses(failed.Config), ", "))
	var answer *pgconn.PgError
	if errors.As(err, &answer) && IsRejected(err) {
		return &connectingError{err, fmt.Sprintf("%s (SQLSTATE %s; %s): %s", answer.Message, answer.Code, where, remedy(answer.Code))}
	}
	return &connectingError{err, fmt.Sprintf("cannot connect to %s: %s", where, strings.Join(attempts(failed), "; "))}
}

// IsRejected reports whether the server does not let this role into this database. The driver
// tries no other address after such an answer.
func IsRejected(err error) bool { return IsConnecting(err) && remedy(SQLState(err)) != "" }

// remedy returns what to do about a server that rejects a role or a database with this code.
func remedy(code string) string {
	switch {
	case code == "28P01":
		return "correct the user and the password in the URL"
	case strings.HasPrefix(code, "28"): // no such role, or no such entry in pg_hba.conf
		return "correct the user in the URL, or create the role and let it in (pg_hba.conf)"
	case code == StateNoDatabase:
		return "create the database, or correct its name in the URL"
	case code == StateDenied:
		return "GRANT CONNECT on the database to the role"
	}
	return ""
}

// addresses returns the addresses that the driver tries.
func addresses(cfg *pgconn.Config) []string {
	all := []string{net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port)))}
	for _, next := range cfg.Fallbacks { // repeats an address for each kind of connection
		if at := net.JoinHostPort(next.Host, strconv.Itoa(int(next.Port))); !slices.Contains(all, at) {
			all = append(all, at)
		}
	}
	return all
}

// attempts returns why each attempt to connect failed, without repetitions. A server's lack of TLS is not
// a reason if a connection without TLS was tried next.
func attempts(failed *pgconn.ConnectError) []string {
	const noTLS = "tls error: server refused TLS connection"
	var all []string
	for text := range strings.Lines(failed.Unwrap().Error()) {
		text = strings.TrimSpace(text)
		if _, cause, ok := strings.Cut(text, ": dial error: dial "); ok { // which names the address again
			text = "dial " + cause
		}
		text = strings.TrimPrefix(text, "hostname resolving error: ")
		text = strings.Replace(text, "ValidateConnect failed: "+pgconn.ErrReadOnlyConnection.Error(), "the server is read-only, such as a standby", 1)
		if text != "" && !slices.Contains(all, text) {
			all = append(all, text)
		}
	}
	if last := len(all) - 1; last > 0 && !strings.HasSuffix(all[last], noTLS) {
		all = slices.DeleteFunc(all, func(text string) bool { return strings.HasSuffix(text, noTLS) })
	}
	return all
}

type connectingError struct {
	error
	text string
}

func (e *connectingError) Error() string { return e.text }
func (e *connectingError) Unwrap() error { return e.error }
