package pgobjects

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// migrateLock is the key of the advisory lock that serializes migrations: of several
// concurrent CREATE TABLE IF NOT EXISTS, all but one may fail.
const migrateLock = 0x74656e757265 // "tenure"

// lookAgain is how long the store relies on what it found in the database, unless a
// statement's failure contradicts that.
const lookAgain = 10 * time.Minute

var errNoTable = errors.New("the table does not exist")

// setup is what was found in the database.
type setup struct {
	at time.Time // when it was found

	schema            string        // of the table, even if search_path found it
	lacks             string        // privileges on the table that this role lacks
	tombstones        bool          // the table exists, and this role may write it
	unlogged          bool          // a crash empties the table of tombstones
	names             bool          // a unique index covers the names
	idAlone           bool          // an ID is unique among all types, not only in its own
	idleTimeout       time.Duration // idle_in_transaction_session_timeout; 0 means none
	synchronousCommit string
}

// equal reports whether both looks found the same.
func (s *setup) equal(other *setup) bool {
	if other == nil {
		return false
	}
	same := *other
	same.at = s.at
	return same == *s
}

// setups knows what was found in the database, and looks again when that may have
// changed.
type setups struct {
	conns  *pgconns.Conns
	names  names
	logger *slog.Logger

	found   atomic.Pointer[setup]  // nil before the first look, and while the database is unsuitable
	told    atomic.Pointer[setup]  // what was last logged
	prefix  atomic.Pointer[string] // prefix of hints; nil before the table was found
	looking atomic.Bool            // a call is looking again, because found is old
}

// migrate creates missing tables and looks at the result.
func (s *setups) migrate(ctx context.Context) (*setup, error) {
	err := s.whenUp(ctx, func() error {
		_, err := s.inspect(ctx)
		if errors.Is(err, errNoTable) {
			err = s.createTable(ctx, objects.PostgresObjects)
		}
		if err != nil {
			return err
		}
		found, err := s.inspect(ctx)
		if err != nil {
			return err
		}
		if !found.tombstones {
			err := s.createTable(ctx, objects.PostgresTombstones)
			if err != nil && pgconns.SQLState(err) != pgconns.StateDenied { // tombstones are not required
				return err
			}
		}
		return s.migrateClaims(ctx)
	})
	if err != nil {
		return nil, err
	}
	return s.look(ctx)
}

// migrateClaims creates the tables of claims if one is missing. No lease needs them.
func (s *setups) migrateClaims(ctx context.Context) error {
	var exists bool // otherwise CREATE TABLE IF NOT EXISTS would need the right to create tables
	err := s.conns.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL AND to_regclass($2) IS NOT NULL`, []any{s.names.claims, s.names.requests}, &exists)
	if err != nil || exists {
		return err
	}
	err = s.createTable(ctx, objects.PostgresClaims)
	if pgconns.SQLState(err) == pgconns.StateDenied {
		s.logger.Warn("no table of claims, and this role may not create it: sessions cannot claim anything", "missing", s.names.claims)
		return nil
	}
	return err
}

func (s *setups) createTable(ctx context.Context, ddl string) error {
	return pgx.BeginFunc(ctx, s.conns.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, int64(migrateLock)); err != nil {
			return err
		}
		if s.names.schema != "" {
			// Not CREATE SCHEMA IF NOT EXISTS alone: that needs the right to create
			// schemas even if this one exists.
			var exists bool
			err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)`, s.names.schema).Scan(&exists)
			if err != nil {
				return err
			}
			if !exists {
				if _, err := tx.Exec(ctx, `CREATE SCHEMA `+pgx.Identifier{s.names.schema}.Sanitize()); err != nil {
					return err
				}
			}
		}
		_, err := tx.Exec(ctx, s.names.in(ddl))
		return err
	})
}

// get looks at the database on the first call, and again from time to time, because
// people change tables and privileges while replicas run.
func (s *setups) get(ctx context.Context) (*setup, error) {
	found := s.found.Load()
	if found == nil {
		return s.look(ctx)
	}
	if time.Since(found.at) < lookAgain || !s.looking.CompareAndSwap(false, true) {
		return found, nil
	}
	defer s.looking.Store(false)
	again, err := s.look(ctx)
	if err != nil && !errors.Is(err, objects.ErrSetup) { // nothing was found out
		return found, nil
	}
	return again, err
}

// look looks at the database, and remembers what it finds.
func (s *setups) look(ctx context.Context) (*setup, error) {
	found, err := s.inspect(ctx)
	if err != nil {
		if errors.Is(err, objects.ErrSetup) {
			s.found.Store(nil)
		}
		return nil, err
	}
	s.believe(found)
	return found, nil
}

// believe makes the store rely on what was found, and logs what is wrong with it unless
// that was logged before.
func (s *setups) believe(found *setup) {
	prefix := found.hintPrefix()
	s.prefix.Store(&prefix)
	s.found.Store(found)
	before := s.told.Swap(found)
	if found.equal(before) {
		return
	}
	if !found.tombstones {
		s.logger.Warn("no table of tombstones that this role may write: only the database's clock keeps versions from going back",
			"missing", s.names.tombstones)
	}
	if found.unlogged {
		s.logger.Warn("the table of tombstones is unlogged: after a crash of the database only its clock keeps versions from going back",
			"table", s.names.tombstones)
	}
	if !found.names {
		s.logger.Warn("no unique index on (object_type, name): two objects can have one name", "table", s.names.objects)
	}
	if found.synchronousCommit == "off" {
		s.logger.Warn("synchronous_commit is off: a crash of the database can forget a lease that was granted, and repeat its fencing token")
	}
}

// write does a write in the way that suits what was found in the database. If the server
// rejects it because the database has changed since, it looks again and retries the write
// once. A write that the server rejected has changed nothing.
func (s *setups) write(ctx context.Context, write func(found *setup) error) error {
	found, err := s.get(ctx)
	if err != nil {
		return err
	}
	err = write(found)
	if !outdated(err) {
		return err
	}
	again, lookErr := s.look(ctx)
	switch {
	case errors.Is(lookErr, objects.ErrSetup):
		return lookErr // this error explains what is wrong with the table, not only with this write
	case lookErr != nil: // no time was left, for example; the next call begins with a look
		s.found.CompareAndSwap(found, nil)
		return err
	case !again.equal(found):
		return write(again)
	case !found.tombstones:
		return err
	}
	// The tombstones look writable, but something that a look can't evaluate, like the
	// expression of a policy, may forbid it. Tombstones are not required.
	without := *again
	without.tombstones, without.unlogged = false, false
	if write(&without) != nil {
		return err
	}
	s.believe(&without)
	return nil
}

// mayHold returns an error if this role lacks a privilege that a lease needs. Otherwise a
// lease that can be acquired, but not renewed, would be acquired again and again.
func (s *setups) mayHold(ctx context.Context, found *setup) (err error) {
	if found.lacks != "" {
		found, err = s.look(ctx) // it may have been granted since
	}
	if err == nil && found.lacks != "" {
		err = fmt.Errorf("%w: this role lacks privileges that a lease needs (GRANT %s ON %s)", objects.ErrSetup, found.lacks, s.names.objects)
	}
	return err
}

// outdated reports whether a write was rejected because of something that a look finds: a
// table, a column, a privilege.
func outdated(err error) bool {
	code := pgconns.SQLState(err)
	return (strings.HasPrefix(code, "42") && code != statePreparedTwice || code == stateNoSchema) && !pgconns.IsConnecting(err)
}

// whenUp calls fn, repeatedly while the database can't be reached.
func (s *setups) whenUp(ctx context.Context, fn func() error) error {
	var last error // error of the last attempt that ctx did not cut off, which explains what is wrong
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := s.explain(fn())
		switch {
		case err == nil:
			return nil
		case last != nil && ctx.Err() != nil:
			return fmt.Errorf("%w (%w)", last, context.Cause(ctx))
		case errors.Is(err, objects.ErrSetup) || !pgconns.IsDown(err):
			return err
		case last == nil:
			s.logger.Warn("waiting for the database", "error", logtext.OneLine(err))
		}
		last = err
		if !pace.Sleep(ctx, pace.Jitter(pause)) {
			return fmt.Errorf("%w (%w)", err, context.Cause(ctx))
		}
	}
}

const (
	stateNotPrepared   = "26000"
	statePreparedTwice = "42P05"
	stateNoTable       = "42P01"
	stateNoSchema      = "3F000"
	stateOutOfRange    = "22003"
	stateNotNull       = "23502"
	stateUnique        = "23505"
)

// throughPooler is the remedy where a pooler gives a session's prepared statements to others.
const throughPooler = "(through a pooler in transaction mode, add default_query_exec_mode=exec to the URL)"

// explain wraps an error of the driver with what it means here.
func (s *setups) explain(err error) error {
	if err == nil || errors.Is(err, objects.ErrSetup) {
		return err
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return objects.ErrNotFound
	}
	err = pgconns.ExplainConnecting(err)
	switch code := pgconns.SQLState(err); {
	case code == "":
		return err
	case s.conns.Reached() && pgconns.IsConnecting(err) && !pgconns.RefusesSetting(err):
		// The server has accepted connections before, and may do so again by itself: a
		// password is being rotated, or a database replaced.
		return err
	case pgconns.IsRejected(err): // its text says what to do
		return objects.SetupError(err)
	case code == stateNoTable || code == stateNoSchema:
		return &objects.NoTable{Cause: err}
	case code == stateUnique:
		return fmt.Errorf("%w: %w", objects.ErrTaken, err)
	case code == pgconns.StateTooLarge:
		return fmt.Errorf("%w: %w (a key, or a name, must have at most %d bytes together with its type: use a hash of it)", objects.ErrInvalid, err, longestKey)
	case pgconns.RefusesSetting(err):
		return fmt.Errorf("%w: %w (a pooler admits no such setting in the URL)", objects.ErrSetup, err)
	case code == statePreparedTwice:
		return fmt.Errorf("%w: %w %s", objects.ErrSetup, err, throughPooler)
	case code == stateNotPrepared: // not an ErrSetup, because the driver prepares it again if there is no pooler
		return fmt.Errorf("%w %s", err, throughPooler)
	case strings.HasPrefix(code, "42"), // wrong type, no such column, no privilege
		strings.HasPrefix(code, "28"), // the role is rejected
		code == pgconns.StateNoDatabase,
		code == stateOutOfRange, // a column too narrow for a version
		code == stateNotNull:    // another program's column that requires a value
		return fmt.Errorf("%w: %w", objects.ErrSetup, err)
	}
	return err
}

// unreadable marks a value that a read can't scan. It must not be used for writes, which
// have happened even if their answer can't be scanned.
func unreadable(err error) error {
	if errors.As(err, new(pgx.ScanArgError)) {
		return fmt.Errorf("%w: %w", objects.ErrSetup, err)
	}
	return err
}
