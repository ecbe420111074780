package tenure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// migrateLock is the key of the advisory lock that migrations take turns by: of
// several CREATE TABLE IF NOT EXISTS at once, all but one may fail.
const migrateLock = 0x74656e757265 // "tenure"

var errNoTable = fmt.Errorf("%w: table does not exist (call Migrate once)", ErrSetup)

// Migrate creates what is missing: the schema, the table, the table of
// tombstones. It changes nothing that is there, and may be called at every
// start, by many replicas at once. Like [OpenPostgres] it waits for a database
// that is down. It returns [ErrSetup] where the role may not create what is missing,
// where a column has a type that does not fit, where a crash would empty the table
// (UNLOGGED, a partition too), and where row-level security hides it from the role.
// The tombstones alone are not required: without them it logs a warning.
func (s *PostgresStore) Migrate(ctx context.Context) error {
	err := s.whenUp(ctx, func() error {
		_, err := s.inspect(ctx)
		if errors.Is(err, errNoTable) {
			err = s.createTable(ctx, objects.PostgresObjects)
		}
		if err != nil {
			return err
		}
		found, err := s.inspect(ctx)
		if err != nil || found.tombstones {
			return err
		}
		if err := s.createTable(ctx, objects.PostgresTombstones); err != nil && !isDenied(err) {
			return err
		}
		return nil
	})
	var setup *postgresSetup
	if err == nil {
		s.told.Store(nil)
		setup, err = s.look(ctx)
	}
	if err != nil {
		return fmt.Errorf("tenure: migrate %s: %w", s.tables.objects, s.explain(err))
	}
	s.prune(ctx, setup, 0) // for programs that never run for an hour
	return nil
}

func (s *PostgresStore) createTable(ctx context.Context, ddl string) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, int64(migrateLock)); err != nil {
			return err
		}
		if s.tables.schema != "" {
			// Not CREATE SCHEMA IF NOT EXISTS alone: that asks for the right to
			// create schemas even where this one is there.
			var exists bool
			err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)`, s.tables.schema).Scan(&exists)
			if err != nil {
				return err
			}
			if !exists {
				if _, err := tx.Exec(ctx, `CREATE SCHEMA `+pgx.Identifier{s.tables.schema}.Sanitize()); err != nil {
					return err
				}
			}
		}
		_, err := tx.Exec(ctx, s.tables.in(ddl))
		return err
	})
}

// postgresSetup is what was found in the database.
type postgresSetup struct {
	at time.Time // when that was

	schema            string        // of the table, also where search_path has found it
	tombstones        bool          // the table is there, and this role may write it
	unlogged          bool          // a crash empties the table of tombstones
	names             bool          // a unique index covers the names
	idAlone           bool          // an ID is unique among all types, not only in its own
	idleTimeout       time.Duration // idle_in_transaction_session_timeout; 0: none
	synchronousCommit string
}

// equal reports whether another look found the same.
func (setup *postgresSetup) equal(other *postgresSetup) bool {
	if other == nil {
		return false
	}
	same := *other
	same.at = setup.at
	return same == *setup
}

// lookAgain is how long the store relies on what it found, unless a statement fails in
// a way that contradicts it.
const lookAgain = 10 * time.Minute

// setup looks at the database on the first call, and again from time to time, because
// people change tables and privileges while replicas run.
func (s *PostgresStore) setup(ctx context.Context) (*postgresSetup, error) {
	found := s.found.Load()
	if found == nil {
		return s.look(ctx)
	}
	if time.Since(found.at) < lookAgain || !s.looking.CompareAndSwap(false, true) {
		return found, nil
	}
	defer s.looking.Store(false)
	again, err := s.look(ctx)
	if err != nil && !errors.Is(err, ErrSetup) { // nothing was found out
		return found, nil
	}
	return again, err
}

// look looks at the database, and remembers what it finds.
func (s *PostgresStore) look(ctx context.Context) (*postgresSetup, error) {
	found, err := s.inspect(ctx)
	if err != nil {
		if errors.Is(err, ErrSetup) {
			s.found.Store(nil)
		}
		return nil, err
	}
	s.believe(found)
	return found, nil
}

// believe makes the store rely on what was found, and logs what is amiss if that is
// news.
func (s *PostgresStore) believe(found *postgresSetup) {
	prefix := found.hintPrefix()
	s.watches.prefix.Store(&prefix)
	s.found.Store(found)
	before := s.told.Swap(found)
	if found.equal(before) {
		return
	}
	if !found.tombstones {
		s.cfg.Logger.Warn("no table of tombstones that this role may write: only the database's clock keeps versions from going back",
			"missing", s.tables.tombstones)
	}
	if found.unlogged {
		s.cfg.Logger.Warn("the table of tombstones is unlogged: after a crash of the database only its clock keeps versions from going back",
			"table", s.tables.tombstones)
	}
	if !found.names {
		s.cfg.Logger.Warn("no unique index on (object_type, name): two objects can have one name", "table", s.tables.objects)
	}
	if found.synchronousCommit == "off" {
		s.cfg.Logger.Warn("synchronous_commit is off: a crash of the database can forget a lease that was granted, and repeat its fencing token")
	}
}

// withSetup does a write in the way that suits what was found in the database. If the
// server refuses it because the database has changed since, withSetup looks again and
// retries the write once. A write that the server refused has changed nothing.
func (s *PostgresStore) withSetup(ctx context.Context, write func(setup *postgresSetup) error) error {
	setup, err := s.setup(ctx)
	if err != nil {
		return err
	}
	err = write(setup)
	if !outdated(err) {
		return err
	}
	again, lookErr := s.look(ctx)
	switch {
	case errors.Is(lookErr, ErrSetup):
		return lookErr // it says what is wrong with the table, not only with this write
	case lookErr != nil: // no time is left for it, say: the next call begins with a look
		s.found.CompareAndSwap(setup, nil)
		return err
	case !again.equal(setup):
		return write(again)
	case !setup.tombstones:
		return err
	}
	// The tombstones look writable, but something the look can't judge, like the
	// expression of a policy, may forbid it; and they are not required.
	without := *again
	without.tombstones, without.unlogged = false, false
	if write(&without) != nil {
		return err
	}
	s.believe(&without)
	return nil
}

// outdated reports whether a write was refused because of something that the store
// looks at: a table, a column, a privilege.
func outdated(err error) bool {
	code := sqlState(err)
	return (strings.HasPrefix(code, "42") && code != "42P05" || code == "3F000") && !errors.As(err, new(*pgconn.ConnectError))
}

// What pg_class calls the persistence of a table that does not outlive a crash, or a
// session.
const (
	tableUnlogged  = "u"
	tableTemporary = "t"
)

// inspect looks whether the tables fit. Types are compared here because the
// server's own errors come late, or don't name the column.
func (s *PostgresStore) inspect(ctx context.Context) (*postgresSetup, error) {
	found := &postgresSetup{at: time.Now()}
	var exists, unique, hidden bool
	var idleMS int64
	var isolation, persistence, buriedAs string
	var columns map[string]string
	err := s.readRow(ctx, `
		WITH RECURSIVE looked AS MATERIALIZED (
			SELECT to_regclass($1)::oid AS objects, to_regclass($2)::oid AS tombstones),
		parts(root, part) AS (
			SELECT objects, objects FROM looked UNION SELECT tombstones, tombstones FROM looked
			UNION SELECT root, inhrelid FROM parts JOIN pg_inherits ON inhparent = part),
		-- Tables under row-level security without a policy for some command.
		closed(root) AS (
			SELECT DISTINCT root FROM parts, unnest(ARRAY['r', 'a', 'w', 'd']) command
			WHERE part = root AND row_security_active(root) AND NOT EXISTS (
				SELECT FROM pg_policy WHERE polrelid = root AND polpermissive AND polcmd::text IN (command, '*')
					AND EXISTS (SELECT FROM unnest(polroles) member WHERE member = 0 OR pg_has_role(member, 'USAGE'))))
		SELECT objects IS NOT NULL,
			coalesce((SELECT nspname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace WHERE pg_class.oid = objects), ''),
			coalesce((SELECT bool_and(has_table_privilege(tombstones, p))
				FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p), false)
				AND NOT EXISTS (SELECT FROM closed WHERE root = tombstones),
			EXISTS (SELECT FROM closed WHERE root = objects),
			coalesce((SELECT max(relpersistence::text) FROM parts JOIN pg_class ON oid = part WHERE root = objects), ''),
			coalesce((SELECT max(relpersistence::text) FROM parts JOIN pg_class ON oid = part WHERE root = tombstones), ''),
			coalesce((SELECT jsonb_object_agg(attname, format_type(atttypid, NULL))
				FROM pg_attribute WHERE attrelid = objects AND attnum > 0 AND NOT attisdropped), '{}'),
			(SELECT setting::bigint FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'),
			current_setting('synchronous_commit'),
			current_setting('default_transaction_isolation'),
			EXISTS (SELECT 1 FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0]
				WHERE indrelid = objects AND indisunique AND indnkeyatts = 1 AND attname = 'id'),
			EXISTS (SELECT 1 FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY ((indkey::int2[])[0:indnkeyatts - 1])
				WHERE indrelid = objects AND indisunique AND indisvalid
				GROUP BY indexrelid HAVING bool_or(attname = 'name') AND NOT bool_or(attname = 'id')),
			EXISTS (SELECT 1 FROM pg_index
				WHERE indrelid = objects AND indisunique AND indisvalid AND indimmediate AND indpred IS NULL AND indexprs IS NULL
					AND (SELECT array_agg(attname::text ORDER BY attname) FROM pg_attribute
						WHERE attrelid = indrelid AND attnum = ANY ((indkey::int2[])[0:indnkeyatts - 1]))
						IN (ARRAY['id'], ARRAY['id', 'object_type']))
		FROM looked`,
		[]any{s.tables.objects, s.tables.tombstones},
		&exists, &found.schema, &found.tombstones, &hidden, &persistence, &buriedAs, &columns,
		&idleMS, &found.synchronousCommit, &isolation, &found.idAlone, &found.names, &unique)
	if err != nil {
		return nil, err
	}
	found.idleTimeout = time.Duration(idleMS) * time.Millisecond
	// Until there is a crash, an unlogged one is better than none.
	found.tombstones = found.tombstones && buriedAs != tableTemporary
	found.unlogged = found.tombstones && buriedAs == tableUnlogged
	if !exists || len(columns) == 0 { // none: it was made while the statement ran
		return nil, fmt.Errorf("%s: %w", s.tables.objects, errNoTable)
	}
	var errs []error
	if isolation != "read committed" {
		// A snapshot that is older than the wait for a lock hides what was waited for.
		errs = append(errs, fmt.Errorf("%w: default_transaction_isolation is %q, which must be \"read committed\" for the store's connections: set it in their URL, or for the role",
			ErrSetup, isolation))
	}
	switch persistence {
	case tableUnlogged:
		errs = append(errs, fmt.Errorf("%w: table %s, or a partition of it, is UNLOGGED: a crash of the server empties it, and then two can hold one lease (ALTER TABLE %[2]s SET LOGGED)",
			ErrSetup, s.tables.objects))
	case tableTemporary:
		errs = append(errs, fmt.Errorf("%w: table %s is TEMPORARY: each connection has one of its own, and two can hold one lease", ErrSetup, s.tables.objects))
	}
	if hidden {
		errs = append(errs, fmt.Errorf("%w: table %s is under row-level security, and there are no policies that let this role SELECT, INSERT, UPDATE and DELETE rows",
			ErrSetup, s.tables.objects))
	}
	text := []string{"text", "character varying"}
	for _, want := range []struct {
		column string
		types  []string
	}{
		{"object_type", text},
		{"id", text},
		{"name", text},
		{"labels", []string{"jsonb"}},
		{"payload", []string{"bytea"}},
		{"resource_version", []string{"bigint"}},
		{"created_at_ms", []string{"bigint"}},
		{"updated_at_ms", []string{"bigint"}},
	} {
		switch is, ok := columns[want.column]; {
		case !ok:
			errs = append(errs, fmt.Errorf("%w: table %s lacks the column %s", ErrSetup, s.tables.objects, want.column))
		case !slices.Contains(want.types, is):
			errs = append(errs, fmt.Errorf("%w: column %s of table %s is %s, not %s",
				ErrSetup, want.column, s.tables.objects, is, strings.Join(want.types, " or ")))
		}
	}
	if len(errs) == 0 && !unique { // two could create one object, and hold one lease
		errs = append(errs, fmt.Errorf("%w: table %s has no unique key on (object_type, id), nor on id", ErrSetup, s.tables.objects))
	}
	return found, errors.Join(errs...)
}

// whenUp calls fn, again and again while the database cannot be reached.
func (s *PostgresStore) whenUp(ctx context.Context, fn func() error) error {
	var last error // of a try that ctx did not cut off: it tells what is wrong
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := s.explain(fn())
		switch {
		case err == nil:
			return nil
		case last != nil && ctx.Err() != nil:
			return fmt.Errorf("%w: %w", context.Cause(ctx), last)
		case !isDown(err):
			return err
		case last == nil:
			s.cfg.Logger.Warn("waiting for the database", "error", err)
		}
		last = err
		if !pace.Sleep(ctx, pace.Jitter(pause)) {
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}

// explain adds to an error of the driver what it means here. The driver's stays
// reachable.
func (s *PostgresStore) explain(err error) error {
	if err == nil || errors.Is(err, ErrSetup) {
		return err
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrNotFound
	}
	switch code := sqlState(err); {
	case code == "":
		return err
	case s.reached.Load() && errors.As(err, new(*pgconn.ConnectError)) && !refusesSetting(err):
		// The server has accepted connections before, and may do so again without
		// anybody's help: a password is being rotated, or a database replaced.
		return err
	case code == "42P01" || code == "3F000": // no such table, no such schema
		return fmt.Errorf("%w: %w (call Migrate once)", ErrSetup, err)
	case code == "23505":
		return fmt.Errorf("%w: %w", ErrTaken, err)
	case refusesSetting(err):
		return fmt.Errorf("%w: %w (a pooler admits no such setting in the URL)", ErrSetup, err)
	case code == "42P05": // a prepared statement that is there already
		return fmt.Errorf("%w: %w (through a pooler in transaction mode, add default_query_exec_mode=exec to the URL)", ErrSetup, err)
	case strings.HasPrefix(code, "42"), // wrong type, no such column, no privilege
		strings.HasPrefix(code, "28"), // the role is refused
		code == "3D000",               // no such database
		code == "22003",               // a column too narrow for a version
		code == "23502":               // a column of another program that wants a value
		return fmt.Errorf("%w: %w", ErrSetup, err)
	}
	return err
}

// unreadable marks a value that a read cannot take for what it should be. It is
// not for writes: theirs have happened when their answer cannot be read.
func unreadable(err error) error {
	if scan := (pgx.ScanArgError{}); errors.As(err, &scan) {
		return fmt.Errorf("%w: %w", ErrSetup, err)
	}
	return err
}

func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

func isDenied(err error) bool { return sqlState(err) == "42501" }

// isDown reports whether err says that the server cannot be reached or does not
// take connections yet.
func isDown(err error) bool {
	if errors.Is(err, ErrSetup) {
		return false
	}
	var connect *pgconn.ConnectError
	switch code := sqlState(err); {
	case code != "":
		return strings.HasPrefix(code, "57P") || strings.HasPrefix(code, "08") || strings.HasPrefix(code, "53")
	default:
		return errors.As(err, &connect)
	}
}
