package mysqltenure

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// Migrate creates the table if it is missing, and then does what [Store.Check] does. It changes nothing that exists, and may
// be called at every start, by many processes at once.
func (s *Store) Migrate(ctx context.Context) error { return s.prepare(ctx, "migrate", true) }

// Check returns a [tenure.ErrSetup] that names what of the table or the server is unfit for leases. What can lose an
// acknowledged lease, but does not prevent its use, it logs as a warning.
func (s *Store) Check(ctx context.Context) error { return s.prepare(ctx, "check", false) }

func (s *Store) prepare(ctx context.Context, op string, create bool) (err error) {
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	defer storekit.OpError(ctx, &err, "mysqltenure: "+op, s.cfg.Table)
	if s.server.variables["log_bin"] == "ON" && s.server.variables["binlog_format"] == "STATEMENT" {
		return fmt.Errorf("%w: binlog_format is STATEMENT, with which a replica may come to other results: set ROW or MIXED", tenure.ErrSetup)
	}
	missing, err := s.inspect(ctx)
	switch {
	case err == nil && missing && !create:
		return storekit.NotMigrated(fmt.Errorf("there is no table %s", s.cfg.Table))
	case err == nil && missing: // only then, because a user who must not create a table may not even try
		if _, err = s.pools.calls.ExecContext(ctx, s.sql.create); err == nil {
			_, err = s.inspect(ctx)
		}
	}
	if err != nil {
		return explained(err)
	}
	grants, err := s.strings(ctx, "SHOW GRANTS")
	for _, warning := range append(s.server.warnings(), grantWarnings(grants)...) {
		s.cfg.Logger.Warn(warning, "table", s.cfg.Table)
	}
	return explained(err)
}

// ignoresReadOnly matches a grant of what lets a user write to a server that is read-only.
var ignoresReadOnly = regexp.MustCompile(`(ALL PRIVILEGES|SUPER|READ_ONLY ADMIN|READ ONLY ADMIN|CONNECTION_ADMIN).* ON \*\.\*`)

// grantWarnings says whether a user may write to a server that is read-only.
func grantWarnings(grants []string) []string {
	for _, grant := range grants {
		if found := ignoresReadOnly.FindStringSubmatch(grant); found != nil {
			return []string{"the user has " + found[1] + ", and so writes even to a server that is read-only because another one was promoted: two replicas may hold a lease"}
		}
	}
	return nil
}

// shape is what the table must have. The second key is what makes names unique.
var shape = []string{
	"column object_type varbinary(255) not null", "column id varbinary(1024) not null", "column name varbinary(1024) null",
	"column labels mediumblob null", "column payload mediumblob null", "column resource_version bigint not null",
	"column created_at_us bigint not null", "column written_at_us bigint not null", "column fences bigint not null", "column wakes bigint not null",
	"unique key PRIMARY object_type,id", "unique key name object_type,name",
}

// inspect reports whether the table is missing, and returns [tenure.ErrSetup] if it can't be used.
func (s *Store) inspect(ctx context.Context) (missing bool, err error) {
	database, table := s.table()
	engines, err := s.strings(ctx, "SELECT COALESCE(ENGINE, 'none') FROM information_schema.TABLES WHERE TABLE_SCHEMA = ? AND TABLE_NAME = ?", database, table)
	if err != nil || len(engines) == 0 {
		return true, err
	}
	if !strings.EqualFold(engines[0], "InnoDB") {
		return false, fmt.Errorf("%w: the table has the engine %s and must have InnoDB, without which there are no transactions", tenure.ErrSetup, engines[0])
	}
	has, err := s.strings(ctx, `SELECT CONCAT('column ', LOWER(CONCAT(COLUMN_NAME, ' ', REPLACE(COLUMN_TYPE, 'bigint(20)', 'bigint'), IF(IS_NULLABLE = 'YES', ' null', ' not null'))))
		FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = ? AND TABLE_NAME = ?
		UNION ALL SELECT CONCAT('unique key ', INDEX_NAME, ' ', GROUP_CONCAT(COLUMN_NAME ORDER BY SEQ_IN_INDEX))
		FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = ? AND TABLE_NAME = ? AND NON_UNIQUE = 0 AND SUB_PART IS NULL GROUP BY INDEX_NAME`, database, table, database, table)
	if err != nil {
		return false, err
	}
	var errs []error
	for _, want := range shape {
		if !slices.Contains(has, want) {
			errs = append(errs, fmt.Errorf("%w: the table has no %s", tenure.ErrSetup, want))
		}
	}
	return false, errors.Join(errs...)
}

// strings returns the rows of a query with one column.
func (s *Store) strings(ctx context.Context, query string, args ...any) (all []string, err error) {
	err = each(ctx, s.pools.calls, func(rows *sql.Rows) error {
		var text string
		err := rows.Scan(&text)
		all = append(all, text)
		return err
	}, query, args...)
	return all, err
}
