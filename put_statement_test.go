package tenure_test

import (
	"database/sql"
	"errors"
	"path/filepath"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

func TestAPutStatementWritesOnlyWhatHasTheVersion(t *testing.T) {
	type putter interface {
		migrator
		PutStatement(obj tenure.Object, version int64) (string, []any, error)
	}
	for name, open := range map[string]func(t *testing.T) (putter, *sql.DB){
		"postgres": func(t *testing.T) (putter, *sql.DB) {
			url := postgresURL(t)
			return openPostgres(t, url, tenure.PostgresConfig{}), openSQL(t, "pgx", url)
		},
		"sqlite": func(t *testing.T) (putter, *sql.DB) {
			path := filepath.Join(t.TempDir(), "tenure.db")
			return openSQLite(t, path), openSQL(t, "sqlite", "file:"+path)
		},
	} {
		t.Run(name, func(t *testing.T) {
			store, db := open(t)
			migrate(t, store)
			_, err := db.Exec(`CREATE TABLE work (id bigint)`)
			require.NoError(t, err)
			key := tenure.Key{Type: "slot", ID: "a"}
			obj := tenure.Object{Key: key, Name: "n", Labels: map[string]string{"l": "v"}, Payload: []byte("new")}
			put := func(version int64) error {
				query, args, err := store.PutStatement(obj, version)
				require.NoError(t, err)
				tx, err := db.Begin()
				require.NoError(t, err)
				defer tx.Rollback()
				_, err = tx.Exec(`INSERT INTO work VALUES (1)`)
				require.NoError(t, err)
				if _, err := tx.Exec(query, args...); err != nil {
					return err
				}
				return tx.Commit()
			}
			require.Error(t, put(1), "the table is empty")
			old, err := store.PutIf(t.Context(), tenure.Object{Key: key, Payload: []byte("old")}, tenure.MustCreate())
			require.NoError(t, err)
			require.Error(t, put(old.Version-1))
			require.NoError(t, put(old.Version))
			require.Error(t, put(old.Version), "a second time")

			now, err := store.Get(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, obj.Payload, now.Payload)
			require.Equal(t, obj.Labels, now.Labels)
			require.Equal(t, obj.Name, now.Name)
			require.Greater(t, now.Version, old.Version)
			require.Equal(t, old.CreatedAt, now.CreatedAt)
			require.NoError(t, store.DeleteIf(t.Context(), key, now.Version))
			_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "slot", ID: "b"}}, tenure.MustCreate())
			require.NoError(t, err)
			require.Error(t, put(now.Version), "the object is gone")
			var rows int
			require.NoError(t, db.QueryRow(`SELECT count(*) FROM work`).Scan(&rows))
			require.Equal(t, 1, rows)

			_, _, err = store.PutStatement(tenure.Object{}, 0)
			require.ErrorIs(t, err, tenure.ErrInvalid)
			fenced, err := tenure.Fence(store, mustAcquire(t, newLease(t, store, tenure.LeaseConfig{})))
			require.NoError(t, err)
			_, _, err = fenced.(putter).PutStatement(obj, 1)
			require.ErrorIs(t, err, errors.ErrUnsupported)
		})
	}
}
