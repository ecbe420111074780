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

	"github.com/tenurelib/tenure/internal/schema"
)

// migrateLock is the key of the advisory lock that migrations take turns by: of
// several CREATE TABLE IF NOT EXISTS at once, all but one may fail.
const migrateLock = 0x74656e757265 // "tenure"

var errNoTable = fmt.Errorf("%w: table does not exist (call Migrate once)", ErrSetup)

// Migrate creates what is missing: the schema, the table, the table of
// tombstones. It changes nothing that is there, and may be called at every
// start, by many replicas at once. Like [OpenPostgres] it waits for a database
// that is down. Where the role may not create what is missing, or a column has
// a type that does not fit, it returns [ErrSetup]; the tombstones alone are
// not required: without them it logs a warning.
func (s *PostgresStore) Migrate(ctx context.Context) error {
	err := s.whenUp(ctx, func() error {
		_, err := s.inspect(ctx)
		if errors.Is(err, errNoTable) {
			err = s.createTable(ctx, schema.PostgresObjects)
		}
		if err != nil {
			return err
		}
		found, err := s.inspect(ctx)
		if err != nil || found.tombstones {
			return err
		}
		if err := s.createTable(ctx, schema.PostgresTombstones); err != nil && !isDenied(err) {
			return err
		}
		return nil
	})
	var setup *postgresSetup
	if err == nil {
		s.found.Store(nil)
		setup, err = s.setup(ctx)
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
	schema            string        // of the table, also where search_path has found it
	tombstones        bool          // the table is there, and this role may write it
	idAlone           bool          // an ID is unique among all types, not only in its own
	idleTimeout       time.Duration // idle_in_transaction_session_timeout; 0: none
	synchronousCommit string
}

// setup looks at the database at the first call, and logs what is amiss.
func (s *PostgresStore) setup(ctx context.Context) (*postgresSetup, error) {
	if found := s.found.Load(); found != nil {
		return found, nil
	}
	found, err := s.inspect(ctx)
	if err != nil {
		return nil, err
	}
	prefix := found.hintPrefix()
	s.watches.prefix.Store(&prefix)
	if !s.found.CompareAndSwap(nil, found) {
		return found, nil
	}
	if !found.tombstones {
		s.cfg.Logger.Warn("no table of tombstones that this role may write: only the database's clock keeps versions from going back",
			"missing", s.tables.tombstones)
	}
	if found.synchronousCommit == "off" {
		s.cfg.Logger.Warn("synchronous_commit is off: a crash of the database can forget a lease that was granted, and repeat its fencing token")
	}
	return found, nil
}

// inspect looks whether the tables fit. Types are compared here because the
// server's own errors come late, or don't name the column.
func (s *PostgresStore) inspect(ctx context.Context) (*postgresSetup, error) {
	found := &postgresSetup{}
	var exists, unique bool
	var idleMS int64
	var isolation string
	var columns map[string]string
	err := s.readRow(ctx, `
		SELECT to_regclass($1) IS NOT NULL,
			coalesce((SELECT nspname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace WHERE pg_class.oid = to_regclass($1)), ''),
			coalesce((SELECT bool_and(has_table_privilege(to_regclass($2), p))
				FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p), false),
			coalesce((SELECT jsonb_object_agg(attname, format_type(atttypid, NULL))
				FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped), '{}'),
			(SELECT setting::bigint FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'),
			current_setting('synchronous_commit'),
			current_setting('default_transaction_isolation'),
			EXISTS (SELECT 1 FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0]
				WHERE indrelid = to_regclass($1) AND indisunique AND indnkeyatts = 1 AND attname = 'id'),
			EXISTS (SELECT 1 FROM pg_index
				WHERE indrelid = to_regclass($1) AND indisunique AND indisvalid AND indimmediate AND indpred IS NULL AND indexprs IS NULL
					AND (SELECT array_agg(attname::text ORDER BY attname) FROM pg_attribute
						WHERE attrelid = indrelid AND attnum = ANY ((indkey::int2[])[0:indnkeyatts - 1]))
						IN (ARRAY['id'], ARRAY['id', 'object_type']))`,
		[]any{s.tables.objects, s.tables.tombstones},
		&exists, &found.schema, &found.tombstones, &columns, &idleMS, &found.synchronousCommit, &isolation, &found.idAlone, &unique)
	if err != nil {
		return nil, err
	}
	found.idleTimeout = time.Duration(idleMS) * time.Millisecond
	if !exists || len(columns) == 0 { // none: it was made while the statement ran
		return nil, fmt.Errorf("%s: %w", s.tables.objects, errNoTable)
	}
	var errs []error
	if isolation != "read committed" {
		// A snapshot that is older than the wait for a lock hides what was waited for.
		errs = append(errs, fmt.Errorf("%w: default_transaction_isolation is %q, which must be \"read committed\" for the store's connections: set it in their URL, or for the role",
			ErrSetup, isolation))
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
		if !sleep(ctx, jitter(pause)) {
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
