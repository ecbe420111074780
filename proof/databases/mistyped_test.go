package databases_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The servers' addresses refuse connections at once, and the context has ended.
func TestNoErrorShowsThePasswordOfAMistypedURL(t *testing.T) {
	testkit.Slow(t)
	t.Chdir(t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	opens := map[string]func(url string) error{
		"Open": func(url string) error { _, err := tenure.Open(ctx, url); return err },
		"OpenPostgres": func(url string) error {
			_, err := tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{Logger: logger})
			return err
		},
		"OpenSQLite": func(url string) error {
			store, err := tenure.OpenSQLite(t.Context(), url, tenure.SQLiteConfig{Logger: logger})
			if err == nil {
				store.Close()
			}
			return err
		},
	}
	for url := range testkit.MistypedURLs() {
		if strings.HasPrefix(strings.TrimPrefix(url, "sqlite:"), "/") { // an absolute path, whatever else it may have been meant to be
			continue
		}
		for name, open := range opens {
			err := open(url)
			if err == nil || testkit.ShowsPassword(fmt.Sprintf("%v %+v", err, err)+log.String()) {
				t.Errorf("%s(%q): %v, logged: %s", name, url, err, &log)
			}
			if name == "Open" && strings.Contains(fmt.Sprint(err), "open SQLite") {
				t.Errorf("Open(%q) has looked for a file: %v", url, err)
			}
			log.Reset()
		}
		files, err := os.ReadDir(".")
		require.NoError(t, err)
		require.Empty(t, files, "%q was taken for the path of a file", url)
	}
}

// Servers and errors quote all of that, and a later error may come at any time.
func TestAMistypedConnectionStringHasItsPasswordNowhereElse(t *testing.T) {
	testkit.Slow(t)
	parsed := 0
	for url := range testkit.MistypedURLs() {
		cfg, err := pgconns.ParseURL(url)
		if err != nil {
			continue
		}
		parsed++
		conn := cfg.ConnConfig
		shown := append(slices.Collect(maps.Keys(conn.RuntimeParams)), conn.User, conn.Host, conn.Database)
		if slices.ContainsFunc(shown, testkit.ShowsPassword) {
			t.Errorf("%q: %q", url, shown)
		}
	}
	require.NotZero(t, parsed)
}
