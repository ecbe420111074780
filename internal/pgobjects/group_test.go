package pgobjects

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestOnlyAGroupThatTheServerRejectsWasRolledBack(t *testing.T) {
	for _, c := range []struct {
		what string
		err  error
		want bool
	}{
		{"a lock timeout", &pgconn.PgError{Severity: "FEHLER", SeverityUnlocalized: "ERROR", Code: "55P03"}, true},
		{"an old server's error", &pgconn.PgError{Severity: "ERROR", Code: "55P03"}, true},
		{"the server's shutdown", &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01"}, false},
		{"a pooler that reports that the server is gone", &pgconn.PgError{Severity: "ERROR", Code: "08006"}, false},
		{"a pooler that refuses the connection", &pgconn.PgError{Severity: "FATAL", Code: "08P01", Message: "unsupported startup parameter: lock_timeout"}, true},
		{"a connection that breaks", errors.New("unexpected EOF"), false},
		{"nothing", nil, false},
	} {
		if got := rolledBack(c.err); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}
