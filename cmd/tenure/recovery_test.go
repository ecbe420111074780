//go:build unix

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/tenurelib/tenure/internal/testkit"
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
