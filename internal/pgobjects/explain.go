package pgobjects

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

const (
	stateNotPrepared   = "26000"
	statePreparedTwice = "42P05"
	stateNoTable       = "42P01"
	stateNoFunction    = "42883"
	stateNotInState    = "55000" // object_not_in_prerequisite_state
	stateNotSupported  = "0A000"
	stateNoSchema      = "3F000"
	stateOutOfRange    = "22003"
	stateNotNull       = "23502"
	stateUnique        = "23505"
)

// outdated reports whether a write was rejected because of something that a look can find: a table,
// a column, a privilege.
func outdated(err error) bool {
	code := pgconns.SQLState(err)
	return (strings.HasPrefix(code, "42") && code != statePreparedTwice || code == stateNoSchema) && !pgconns.IsConnecting(err)
}

// throughPooler is the remedy for a pooler that gives a session's prepared statements to other clients.
const throughPooler = "(through a pooler in transaction mode, add default_query_exec_mode=exec to the URL)"

// explain wraps a driver's error with its meaning.
func (s *setups) explain(err error) error {
	if err == nil || errors.Is(err, objects.ErrSetup) {
		return err
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return objects.ErrNotFound
	}
	if errors.Is(err, pgconns.ErrStandby) {
		return fmt.Errorf("%w (%s)", err, pgconns.ReadOnlyRemedy)
	}
	err = pgconns.ExplainConnecting(err)
	switch code := pgconns.SQLState(err); {
	case code == "":
		return err
	case s.conns.Reached() && pgconns.IsConnecting(err) && !pgconns.RefusesSetting(err):
		// The server has accepted connections before and may do so again: a password may be in
		// rotation, or a database being replaced.
		return err
	case pgconns.IsRejected(err): // its text says what to do
		return objects.SetupError(err)
	case pgconns.IsReadOnly(err):
		return fmt.Errorf("%w (%s)", err, pgconns.ReadOnlyRemedy)
	case code == stateNoTable || code == stateNoSchema:
		return &objects.NoTable{Cause: err}
	case code == stateUnique:
		return fmt.Errorf("%w: %w", objects.ErrTaken, err)
	case code == pgconns.StateTooLarge:
		return fmt.Errorf("%w: %w (a key, or a name, must have at most %d bytes together with its type: use a hash of it)", objects.ErrInvalid, err, longestKey)
	case pgconns.IsUnknownSetting(err):
		return fmt.Errorf("%w: %w (remove this setting from the URL: the server does not know it, so it must be meant for another program)", objects.ErrSetup, err)
	case pgconns.RefusesSetting(err):
		return fmt.Errorf("%w: %w (a pooler does not accept such a setting in the URL)", objects.ErrSetup, err)
	case code == statePreparedTwice:
		return fmt.Errorf("%w: %w %s", objects.ErrSetup, err, throughPooler)
	case code == stateNotPrepared: // not an ErrSetup, because the driver prepares it again if there is no pooler
		return fmt.Errorf("%w %s", err, throughPooler)
	case code == pgconns.StateDenied:
		return fmt.Errorf("%w: %w%s", objects.ErrSetup, err, s.remedyFor(err))
	case strings.HasPrefix(code, "42"), // wrong type, no such column
		strings.HasPrefix(code, "28"), // the role is rejected
		code == pgconns.StateNoDatabase,
		code == stateOutOfRange, // a column too narrow for a version
		code == stateNotNull:    // another program's column that requires a value
		return fmt.Errorf("%w: %w", objects.ErrSetup, err)
	}
	return err
}

// remedyFor returns the statements that grant this role what a statement was denied, or "" if that is not known:
// the function of a trigger may need a privilege, too.
func (s *setups) remedyFor(denied error) string {
	of := func(name string) bool { return strings.Contains(denied.Error(), " "+name+" (SQLSTATE") }
	if s.cfg.Schema != "" && of(s.cfg.Schema) {
		role := s.conns.Pool.Config().ConnConfig.User
		if told := s.told.Load(); told != nil {
			role = told.role
		}
		return fmt.Sprintf(" (as its owner: GRANT USAGE ON SCHEMA %s TO %s)", objects.Quoted(s.cfg.Schema), objects.Quoted(role))
	}
	told := s.told.Load()
	if told == nil || told.grants() == "" || !slices.ContainsFunc(objects.OwnTables[:], func(own objects.OwnTable) bool { return of(s.cfg.Table + own.Suffix) }) {
		return ""
	}
	return " (as the owner: " + told.grants() + ")"
}

// unreadable marks a value that a read can't scan. It must not be used for writes, which
// have happened even if their answer can't be scanned.
func unreadable(err error) error {
	if errors.As(err, new(pgx.ScanArgError)) {
		return fmt.Errorf("%w: %w", objects.ErrSetup, err)
	}
	return err
}
