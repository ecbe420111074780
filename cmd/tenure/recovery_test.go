//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storekit"
)

func TestARotatedPasswordIsReadFromItsFile(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t)
	conn := connect(t, server.URL())
	at := conn.Config()
	var rules string
	if err := conn.QueryRow(t.Context(), `SHOW hba_file`).Scan(&rules); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(rules, []byte("host all app 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "passwords")
	rotate := func(password, statements string) {
		if err := os.WriteFile(file, fmt.Appendf(nil, "%s:%d:postgres:app:%s\n", at.Host, at.Port, password), 0o600); err != nil {
			t.Fatal(err)
		}
		execSQL(t, conn, statements+`; ALTER ROLE app PASSWORD '`+password+`'`)
	}
	rotate("first", `CREATE ROLE app LOGIN; GRANT ALL ON SCHEMA public TO app; SELECT pg_reload_conf()`)
	s := newSite(t, server.URL())
	url := fmt.Sprintf("postgres://app@%s:%d/postgres?sslmode=disable", at.Host, at.Port)
	s.startWith(t, "a", []string{storeEnv + "=" + url, "PGPASSFILE=" + file}, s.service(t)...)
	s.awaitStart(t, 0)
	rotate("second", `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'`)
	awaitRenewal(t, s.open(t))
}

func TestAStoreThatWasLostIsSetUpAgain(t *testing.T) {
	t.Parallel()
	for name, lost := range map[string]func(t *testing.T) (store string, lose func()){
		"postgres": func(t *testing.T) (string, func()) {
			url := testkit.PostgresURL(t)
			return url, func() { execSQL(t, connect(t, url), `DROP TABLE objects, objects_tombstones`) }
		},
		"nats": func(t *testing.T) (string, func()) {
			url := startNATS(t, nil)
			return url, func() {
				conn := testkit.Must(nats.Connect(url))
				defer conn.Close()
				if err := testkit.Must(conn.JetStream()).DeleteStream("TENURE"); err != nil {
					t.Error(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, lose := lost(t)
			s := newSite(t, store)
			for _, name := range []string{"a", "b"} {
				s.start(t, name, s.service(t)...)
			}
			s.awaitStart(t, 0)
			lose()
			s.awaitStart(t, 1) // the site's tokens rise, and no two services run at once
			awaitRenewal(t, s.open(t))
		})
	}
}

// emptied is a store without its tables. It can't be opened.
type emptied struct {
	database
	migrated int
	err      error
}

func (s *emptied) Migrate(context.Context) error { s.migrated++; return s.err }
func (*emptied) String() string                  { return "emptied" }

func TestALostStoreIsSetUpAgainOnceNoHolderTrustsItsTerm(t *testing.T) {
	t.Parallel()
	missing := fmt.Errorf("acquire: %w", storekit.NotMigrated(errors.New("no table")))
	denied := fmt.Errorf("acquire: %w", tenure.ErrSetup)
	for name, test := range map[string]struct {
		attempt  func(second int) error // at each second
		migrate  error
		migrated int // in 20 s, at a TTL of 5 s
		ends     int // second at which run has ended; 0: it goes on
	}{
		"missing": {func(int) error { return missing }, nil, 3, 0},
		"missing, after a longer TTL": {func(s int) error {
			return oneOf(s == 0, error(&tenure.HeldError{Holding: tenure.Holding{TTL: 15 * time.Second}}), missing)
		}, nil, 1, 0},
		"missing now and then":         {func(s int) error { return oneOf(s%4 == 0, errors.New("down"), missing) }, nil, 0, 0},
		"missing, and may not be made": {func(int) error { return missing }, denied, 61, 65},
		"denied for long":              {func(int) error { return denied }, nil, 0, 65},
		"denied for a while":           {func(s int) error { return oneOf(s == 60, nil, denied) }, nil, 0, 0},
		"down":                         {func(int) error { return errors.New("down") }, nil, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				r := &runner{opts: &runOptions{ttl: 5 * time.Second}, log: slog.New(slog.DiscardHandler), shutdown: cancel}
				store := &emptied{err: test.migrate}
				attempted := r.setUpAgain(ctx, store)
				ended := 0
				for second := range 100 {
					if second == 20 && test.ends == 0 && store.migrated != test.migrated {
						t.Errorf("set up %d times, want %d", store.migrated, test.migrated)
					}
					attempted(0, test.attempt(second))
					if ctx.Err() != nil {
						ended = second
						break
					}
					time.Sleep(time.Second)
				}
				if ended != test.ends {
					t.Errorf("ended after %d s, want %d", ended, test.ends)
				}
				if test.ends > 0 && (store.migrated != test.migrated || !errors.Is(context.Cause(ctx), tenure.ErrSetup)) {
					t.Errorf("set up %d times, and ended with %v", store.migrated, context.Cause(ctx))
				}
			})
		})
	}
}

func oneOf[T any](first bool, a, b T) T {
	if first {
		return a
	}
	return b
}

func TestRunThatIsRefusedAtItsStartWaitsAMoment(t *testing.T) {
	t.Parallel()
	began := time.Now()
	status, _, stderr := tenureCommand(t, "run", "--key", "k", "--store", t.TempDir(), "--", "true")
	if took := time.Since(began); status != 1 || took < time.Second {
		t.Errorf("exit status %d and %q after %v", status, stderr, took)
	}
}

func TestASettingOfAnotherProgramIsNamed(t *testing.T) {
	t.Parallel()
	url := testkit.PostgresURL(t)
	for setting, want := range map[string]string{
		"schema=s3cret":    `unrecognized configuration parameter "schema" (SQLSTATE 42704) (remove this setting from the URL: `,
		"pgbouncer=s3cret": `unrecognized configuration parameter "pgbouncer" (SQLSTATE 42704) (remove this setting from the URL: `,
		"sslmode=s3cret":   `(sslmode is invalid); correct this setting, or remove it from the URL `,
	} {
		status, _, stderr := tenureCommand(t, "status", "--key", "k", "--store", strings.Replace(url, "sslmode=disable", setting, 1))
		if status == 0 || !strings.Contains(stderr, want) || strings.Contains(stderr, "s3cret") || strings.Contains(stderr, "pooler") || strings.Contains(stderr, "characters") {
			t.Errorf("%s: exit status %d and %q, want %q", setting, status, stderr, want)
		}
	}
}

func TestATableThatIsOnlyHiddenIsNotReplaced(t *testing.T) {
	t.Parallel()
	s := newSite(t, testkit.PostgresURL(t))
	store, r := s.open(t), &runner{opts: &runOptions{}}
	for _, test := range []struct {
		statement string
		ok        bool
	}{
		{``, true},
		{`ALTER TABLE objects RENAME TO mine`, false},
		{`ALTER TABLE mine RENAME TO objects`, true},
		{`CREATE SCHEMA other; ALTER TABLE objects SET SCHEMA other`, false},
		{`DROP TABLE other.objects`, true},
	} {
		s.exec(t, test.statement)
		if err := r.setUp(t.Context(), store); (err == nil) != test.ok {
			t.Errorf("after %q: %v", test.statement, err)
		}
	}
	acquire(t, store, tenure.Key{Type: defaultType, ID: "svc"})
}
