//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// eachStore runs a test on a site with Postgres, on one with SQLite and on one with NATS.
func eachStore(t *testing.T, test func(t *testing.T, s *site)) {
	eachDatabase(t, test)
	t.Run("nats", func(t *testing.T) {
		t.Parallel()
		test(t, natsSite(t))
	})
}

// eachDatabase runs a test on a site with Postgres and on one with SQLite.
func eachDatabase(t *testing.T, test func(t *testing.T, s *site)) {
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		test(t, newSite(t, testkit.PostgresURL(t)))
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		test(t, sqliteSite(t))
	})
}

// ask runs a command on the site's lease, which must succeed, and returns its output. The status of a lease
// that is not held is a success.
func (s *site) ask(t *testing.T, command string, args ...string) string {
	t.Helper()
	args = append([]string{command, "--store", s.store}, args...)
	if command != "list" && command != "migrate" {
		args = append(args, "--key", "svc")
	}
	status, stdout, stderr := tenureCommand(t, args...)
	if status != 0 && !(command == "status" && (status == exitFree || status == exitUnused)) || stderr != "" && stderr != "no sessions\n" {
		t.Fatalf("%s: exit status %d and %q", command, status, stderr)
	}
	return stdout
}

// view returns what status --json prints.
func (s *site) view(t *testing.T) (v leaseView) {
	t.Helper()
	if err := json.Unmarshal([]byte(s.ask(t, "status", "--json")), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestCommandsShowMoveAndWatchALease(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *site) {
		const key = "reconciler_lease/svc"
		if got := s.ask(t, "migrate"); !strings.HasSuffix(got, " is ready\n") {
			t.Errorf("migrate: %q", got)
		}
		if got := s.ask(t, "migrate", "--json"); !strings.HasPrefix(got, `{"migrated":"`) {
			t.Errorf("migrate --json: %q", got)
		}
		if v := s.view(t); v.State != stateUnused || v.Key != key {
			t.Errorf("at first the status is %+v", v)
		}
		if got := s.ask(t, "list", "--json"); got != "[]\n" {
			t.Errorf("at first the list is %q", got)
		}
		if status, _, stderr := tenureCommand(t, "resign", "--store", s.store, "--key", "svc"); status != 1 || stderr != "tenure resign: nobody holds "+key+"; "+keyHint+"\n" {
			t.Errorf("resign with no holder: exit status %d, %q", status, stderr)
		}
		lines, changes := s.watch(t), s.watch(t, "--json")
		awaitWatched := func(holder string) {
			t.Helper()
			eventually(t, soon, "watch shows "+holder, func() bool {
				return strings.Contains(lines.String(), "  "+key+"  held by "+holder+"\n") &&
					strings.Contains(changes.String(), `"state":"held","holder":"`+holder+`"`)
			})
		}

		for i, name := range []string{"a", "b", "c"} {
			r := s.start(t, name, s.service(t)...)
			if i == 0 {
				s.awaitStart(t, 0)
			}
			eventually(t, soon, name+" competes", func() bool { return strings.Contains(r.log(), "msg=competing") })
		}
		v := s.view(t)
		if v.State != stateHeld || v.Holder != "a" || v.Term == "" || v.TTLMS != testTTL.Milliseconds() || v.AgeMS > v.TTLMS ||
			v.AcquiredAt == nil || time.Since(*v.AcquiredAt) > soon || v.RenewedAt == nil {
			t.Errorf("the status is %+v", v)
		}
		text := s.ask(t, "status")
		for _, want := range []string{`lease +` + key, `state +held, expires in \S+ unless renewed`, `holder +a`, `since +\d`, `renewed +\S+ ago.*, TTL 3s`, `term +` + v.Term, `token +at most \d`} {
			if !regexp.MustCompile(`(?m)^` + want).MatchString(text) {
				t.Errorf("the status has no %q:\n%s", want, text)
			}
		}
		if got := s.ask(t, "list"); !regexp.MustCompile(`(?s)^LEASE.*\n`+key+` +a +\S+ +held`).MatchString(got) || strings.Count(got, "\n") != 2 {
			t.Errorf("the list is\n%s", got)
		}
		var list []leaseView
		if err := json.Unmarshal([]byte(s.ask(t, "list", "--json")), &list); err != nil || len(list) != 1 || list[0].Term != v.Term {
			t.Errorf("the list is %+v, %v", list, err)
		}
		if got := s.ask(t, "list", "--type", "other", "--json"); got != "[]\n" {
			t.Errorf("the list of another type is %q", got)
		}
		awaitWatched("a")

		if got := s.ask(t, "handover", "--to", "c"); got != "asked a to hand "+key+" over to c (the store does not know whether a replica of that name stands by; --wait tells)\n" {
			t.Errorf("handover: %q", got)
		}
		if next := s.awaitStart(t, 1); next.holder != "c" {
			t.Errorf("it was handed over to %s", next.holder)
		}
		awaitWatched("c")
		if got := s.ask(t, "handover", "--to", "c"); got != "c already holds "+key+"\n" {
			t.Errorf("a second handover: %q", got)
		}
		if got := s.ask(t, "resign", "--json"); got != `{"key":"`+key+`","holder":"c"}`+"\n" {
			t.Errorf("resign: %q", got)
		}
		next := s.awaitStart(t, 2)
		if next.holder == "c" {
			t.Error("c took the lease back after it resigned")
		}

		awaitWatched(next.holder)
		if first, _, _ := strings.Cut(lines.String(), "\n"); !strings.HasSuffix(first, "  "+key+"  free") {
			t.Errorf("watch began with %q", first)
		}
		// The third holder may be the first one again, which watch has shown before.
		eventually(t, soon, "watch shows three terms", func() bool { return strings.Count(lines.String(), "held by") >= 3 })
		if got := strings.Count(lines.String(), "held by"); got != 3 {
			t.Errorf("watch has shown %d terms:\n%s", got, lines.String())
		}
	})
}

// buffer is a buffer that can be read while it is being written.
type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// watch runs "tenure watch" until the end of the test, and returns when it has
// printed a line.
func (s *site) watch(t *testing.T, args ...string) *buffer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var stdout, stderr buffer
	done := make(chan int)
	go func() {
		done <- run(ctx, append([]string{"watch", "--store", s.store, "--key", "svc"}, args...), &stdout, &stderr)
	}()
	t.Cleanup(func() {
		cancel()
		if status := <-done; status != 0 || stderr.String() != "" {
			t.Errorf("watch: exit status %d and %q", status, stderr.String())
		}
	})
	eventually(t, soon, "watch begins", func() bool { return stdout.String() != "" })
	return &stdout
}

func TestAStoreThatIsDownIsReportedWithExitStatus1(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, store := range []string{
		"postgres://user:s3cret@127.0.0.1:1/db",
		filepath.Join(dir, "missing.db"),
		dir,
	} {
		for _, command := range []string{"status", "watch", "list", "owner", "resign", "handover", "migrate"} {
			if command == "migrate" && store == filepath.Join(dir, "missing.db") {
				continue // migrate creates the file
			}
			t.Run(command+" "+filepath.Base(store), func(t *testing.T) {
				t.Parallel()
				args := []string{command, "--store", store}
				if command != "list" && command != "migrate" {
					args = append(args, "--key", "type/svc")
				}
				if command == "handover" {
					args = append(args, "--to", "b")
				}
				status, stdout, stderr := tenureCommand(t, args...)
				if status != 1 || stdout != "" || strings.Count(stderr, "\n") != 1 || strings.Contains(stderr, "s3cret") {
					t.Errorf("exit status %d, %q and %q", status, stdout, stderr)
				}
			})
		}
	}
}

func TestAConnectionThatIsRefusedIsExplainedInOneLine(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t)
	conn := connect(t, server.URL())
	at := conn.Config()
	var rules string
	if err := conn.QueryRow(t.Context(), `SHOW hba_file`).Scan(&rules); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(rules, []byte(`
host all app 127.0.0.1/32 scram-sha-256
host all stranger 127.0.0.1/32 reject
host all all 127.0.0.1/32 trust
`), 0o600); err != nil {
		t.Fatal(err)
	}
	execSQL(t, conn, `CREATE ROLE app LOGIN PASSWORD 'right'; CREATE ROLE stranger LOGIN; SELECT pg_reload_conf()`)
	url := func(user, database string) string {
		return fmt.Sprintf("postgres://%s@%s:%d/%s", user, at.Host, at.Port, database)
	}
	eventually(t, soon, "the server reads its new rules", func() bool {
		_, _, stderr := tenureCommand(t, "migrate", "--store", url("app:s3cret", "postgres"))
		return strings.Contains(stderr, "password")
	})
	for _, test := range []struct{ store, cause string }{
		{url("app:s3cret", "postgres"), `password authentication failed for user "app"`},
		{url("stranger", "postgres"), `pg_hba.conf rejects connection for host "127.0.0.1", user "stranger", database "postgres", no encryption`},
		{url("nobody", "postgres"), `role "nobody" does not exist`},
		{url("postgres", "missing"), `database "missing" does not exist`},
	} {
		for _, command := range [][]string{{"status", "--key", "k"}, {"migrate"}, {"run", "--key", "k"}} {
			args := append(command, "--store", test.store)
			if command[0] == "run" {
				args = append(args, "--", "true")
			}
			status, stdout, stderr := tenureCommand(t, args...)
			want := fmt.Sprintf("tenure %s: open Postgres: %s (", command[0], test.cause)
			if status != 1 || stdout != "" || !strings.HasPrefix(stderr, want) || strings.Count(stderr, "\n") != 1 {
				t.Errorf("%s: exit status %d, %q and %q, want one line that begins with %q", test.cause, status, stdout, stderr, want)
			}
		}
	}
}

func TestAMissingTableIsCreatedByTheCommandThatTheErrorNames(t *testing.T) {
	t.Parallel()
	for store, cause := range map[string]string{
		testkit.PostgresURL(t):               `"mine": the table does not exist`,
		filepath.Join(t.TempDir(), "new.db"): "SQL logic error: no such table: main.mine (1)",
	} {
		if !isPostgres(store) {
			if err := os.WriteFile(store, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, command := range [][]string{{"status", "--key", "k"}, {"list"}, {"resign", "--key", "k"}} {
			status, _, stderr := tenureCommand(t, append(command, "--store", store, "--table", "mine")...)
			want := fmt.Sprintf("tenure %s: %s: run \"tenure migrate --table 'mine'\"\n", command[0], cause)
			if status != 1 || stderr != want {
				t.Errorf("exit status %d and %q, want %q", status, stderr, want)
			}
		}
		if status, _, stderr := tenureCommand(t, "migrate", "--store", store, "--table", "mine"); status != 0 {
			t.Errorf("migrate: %q", stderr)
		}
		if status, _, stderr := tenureCommand(t, "list", "--store", store, "--table", "mine"); status != 0 {
			t.Errorf("list after migrate: %q", stderr)
		}
	}
}

// connect opens a connection for the time of the test.
func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// execSQL runs any number of statements.
func execSQL(t *testing.T, conn *pgx.Conn, statements string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(t.Context(), statements).ReadAll(); err != nil {
		t.Fatal(err)
	}
}

func TestBehindAPoolerRunSaysHowStandbysAreWoken(t *testing.T) {
	t.Parallel()
	s := newSite(t, testkit.StartBouncer(t, testkit.PostgresURL(t))+"&default_query_exec_mode=exec")
	r := s.start(t, "a", s.service(t)...)
	r.awaitLog(t, "standbys are not woken, and poll")
	r.awaitLog(t, "set ListenURL, or the store's whole URL, to the server itself")
}

func TestATableOfTheApplicationsOwnIsExplainedInOneLine(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		const lacks = "it lacks the columns object_type, labels, payload, resource_version, created_at_ms, updated_at_ms"
		want := `table "objects" does not fit: its column id is bigint, not text or character varying; ` + lacks
		reads := want
		const table = `CREATE TABLE objects (id bigint PRIMARY KEY, name text)`
		if isPostgres(s.store) {
			execSQL(t, connect(t, s.store), table)
		} else {
			execSQLite(t, s.store, table)
			want = `table "objects" does not fit: its column id is BIGINT, not TEXT; ` + lacks
			reads = "no such column: " // a command that only reads does not inspect the table
		}
		const remedy = " (if it is another program's table, choose another name with Table or Schema, or with the command's --table or --schema)\n"
		for _, command := range [][]string{{"migrate"}, {"status", "--key", "k"}, {"run", "--key", "k", "--", "true"}} {
			want := want
			if command[0] == "status" {
				want = reads
			}
			args := slices.Insert(slices.Clone(command), 1, "--store", s.store)
			status, stdout, stderr := tenureCommand(t, args...)
			if status != 1 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) || !strings.HasSuffix(stderr, remedy) {
				t.Errorf("%s: exit status %d, %q and %q", command[0], status, stdout, stderr)
			}
		}
	})
}

// execSQLite runs statements in a SQLite file.
func execSQLite(t *testing.T, path, statements string) {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(10000)") // tenure writes, too
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), statements); err != nil {
		t.Fatal(err)
	}
}

func TestAnotherTableHasOtherLeases(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		other := []string{"--table", "leases"}
		if isPostgres(s.store) {
			other = append(other, "--schema", "else where")
		}
		s.ask(t, "migrate")
		s.ask(t, "migrate", other...)
		s.start(t, "a", append(other, s.service(t)...)...)
		s.awaitStart(t, 0)
		if got := s.ask(t, "status", other...); !strings.Contains(got, "holder   a") {
			t.Errorf("the status is\n%s", got)
		}
		if got := s.ask(t, "list", append(other, "--json")...); !strings.Contains(got, `"holder":"a"`) {
			t.Errorf("the list is %s", got)
		}
		if got := s.watch(t, other...).String(); !strings.Contains(got, "held by a") {
			t.Errorf("watch prints %q", got)
		}
		if v := s.view(t); v.State == stateHeld {
			t.Errorf("in the default table the lease is %+v", v)
		}
		s.ask(t, "resign", other...)
		s.awaitStart(t, 1)
	})
}

// The statements are run by a role that may create tables, and then tenure by one that may
// not.
func TestThePrintedStatementsSetAStoreUp(t *testing.T) {
	t.Parallel()
	url := testkit.PostgresURL(t)
	owner := connect(t, url)
	role := "app_" + owner.Config().Database
	execSQL(t, owner, `CREATE ROLE "`+role+`" LOGIN`)
	t.Cleanup(func() { // after the site's, whose replicas use the role
		conn, err := pgx.Connect(context.Background(), url)
		if err == nil {
			defer conn.Close(context.Background())
			_, err = conn.PgConn().Exec(context.Background(), `DROP OWNED BY "`+role+`"; DROP ROLE "`+role+`"`).ReadAll()
		}
		if err != nil {
			t.Error(err)
		}
	})
	s := newSite(t, strings.Replace(url, "postgres@", role+"@", 1))
	place := []string{"--schema", "Else where", "--table", "my \"leases\""}
	ddl := s.ask(t, "migrate", append(place, "--print")...)
	for range 2 { // it may be run again
		execSQL(t, owner, ddl)
	}
	if status, _, stderr := tenureCommand(t, append([]string{"status", "--store", s.store, "--key", "svc"}, place...)...); status != 1 || !strings.Contains(stderr, "permission denied") {
		t.Errorf("a role without privileges: exit status %d and %q", status, stderr)
	}
	execSQL(t, owner, `GRANT USAGE ON SCHEMA "Else where" TO "`+role+`";
		GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA "Else where" TO "`+role+`"`)
	r := s.start(t, "a", append(place, s.service(t)...)...)
	s.awaitStart(t, 0)
	if strings.Contains(r.log(), "level=WARN") {
		t.Error("something is missing")
	}

	file := sqliteSite(t)
	ddl = file.ask(t, "migrate", "--print", "--table", "my leases")
	if _, err := os.Stat(file.store); err == nil {
		t.Error("--print has created the file")
	}
	for range 2 {
		execSQLite(t, file.store, ddl)
	}
	if got := file.ask(t, "list", "--table", "my leases", "--json"); got != "[]\n" {
		t.Errorf("the list is %q", got)
	}
	if status, _, stderr := tenureCommand(t, "migrate", "--print", "--store", "postgres://nobody@127.0.0.1:1/none"); status != 0 || stderr != "" {
		t.Errorf("without a server: exit status %d and %q", status, stderr)
	}
}

func TestTheExitStatusOfStatusTellsWhetherTheLeaseIsHeld(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *site) {
		expect := func(want int, state string) {
			t.Helper()
			for _, args := range [][]string{{"--json"}, nil} {
				status, stdout, stderr := tenureCommand(t, append([]string{"status", "--store", s.store, "--key", "svc"}, args...)...)
				if status != want || stderr != "" || !strings.Contains(stdout, state) {
					t.Errorf("exit status %d, %q and %q, want %d and %s", status, stdout, stderr, want, state)
				}
			}
		}
		s.ask(t, "migrate")
		expect(4, "unused")
		store := s.open(t)
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: defaultType, ID: "svc"}, TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		acquire := func() *tenure.Term {
			t.Helper()
			term, err := lease.TryAcquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return term
		}
		term := acquire()
		expect(0, "held")
		if v := s.view(t); v.MaxToken != term.Token() {
			t.Errorf("the token %d is shown as at most %d", term.Token(), v.MaxToken)
		}
		if err := lease.Renew(t.Context(), term); err != nil {
			t.Fatal(err)
		}
		if v := s.view(t); v.MaxToken <= term.Token() {
			t.Errorf("after a renewal the token %d is shown as at most %d", term.Token(), v.MaxToken)
		}
		if err := lease.Release(t.Context(), term); err != nil {
			t.Fatal(err)
		}
		expect(3, "free")
		acquire()
		const expire = `UPDATE objects SET updated_at_ms = updated_at_ms - 60000`
		switch {
		case isPostgres(s.store):
			execSQL(t, connect(t, s.store), expire)
		case schemeOf(s.store) == nil:
			execSQLite(t, s.store, expire)
		default:
			w := tap(t, s)
			h, _ := holding(t, store)
			w.publish(t, renewed, fmt.Sprintf(`{"type":%q,"id":"svc","updated_us":%d}`+"\n"+`{"holder":"a","term":%q,"ttl_ms":60000}`,
				defaultType, time.Now().Add(-time.Minute).UnixMicro(), h.Term), uint64(h.Version))
		}
		expect(3, "expired")
		if isPostgres(s.store) { // a lease works without tombstones
			execSQL(t, connect(t, s.store), `DELETE FROM objects; DROP TABLE objects_tombstones`)
			expect(3, "free") // nobody can tell
		}
	})
}

func TestStatusShowsTheSlotsOfASchedule(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		now := time.Now().Truncate(time.Hour)
		payload := fmt.Sprintf(`{"done":%q,"begun":%q,"next":%q,"location":"Europe/Berlin"}`, now.Format(time.RFC3339), now.Add(-time.Minute).Format(time.RFC3339), now.Add(24*time.Hour).Format(time.RFC3339))
		_, err := s.open(t).PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: defaultType, ID: "svc"}, Payload: []byte(payload)}, tenure.IfAbsent())
		if err != nil {
			t.Fatal(err)
		}
		berlin, err := time.LoadLocation("Europe/Berlin")
		if err != nil {
			t.Fatal(err)
		}
		at := func(t time.Time) string { return t.In(berlin).Format(time.DateTime + " MST") }
		want := "schedule  " + defaultType + "/svc\ndone      " + at(now) + "\nnext      " + at(now.Add(24*time.Hour)) + "\n"
		if got := s.ask(t, "status"); got != want {
			t.Errorf("the status is\n%s, want\n%s", got, want)
		}
		if got := s.ask(t, "status", "--json"); !strings.Contains(got, `"state":"schedule","done":`) || !strings.Contains(got, `"late":false`) {
			t.Errorf("the status is %s", got)
		}
	})
}

func TestStatusOfAMistypedTypeNamesTheTypesThatHaveTheLease(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		if got := s.ask(t, "status"); strings.Contains(got, "note") {
			t.Errorf("in an empty store the status is\n%s", got)
		}
		store := s.open(t)
		acquire := func(kind string) {
			t.Helper()
			lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: kind, ID: "svc"}, TTL: time.Minute})
			if err == nil {
				_, err = lease.TryAcquire(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		acquire("job")
		acquire("cron")
		if _, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "order", ID: "svc"}, Payload: []byte(`{}`)}, tenure.IfAbsent()); err != nil {
			t.Fatal(err)
		}
		if got := s.ask(t, "status"); !strings.HasSuffix(got, "\nnote   other types have a lease svc: cron, job (is --key TYPE/svc meant?)\n") {
			t.Errorf("the status is\n%s", got)
		}
		if got := s.ask(t, "status", "--json"); strings.Contains(got, "cron") {
			t.Errorf("the status is %s", got)
		}
		acquire(defaultType)
		if got := s.ask(t, "status"); strings.Contains(got, "note") {
			t.Errorf("a lease that is held has the status\n%s", got)
		}
	})
}

func TestHandoverWaitsUntilTheReplicaHoldsTheLease(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *site) {
		const key = "reconciler_lease/svc"
		handover := func(to, wait string) (status int, stdout, stderr string) {
			return tenureCommand(t, "handover", "--store", s.store, "--key", "svc", "--to", to, "--wait", wait)
		}
		a := s.start(t, "a", s.service(t)...)
		s.awaitStart(t, 0)
		b := s.start(t, "b", s.service(t)...)
		eventually(t, soon, "b competes", func() bool { return strings.Contains(b.log(), "msg=competing") })

		status, stdout, stderr := handover("b", "1m")
		if want := "asked a to hand " + key + " over to b\nb holds " + key + "\n"; status != 0 || stdout != want || stderr != "" {
			t.Errorf("to b: exit status %d, %q and %q", status, stdout, stderr)
		}
		s.awaitStart(t, 1) // a program that is ended before it has begun leaves no line
		if got := s.ask(t, "handover", "--to", "b", "--wait", "1m"); got != "b already holds "+key+"\n" {
			t.Errorf("again to b: %q", got)
		}

		// No replica has that name, so any may take the lease after a while.
		status, stdout, stderr = handover("typo", "1m")
		taken := regexp.MustCompile(`^tenure handover: ` + key + ` was not handed over to typo: [ab] holds it now; does a replica of that name stand by\?\n$`)
		if want := "asked b to hand " + key + " over to typo\n"; status != 1 || stdout != want || !taken.MatchString(stderr) {
			t.Errorf("to a name that no replica has: exit status %d, %q and %q", status, stdout, stderr)
		}

		holder := s.awaitStart(t, 2).holder
		awaitRenewal(t, s.open(t))
		map[string]*replica{"a": a, "b": b}[holder].signal(t, syscall.SIGSTOP)
		status, _, stderr = handover("c", "200ms")
		if want := "tenure handover: " + key + " was not handed over to c within 200ms: " + holder + " still holds it\n"; status != 1 || stderr != want {
			t.Errorf("while its holder is stopped: exit status %d and %q", status, stderr)
		}
		map[string]*replica{"a": a, "b": b}[holder].signal(t, syscall.SIGCONT)
	})
}

func TestADrainedReplicaGivesTheLeaseBackAndTakesNone(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *site) {
		run := func(args ...string) (status int, stdout, stderr string) {
			return tenureCommand(t, append(args, "--store", s.store)...)
		}
		s.start(t, "a", s.service(t)...)
		s.awaitStart(t, 0)
		b := s.start(t, "b", s.service(t)...)
		eventually(t, soon, "b competes", func() bool { return strings.Contains(b.log(), "msg=competing") })

		if status, stdout, stderr := run("drain", "--replica", "a", "--wait", "1m"); status != 0 || !regexp.MustCompile(`\na +another 24h0m0s`).MatchString(stdout) || stderr != "" {
			t.Errorf("drain a: exit status %d, %q and %q", status, stdout, stderr)
		}
		if next := s.awaitStart(t, 1); next.holder != "b" {
			t.Errorf("%s runs the program, and a is drained", next.holder)
		}
		var list []drainView
		if err := json.Unmarshal([]byte(s.ask(t, "list", "--drained", "--json")), &list); err != nil || len(list) != 1 || list[0].Replica != "a" {
			t.Errorf("list --drained: %+v, %v", list, err)
		}
		if status, _, stderr := run("drain", "--replica", "b", "--wait", "1m", "--for", "1h"); status != 0 || stderr != "no other replica holds reconciler_lease/svc now: undrain one, or start another\n" {
			t.Errorf("drain b: exit status %d and %q", status, stderr)
		}
		if v := s.view(t); v.State == stateHeld || !slices.Equal(slices.Sorted(slices.Values(v.Drained)), []string{"a", "b"}) {
			t.Errorf("both are drained, and the lease is %+v", v)
		}
		if got := s.ask(t, "status"); !regexp.MustCompile(`\ndrained +(a, b|b, a)\n`).MatchString(got) {
			t.Errorf("both are drained, and status says %s", got)
		}
		if status, stdout, stderr := run("undrain", "--replica", "a"); status != 0 || stdout != "a is no longer drained\n" || stderr != "" {
			t.Errorf("undrain a: exit status %d, %q and %q", status, stdout, stderr)
		}
		if next := s.awaitStart(t, 2); next.holder != "a" {
			t.Errorf("%s runs the program", next.holder)
		}
		if v := s.view(t); v.State != stateHeld || v.Drained != nil {
			t.Errorf("a holds the lease, and status says %+v", v)
		}
		if status, stdout, stderr := run("undrain", "--replica", "a"); status != 0 || stdout != "a is not drained\n" || stderr != "" {
			t.Errorf("undrain again: exit status %d, %q and %q", status, stdout, stderr)
		}
		for _, wrong := range [][]string{{"drain"}, {"undrain"}, {"drain", "--replica", "a", "--session", "s"}, {"drain", "--replica", "a", "--for", "1ms"}, {"drain", "--replica", "a", "--wait", "-1s"}, {"list", "--drained", "--sessions"}} {
			if status, _, _ := run(wrong...); status != 2 {
				t.Errorf("%v: exit status %d", wrong, status)
			}
		}
	})
}

func TestAFileThatIsNoDatabaseIsNamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text := filepath.Join(dir, "main.go")
	if err := os.WriteFile(text, bytes.Repeat([]byte("package main\n"), 100), 0o600); err != nil {
		t.Fatal(err)
	}
	for store, says := range map[string]string{dir: " is a directory", text: " is not a SQLite database"} {
		for _, command := range [][]string{{"status", "--key", "k"}, {"list"}, {"drain", "--replica", "a"}, {"migrate"}} {
			status, _, stderr := tenureCommand(t, append(command, "--store", store)...)
			if want := "tenure " + command[0] + ": " + store + says + "\n"; status != 1 || stderr != want {
				t.Errorf("exit status %d and %q, want %q", status, stderr, want)
			}
		}
	}
}

func TestWhyAHandoverHasNotHappened(t *testing.T) {
	t.Parallel()
	for want, v := range map[string]leaseView{
		"a still holds it": {State: stateHeld, Holder: "a"},
		"a no longer renews it: it has vanished, or its job does not return": {State: stateExpired, Holder: "a"},
		"nobody has taken it; does a replica named typo stand by?":           {State: stateOffered, OfferedTo: "typo"},
	} {
		if got := whyNotTaken(v, "typo", nil); got != want {
			t.Errorf("%+v: %q, want %q", v, got, want)
		}
	}
}

func TestOnceEndsWithTheProgramsStatus(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	for _, test := range []struct {
		program []string
		want    int
	}{
		{s.service(t, "exit=0"), 0},
		{s.service(t, "exit=7"), 7},
		{[]string{"--", "sh", "-c", "kill -KILL $$"}, 128 + int(syscall.SIGKILL)},
		{[]string{"--", s.dir}, 2},
	} {
		r := s.start(t, "a", append([]string{"--once"}, test.program...)...)
		if got := r.awaitExit(t); got != test.want {
			t.Errorf("%q: exit status %d, want %d", test.program, got, test.want)
		}
		if v := s.view(t); test.want != 2 && v.State != stateFree {
			t.Errorf("%q: the lease is %s", test.program, v.State)
		}
	}
	// When tenure is told to end, its exit status is the program's if the program runs, and
	// that of a process killed by the signal if not.
	a := s.start(t, "a", append([]string{"--once"}, s.service(t)...)...)
	s.awaitStart(t, 2)
	b := s.start(t, "b", append([]string{"--once"}, s.service(t)...)...)
	eventually(t, soon, "b competes", func() bool { return strings.Contains(b.log(), "msg=competing") })
	b.signal(t, syscall.SIGTERM)
	if got := b.awaitExit(t); got != 128+int(syscall.SIGTERM) {
		t.Errorf("a program that never ran: exit status %d", got)
	}
	interrupt := syscall.SIGINT
	if signal.Ignored(interrupt) { // the shell runs the test in the background, and tenure inherits that
		interrupt = syscall.SIGTERM
	}
	a.signal(t, interrupt)
	if got := a.awaitExit(t); got != 0 {
		t.Errorf("a program that was told to end: exit status %d", got)
	}
	if !s.has(t, "stop") {
		t.Error("the program was not told to end")
	}
}

func TestAProgramThatEndsIsStartedAgainElsewhere(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	for _, name := range []string{"a", "b"} {
		s.start(t, name, s.service(t, "exit=1")...)
	}
	s.awaitStart(t, 3)
	starters := make(map[string]bool)
	for _, e := range s.starts(t) {
		starters[e.holder] = true
	}
	if len(starters) != 2 {
		t.Errorf("only these replicas started it: %v", starters)
	}
}

func TestAProgramKnowsItsTermAndGetsSignals(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	r := s.start(t, "a", append([]string{"--stop-timeout", "300ms"}, s.service(t)...)...)
	start := s.awaitStart(t, 0)
	if start.holder != "a" || start.token == 0 {
		t.Errorf("it was told %+v", start)
	}
	if got := environOf(t, r.pid(t, "program")); !strings.Contains(got, "TENURE_TERM="+s.view(t).Term) {
		t.Error("it was not told the term's ID")
	}
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGUSR1} {
		if signal.Ignored(sig) {
			continue // the test was started by nohup, which the program inherits
		}
		r.signal(t, sig)
		eventually(t, soon, "the program gets "+sig.String(), func() bool { return s.has(t, fmt.Sprintf("signal-%d", int(sig))) })
	}
	r.awaitLog(t, "token="+fmt.Sprint(start.token))
}

// environOf returns the environment of a process.
func environOf(t *testing.T, pid int) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		out, err := exec.Command("ps", "eww", "-o", "command=", "-p", fmt.Sprint(pid)).Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	return string(data)
}

func TestAPasswordIsNeverShown(t *testing.T) {
	t.Parallel()
	const password = "s3cret"
	for name, store := range map[string]func(t *testing.T) string{
		"postgres": func(t *testing.T) string {
			return strings.Replace(testkit.PostgresURL(t), "postgres@", "postgres:"+password+"@", 1)
		},
		"nats": func(t *testing.T) string {
			url := startNATS(t, func(opts *server.Options) { opts.Username, opts.Password = "app", password })
			return strings.Replace(url, "//", "//app:"+password+"@", 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			passwordIsNeverShown(t, newSite(t, store(t)), password)
		})
	}
}

func passwordIsNeverShown(t *testing.T, s *site, password string) {
	if !strings.Contains(s.store, password) {
		t.Fatal("the test has no password")
	}
	inArguments := s.start(t, "a", s.service(t)...)
	s.awaitStart(t, 0)
	inEnvironment := s.startWith(t, "b", []string{storeEnv + "=" + s.store}, s.service(t)...)
	eventually(t, soon, "b competes", func() bool { return strings.Contains(inEnvironment.log(), "msg=competing") })
	watching := exec.Command(testBinary(t), "watch", "--key", "svc", "--store", s.store, "--json")
	watching.Env = append(environ(), asTenure+"=1")
	lines, err := watching.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := watching.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		watching.Process.Signal(syscall.SIGTERM)
		if err := watching.Wait(); err != nil {
			t.Errorf("watch: %v", err)
		}
	}()
	if line, err := bufio.NewReader(lines).ReadString('\n'); err != nil || !strings.Contains(line, `"held"`) {
		t.Errorf("watch: %q, %v", line, err)
	}
	if out, err := exec.Command("ps", "ww", "-o", "args=", "-p", fmt.Sprint(watching.Process.Pid)).Output(); err != nil || strings.Contains(string(out), password) {
		t.Errorf("ps shows %q, %v", out, err)
	}
	for _, pid := range []int{inArguments.cmd.Process.Pid, inEnvironment.cmd.Process.Pid, inArguments.pid(t, "guard"), inArguments.pid(t, "program")} {
		out, err := exec.Command("ps", "ww", "-o", "args=", "-p", fmt.Sprint(pid)).Output()
		if err != nil || strings.Contains(string(out), password) || !strings.Contains(string(out), s.dir) {
			t.Errorf("ps shows %q, %v", out, err)
		}
	}
	for _, pid := range []int{inArguments.pid(t, "guard"), inArguments.pid(t, "program")} {
		if strings.Contains(environOf(t, pid), password) {
			t.Errorf("the password is in the environment of %d", pid)
		}
	}
	said := inArguments.log() + inEnvironment.log() + s.ask(t, "status") + s.ask(t, "list", "--json") + s.ask(t, "migrate", "--json")
	for _, mistake := range [][]string{
		{"status", s.store},
		{"status", "--key", "svc", "--store", strings.Replace(s.store, password, password+"/", 1)},
		{"status", "--key", "svc", "--store", strings.Replace(s.store, password, "1/"+password, 1)},
		{"status", "--key", "svc", "--store", strings.Replace(s.store, password, password+"%", 1)},
		{"status", "--key", "svc", "--store", "postgres://u:" + password + "@127.0.0.1:port/db"},
		{"status", "--ttl=" + s.store},
		{"status", "host=h password=" + password},
		{"status", "--key", "svc", "--store", "host=h password=" + password},
		{"status", "--key", "svc", "--store", "host=h PassWord = " + password},
		{"status", "--key", "svc", "--store", "sslpassword=" + password},
		{"status", "--key", "svc", "--store", `application_name='a b' sslpassword = 'x\'` + password + "'"},
		{"status", "--key", "svc", "--store", "POSTGRES://u:" + password + "@h/db"},
		{"status", "--key", "svc", "--store", "NATS://u:" + password + "@h"},
		{"status", "--key", "svc", "--store", "nats://u:" + password + "@h:port"},
		{"status", strings.Replace(s.store, password, `a" `+password, 1)},
		{"run", "--ttl", s.store},
		{s.store},
	} {
		status, stdout, stderr := tenureCommand(t, mistake...)
		if status != 2 {
			t.Errorf("%q: exit status %d", mistake, status)
		}
		said += stdout + stderr
	}
	asking := exec.Command(testBinary(t), "handover", "--key", "svc", "--to", "nobody", "--wait", "1m", "--store", s.store)
	asking.Env = append(environ(), asTenure+"=1")
	answer, err := asking.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := asking.Start(); err != nil {
		t.Fatal(err)
	}
	defer asking.Wait()
	defer asking.Process.Kill()
	if line, err := bufio.NewReader(answer).ReadString('\n'); err != nil || !strings.HasPrefix(line, "asked ") {
		t.Errorf("handover: %q, %v", line, err)
	}
	if out, err := exec.Command("ps", "ww", "-o", "args=", "-p", fmt.Sprint(asking.Process.Pid)).Output(); err != nil || strings.Contains(string(out), password) {
		t.Errorf("ps shows %q, %v", out, err)
	}
	if strings.Contains(said, password) {
		t.Errorf("the password is in tenure's output:\n%s", said)
	}
}

func TestRunWaitsForAStoreThatIsDown(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t)
	if err := server.Stop("fast"); err != nil {
		t.Fatal(err)
	}
	s := newSite(t, server.URL())
	impatient, patient := s.start(t, "a", s.service(t)...), s.start(t, "b", s.service(t)...)
	for _, r := range []*replica{impatient, patient} {
		eventually(t, soon, r.name+" waits", func() bool { return strings.Contains(r.log(), "waiting for the database") })
	}
	impatient.signal(t, syscall.SIGTERM)
	if status := impatient.awaitExit(t); status != 0 {
		t.Errorf("a replica that was told to end while it waited: exit status %d", status)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	s.awaitStart(t, 0)
}

func TestTextFromTheStoreCannotControlATerminal(t *testing.T) {
	t.Parallel()
	const bad = "b\nstate  free\x1b[2J"
	v := leaseView{Key: "t/" + bad, State: stateHeld, Holder: bad, Term: bad, Labels: map[string]string{bad: bad}}
	var out bytes.Buffer
	if err := errors.Join(
		v.print(&out),
		leaseList{v}.print(&out),
		change{time.Now(), v}.print(&out),
		requested{Key: v.Key, Holder: bad, To: "c" + bad}.print(&out),
	); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); strings.Contains(got, "\x1b") || strings.Contains(got, "\nstate  free") || strings.Count(got, `"b\nstate  free\x1b[2J"`) < 6 {
		t.Errorf("the commands print %q", got)
	}
	if got := printable("Zoë's host-1"); got != "Zoë's host-1" {
		t.Errorf("a harmless name is quoted: %q", got)
	}
	if got := printable("\x9b2J"); !utf8.ValidString(got) { // a terminal may take its first byte for ESC [
		t.Errorf("bytes that are no text are printed as %q", got)
	}
}

func TestABadRowDoesNotHideOthers(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	s.ask(t, "migrate")
	db, err := sql.Open("sqlite", s.store)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	const good = `{"holder":"a","term":"t","ttl_ms":60000}`
	long, err := json.Marshal(map[string]string{"holder": strings.Repeat("long", 1000)})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct{ id, payload any }{
		{[]byte("\x9b2J\xff"), good},
		{[]byte("nul\x00"), good},
		{[]byte("of\x1b[2J"), `{"holder":"\u001b[2J"}`},
		{[]byte("svc"), "no JSON"},
		{[]byte("t-long"), long},
		{[]byte("u-good"), good},
	} {
		_, err := db.Exec(`INSERT INTO objects (id, object_type, labels, payload, resource_version, created_at_ms, updated_at_ms)
			VALUES (CAST(? AS TEXT), ?, '{', ?, 1, 1, ?)`, row.id, defaultType, row.payload, int64(1)<<60)
		if err != nil {
			t.Fatal(err)
		}
	}
	text := s.ask(t, "list")
	// Two rows have a key that no lease can have, and are not listed.
	if strings.Count(text, "\n") != 5 || !strings.Contains(text, defaultType+"/u-good ") || !utf8.ValidString(text) ||
		strings.ContainsFunc(text, func(r rune) bool { return r != '\n' && unprintable(r) }) || len(text) > 5000 {
		t.Errorf("the list is\n%q", text)
	}
	var list []leaseView
	if err := json.Unmarshal([]byte(s.ask(t, "list", "--json")), &list); err != nil || len(list) != 4 {
		t.Fatalf("the list is %+v, %v", list, err)
	}
	cmd := exec.Command(testBinary(t), "status", "--store", s.store, "--key", "svc", "--json")
	cmd.Env = append(environ(), asTenure+"=1")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || !strings.Contains(string(out), `"holder":"unknown"`) || stderr.Len() > 0 {
		t.Errorf("the status is %q and %q, %v", out, &stderr, err)
	}
	changes := s.watch(t, "--json")
	if !strings.Contains(changes.String(), `"holder":"unknown"`) {
		t.Errorf("watch prints %q", changes)
	}
}

func TestAnErrorCannotControlATerminal(t *testing.T) {
	t.Parallel()
	var stderr bytes.Buffer
	out := &output{stderr: plainText{&stderr}}
	out.exit("tenure list", errors.New("no\x1b[2J\x9b\nneither"))
	if got := stderr.String(); got != "tenure list: no\uFFFD[2J\uFFFD neither\n" {
		t.Errorf("stderr is %q", got)
	}
}

func TestACommandHasEndedWhenItsShellHas(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	lock, pipe, hangs := filepath.Join(s.dir, "lock"), filepath.Join(s.dir, "pipe"), filepath.Join(s.dir, "hangs")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(ctx context.Context, line string) <-chan error {
		ended := make(chan error, 1)
		go func() { ended <- runHook(ctx, line, nil, environ(), nil) }()
		return ended
	}
	// The command leaves a process behind that holds its output open.
	select {
	case err := <-run(t.Context(), fmt.Sprintf("cat %s & echo said; exit 3", pipe)):
		if err == nil || err.Error() != "exit status 3: said" {
			t.Errorf("a command that fails: %v", err)
		}
	case <-time.After(soon):
		t.Error("runHook waits for the process that the command left behind")
	}
	release, err := os.OpenFile(pipe, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	release.Close()

	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("out of time")
	ended := run(ctx, fmt.Sprintf("exec 9>%s; flock 9; touch %s; sleep 1000", lock, hangs))
	eventually(t, soon, "the command hangs", func() bool { _, err := os.Stat(hangs); return err == nil })
	cancel(why)
	if err := <-ended; !errors.Is(err, why) {
		t.Errorf("a command that ran out of time: %v", err)
	}
	eventually(t, soon, "all of it has ended", s.idle)
	if err := <-run(ctx, "touch "+lock+"-late"); !errors.Is(err, why) {
		t.Errorf("a command after the context has ended: %v", err)
	}
	if _, err := os.Stat(lock + "-late"); err == nil {
		t.Error("the command was run")
	}
}
