package databases_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// ownKeys are the keys of the tables that [tenure.PostgresStore.Migrate] and [claims.Migrate] create, and numbers a column of each.
var (
	ownKeys = map[string]string{
		"objects": "object_type, id", "objects_tombstones": "object_type, id", "objects_claims": "kind, id", "objects_requests": "session, kind, id, token",
	}
	numbers = map[string]string{
		"objects": "resource_version", "objects_tombstones": "resource_version", "objects_claims": "token", "objects_requests": "token",
	}
)

// ailments are what may have become of a table on Postgres, and what the error says of it.
var ailments = map[string]struct{ ddl, says string }{
	"unlogged":                        {`ALTER TABLE {s}.{t} SET UNLOGGED`, "SET LOGGED"},
	"without its key":                 {`ALTER TABLE {s}.{t} DROP CONSTRAINT {t}_pkey`, "no unique key on ({k})"},
	"with a key that is checked late": {`ALTER TABLE {s}.{t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY ({k}) DEFERRABLE`, "no unique key on ({k})"},
	"with a key of some rows":         {`ALTER TABLE {s}.{t} DROP CONSTRAINT {t}_pkey; CREATE UNIQUE INDEX ON {s}.{t} ({k}) WHERE {n} > 0`, "no unique key on ({k})"},
	"with another type":               {`ALTER TABLE {s}.{t} ALTER COLUMN {n} TYPE numeric`, "its column {n} is numeric, not bigint"},
	"without a column":                {`ALTER TABLE {s}.{t} DROP COLUMN {n} CASCADE`, "it lacks the columns {n}"},
	"a view":                          {`ALTER TABLE {s}.{t} RENAME TO {t}_behind; CREATE VIEW {s}.{t} AS SELECT * FROM {s}.{t}_behind`, "is a view"},
	"inherited":                       {`CREATE TABLE {s}.{t}_part () INHERITS ({s}.{t})`, "inherit from it"},
	"a partitioned table":             {`ALTER TABLE {s}.{t} RENAME TO {t}_whole; CREATE TABLE {s}.{t} (LIKE {s}.{t}_whole, PRIMARY KEY ({k})) PARTITION BY HASH ({k})`, "is partitioned"},
	"under row-level security":        {`ALTER TABLE {s}.{t} ENABLE ROW LEVEL SECURITY`, "row-level security"},
	"under half a set of policies":    {`ALTER TABLE {s}.{t} ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON {s}.{t} FOR SELECT USING (true)`, "row-level security"},
}

// take claims a key as sessions do.
func take(ctx context.Context, store *tenure.PostgresStore, key string) ([]objects.Claim, error) {
	return store.Backend().Claims().Take(ctx, "session", "kind", []string{key}, nil, []string{key}, testkit.Patience)
}

// wantRefused makes a call until the connections that have ended are replaced, and wants to be told
// then what is wrong. It must never succeed.
func wantRefused(t *testing.T, says string, call func() error) {
	t.Helper()
	var err error
	testkit.Await(t, "refused: "+says, func() bool {
		err = call()
		return err == nil || errors.Is(err, tenure.ErrSetup)
	})
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, says)
}

func TestATableOnWhichNoPromiseCanBeKeptIsRefusedAtSetUpAndAfterAReconnect(t *testing.T) {
	testkit.Slow(t)
	url, owner := testkit.AsWorker(t)
	role := "worker_" + owner.Config().ConnConfig.Database
	for ailment, c := range ailments {
		for _, table := range testkit.OwnTables {
			if table == "objects" && strings.Contains("inherited, a partitioned table", ailment) {
				continue // no statement needs it to be whole
			}
			t.Run(table+" "+ailment, func(t *testing.T) {
				schema := fmt.Sprintf("s%x", fmt.Sprint(table, len(ailment), ailment[:3], ailment[len(ailment)-3:]))
				in := strings.NewReplacer("{s}", schema, "{t}", table, "{k}", ownKeys[table], "{n}", numbers[table]).Replace
				ownersURL := owner.Config().ConnString()
				testkit.MigrateClaims(t, testkit.OpenPostgres(t, ownersURL, tenure.PostgresConfig{Schema: schema}))
				grant := fmt.Sprintf(`GRANT USAGE ON SCHEMA %s TO %s; GRANT ALL ON ALL TABLES IN SCHEMA %[1]s TO %[2]s`, schema, role)
				testkit.ExecPostgres(t, owner, grant)
				running := testkit.OpenPostgres(t, url+"&search_path="+schema, tenure.PostgresConfig{})
				lease := testkit.NewLease(t, running, tenure.LeaseConfig{})
				testkit.WantErr(t, lease.Release(t.Context(), testkit.MustAcquire(t, lease)), nil)
				_, err := take(t.Context(), running, "before")
				require.NoError(t, err)

				testkit.ExecPostgres(t, owner, in(c.ddl))
				testkit.ExecPostgres(t, owner, grant)
				testkit.ExecPostgres(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '`+role+`'`)
				var log testkit.SyncBuffer
				fresh := testkit.Must(tenure.NewPostgresStore(testkit.PostgresPool(t, url+"&search_path="+schema), tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
				t.Cleanup(func() { fresh.Close() })
				for _, store := range []*tenure.PostgresStore{running, fresh} {
					lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
					acquire := func() error { _, err := lease.AcquireOrSteal(t.Context()); return err }
					claim := func() error { _, err := take(t.Context(), store, "after"); return err }
					if table == "objects" {
						wantRefused(t, in(c.says), acquire)
						wantRefused(t, in(c.says), claim)
						continue
					}
					var term *tenure.Term
					testkit.Await(t, "acquired", func() bool { term, err = lease.AcquireOrSteal(t.Context()); return err == nil })
					if table == "objects_tombstones" {
						testkit.Await(t, "claimed", func() bool { return claim() == nil })
					} else {
						wantRefused(t, in(c.says), claim)
					}
					testkit.WantErr(t, lease.Release(t.Context(), term), nil)
				}
				err = fresh.Migrate(t.Context())
				if table == "objects_claims" || table == "objects_requests" {
					require.NoError(t, err, "leases need none")
					err = claims.Migrate(t.Context(), fresh)
				}
				switch {
				case table != "objects_tombstones":
					require.ErrorIs(t, err, tenure.ErrSetup)
					require.ErrorContains(t, err, in(c.says))
				case ailment == "unlogged":
					require.NoError(t, err)
					require.Contains(t, log.String(), "unlogged")
				default: // leases need none
					require.NoError(t, err)
					require.Contains(t, log.String(), in(c.says))
				}
			})
		}
	}
}

// What must hold for Postgres must hold for SQLite, as far as it can be otherwise there.
func TestATableOnWhichNoPromiseCanBeKeptIsRefusedOnSQLite(t *testing.T) {
	testkit.Slow(t)
	const again = `ALTER TABLE {t} RENAME TO {t}_old; CREATE TABLE {t} (%s)`
	columns := map[string]string{
		"objects":            `object_type TEXT NOT NULL, id TEXT NOT NULL, name TEXT, labels TEXT, payload BLOB NOT NULL, resource_version INTEGER NOT NULL, created_at_ms INTEGER, updated_at_ms INTEGER`,
		"objects_tombstones": `object_type TEXT NOT NULL, id TEXT NOT NULL, resource_version INTEGER NOT NULL`,
		"objects_claims":     `kind TEXT NOT NULL, id TEXT NOT NULL, session TEXT, token INTEGER NOT NULL`,
		"objects_requests":   `session TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL, token INTEGER NOT NULL`,
	}
	for ailment, c := range map[string]struct{ ddl, says string }{
		"without its key":         {fmt.Sprintf(again, `{c}`), "no unique key on ("},
		"with a key of some rows": {fmt.Sprintf(again, `{c}`) + `; CREATE UNIQUE INDEX {t}_some ON {t} ({k}) WHERE {n} > 0`, "no unique key on ("},
		"with other numbers":      {fmt.Sprintf(again, `{numbers as text}, PRIMARY KEY ({k})`), "its column {n} is TEXT, not INTEGER"},
		"with other text":         {fmt.Sprintf(again, `{text as numbers}, PRIMARY KEY ({k})`), "its column id is INT, not TEXT"},
		"without a column":        {`ALTER TABLE {t} RENAME COLUMN {n} TO other`, "it lacks the columns {n}"},
		"without row IDs":         {fmt.Sprintf(again, `{c}, PRIMARY KEY ({k})`) + ` WITHOUT ROWID`, "it is WITHOUT ROWID"},
		"a view":                  {`ALTER TABLE {t} RENAME TO {t}_behind; CREATE VIEW {t} AS SELECT * FROM {t}_behind`, "is a view"},
	} {
		for _, table := range testkit.OwnTables {
			if table == "objects" && (ailment == "without row IDs" || ailment == "with other numbers") {
				continue // no statement needs row IDs, and another program's table may keep versions as it likes
			}
			t.Run(table+" "+ailment, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "t.db")
				testkit.MigrateClaims(t, testkit.OpenSQLite(t, path))
				n := numbers[table]
				in := strings.NewReplacer("{t}", table, "{k}", ownKeys[table], "{n}", n, "{c}", columns[table],
					"{numbers as text}", strings.ReplaceAll(columns[table], n+" INTEGER", n+" TEXT"),
					"{text as numbers}", strings.ReplaceAll(columns[table], " id TEXT", " id INT")).Replace
				testkit.ExecSQL(t, testkit.OpenSQL(t, "sqlite", "file:"+path), in(c.ddl))
				store := testkit.OpenSQLite(t, path)
				_, acquireErr := testkit.NewLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
				_, claimErr := store.Backend().Claims().Take(t.Context(), "session", "kind", nil, nil, []string{"k"}, testkit.Patience)
				for what, err := range map[string]error{"acquire": acquireErr, "claim": claimErr, "Migrate": store.Migrate(t.Context()), "claims.Migrate": claims.Migrate(t.Context(), store)} {
					if (what == "acquire" || what == "Migrate") && (table == "objects_claims" || table == "objects_requests") {
						require.NoError(t, err, what)
						continue
					}
					require.ErrorIs(t, err, tenure.ErrSetup, what)
					require.ErrorContains(t, err, in(c.says), what)
				}
			})
		}
	}
}
