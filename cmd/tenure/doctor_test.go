//go:build unix

package main

import (
	"database/sql"
	"encoding/json"
	neturl "net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// diagnose returns what doctor says about a store, and its exit status.
func diagnose(t *testing.T, store string, more ...string) (diagnosis, int) {
	t.Helper()
	status, stdout, stderr := tenureCommand(t, append([]string{"doctor", "--store", store, "--look", "300ms", "--json"}, more...)...)
	var d diagnosis
	if err := json.Unmarshal([]byte(stdout), &d); err != nil || stderr != "" {
		t.Fatalf("exit status %d, %q and %q: %v", status, stdout, stderr, err)
	}
	return d, status
}

// ready returns a store's URL or path after migrate.
func ready(t *testing.T, store string) string {
	t.Helper()
	printed(t, "migrate", "--store", store)
	return store
}

func TestDoctorFindsNothingWrongWithAHealthyStore(t *testing.T) {
	t.Parallel()
	postgres := func(t *testing.T) string { return ready(t, testkit.StartPostgres(t, testkit.OnDisk).URL()) }
	for name, open := range map[string]func(t *testing.T) (store, kind string){
		"Postgres": func(t *testing.T) (string, string) { return postgres(t), "PostgreSQL 1" },
		"PgBouncer": func(t *testing.T) (string, string) {
			return testkit.StartBouncer(t, postgres(t), "pool_mode = session", "default_pool_size = 20"), "through a pooler in session mode"
		},
		"SQLite": func(t *testing.T) (string, string) { return ready(t, filepath.Join(t.TempDir(), "t.db")), "SQLite on " },
		"NATS":   func(t *testing.T) (string, string) { return ready(t, startNATS(t, nil)), "NATS JetStream" },
		"etcd": func(t *testing.T) (string, string) {
			address := startEtcd(t)
			etcdClient(t, address)
			return ready(t, "etcd://"+address+"/doctor"), "etcd"
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, kind := open(t)
			d, status := diagnose(t, store)
			d.Findings = slices.DeleteFunc(d.Findings, func(f finding) bool { return f.Check == "latency" || f.Check == "file_system" && f.Level == levelNote }) // of a busy machine, and a TMPDIR in memory
			if !d.Fit || len(d.Findings) > 0 || status != 0 && status != exitWarned || !strings.Contains(d.Server, kind) || d.Renewals < 10 || d.RenewalP50 <= 0 || d.TTL < 30 {
				t.Errorf("exit status %d, %+v", status, d)
			}
			if isPostgres := strings.HasPrefix(store, "postgres:"); (d.Clock != nil) != isPostgres {
				t.Errorf("the clock: %+v", d.Clock)
			}
			if d.WakeUp <= 0 && name != "SQLite" {
				t.Error("no wake-up was measured")
			}
			_, text, _ := tenureCommand(t, "doctor", "--store", store, "--look", "100ms")
			if !strings.HasPrefix(text, "server   "+d.Server+"\n") || !strings.Contains(text, "\nresult   fit") {
				t.Errorf("as text:\n%s", text)
			}
			if left := printed(t, "list", "--store", store, "--json"); left != "[]\n" {
				t.Errorf("it has left its lease:\n%s", left)
			}
		})
	}
}

// planted is a fault that is put into a real store.
type planted struct {
	check, level string
	plant        func(t *testing.T) (store string)
	says         string
}

// withSettings returns a plant of settings in the URL of a healthy server.
func (h *hospital) withSettings(settings string) func(*testing.T) string {
	return func(*testing.T) string { return h.url + "&" + settings }
}

// hospital is a healthy server with the tables, and the faults of roles and databases on it.
type hospital struct {
	server *testkit.PostgresServer
	url    string
}

func (h *hospital) run(t *testing.T, url string, statements ...string) {
	t.Helper()
	pool := testkit.PostgresPool(t, url)
	for _, s := range statements {
		testkit.ExecPostgres(t, pool, s)
	}
}

// as returns a plant that makes a role by that name, runs statements, and connects as that role.
func (h *hospital) as(role, attributes string, statements ...string) func(*testing.T) string {
	return func(t *testing.T) string {
		h.run(t, h.url, append([]string{"CREATE ROLE " + role + " LOGIN " + attributes}, statements...)...)
		return strings.Replace(h.url, "postgres@", role+"@", 1)
	}
}

// in returns a plant that makes a database by that name with the tables, runs statements in it, and connects to it.
func (h *hospital) in(name string, statements ...string) func(*testing.T) string {
	return func(t *testing.T) string {
		h.run(t, h.url, "CREATE DATABASE "+name)
		url := ready(t, strings.Replace(h.url, "/postgres?", "/"+name+"?", 1))
		h.run(t, url, statements...)
		return url
	}
}

// grants lets a role use the tables.
func grants(role string) string {
	return "GRANT SELECT, INSERT, UPDATE, DELETE ON objects, objects_tombstones, objects_claims, objects_requests TO " + role
}

func TestDoctorFindsEachPlantedFault(t *testing.T) {
	t.Parallel()
	h := &hospital{server: testkit.StartPostgres(t, testkit.OnDisk)}
	h.url = ready(t, h.server.URL())
	// A clock whose search_path hides the server's. It is twice as fast: on a busy machine, doctor is uncertain about less.
	fake := []string{"CREATE SCHEMA fake", "CREATE FUNCTION fake.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS " +
		"$$SELECT pg_catalog.clock_timestamp() + (pg_catalog.clock_timestamp() - pg_postmaster_start_time()) + interval '3 days'$$"}
	fast := h.in("fast", fake...)
	standby := func(t *testing.T) *testkit.PostgresServer {
		s, err := h.server.Standby()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	faults := []planted{
		{"fsync", levelFault, func(t *testing.T) string { return ready(t, testkit.StartPostgres(t, "fsync=off").URL()) }, "crash"},
		{"full_page_writes", levelWarning, func(t *testing.T) string { return ready(t, testkit.StartPostgres(t, "full_page_writes=off").URL()) }, "pages"},
		{"autovacuum", levelWarning, func(t *testing.T) string { return ready(t, testkit.StartPostgres(t, "autovacuum=off").URL()) }, "dead row"},
		{"synchronous_standby", levelFault, func(t *testing.T) string {
			s := testkit.StartPostgres(t)
			url := ready(t, s.URL())
			h.run(t, url, "ALTER SYSTEM SET synchronous_standby_names = 'gone'", "SELECT pg_reload_conf()")
			return url + "&synchronous_commit=on"
		}, "no commit returns"},
		{"synchronous_commit", levelWarning, h.withSettings("synchronous_commit=off"), "your own transactions"},
		{"store", levelFault, h.in("unlogged", "ALTER TABLE objects SET UNLOGGED"), "is UNLOGGED"},
		{"store", levelFault, h.as("hidden", "", grants("hidden"), "ALTER TABLE objects ENABLE ROW LEVEL SECURITY", "CREATE POLICY others ON objects TO postgres USING (true)"), "row-level security"},
		{"store", levelFault, h.as("reader", "", "GRANT SELECT ON objects TO reader", "ALTER TABLE objects DISABLE ROW LEVEL SECURITY"), "GRANT INSERT"},
		{"store", levelFault, func(t *testing.T) string {
			h.run(t, h.url, "CREATE DATABASE empty")
			return strings.Replace(h.url, "/postgres?", "/empty?", 1)
		}, "does not exist: run tenure migrate, then doctor again"},
		{"store", levelFault, h.withSettings("default_transaction_isolation=serializable"), "read committed"},
		{"log", levelWarning, h.in("tombless", "DROP TABLE objects_tombstones"), "no table of tombstones"},
		{"planner", levelWarning, h.withSettings("enable_indexscan=off"), "more of the table"},
		{"idle_session_timeout", levelWarning, h.withSettings("idle_session_timeout=9000"), "between two renewals"},
		{"statement_timeout", levelWarning, h.withSettings("statement_timeout=900"), "ends a renewal"},
		{"read_only", levelFault, h.withSettings("default_transaction_read_only=on"), "read_only is on"},
		{"connections", levelFault, h.as("few", "CONNECTION LIMIT 5", grants("few")), "5 connections are left of the role's limit"},
		{"connections", levelWarning, h.as("several", "CONNECTION LIMIT 9", grants("several")), "of the role's limit"},
		{"connect", levelFault, h.withSettings("user=nobody"), "create the role"},
		{"search_path", levelWarning, func(t *testing.T) string { return fast(t) + "&search_path=fake,pg_catalog,public" }, "clock_timestamp"},
		{"clock_rate", levelFault, func(*testing.T) string {
			return strings.Replace(h.url, "/postgres?", "/fast?", 1) + "&search_path=fake,pg_catalog,public"
		}, "faster than this machine's"},
		{"clock_offset", levelWarning, func(*testing.T) string {
			return strings.Replace(h.url, "/postgres?", "/fast?", 1) + "&search_path=fake,pg_catalog,public"
		}, "72h"},
		{"pooler", levelNote, func(t *testing.T) string { return testkit.StartBouncer(t, h.url) + "&default_query_exec_mode=exec" }, "nobody can listen"},
		{"log", levelWarning, func(t *testing.T) string { return testkit.StartBouncer(t, h.url) + "&default_query_exec_mode=exec" }, "standbys are not woken"},
		{"pooler", levelFault, func(t *testing.T) string { return testkit.StartBouncer(t, h.url, "pool_mode = statement") }, "refuses transactions"},
		{"server", levelFault, func(t *testing.T) string {
			return testkit.Relabelled(t, h.url, "crdb_version", "CockroachDB CCL v25.2.1")
		}, "this server is CockroachDB"},
		{"standby", levelFault, func(t *testing.T) string { return standby(t).URL() }, "takes no writes"},
		{"asynchronous_standby", levelNote, func(t *testing.T) string {
			if err := standby(t).CatchUp(t.Context(), h.server); err != nil {
				t.Fatal(err)
			}
			return h.url
		}, "asynchronous"},

		{"file", levelFault, func(t *testing.T) string { return filepath.Join(t.TempDir(), "none.db") }, "there is no store"},
		{"journal_mode", levelWarning, func(t *testing.T) string {
			path := ready(t, filepath.Join(t.TempDir(), "t.db"))
			db := testkit.Must(sql.Open("sqlite", path))
			defer db.Close()
			testkit.Must(db.Exec("PRAGMA journal_mode = DELETE"))
			t.Cleanup(func() {
				if file := testkit.Must(os.ReadFile(path)); file[18] != 1 {
					t.Error("doctor has changed the file")
				}
			})
			return path
		}, "not in WAL mode"},
		{"exclusive", levelFault, func(t *testing.T) string {
			path := ready(t, filepath.Join(t.TempDir(), "t.db"))
			alone := testkit.Must(tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{}))
			t.Cleanup(func() { alone.Close() })
			if err := alone.Migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
			return path
		}, "to itself"},
		{"free_space", levelFault, func(t *testing.T) string {
			dir := t.TempDir()
			if err := mount(dir, "size=2m"); err != nil {
				t.Skip("cannot mount a volume: ", err)
			}
			t.Cleanup(func() { unmount(dir) })
			return ready(t, filepath.Join(dir, "t.db"))
		}, "are free on its volume"},

		{"sync", levelWarning, func(t *testing.T) string { return strings.TrimSuffix(ready(t, startNATS(t, nil)), "?sync=always") }, "sync=always"},
		{"store", levelFault, func(t *testing.T) string { return startNATS(t, nil) }, "there is no stream"},
		{"store", levelFault, func(t *testing.T) string {
			return startNATS(t, func(o *server.Options) { o.JetStream = false })
		}, "JetStream"},
		{"store", levelFault, func(t *testing.T) string {
			address := startEtcd(t)
			etcdClient(t, address)
			return "etcd://" + address + "/nothing"
		}, "epoch"},
	}
	for _, f := range faults {
		t.Run(f.check+" "+f.says, func(t *testing.T) {
			began := time.Now()
			url := f.plant(t)
			d, status := diagnose(t, url)
			found := func() bool {
				return slices.ContainsFunc(d.Findings, func(is finding) bool {
					return is.Check == f.check && is.Level == f.level && strings.Contains(is.Text+": "+is.Remedy, f.says)
				})
			}
			for range 3 { // where the machine is busy, the rate of a clock is not certain at once
				if f.check != "clock_rate" || found() {
					break
				}
				d, status = diagnose(t, url)
			}
			if !found() {
				t.Errorf("it was not found: exit status %d, %+v", status, d)
			}
			if want := map[string]int{levelFault: exitUnfit, levelWarning: exitWarned}[f.level]; f.level != levelNote && status != want && status != exitUnfit || d.Fit == d.has(levelFault) {
				t.Errorf("exit status %d, %+v", status, d)
			}
			t.Logf("%s in %v: %+v", f.check, time.Since(began).Round(time.Millisecond), d.Findings)
		})
	}
}

// A server that hangs, from the beginning or later, costs no more than the time that doctor promises.
func TestDoctorEndsInTime(t *testing.T) {
	t.Parallel()
	url := ready(t, testkit.StartPostgres(t).URL())
	server := testkit.Must(neturl.Parse(url))
	for name, when := range map[string]time.Duration{"connect": 0, "store": 2 * time.Second} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy := testkit.Must(rig.NewProxy(server.Host, nil))
			t.Cleanup(func() { proxy.Close() })
			through := *server
			through.Host = proxy.Addr()
			hang := time.AfterFunc(when, func() { proxy.Set(rig.Weather{HangRequests: true, HangAnswers: true}) })
			defer hang.Stop()
			began := time.Now()
			d, status := diagnose(t, through.String(), "--look", "6s")
			if took := time.Since(began); took > 20*time.Second { // 15 s, and what a busy machine adds
				t.Errorf("it took %v", took)
			}
			if status != exitUnfit || !slices.ContainsFunc(d.Findings, func(f finding) bool { return f.Level == levelFault && (f.Check == "connect" || f.Check == name) }) {
				t.Errorf("exit status %d, %+v", status, d)
			}
		})
	}
}

func TestAFileOnANetworkIsAFault(t *testing.T) {
	t.Parallel()
	if f := (volume{fileSystem: "NFS", remote: true}).suits(); f.Level != levelFault || !strings.Contains(f.Text, "on NFS") {
		t.Errorf("%+v", f)
	}
	if runtime.GOOS != "linux" {
		return
	}
	v, err := volumeOf(os.TempDir())
	if err != nil || v.remote || v.free <= 0 || v.fileSystem == "" {
		t.Errorf("%+v, %v", v, err)
	}
	if v, err := volumeOf("/dev/shm"); err == nil && v.fileSystem == "tmpfs" && v.suits().Level != levelNote {
		t.Errorf("in memory: %+v", v)
	}
}

func TestEachFindingOfDoctorIsInTheDocuments(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	checks := []string{"connect", "server", "store", "log", "connections", "file", "journal_mode", "exclusive", "file_system", "free_space", "latency", "sync", "clock_offset", "clock_rate", "wake_up"}
	for _, c := range postgresChecks {
		checks = append(checks, c.name)
	}
	for _, name := range checks {
		if !strings.Contains(string(page), "`"+name+"`") {
			t.Errorf("docs/operations.md does not explain %s", name)
		}
	}
}
