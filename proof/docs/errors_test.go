package docs_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/schedule"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/stores/mysqltenure"
	"github.com/tenurelib/tenure/storetest"
)

// errorPage is a section of docs/operations.md; a test produces its errors.
type errorPage struct {
	*testing.T
	names map[string]string // the sentinels that the errors of the rows match, by their texts; empty: any
	shown map[string]bool   // the rows that were produced
}

var sentinels = map[string]error{
	"`ErrHeld`": tenure.ErrHeld, "`ErrLost`": tenure.ErrLost, "`ErrDeadline`": tenure.ErrDeadline, "`ErrConflict`": tenure.ErrConflict,
	"`ErrExists`": tenure.ErrExists, "`ErrNotFound`": tenure.ErrNotFound, "`ErrTaken`": tenure.ErrTaken, "`ErrInvalid`": tenure.ErrInvalid,
	"`ErrSetup`": tenure.ErrSetup, "`ErrUnhealthy`": tenure.ErrUnhealthy, "`ErrResigned`": tenure.ErrResigned, "`ErrShutdown`": tenure.ErrShutdown,
	"`ErrJobEnded`": tenure.ErrJobEnded, "`errors.ErrUnsupported`": errors.ErrUnsupported,
	"`ErrMoved`": tenure.ErrMoved, "`ErrClosed`": tenure.ErrClosed, "`claims.ErrClosed`": claims.ErrClosed, "`claims.ErrOverdue`": claims.ErrOverdue, "`claims.ErrCanceled`": claims.ErrCanceled,
}

// row checks an error against the row that begins with the text.
func (p *errorPage) row(text string, err error) {
	p.Helper()
	name, ok := p.names[text]
	if !ok {
		p.Errorf("docs/operations.md has no row `%s`, which is for %v", text, err)
	}
	p.shown[text] = true
	pattern := strings.ReplaceAll(regexp.QuoteMeta(text), "…", "(?s:.+)")
	if err == nil || !regexp.MustCompile(pattern).MatchString(err.Error()) {
		p.Errorf("the row `%s` does not match the error %v", text, err)
	}
	if name != "" && !errors.Is(err, sentinels[name]) {
		p.Errorf("the row `%s`: %v is not %s", text, err, name)
	}
}

// Each row of the page is the text of an error that the library returns.
func TestTheErrorsOfThePageAreThoseOfTheLibrary(t *testing.T) {
	testkit.Docs(t)
	for section, raise := range map[string]func(p *errorPage){
		"The errors that programs test": raiseNamed, "Leases and fences": raiseOfLeases, "Postgres": raiseOfPostgres, "SQLite": raiseOfSQLite,
		"MySQL and MariaDB": raiseOfMySQL, "Claims, queues, shards and schedules": raiseOfClaims,
	} {
		t.Run(section, func(t *testing.T) {
			_, text, found := strings.Cut(documents(t)["docs/operations.md"], "\n## "+section+"\n")
			require.True(t, found, "the page has no such section")
			text, _, _ = strings.Cut(text, "\n## ")
			p := &errorPage{t, map[string]string{}, map[string]bool{}}
			for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|(?: (`[^|]+`) \\|)? ").FindAllStringSubmatch(text, -1) {
				require.NotContains(t, p.names, row[1], "twice")
				p.names[row[1]] = row[2]
				require.True(t, row[2] == "" || sentinels[row[2]] != nil, "%s is no sentinel", row[2])
			}
			require.NotEmpty(t, p.names)
			raise(p)
			for text := range p.names {
				require.Contains(t, p.shown, text, "no test produces the error of the row")
			}
		})
	}
	_, texts, _ := strings.Cut(documents(t)["docs/operations.md"], "\n## The errors that programs test")
	texts, _, _ = strings.Cut(texts, "\n## Normal lines of the log")
	require.Equal(t, 5, strings.Count(texts, "\n## "), "each section is tested, and the first")
}

func raiseOfMySQL(p *errorPage) {
	if _, err := os.Stat(rig.MariaDBProgram); err != nil && os.Getenv("TENURE_REQUIRE_MARIADB") == "" {
		p.Skip("there is no mariadbd: install mariadb-server")
	}
	p.Cleanup(rig.RemoveMariaDB)
	server, err := rig.NewMariaDB("")
	require.NoError(p, err)
	p.Cleanup(func() { _ = server.Close() })
	ctx := p.Context()
	require.NoError(p, server.Start(ctx))
	store, err := mysqltenure.Open(ctx, server.URL.String(), mysqltenure.Config{Logger: testkit.Quiet})
	require.NoError(p, err)
	defer store.Close()
	require.NoError(p, store.Migrate(ctx))
	obj := testkit.Put(p, store, tenure.Object{Key: tenure.Key{Type: "lease", ID: "a"}})
	db, err := sql.Open("mysql", server.DSN("admin", ""))
	require.NoError(p, err)
	defer db.Close()
	put := func() error {
		written, err := store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
		if err == nil {
			obj = written
		}
		return err
	}

	tx, err := db.BeginTx(ctx, nil)
	require.NoError(p, err)
	defer tx.Rollback()
	var locks, oldest int64
	require.NoError(p, tx.QueryRow("SELECT CONNECTION_ID() FROM tenure_objects FOR UPDATE").Scan(&locks))
	require.NoError(p, db.QueryRow("SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX ORDER BY trx_started LIMIT 1").Scan(&oldest))
	require.Equal(p, locks, oldest)
	p.row("Lock wait timeout exceeded", put())
	_, err = db.Exec(fmt.Sprint("KILL ", oldest))
	require.NoError(p, err)
	require.NoError(p, put())

	_, err = db.Exec("SET GLOBAL read_only = 1")
	require.NoError(p, err)
	p.row("the server is read-only", put())
}

// held runs a coordinator for a term, and returns why the term was over.
func held(t testing.TB, ctx context.Context, lease *tenure.Lease, term *tenure.Term, cfg tenure.CoordinatorConfig) error {
	t.Helper()
	c, err := tenure.NewCoordinator(lease, cfg)
	require.NoError(t, err)
	return c.Hold(ctx, term)
}

// stays is a job that runs until its context ends.
func stays(ctx context.Context) error { <-ctx.Done(); return nil }

func raiseNamed(p *errorPage) {
	ctx := p.Context()
	mem, key := storetest.NewMem(), tenure.Key{Type: "t", ID: "1"}
	put := func(cond tenure.WriteCondition) error {
		return testkit.ErrOf(mem.PutIf(ctx, tenure.Object{Key: key}, cond))
	}
	p.row("version conflict: wanted version … of …, which is gone", put(tenure.IfVersion(7)))
	require.NoError(p, put(tenure.IfAbsent()))
	p.row("version conflict: wanted version … of …, which is at …", put(tenure.IfVersion(1<<40)))
	moving := storetest.NewMem()
	moving.Lineages = true
	p.row("the database is on another server than before, or has been restarted",
		testkit.ErrOf(moving.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent().OnServer("another", 0))))
	p.row("object exists already", put(tenure.IfAbsent()))
	p.row("object not found", testkit.ErrOf(mem.Get(ctx, tenure.Key{Type: "t", ID: "2"})))
	p.row("invalid argument: …", testkit.ErrOf(tenure.NewLease(mem, tenure.LeaseConfig{})))
	p.row("unsupported operation: …", tenure.Static().DeleteIf(ctx, key, tenure.IfVersion(1)))
	lite := testkit.OpenSQLite(p, ":memory:")
	p.row("store is not set up: …", testkit.ErrOf(lite.Get(ctx, key)))
	testkit.Migrate(p, lite)
	testkit.Put(p, lite, tenure.Object{Key: key, Name: "n"})
	closed := testkit.OpenSQLite(p, ":memory:")
	coordinator, err := tenure.NewCoordinator(testkit.NewLease(p.T, closed, tenure.LeaseConfig{}), tenure.CoordinatorConfig{})
	require.NoError(p, err)
	require.NoError(p, closed.Close())
	p.row("store is closed for good: …", coordinator.Run(ctx))
	p.row("id or name taken by another object", testkit.ErrOf(lite.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}, Name: "n"}, tenure.IfAbsent())))

	synctest.Test(p.T, func(t *testing.T) {
		store, ctx := storetest.NewMem(), t.Context()
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
		other := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "b"})
		term := testkit.MustAcquire(t, lease)
		p.row("lease is held: … by …", testkit.ErrOf(other.TryAcquire(ctx)))
		testkit.RemoveRecord(t, store)
		p.row("lease lost: … is gone", lease.Renew(ctx, term))
		term = testkit.MustAcquire(t, lease)
		testkit.RemoveRecord(t, store)
		testkit.MustAcquire(t, other)
		p.row("lease lost: … is held by …", lease.Renew(ctx, term))
		testkit.RemoveRecord(t, store)
		term = testkit.MustAcquire(t, lease)
		time.Sleep(time.Minute)
		p.row("lease not renewed in time", lease.Renew(ctx, term))
		testkit.RemoveRecord(t, store)

		p.row("replica is unhealthy: …", held(t, ctx, lease, testkit.MustAcquire(t, lease), tenure.CoordinatorConfig{
			Check: func(context.Context, tenure.Role) error { return errors.New("the disk is full") },
		}))
		p.row("job ended: …", held(t, ctx, lease, testkit.MustAcquire(t, lease), tenure.CoordinatorConfig{Watch: testkit.Succeeds}))
		term = testkit.MustAcquire(t, lease)
		require.NoError(t, lease.RequestHandover(ctx, "b"))
		p.row("lease resigned", held(t, ctx, lease, term, tenure.CoordinatorConfig{Watch: stays}))
		time.Sleep(time.Minute) // until the offer has ended
		var cause error
		stopping, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		require.NoError(t, held(t, stopping, lease, testkit.MustAcquire(t, lease), tenure.CoordinatorConfig{Watch: func(ctx context.Context) error {
			<-ctx.Done()
			cause = context.Cause(ctx)
			return nil
		}}))
		p.row("replica is shutting down", cause)
	})

	withQueue(p, claims.QueueConfig{Deadline: time.Minute, Done: "done = 1"}, func(t *testing.T, q *claims.Queue, w *claims.Worker, session *claims.Session, store *tenure.SQLiteStore, stop func()) {
		ctx := t.Context()
		got, err := w.Take(ctx, 1)
		require.NoError(t, err)
		p.row("the claim's deadline has passed", w.Do(ctx, got[0], stays))
		p.row("lease lost: finished, freed, deleted or taken by another: …", q.Finish(ctx, got...))
		stop()
		p.row("session is closed", testkit.ErrOf(w.Take(ctx, 1)))
	})
	withQueue(p, claims.QueueConfig{Done: "done = 1", Canceled: "done = 2"}, func(t *testing.T, q *claims.Queue, w *claims.Worker, session *claims.Session, store *tenure.SQLiteStore, stop func()) {
		got := testkit.Must(w.Take(t.Context(), 2))
		p.row("the row was canceled", w.Do(t.Context(), got[0], func(ctx context.Context) error {
			testkit.ExecSQL(t, store.DB(), `UPDATE tasks SET done = 2`)
			return stays(ctx)
		}))
		p.row("lease lost: canceled, finished, freed, deleted or taken by another: …", q.Finish(t.Context(), got[1]))
	})
}

// withQueue runs a test of a queue with two rows in virtual time.
func withQueue(p *errorPage, cfg claims.QueueConfig, test func(t *testing.T, q *claims.Queue, w *claims.Worker, session *claims.Session, store *tenure.SQLiteStore, stop func())) {
	p.Helper()
	synctest.Test(p.T, func(t *testing.T) {
		store := testkit.OpenSQLite(t, ":memory:")
		testkit.MigrateClaims(t, store)
		cfg.Table = "tasks"
		testkit.ExecSQL(t, store.DB(), `CREATE TABLE tasks (id INTEGER PRIMARY KEY, done INTEGER NOT NULL DEFAULT 0); INSERT INTO tasks (id) VALUES (1), (2)`)
		testkit.ExecSQL(t, store.DB(), testkit.Must(cfg.SQLiteDDL()))
		if cfg.Logger == nil {
			cfg.Logger = testkit.Quiet
		}
		session := testkit.Must(claims.NewSession(store, claims.SessionConfig{Logger: cfg.Logger}))
		q := testkit.Must(claims.NewQueue(store, cfg))
		w := testkit.Must(claims.NewWorker(session, q))
		ctx, cancel := context.WithCancel(context.Background())
		returned := make(chan struct{})
		go func() {
			defer close(returned)
			_ = session.Run(ctx)
		}()
		stop := func() { cancel(); <-returned }
		defer stop()
		test(t, q, w, session, store, stop)
	})
}

func raiseOfLeases(p *errorPage) {
	ctx := p.Context()
	store := testkit.OpenSQLite(p, filepath.Join(p.TempDir(), "a.db"))
	testkit.Migrate(p, store)
	lease := testkit.NewLease(p, store, tenure.LeaseConfig{TTL: time.Hour})
	term := testkit.MustAcquire(p, lease)
	none := func(*sql.Tx) error { return nil }
	nowhere := testkit.OpenSQL(p.T, "pgx", "postgres://127.0.0.1:1/none?connect_timeout=1")
	failed := tenure.FencedTx(ctx, store, term, nowhere, nil, none)
	p.row("tenure: failed to run a transaction fenced by …: …", failed)
	require.NotErrorIs(p, failed, tenure.ErrLost)
	elsewhere := testkit.OpenSQLite(p, filepath.Join(p.TempDir(), "b.db"))
	testkit.Migrate(p, elsewhere)
	p.row("the lease stands, so db is not the database that has it", tenure.FencedTx(ctx, store, term, elsewhere.DB(), nil, none))
	p.row("fn has ended the transaction itself", tenure.FencedTx(ctx, store, term, store.DB(), nil, func(tx *sql.Tx) error {
		_, err := tx.Exec("ROLLBACK")
		return err
	}))
	for _, url := range []string{"mysql://h/db", "sqlite:data@home.db"} {
		p.row("the URL is neither a postgres:// URL nor the path of a SQLite file; put ./ before a relative path with //, or one of : @ ? = in it",
			testkit.ErrOf(tenure.Open(ctx, url)))
	}
	p.row("cannot parse the connection string", testkit.ErrOf(tenure.Open(ctx, "postgres://h:port/db")))
	p.row("no term or claim is given; see TermFromContext", store.Fenced(ctx, tenure.TermFromContext(ctx), none))
	p.row("Token of a nil Term; TermFromContext returns one for a context that does not come from a job",
		testkit.PanicOf(func() { tenure.TermFromContext(ctx).Token() }))
	p.row("Key is empty: name the lease", testkit.ErrOf(tenure.NewLease(store, tenure.LeaseConfig{})))
	p.row("the term is one of …", testkit.NewLease(p, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "other"}}).Renew(ctx, term))
	p.row("a session of package claims is not handed over",
		testkit.NewLease(p, store, tenure.LeaseConfig{Key: claims.SessionKey("s")}).RequestRelease(ctx))
	testkit.RemoveRecord(p, store)
	p.row("tenure: fenced by …: lease lost: …", store.Fenced(ctx, term, none))
	testkit.Put(p, store, tenure.Object{Key: testkit.LeaseKey, Name: "reconciler-lease", Payload: []byte("of another program")})
	p.row("is held by a program that cannot be asked", lease.RequestRelease(ctx))

	synctest.Test(p.T, func(t *testing.T) {
		ctx, mem := t.Context(), testkit.NewMovable(storetest.NewMem())
		faulty := storetest.Faulty(mem, testkit.AnswerAfter(time.Minute))
		lease := testkit.NewLease(t, faulty, tenure.LeaseConfig{})
		_, err := lease.TryAcquire(ctx)
		p.row("the answer took …: lease not renewed in time", err)
		faulty.SetHook(nil)
		time.Sleep(time.Minute)

		p.row("the check has not returned", held(t, ctx, lease, testkit.MustAcquire(t, lease), tenure.CoordinatorConfig{
			Check: func(context.Context, tenure.Role) error { time.Sleep(time.Hour); return nil },
		}))

		hung := make(chan struct{})
		stopping, cancel := context.WithCancel(ctx)
		c := testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Watch: func(context.Context) error { <-hung; return nil }}))
		returned := make(chan error, 1)
		term := testkit.MustAcquire(t, lease)
		go func() { returned <- c.Hold(stopping, term) }()
		synctest.Wait()
		p.row("the coordinator is running", c.Run(ctx))
		faulty.SetHook(testkit.Refuse)
		time.Sleep(time.Hour)
		p.row("the job still runs although its term is over", c.Healthy(0))
		faulty.SetHook(nil)
		close(hung)
		cancel()
		<-returned

		time.Sleep(time.Minute)
		successor := testkit.NewLease(t, faulty, tenure.LeaseConfig{Holder: "successor", TTL: time.Second})
		testkit.MustAcquire(t, successor)
		time.Sleep(time.Minute)
		causes := make(chan error, 100)
		c = testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			FencePredecessor: func(context.Context, tenure.Holding) error { return errors.New("no power switch") },
			Trace:            &tenure.Trace{Released: func(_ *tenure.Term, cause error) { causes <- cause }},
		}))
		running, cancel := context.WithTimeout(ctx, 10*time.Minute)
		defer cancel()
		require.NoError(t, c.Run(running))
		p.row("predecessor … not fenced for …", <-causes)

		mem.Restore()
		_, err = lease.AcquireOrSteal(ctx)
		p.row("fencing token … would follow …", err)
	})
}

func raiseOfSQLite(p *errorPage) {
	ctx, key := p.Context(), tenure.Key{Type: "t", ID: "1"}
	path := filepath.Join(p.TempDir(), "a.db")
	store := testkit.OpenSQLite(p, path)
	p.row("no such table: … (call Migrate once)", testkit.ErrOf(store.Get(ctx, key)))
	testkit.Migrate(p, store)
	keys := testkit.Must(claims.NewKeys(testkit.Must(claims.NewSession(store, claims.SessionConfig{})), "tenant"))
	p.row("no such table: … (call claims.Migrate once)", keys.Forget(ctx))
	alone := filepath.Join(p.TempDir(), "alone.db")
	first := testkit.Must(tenure.OpenSQLite(ctx, alone, tenure.SQLiteConfig{Logger: testkit.Quiet}))
	defer first.Close()
	testkit.Migrate(p, first)
	second := testkit.Must(tenure.OpenSQLite(ctx, alone, tenure.SQLiteConfig{Shared: true, Logger: testkit.Quiet}))
	defer second.Close()
	p.row("the file is in use: …", second.Migrate(ctx))
	p.row("unable to open database file", testkit.ErrOf(tenure.OpenSQLite(ctx, filepath.Join(p.TempDir(), "missing", "a.db"), tenure.SQLiteConfig{})))
	other := filepath.Join(p.TempDir(), "a.txt")
	require.NoError(p, os.WriteFile(other, []byte(strings.Repeat("no database ", 100)), 0o600))
	p.row("file is not a database", testkit.ErrOf(tenure.OpenSQLite(ctx, other, tenure.SQLiteConfig{})))

	db := testkit.OpenSQL(p.T, "sqlite", "file:"+path+"?mode=ro")
	reader := testkit.Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true, Logger: testkit.Quiet}))
	defer reader.Close()
	p.row("attempt to write a readonly database", testkit.ErrOf(reader.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent())))
	conn, err := store.DB().Conn(ctx)
	require.NoError(p, err)
	defer conn.Close()
	_, err = conn.ExecContext(ctx, "BEGIN IMMEDIATE")
	require.NoError(p, err)
	waits := testkit.OpenSQLite(p, path)
	limited, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	p.row("database is locked", testkit.ErrOf(waits.PutIf(limited, tenure.Object{Key: key}, tenure.IfAbsent())))
	_, err = conn.ExecContext(ctx, "ROLLBACK")
	require.NoError(p, err)
}

// raiseOfPostgres begins with an empty database, and changes it step by step.
func raiseOfPostgres(p *errorPage) {
	ctx, key := p.Context(), tenure.Key{Type: "t", ID: "1"}
	server := testkit.StartPostgres(p)
	url := server.URL()
	owner := testkit.PostgresPool(p, url)
	run := func(sql string) { testkit.ExecPostgres(p, owner, sql) }
	const role = "reader"
	run(`REVOKE CREATE ON SCHEMA public FROM PUBLIC; CREATE ROLE reader LOGIN; CREATE ROLE app LOGIN PASSWORD 'right'`)
	var rules string
	require.NoError(p, owner.QueryRow(ctx, `SHOW hba_file`).Scan(&rules))
	require.NoError(p, os.WriteFile(rules, []byte("host all app all scram-sha-256\nhost all all all trust\n"), 0o600))
	run(`SELECT pg_reload_conf()`)
	open := func(user string) *tenure.PostgresStore {
		return testkit.OpenPostgres(p, strings.Replace(url, "postgres@", user+"@", 1), tenure.PostgresConfig{})
	}
	get := func(store tenure.Store) error { return testkit.ErrOf(store.Get(ctx, key)) }
	keysOf := func(store tenure.Store) *claims.Keys {
		return testkit.Must(claims.NewKeys(testkit.Must(claims.NewSession(store, claims.SessionConfig{Logger: testkit.Quiet})), "tenant"))
	}
	store, denied := open("postgres"), open(role)
	p.row("the table does not exist (call Migrate once)", get(store))
	p.row("unrecognized configuration parameter … (remove this setting from the URL: …)", testkit.ErrOf(tenure.Open(ctx, url+"&schema=public")))
	p.row("permission denied for schema … (make all tables as the owner, for example with tenure migrate, and then: GRANT …)", denied.Migrate(ctx))
	run(`REVOKE USAGE ON SCHEMA public FROM PUBLIC`)
	p.row("no schema has been selected to create in", open(role).Migrate(ctx))
	run(`GRANT USAGE ON SCHEMA public TO PUBLIC`)
	testkit.Migrate(p, store)
	p.row("the table does not exist (call claims.Migrate once)", keysOf(store).Forget(ctx))
	testkit.MigrateClaims(p, store)
	run(`GRANT SELECT, INSERT ON objects, objects_tombstones TO ` + role)
	p.row("this role lacks privileges that a lease needs (as the owner: GRANT …)", testkit.ErrOf(testkit.NewLease(p, open(role), tenure.LeaseConfig{}).TryAcquire(ctx)))
	p.row("permission denied for table … (as the owner: GRANT …)", keysOf(open(role)).Forget(ctx))

	openErr := func(url string) error {
		limited, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		return testkit.ErrOf(tenure.OpenPostgres(limited, url, tenure.PostgresConfig{Logger: testkit.Quiet}))
	}
	nowhere := testkit.Must(tenure.NewPostgresStore(testkit.PostgresPool(p, "postgres://127.0.0.1:1/none"), tenure.PostgresConfig{Logger: testkit.Quiet}))
	p.Cleanup(func() { nowhere.Close() })
	var refused error
	testkit.Await(p, "the server reads its new rules", func() bool {
		refused = openErr(strings.Replace(url, "postgres@", "app:wrong@", 1))
		return refused != nil
	})
	p.row("password authentication failed for user …", refused)
	p.row("role … does not exist", openErr(strings.Replace(url, "postgres@", "nobody@", 1)))
	p.row("database … does not exist", openErr(strings.Replace(url, "/postgres?", "/missing?", 1)))
	p.row("cannot connect to database … on …", get(nowhere))

	term := testkit.MustAcquire(p, testkit.NewLease(p, store, tenure.LeaseConfig{TTL: time.Hour}))
	fenced, err := owner.Begin(ctx)
	require.NoError(p, err)
	query, args, err := store.FenceStatement(term)
	require.NoError(p, err)
	testkit.ExecPostgres(p, fenced, query, args...)
	limited, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	p.row("canceling statement due to lock timeout", testkit.NewLease(p, store, tenure.LeaseConfig{TTL: time.Hour}).Renew(limited, term))
	require.NoError(p, fenced.Rollback(ctx))

	run(`CREATE TABLE tasks (id bigint PRIMARY KEY); INSERT INTO tasks VALUES (1)`)
	tasks := claims.QueueConfig{Table: "tasks", Logger: testkit.Quiet}
	run(testkit.Must(tasks.PostgresDDL()))
	queue := testkit.Must(claims.NewQueue(store, tasks))
	testkit.MustAcquire(p, testkit.NewLease(p, store, tenure.LeaseConfig{Key: claims.SessionKey("worker"), TTL: time.Hour}))
	taken, err := queue.TryTakeFor(ctx, "worker", claims.TakeOptions{N: 1})
	require.NoError(p, err)
	locked, err := owner.Begin(ctx)
	require.NoError(p, err)
	testkit.ExecPostgres(p, locked, `SELECT FROM tasks FOR UPDATE`)
	p.row("another transaction keeps the row locked", queue.Release(ctx, taken...))
	require.NoError(p, locked.Rollback(ctx))

	standby := testkit.Must(tenure.NewPostgresStore(testkit.OneConn(p, url, `SET default_transaction_read_only = on`), tenure.PostgresConfig{Logger: testkit.Quiet}))
	p.Cleanup(func() { standby.Close() })
	p.row("in a read-only transaction (SQLSTATE 25006) (the server is read-only, such as a standby", testkit.ErrOf(standby.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent())))
	var long strings.Builder // which no compression makes short enough
	for i := range 10_000 {
		fmt.Fprint(&long, sha256.Sum256([]byte{byte(i), byte(i >> 8)}))
	}
	p.row("must have at most … bytes together with its type: use a hash of it",
		testkit.ErrOf(store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: long.String()}}, tenure.IfAbsent())))
	isolated := testkit.Must(tenure.NewPostgresStore(testkit.OneConn(p, url, `SET default_transaction_isolation = 'serializable'`), tenure.PostgresConfig{Logger: testkit.Quiet}))
	p.Cleanup(func() { isolated.Close() })
	p.row(`default_transaction_isolation is …, which must be "read committed"`, get(isolated))

	p.row("this server is …, which has neither", openErr(testkit.Relabelled(p, url, "crdb_version", "CockroachDB CCL v25.2.1")))

	run(`ALTER TABLE objects SET UNLOGGED`)
	p.row("is UNLOGGED: a crash of the server empties it", openErr(url))
	run(`ALTER TABLE objects SET LOGGED; ALTER TABLE objects ENABLE ROW LEVEL SECURITY`)
	p.row("is under row-level security, and there are no policies", openErr(strings.Replace(url, "postgres@", role+"@", 1)))
	run(`DO $$ DECLARE name text; BEGIN
		FOR name IN SELECT conname FROM pg_constraint WHERE conrelid = 'objects'::regclass AND contype IN ('p', 'u') LOOP
			EXECUTE format('ALTER TABLE objects DROP CONSTRAINT %I', name);
		END LOOP; END $$`)
	p.row("has no unique key on …", openErr(url))
	run(`ALTER TABLE objects DROP COLUMN payload`)
	p.row("does not fit: …", openErr(url))
}

func raiseOfClaims(p *errorPage) {
	p.row("has no tables for claims", claims.Migrate(p.Context(), storetest.NewMem()))
	var log testkit.SyncBuffer
	logged := func() error { return errors.New(log.String()) }
	withQueue(p, claims.QueueConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}, func(t *testing.T, q *claims.Queue, w *claims.Worker, session *claims.Session, store *tenure.SQLiteStore, stop func()) {
		ctx := t.Context()
		got, err := w.Take(ctx, 1)
		require.NoError(t, err)
		p.row("this store knows no queue of table …", testkit.Must(tenure.NewSQLiteStore(store.DB(), tenure.SQLiteConfig{Shared: true})).Fenced(ctx, got[0], func(*sql.Tx) error { return nil }))
		require.NoError(t, w.Do(ctx, got[0], func(ctx context.Context) error {
			p.row("a func runs for it", w.Do(ctx, got[0], testkit.Succeeds))
			return nil
		}))
		p.row("it was released or detached", w.Do(ctx, got[0], testkit.Succeeds))
		got[0].Session = "another"
		p.row("its session … has ended, or is another's", w.Do(ctx, got[0], testkit.Succeeds))
		p.row("session … has no record: it has ended, or never began", testkit.ErrOf(q.TryTakeFor(ctx, "another", claims.TakeOptions{N: 1})))
		p.row("table … can't have claims on its rows: …", testkit.Must(claims.NewQueue(store, claims.QueueConfig{Table: "objects", Session: "owner"})).Check(ctx))

		serving, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		require.NoError(t, w.Serve(serving, 1, func(context.Context, claims.Claim) error { return nil }))
		p.row("the func returned nil, but did not end its claim", logged())

		keys := testkit.Must(claims.NewKeys(session, "tenant"))
		claimed, err := keys.TryClaim(ctx, "one")
		require.NoError(t, err)
		require.NoError(t, keys.Release(ctx, claimed...))
		p.row("was freed, or another has claimed it", claims.ReleaseDetached(ctx, store, claimed...))
		testkit.ExecSQL(t, store.DB(), `CREATE TRIGGER no BEFORE INSERT ON objects_claims WHEN NEW.id = 'two' BEGIN SELECT RAISE(ABORT, 'no'); END`)
		p.row("the database refuses the key …", testkit.ErrOf(keys.TryClaim(ctx, "two")))

		member := testkit.Must(shards.New(session, shards.Config{Kind: "job", Count: 1, Work: func(context.Context, string) error { return nil }}))
		testkit.ExecSQL(t, store.DB(), `UPDATE tasks SET session = 'worker-1' WHERE id = 2`)
		testkit.ExecSQL(t, store.DB(), `ALTER TABLE tasks ADD COLUMN not_before INTEGER`)
		logger := slog.New(slog.NewTextHandler(&log, nil))
		require.NoError(t, testkit.Must(claims.NewQueue(store, claims.QueueConfig{Table: "tasks", NotBefore: "not_before", Logger: logger})).Check(ctx))
		p.row("rows name owners that are no sessions of this store, and are not taken: …", logged())
		p.row("no index finds the rows of the table that are due later; …", logged())

		p.row("there is no such shard", testkit.ErrOf(member.Owner(ctx, "7")))
		taking, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		require.NoError(t, member.Run(taking))
		p.row("Work returned although it was not told to", logged())
		another := testkit.Must(shards.New(session, shards.Config{Kind: "partition", Count: 1, Work: func(ctx context.Context, _ string) error { <-ctx.Done(); return nil }}))
		testkit.ExecSQL(t, store.DB(), `INSERT INTO objects_claims VALUES ('partition', '7', '`+session.ID()+`', 1)`)
		taking, cancel = context.WithTimeout(ctx, time.Minute)
		defer cancel()
		require.NoError(t, another.Run(taking))
		p.row("another member runs a shard that this one is not configured with: …", logged())

		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		cfg := schedule.Config{
			Store: store, Key: tenure.Key{Type: "schedule", ID: "nightly"}, Plan: schedule.Interval(time.Hour, 0), Logger: slog.New(slog.NewTextHandler(&log, nil)),
			Do: func(_ context.Context, slot schedule.Slot) error {
				_, _, err := slot.Statement()
				return err
			},
		}
		run := func(s *schedule.Schedule) error {
			running, cancel := context.WithTimeout(ctx, 3*time.Hour)
			defer cancel()
			return held(t, running, lease, testkit.MustAcquire(t, lease), tenure.CoordinatorConfig{Watch: s.Run})
		}
		nightly := testkit.Must(schedule.New(cfg))
		p.row("the context is not that of a coordinator's job", nightly.Run(ctx))
		require.NoError(t, run(nightly))
		p.row("but its transaction with the slot's statement was not committed", logged())
		testkit.Put(t, store, tenure.Object{Key: cfg.Key, Payload: []byte("of another program")})
		p.row("is not the state of a schedule", testkit.ErrOf(schedule.ReadState(ctx, store, cfg.Key)))
		cfg.Key = lease.Config().Key
		p.row("Key is the lease's own", run(testkit.Must(schedule.New(cfg))))
		cfg.Key, cfg.Plan = tenure.Key{Type: "schedule", ID: "never"}, never{}
		p.row("Plan has no slot after …", run(testkit.Must(schedule.New(cfg))))
		cfg.Key.ID, cfg.Plan = "backwards", backwards{}
		p.row("the plan's Next(…) is …, which is not later", run(testkit.Must(schedule.New(cfg))))
	})
}

type never struct{}

func (never) Next(time.Time) time.Time { return time.Time{} }

// backwards is a plan whose next slot is earlier than the one before.
type backwards struct{}

func (backwards) Next(after time.Time) time.Time { return after.Add(-time.Hour) }
