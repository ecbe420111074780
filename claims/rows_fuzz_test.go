package claims_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// values are what another program may store in a column. The database refuses a type that a column does not
// take.
var values = map[string][]string{
	"sqlite": {
		"NULL", "0", "-1", "1.5", "-1.5", "1e300", "-1e300", "9e999", "9223372036854775807", "-9223372036854775808", "4611686018427387904", "9007199254740993",
		"''", "'abc'", "'1'", "'1.5'", "'ab' || char(0) || 'c'", "CAST(x'61ff' AS TEXT)", "x''", "x'00'", "x'6162'", "x'ff'", "hex(randomblob(3000))", "zeroblob(100000)",
	},
	"postgres": {
		"NULL", "0", "-1", "1", "32767", "-32768", "2147483647", "-2147483648", "9223372036854775807", "-9223372036854775808", "4611686018427387904",
		"'infinity'", "'-infinity'", "'4713-01-01 BC'", "'294276-12-31'", "''", "'abc'", "' '", "repeat('x', 100000)", "E'\\n'", "md5('a')",
	},
}

// A row may have any content, and keeps no other from being taken, finished, released, freed and listed.
func TestARowOfAnyContentHarmsOnlyItself(t *testing.T) {
	testkit.Slow(t)
	cfg := tasks
	cfg.MaxAttempts, cfg.Exhausted, cfg.PollInterval = 20, "status = 'failed'", 5*time.Millisecond
	for _, idType := range []string{"integer", "text"} {
		t.Run(idType, func(t *testing.T) {
			t.Parallel()
			eachRowsServer(t, cfg, func(db *rowsDB) {
				db.exec(`DROP TABLE tasks`)
				db.exec(`CREATE TABLE tasks (id ` + idType + ` NOT NULL UNIQUE, status text DEFAULT 'queued', priority integer DEFAULT 0, result text,
					session text, token bigint DEFAULT 0, attempts bigint DEFAULT 0)`)
				if db.pool != nil {
					db.exec(testkit.Must(cfg.PostgresDDL()))
				} else {
					db.exec(`ALTER TABLE tasks ADD COLUMN not_before INTEGER`)
					ddl := testkit.Must(cfg.SQLiteDDL())
					db.exec(ddl[strings.Index(ddl, "CREATE INDEX"):])
				}
				a := db.worker(claims.SessionConfig{TTL: 8 * time.Second}, cfg)
				require.NoError(db, a.rows.Check(db.Context()))
				for _, column := range []string{"id", "session", "token", "attempts", "not_before", "priority"} {
					db.anyContent(a, column)
				}
			})
		})
	}
}

// anyContent adds rows with any value in a column before two good ones, which are taken, given back,
// freed and finished all the same.
func (db *rowsDB) anyContent(a *worker, column string) {
	db.exec(`DELETE FROM tasks`)
	db.exec(`INSERT INTO tasks (id, priority) VALUES ('8', -1), ('9', -2)`)
	dialect := "sqlite"
	if db.pool != nil {
		dialect = "postgres"
	}
	for i, value := range values[dialect] { // those that the column does not take are left out
		if column == "id" {
			_, _ = db.sql.Exec(`INSERT INTO tasks (id, priority) VALUES (` + value + `, 5)`)
			continue
		}
		db.exec(fmt.Sprintf(`INSERT INTO tasks (id, priority) VALUES ('%d', 5)`, 100+i))
		_, _ = db.sql.Exec(fmt.Sprintf(`UPDATE tasks SET %s = %s WHERE id = '%d'`, column, value, 100+i))
	}
	ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
	defer cancel()
	isGood := func(c claims.Claim) bool { return c.Key.ID == "8" || c.Key.ID == "9" }
	take := func(n int) (got []claims.Claim) {
		for good := 0; good < 2; {
			some, err := a.rows.Take(ctx, n)
			require.NoError(db, err, "%s: got %v", column, got)
			for _, c := range some {
				if isGood(c) {
					good++
				}
			}
			got = append(got, some...)
		}
		return got
	}
	each := func(got []claims.Claim, end func(context.Context, ...claims.Claim) error) {
		for _, c := range got {
			if err := end(ctx, c); isGood(c) {
				require.NoError(db, err, column)
			}
		}
	}
	for _, n := range []int{1, 3, 100} {
		got := take(n)
		owned, err := a.rows.OwnedBy(ctx, a.session.ID())
		require.NoError(db, err, column)
		require.Subset(db, takenIDs(owned), []string{"8", "9"}, column)
		each(got, a.rows.Release)
	}
	db.endedSession("gone " + column)
	db.exec(`UPDATE tasks SET session = 'gone ` + column + `' WHERE '` + column + `' <> 'session' OR id IN ('8', '9')`)
	each(take(3), a.rows.Finish)
	require.Equal(db, 2, db.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND id IN ('8', '9') AND session IS NULL`), column)
}

// The same for the library's own tables.
func TestARowOfTheClaimsOfAnyContentHarmsOnlyItself(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	for dialect, db := range map[string]*rowsDB{"postgres": rowsOnPostgres(t), "sqlite": rowsOnSQLite(t)} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			db.T = t
			w := newWorld(t, db.open())
			cfg := claims.SessionConfig{PollInterval: 5 * time.Millisecond}
			a, b := w.startWith("a", cfg), w.startWith("b", cfg)
			gone := 0
			for _, table := range []string{"objects_claims", "objects_requests", "objects_tombstones", "objects"} {
				columns := []string{"kind", "id", "session", "token"}
				if strings.HasSuffix(table, "tombstones") {
					columns = []string{"object_type", "id", "resource_version"}
				} else if table == "objects" {
					columns = []string{"id", "name", "labels", "payload", "resource_version", "created_at_ms", "updated_at_ms"}
				}
				for _, column := range columns {
					for _, value := range values[dialect] {
						what := table + "." + column + " = " + value
						db.exec(`DELETE FROM objects_claims; DELETE FROM objects_requests`)
						db.exec(`DELETE FROM objects_tombstones; DELETE FROM objects WHERE object_type = 'tenure.session' AND id LIKE 'foreign%'`)
						gone++
						dead := fmt.Sprintf("gone-%d", gone)
						db.exec(`INSERT INTO objects_claims (kind, id, session, token) VALUES ('tenant', 'a', '` + dead + `', 1), ('tenant', 'bad', '` + dead + `', 1)`)
						db.exec(`INSERT INTO objects_requests (session, kind, id, token) VALUES ('` + a.session.ID() + `', 'tenant', 'bad', 1)`)
						db.exec(`INSERT INTO objects_tombstones (object_type, id, resource_version) VALUES ('tenure.session', 'bad', 1)`)
						db.exec(`INSERT INTO objects (object_type, id, payload, resource_version, created_at_ms, updated_at_ms) VALUES ('tenure.session', 'foreign bad', '', 1, 1, 1)`)
						if _, err := db.sql.Exec(`UPDATE ` + table + ` SET ` + column + ` = ` + value + ` WHERE id LIKE '%bad'`); err != nil {
							continue
						}
						ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
						defer cancel()
						last, pages := objects.Claim{}, 0
						for ; pages < 5; pages++ { // of a session that the rows name for the moment
							page, err := w.table.Owned(ctx, dead, last.Kind, last.ID, 1, testkit.Patience)
							require.NoError(t, err, what)
							if len(page) == 0 {
								break
							}
							last = page[0]
						}
						require.Less(t, pages, 5, "%s: the pages do not come to an end", what)
						got, err := a.keys.Claim(ctx, "a")
						require.NoError(t, err, what)
						if bad, _ := a.keys.TryClaim(ctx, "bad"); len(bad) > 0 {
							_ = a.keys.Release(ctx, bad...)
						}
						require.NoError(t, b.keys.RequestRelease(ctx, "a", "bad"), what)
						_, err = a.session.List(ctx, "tenant")
						require.NoError(t, err, what)
						_, _ = a.keys.Owner(ctx, "bad")
						require.NoError(t, a.keys.Release(ctx, got...), what)
						others := b.claim("a", "z")
						require.Len(t, others, 2, what)
						require.NoError(t, b.keys.Release(ctx, others...), what)
						require.NoError(t, a.keys.Forget(ctx), what)
					}
				}
			}
			require.Zero(t, a.session.Status().SweepErrors)
			require.Zero(t, b.session.Status().SweepErrors)
		})
	}
}
