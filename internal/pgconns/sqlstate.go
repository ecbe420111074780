package pgconns

import (
	"errors"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// The SQLSTATEs that the stores act on.
const (
	stateProtocolViolation    = "08P01"
	stateNotSupported         = "0A000"
	StateDivisionByZero       = "22012"
	stateReadOnly             = "25006"
	StateIdleTimeout          = "25P03" // idle_in_transaction_session_timeout
	StateNoDatabase           = "3D000"
	StateSerializationFailure = "40001"
	StateDenied               = "42501"
	stateNoSuchObject         = "42704"
	StateLockNotAvailable     = "55P03"
	StateTooLarge             = "54000" // program_limit_exceeded: an index entry has too many bytes, for example
	stateCanceled             = "57014" // by statement_timeout, or by a person
)

// SQLState returns the code of the server's error, or "" if err did not come from the
// server.
func SQLState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// IsConnecting reports whether err comes from an attempt to connect.
func IsConnecting(err error) bool { return errors.As(err, new(*pgconn.ConnectError)) }

// RefusesSetting reports whether a connection was rejected because of a setting that it
// asked for. Poolers do that, each with a different error.
func RefusesSetting(err error) bool {
	switch SQLState(err) {
	case stateProtocolViolation:
		return strings.Contains(err.Error(), "startup parameter")
	case stateNotSupported, stateNoSuchObject:
		return IsConnecting(err)
	default:
		return false
	}
}

// IsUnknownSetting reports whether a connection was rejected because of a setting that Postgres does not have.
func IsUnknownSetting(err error) bool { return IsConnecting(err) && SQLState(err) == stateNoSuchObject }

// IsDown reports whether the server can't be reached, or does not yet accept connections or writes.
func IsDown(err error) bool {
	if IsReadOnly(err) {
		return true
	}
	if code := SQLState(err); code != "" {
		return strings.HasPrefix(code, "57P") || strings.HasPrefix(code, "08") || strings.HasPrefix(code, "53")
	}
	return IsConnecting(err)
}

// MayBeOfOneRow reports whether a statement may have failed because of one of its rows: because of a
// constraint, its data, its size, or a trigger, which can raise a code of its own. The classes below concern
// connections, transactions, locks, names, rights and the server.
func MayBeOfOneRow(err error) bool {
	code := SQLState(err)
	if len(code) < 2 || IsConnecting(err) {
		return false
	}
	if code == StateTooLarge {
		return true
	}
	return !slices.Contains([]string{"08", "0A", "25", "26", "28", "34", "3D", "3F", "40", "42", "53", "54", "55", "57", "58", "F0", "XX"}, code[:2])
}

// IsCanceled reports whether the server ended a statement, for example at its time limit, and rolled its
// transaction back.
func IsCanceled(err error) bool { return SQLState(err) == stateCanceled }

// IsEndedEarly reports whether the server ended a statement, or its wait for a lock, for example at a time
// limit of the role.
func IsEndedEarly(err error) bool {
	return IsCanceled(err) || SQLState(err) == StateLockNotAvailable
}

// EarlyRemedy explains why the server keeps ending statements early.
const EarlyRemedy = "if it is the statement_timeout or lock_timeout of the role or the database, set a longer one in the URL; otherwise see pg_locks for the sessions that hold locks"

// ErrStandby is the error of a call that only a primary can answer.
var ErrStandby = errors.New("the server is a standby: it is in recovery")

// IsReadOnly reports whether a write was rejected because the server or the session is
// read-only, or would have been.
func IsReadOnly(err error) bool { return SQLState(err) == stateReadOnly || errors.Is(err, ErrStandby) }
