//go:build unix

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	leaserecord "github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/testkit"
)

// acquire lets the replica "somebody" hold a lease.
func acquire(t *testing.T, store tenure.Store, key tenure.Key) {
	t.Helper()
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Holder: "somebody", TTL: 10 * soon})
	if err == nil {
		_, err = lease.TryAcquire(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestListShowsTheLeasesOfAllTypesAndNothingElse(t *testing.T) {
	t.Parallel()
	test := func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		store := s.open(t)
		for _, object := range []struct{ kind, payload string }{
			{"widget", "no JSON"},
			{"widget2", `{"holder":"a","term":7}`},
			{"widget3", `{"term":"winter"}`},
			{objects.QueueType, `{"table":"mails"}`},
		} {
			if _, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: object.kind, ID: "1"}, Payload: []byte(object.payload)}, tenure.IfAbsent()); err != nil {
				t.Fatal(err)
			}
		}
		acquire(t, store, tenure.Key{Type: objects.SessionType, ID: "s"})
		want := []string{"a b/c", "lease/nightly", "lease/sweeper", "reconciler_lease/svc", "widget/2", "ä/1"}
		for _, text := range want {
			var key tenure.Key
			if err := key.UnmarshalText([]byte(text)); err != nil {
				t.Fatal(err)
			}
			acquire(t, store, key)
		}
		var got []string
		var list []leaseView
		if err := json.Unmarshal([]byte(s.ask(t, "list", "--json")), &list); err != nil {
			t.Fatal(err)
		}
		for _, v := range list {
			got = append(got, v.Key)
			if v.State != stateHeld || v.Holder != "somebody" {
				t.Errorf("%s is %s by %s", v.Key, v.State, v.Holder)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("the list has %q, want %q", got, want)
		}
		if got := s.ask(t, "list", "--type", "lease"); strings.Count(got, "\n") != 3 || !strings.Contains(got, "lease/sweeper  somebody ") {
			t.Errorf("the list of one type is\n%s", got)
		}
	}
	eachStore(t, test)
	t.Run("etcd", func(t *testing.T) {
		t.Parallel()
		test(t, newSite(t, "etcd://"+startEtcd(t)+"/apps"))
	})
}

func TestListReadsAMillionObjectsOnlyIfItIsToldTo(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		series := `SELECT n FROM generate_series(1, %d) AS s(n)`
		if !isPostgres(s.store) {
			series = `WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < %d) SELECT n FROM s`
		}
		objects := func(kind, id string, n int) string {
			return fmt.Sprintf(`INSERT INTO objects (object_type, id, payload, resource_version, created_at_ms, updated_at_ms)
				SELECT %s, %s, '{}', 1, 1, 1 FROM (`+series+`) AS numbers;`, kind, id, n)
		}
		s.exec(t, objects(`'widget'`, `'w' || n`, mostOfType+1)+objects(`'exact'`, `'w' || n`, mostOfType))
		acquire(t, s.open(t), tenure.Key{Type: "widget", ID: "a-lease"})
		acquire(t, s.open(t), tenure.Key{Type: "widget", ID: "z-lease"})
		status, stdout, stderr := tenureCommand(t, "list", "--store", s.store)
		if want := "only the first 1000 objects of type widget were read; --type widget reads all\n"; status != 0 || stderr != want ||
			!strings.Contains(stdout, "widget/a-lease ") || strings.Contains(stdout, "z-lease") {
			t.Errorf("exit status %d, %q and\n%s", status, stderr, stdout)
		}
		if got := s.ask(t, "list", "--type", "widget"); strings.Count(got, "\n") != 1+mostOfType+1+2 {
			t.Errorf("the list of the type has %d lines", strings.Count(got, "\n"))
		}
		s.exec(t, objects(`'t' || n`, `'1'`, mostTypes))
		if status, _, stderr := tenureCommand(t, "list", "--store", s.store); status != 0 || !strings.HasPrefix(stderr, "there are more than 100 types of objects; ") {
			t.Errorf("with many types: exit status %d and %q", status, stderr)
		}
	})
}

func TestATypeThatIsNoTextDoesNotKeepListFromEnding(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	s.ask(t, "migrate")
	s.exec(t, `INSERT INTO objects (object_type, id, payload, resource_version, created_at_ms, updated_at_ms)
		VALUES (x'ff', '1', '{}', 1, 1, 1), (CAST(x'ff' AS TEXT), '1', '{}', 1, 1, 1), ('', '1', '{}', 1, 1, 1)`)
	if status, stdout, stderr := tenureCommand(t, "list", "--store", s.store, "--json"); status != 0 || stdout != "[]\n" || stderr != "" {
		t.Errorf("exit status %d, %q and %q", status, stdout, stderr)
	}
}

func TestStatusNamesTheProcessThatHasAFileToItself(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"", "My Leases"} {
		path := filepath.Join(t.TempDir(), "tenure.db")
		ask := func(command ...string) (status int, stdout, stderr string) {
			t.Helper()
			return tenureCommand(t, append(command, "--store", path, "--table", table)...)
		}
		store, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{Table: table})
		if err != nil {
			t.Fatal(err)
		}
		explained := regexp.MustCompile(fmt.Sprintf(`process %d( \(\S+\))? has the file to itself \(it was opened without Shared\), and its leases are in that process only\n`, os.Getpid()))
		for _, when := range []string{"before its table exists", "afterwards"} {
			status, stdout, stderr := ask("status", "--key", "lease/sweeper")
			if status != exitUnused || stderr != "" || !explained.MatchString(stdout) || strings.Contains(stdout, "is the key right") {
				t.Errorf("%s: exit status %d, %q and %q", when, status, stdout, stderr)
			}
			var v leaseView
			_, stdout, _ = ask("status", "--key", "lease/sweeper", "--json")
			if err := json.Unmarshal([]byte(stdout), &v); err != nil || v.Key != "lease/sweeper" || v.State != stateExclusive || v.Exclusive == nil || v.Exclusive.PID != os.Getpid() {
				t.Errorf("%s: %s", when, stdout)
			}
			if _, err := os.Stat("/proc/self/comm"); err == nil && v.Exclusive.Program == "" {
				t.Errorf("%s: no program: %s", when, stdout)
			}
			for _, args := range [][]string{{"resign", "--key", "lease/sweeper"}, {"handover", "--key", "lease/sweeper", "--to", "b"}} {
				if status, _, stderr := ask(args...); status != 1 || !explained.MatchString(stderr) {
					t.Errorf("%s, %v: exit status %d and %q", when, args, status, stderr)
				}
			}
			if err := store.Migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if status, _, stderr := ask("drain", "--replica", "a"); status != 0 || !explained.MatchString(stderr) {
			t.Errorf("drain: exit status %d and %q", status, stderr)
		}
		if status, _, stderr := ask("list"); status != 0 || !explained.MatchString(stderr) {
			t.Errorf("list: exit status %d and %q", status, stderr)
		}
		store.Close()
		shared, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{Table: table, Shared: true})
		if err != nil {
			t.Fatal(err)
		}
		defer shared.Close()
		if err := shared.Migrate(t.Context()); err != nil { // which locks the file, as a process that shares it
			t.Fatal(err)
		}
		if status, stdout, _ := ask("status", "--key", "lease/sweeper"); status != exitUnused || !strings.Contains(stdout, "unused") {
			t.Errorf("of a shared file: exit status %d and %q", status, stdout)
		}
	}
}

func TestStatusShowsARunThatLastsForLong(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	s.ask(t, "migrate")
	store := s.open(t)
	key := tenure.Key{Type: defaultType, ID: "svc"}
	acquire(t, store, key)
	if got := s.ask(t, "status"); strings.Contains(got, "running") {
		t.Errorf("at first the status is\n%s", got)
	}
	since := time.Now().Add(-12 * time.Minute)
	err := testkit.Update(t.Context(), store, key, func(obj tenure.Object) (tenure.Object, error) {
		obj.Labels = leaserecord.WithRunning(obj.Labels, s.view(t).Term, since)
		return obj, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := s.ask(t, "status"), `(?m)^running +one run since `+regexp.QuoteMeta(since.Format(time.DateTime))+` \(12m\d+s\)$`; !regexp.MustCompile(want).MatchString(got) {
		t.Errorf("the status is\n%s", got)
	}
	if got := s.ask(t, "list"); !strings.Contains(got, "; one run for 12m") {
		t.Errorf("the list is\n%s", got)
	}
	if v := s.view(t); v.RunningSince == nil || v.RunningSince.UnixMilli() != since.UnixMilli() || v.Labels != nil {
		t.Errorf("the status is %+v", v)
	}
}

func TestListTellsOfTheTableInAnotherSchema(t *testing.T) {
	t.Parallel()
	s := newSite(t, testkit.PostgresURL(t))
	s.exec(t, `CREATE SCHEMA other; CREATE TABLE other.objects (id text)`) // which is none of ours
	for _, command := range [][]string{{"list"}, {"status", "--key", "k"}} {
		if _, _, stderr := tenureCommand(t, append(command, "--store", s.store)...); !strings.Contains(stderr, `run "tenure migrate"`) {
			t.Errorf("without a table: %q", stderr)
		}
	}
	s.ask(t, "migrate", "--schema", "Mine")
	for _, command := range [][]string{{"list"}, {"status", "--key", "k"}, {"resign", "--key", "k"}} {
		status, _, stderr := tenureCommand(t, append(command, "--store", s.store)...)
		want := fmt.Sprintf("tenure %s: the search_path has no table objects, but other schemas have one: give --schema \"Mine\", or set TENURE_SCHEMA\n", command[0])
		if status != 1 || stderr != want {
			t.Errorf("exit status %d and %q, want %q", status, stderr, want)
		}
	}
	if status, _, stderr := tenureCommand(t, "list", "--store", s.store, "--schema", "Mine"); status != 0 {
		t.Errorf("with the schema: %q", stderr)
	}
}

func TestTheSchemaMayBeInTheEnvironment(t *testing.T) {
	s := newSite(t, testkit.PostgresURL(t))
	s.ask(t, "migrate", "--schema", "mine")
	t.Setenv(schemaEnv, "mine")
	if status, _, stderr := tenureCommand(t, "list", "--store", s.store); status != 0 {
		t.Errorf("%q", stderr)
	}
	if status, _, stderr := tenureCommand(t, "migrate", "--store", filepath.Join(t.TempDir(), "a.db")); status != 0 {
		t.Errorf("a store that has no schemas: %q", stderr)
	}
}

func TestListTellsThatAFailoverIsSettling(t *testing.T) {
	t.Parallel()
	s := newSite(t, testkit.PostgresURL(t))
	s.ask(t, "migrate")
	store := s.open(t)
	acquire(t, store, tenure.Key{Type: defaultType, ID: "svc"})
	for _, test := range []struct {
		markAge, want string
		settled       bool
	}{{"100", "which is settling: any replica may take it in 8m20s\n", false}, {"700", "ago, any replica may take it\n", false}, {"100", "ago, any replica may take it\n", true}} {
		s.exec(t, fmt.Sprintf(`UPDATE objects SET updated_at_ms = (extract(epoch FROM now()) * 1000)::bigint - CASE WHEN id = 'svc' THEN 1200 ELSE %s END * 1000;
			UPDATE objects SET payload = convert_to('{"settled": %v}', 'UTF8') WHERE id = '%s'`, test.markAge, test.settled, objects.LineageType))
		for _, got := range []string{s.ask(t, "list"), s.ask(t, "status", "--key", "svc")} {
			if got = regexp.MustCompile(`8m(1\d(\.\d)?|20)s`).ReplaceAllString(got, "8m20s"); !strings.Contains(got, test.want) {
				t.Errorf("a mark of %s s: %q, want %q", test.markAge, got, test.want)
			}
		}
	}
}
