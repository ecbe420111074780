package pgobjects

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// Values of pg_class.relpersistence for a table that does not survive a crash or a
// session.
const (
	tableUnlogged  = "u"
	tableTemporary = "t"
)

// inspect checks whether the tables are suitable. It compares types because the server's
// own errors come late or don't name the column.
func (s *setups) inspect(ctx context.Context) (*setup, error) {
	found := &setup{at: time.Now()}
	var exists, unique, hidden bool
	var idleMS int64
	var isolation, persistence, buriedAs string
	var columns map[string]string
	err := s.conns.QueryRow(ctx, `
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
			coalesce((SELECT string_agg(p, ', ') FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p
				WHERE NOT has_table_privilege(objects, p) AND NOT (p <> 'DELETE' AND has_any_column_privilege(objects, CASE p WHEN 'DELETE' THEN 'SELECT' ELSE p END))), ''),
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
		[]any{s.names.objects, s.names.tombstones},
		&exists, &found.schema, &found.tombstones, &hidden, &found.lacks, &persistence, &buriedAs, &columns,
		&idleMS, &found.synchronousCommit, &isolation, &found.idAlone, &found.names, &unique)
	if err != nil {
		return nil, err
	}
	found.idleTimeout = time.Duration(idleMS) * time.Millisecond
	// As long as there is no crash, unlogged tombstones are better than none.
	found.tombstones = found.tombstones && buriedAs != tableTemporary
	found.unlogged = found.tombstones && buriedAs == tableUnlogged
	if !exists || len(columns) == 0 { // no columns: it was created while the statement ran
		return nil, &objects.NoTable{Cause: fmt.Errorf("%s: %w", s.names.objects, errNoTable)}
	}
	var errs []error
	if isolation != "read committed" {
		// A snapshot from before the wait for a lock hides the change that was waited for.
		errs = append(errs, fmt.Errorf("%w: default_transaction_isolation is %q, which must be \"read committed\" for the store's connections: set it in their URL, or for the role",
			objects.ErrSetup, isolation))
	}
	switch persistence {
	case tableUnlogged:
		errs = append(errs, fmt.Errorf("%w: table %s, or a partition of it, is UNLOGGED: a crash of the server empties it, and then two can hold one lease (ALTER TABLE %[2]s SET LOGGED)",
			objects.ErrSetup, s.names.objects))
	case tableTemporary:
		errs = append(errs, fmt.Errorf("%w: table %s is TEMPORARY: each connection has one of its own, and two can hold one lease", objects.ErrSetup, s.names.objects))
	}
	if hidden {
		errs = append(errs, fmt.Errorf("%w: table %s is under row-level security, and there are no policies that let this role SELECT, INSERT, UPDATE and DELETE rows",
			objects.ErrSetup, s.names.objects))
	}
	var lacks, misfits []string
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
			lacks = append(lacks, want.column)
		case !slices.Contains(want.types, is):
			misfits = append(misfits, fmt.Sprintf("its column %s is %s, not %s", want.column, is, strings.Join(want.types, " or ")))
		}
	}
	if len(lacks) > 0 {
		misfits = append(misfits, "it lacks the columns "+strings.Join(lacks, ", "))
	}
	if len(misfits) > 0 {
		errs = append(errs, fmt.Errorf("%w: table %s does not fit: %s (%s)",
			objects.ErrSetup, s.names.objects, strings.Join(misfits, "; "), objects.OtherTable))
	}
	if len(errs) == 0 && !unique { // two could create one object, and hold one lease
		errs = append(errs, fmt.Errorf("%w: table %s has no unique key on (object_type, id), nor on id", objects.ErrSetup, s.names.objects))
	}
	return found, errors.Join(errs...)
}
