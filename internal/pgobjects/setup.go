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

// connectedAtMost is how long the look by a new connection may take.
const connectedAtMost = 5 * time.Second

// placeAtMost is how long a call without a context may look for the table.
const placeAtMost = 5 * time.Second

var errNoTable = errors.New("the table does not exist")

// setup is what was found in the database.
type setup struct {
	at time.Time // when it was found

	schemas [tableCount]string // in which the tables are, or would be created
	placed  names              // with these schemas
	sql     *statements        // that name these tables
	claims  *claimStatements   // likewise

	exists        bool          // the table does
	schema        string        // of the table, even if search_path found it
	ahead         string        // schema of another table that search_path finds now
	lacks         string        // privileges on the table that this role lacks
	hasTombstones bool          // there is a table of tombstones
	tombstones    bool          // this role may write it, and it is as it should be
	misburied     string        // why it is not as it should be
	unlogged      bool          // a crash empties the table of tombstones
	unclaimed     string        // table without which there are no claims
	misclaimed    string        // why the tables of claims are not as they should be
	uniqueNames   bool          // a unique index covers the names
	idAlone       bool          // an ID is unique among all types, not only in its own
	idleTimeout   time.Duration // idle_in_transaction_session_timeout; 0 means none

	synchronousCommit string
}

// equal reports whether both looks found the same.
func (s *setup) equal(other *setup) bool {
	if other == nil {
		return false
	}
	same := *other
	same.at, same.sql, same.claims = s.at, s.sql, s.claims
	return same == *s
}

// place sets the statements that name the tables in their schemas: those of the last look if nothing
// has moved.
func (s *setup) place(table string, last *setup) {
	if s.placed = newNames(table, s.schemas); last != nil && last.placed == s.placed {
		s.sql, s.claims = last.sql, last.claims
		return
	}
	s.sql, s.claims = newStatements(s.placed), newClaimStatements(s.placed)
}

// setups knows what was found in the database, and looks again when that may have
// changed.
type setups struct {
	conns  *pgconns.Conns
	cfg    Config
	names  names // as configured
	logger *slog.Logger

	found   atomic.Pointer[setup]  // nil before the first look, and while the database is unsuitable
	told    atomic.Pointer[setup]  // what was last logged; nil before the first look that succeeded
	prefix  atomic.Pointer[string] // prefix of hints; nil before the table was found
	looking atomic.Bool            // a call is looking again, because found is old
}

// migrate creates missing tables and looks at the result.
func (s *setups) migrate(ctx context.Context) (*setup, error) {
	err := s.whenUp(ctx, func() error {
		found, err := s.inspect(ctx, s.query)
		if errors.Is(err, errNoTable) {
			if err = s.createTable(ctx, found, objects.PostgresObjects); err == nil {
				found, err = s.inspect(ctx, s.query)
			}
		}
		if err != nil {
			return err
		}
		if !found.hasTombstones {
			err := s.createTable(ctx, found, objects.PostgresTombstones)
			if err != nil && pgconns.SQLState(err) != pgconns.StateDenied { // tombstones are not required
				return err
			}
		}
		return s.migrateClaims(ctx, found)
	})
	if err != nil {
		return nil, err
	}
	found, err := s.look(ctx)
	if err == nil && found.misclaimed != "" {
		err = found.mayClaim()
	}
	return found, err
}

// migrateClaims creates the tables of claims if one is missing. No lease needs them.
func (s *setups) migrateClaims(ctx context.Context, found *setup) error {
	if found.unclaimed == "" { // otherwise CREATE TABLE IF NOT EXISTS would need the right to create tables
		return nil
	}
	err := s.createTable(ctx, found, objects.PostgresClaims)
	if pgconns.SQLState(err) == pgconns.StateDenied {
		s.logger.Warn("no table of claims, and this role may not create it: sessions cannot claim anything", "missing", s.names.claims)
		return nil
	}
	return err
}

// createTable creates tables where they were looked for.
func (s *setups) createTable(ctx context.Context, found *setup, ddl string) (err error) {
	began := time.Now()
	defer func() {
		if pgconns.IsReadOnly(err) { // the primary may be another server by now
			s.conns.NoteResult(ctx, s.conns.Pool, began, err)
		}
	}()
	return pgx.BeginFunc(ctx, s.conns.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, int64(migrateLock)); err != nil {
			return err
		}
		if s.cfg.Schema != "" {
			// Not CREATE SCHEMA IF NOT EXISTS alone: that needs the right to create
			// schemas even if this one exists.
			var exists bool
			err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1)`, s.cfg.Schema).Scan(&exists)
			if err != nil {
				return err
			}
			if !exists {
				if _, err := tx.Exec(ctx, `CREATE SCHEMA `+pgx.Identifier{s.cfg.Schema}.Sanitize()); err != nil {
					return err
				}
			}
		}
		_, err := tx.Exec(ctx, found.placed.in(ddl))
		return err
	})
}

// query sends a query on one of the store's own connections: a session of the application's may
// have a search_path of its own.
func (s *setups) query(ctx context.Context, sql string, args []any, dest ...any) error {
	return s.conns.QueryRow(objects.WithLeaseCall(ctx), sql, args, dest...)
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

// known is get for a caller whose context may have no deadline.
func (s *setups) known(ctx context.Context) (*setup, error) {
	ctx, cancel := objects.Limited(ctx)
	defer cancel()
	return s.get(ctx)
}

// look looks at the database, and remembers what it finds.
func (s *setups) look(ctx context.Context) (*setup, error) {
	return s.lookBy(ctx, s.query)
}

func (s *setups) lookBy(ctx context.Context, query queryRow) (*setup, error) {
	found, err := s.inspect(ctx, query)
	if err != nil {
		if errors.Is(err, objects.ErrSetup) {
			s.found.Store(nil)
		}
		return nil, err
	}
	s.believe(found)
	return found, nil
}

// connected looks again by a connection of the store's own that is new, before any call uses it, and refuses it if the tables are unsuitable now: the last connection may have ended
// because the server crashed, which empties an UNLOGGED table, or because a backup was restored.
// The first connection of all is opened by the first look.
func (s *setups) connected(ctx context.Context, conn *pgx.Conn) error {
	if s.told.Load() == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, connectedAtMost)
	defer cancel()
	_, err := s.lookBy(ctx, func(ctx context.Context, sql string, args []any, dest ...any) error {
		return conn.QueryRow(ctx, sql, args...).Scan(dest...)
	})
	if errors.Is(err, errNoTable) { // which somebody may be about to create by this connection
		return nil
	}
	return err
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
		attrs := []any{"missing", s.names.tombstones}
		if found.misburied != "" {
			attrs = append(attrs, "wrong", found.misburied)
		}
		s.logger.Warn("no table of tombstones that this role may write: only the database's clock keeps versions from going back", attrs...)
	}
	if found.unlogged {
		s.logger.Warn("the table of tombstones is unlogged: after a crash of the database only its clock keeps versions from going back",
			"table", s.names.tombstones)
	}
	if !found.uniqueNames {
		s.logger.Warn("no unique index on (object_type, name): two objects can have one name", "table", s.names.objects)
	}
	if found.ahead != "" {
		s.logger.Warn("search_path now finds another table of that name: this store stays with its own, and replicas that start now use the other one",
			"table", found.placed.objects, "other", found.ahead)
	}
	if found.synchronousCommit == "off" {
		s.logger.Warn("synchronous_commit is off: a crash of the database can forget a lease that was granted, and repeat its fencing token")
	}
}

// call does a call with statements that name the tables which were found. If the server rejects it
// because the database has changed since, call looks again and does it once more. A call that the
// server rejected has changed nothing.
func (s *setups) call(ctx context.Context, fn func(found *setup) error) error {
	_, err := s.try(ctx, fn)
	return err
}

// try is call. If the server rejected fn and nothing has changed since, it also returns what was
// found.
func (s *setups) try(ctx context.Context, fn func(found *setup) error) (same *setup, err error) {
	found, err := s.get(ctx)
	if err != nil {
		return nil, err
	}
	err = fn(found)
	if !outdated(err) {
		return nil, err
	}
	again, lookErr := s.look(ctx)
	switch {
	case errors.Is(lookErr, objects.ErrSetup):
		return nil, lookErr // this error explains what is wrong with the table, not only with this call
	case lookErr != nil: // no time was left, for example; the next call begins with a look
		s.found.CompareAndSwap(found, nil)
		return nil, err
	case !again.equal(found):
		return nil, fn(again)
	}
	return again, err
}

// write does a write in the way that suits what was found in the database, as call does.
func (s *setups) write(ctx context.Context, write func(found *setup) error) error {
	same, err := s.try(ctx, write)
	if same == nil || !same.tombstones {
		return err
	}
	// The tombstones look writable, but something that a look can't evaluate, like the
	// expression of a policy, may forbid it. Tombstones are not required.
	without := *same
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

// claiming returns what was found, or why there can be no claims.
func (s *setups) claiming(ctx context.Context) (*setup, error) {
	found, err := s.get(ctx)
	if err == nil && found.mayClaim() != nil {
		found, err = s.look(ctx) // it may have been mended since
	}
	if err != nil {
		return nil, err
	}
	return found, found.mayClaim()
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
	case pgconns.IsReadOnly(err):
		return fmt.Errorf("%w (%s)", err, pgconns.ReadOnlyRemedy)
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
