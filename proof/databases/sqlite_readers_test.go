package databases_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// The first process to open a file after a crash briefly locks out readers, and a backup may.
func TestOnSQLiteReadsWaitForAnotherConnectionThatLocksOutReaders(t *testing.T) {
	path := filepath.Join(t.TempDir(), "objects.db")
	store, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{Shared: true})
	require.NoError(t, err)
	defer store.Close()
	require.NoError(t, store.Migrate(t.Context()))
	require.NoError(t, claims.Migrate(t.Context(), store))
	_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "thing", ID: "a"}, Payload: []byte(`{}`)}, tenure.IfAbsent())
	require.NoError(t, err)
	store.DB().SetMaxIdleConns(-1) // an open connection would keep the other one from locking the file

	for name, read := range map[string]func(context.Context) error{
		"List": func(ctx context.Context) error {
			found, err := store.List(ctx, "thing", "", 10)
			if err == nil {
				require.Len(t, found, 1)
			}
			return err
		},
		"Sessions": func(ctx context.Context) error {
			_, err := store.Backend().Claims().Sessions(ctx, time.Minute)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			other, err := sql.Open("sqlite", path+"?_pragma=locking_mode(EXCLUSIVE)")
			require.NoError(t, err)
			defer other.Close()
			other.SetMaxOpenConns(1)
			_, err = other.Exec(`DELETE FROM objects WHERE id = 'none'`)
			require.NoError(t, err)

			short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			require.Error(t, read(short))
			require.Error(t, short.Err(), "it did not wait as long as its context allows")
			done := make(chan error, 1)
			go func() { done <- read(t.Context()) }()
			require.NoError(t, other.Close())
			require.NoError(t, <-done)
		})
	}
}
