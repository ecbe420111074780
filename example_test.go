package tenure_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/statuspage"
	"github.com/tenurelib/tenure/storetest"
)

// A service runs its background work on the one replica that holds the lease.
func Example() {
	ctx, stop := context.WithCancel(context.Background()) // in a server: signal.NotifyContext
	defer stop()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Watch: func(ctx context.Context) error {
			<-ctx.Done() // consume events until then
			return nil
		},
		Reconcile: tenure.Every(time.Minute, func(ctx context.Context) error {
			fmt.Println("sweep")
			stop() // for the example's sake
			return nil
		}),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := coordinator.Run(ctx); err != nil {
		fmt.Println(err)
	}
	fmt.Println("holder after Run:", coordinator.IsHolder())
	// Output:
	// sweep
	// holder after Run: false
}

// A program that its supervisor restarts takes its own lease back at once: if this process is killed, the same call
// succeeds in the next one. A second lease in this process waits as for any other holder.
func ExampleLeaseConfig_assumeUniqueHolder() {
	store := storetest.NewMem()
	for range 2 {
		lease, err := uniqueLease(store)
		if err != nil {
			fmt.Println(err)
			return
		}
		_, err = lease.AcquireOrSteal(context.Background())
		fmt.Println(errors.Is(err, tenure.ErrHeld))
	}
	// Output:
	// false
	// true
}

func uniqueLease(store tenure.Store) (*tenure.Lease, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{
		Key:                tenure.Key{Type: "lease", ID: "sweeper"},
		Holder:             host + "/sweeper.service", // a name that no other process has, at any time
		AssumeUniqueHolder: true,
	})
	if err != nil {
		return nil, err
	}
	return lease, nil
}

// Without a coordinator, the caller renews and releases.
func ExampleLease() {
	ctx := context.Background()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	a, _ := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "backup"}, Holder: "a"})
	b, _ := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "backup"}, Holder: "b"})

	first, err := a.AcquireOrSteal(ctx)
	fmt.Println("a:", first.Holder(), err)
	_, err = b.AcquireOrSteal(ctx)
	fmt.Println("b:", err)

	fmt.Println("renewed:", a.Renew(ctx, first))
	fmt.Println("released:", a.Release(ctx, first))
	second, err := b.AcquireOrSteal(ctx)
	fmt.Println("b:", second.Holder(), err)
	fmt.Println("b's token is greater:", second.Token() > first.Token())
	fmt.Println("a's renewal is lost:", errors.Is(a.Renew(ctx, first), tenure.ErrLost))
	// Output:
	// a: a <nil>
	// b: lease is held: lease/backup by a
	// renewed: <nil>
	// released: <nil>
	// b: b <nil>
	// b's token is greater: true
	// a's renewal is lost: true
}

// A job whose writes must not come from a former holder makes them through a fence for its
// term.
func ExampleFence() {
	ctx := context.Background()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	lease, _ := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	term, err := lease.AcquireOrSteal(ctx) // in a job: tenure.TermFromContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fenced, err := tenure.Fence(store, term)
	if err != nil {
		fmt.Println(err)
		return
	}
	obj := tenure.Object{Key: tenure.Key{Type: "sandbox", ID: "one"}}
	_, err = fenced.PutIf(ctx, obj, tenure.Unconditional())
	fmt.Println("while the term stands:", err)

	if err := lease.Release(ctx, term); err != nil {
		fmt.Println(err)
	}
	_, err = fenced.PutIf(ctx, obj, tenure.Unconditional())
	fmt.Println("afterwards:", errors.Is(err, tenure.ErrLost))
	// Output:
	// while the term stands: <nil>
	// afterwards: true
}

// A resource in another database, which cannot see the lease, keeps the greatest fencing token
// beside its data and admits no smaller one.
func ExampleTerm_Token() {
	resource, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resource.Close()
	resource.SetMaxOpenConns(1)
	if _, err := resource.Exec(`
		CREATE TABLE volumes (name TEXT PRIMARY KEY, attached_to TEXT, token BIGINT NOT NULL DEFAULT 0);
		INSERT INTO volumes (name) VALUES ('data')`); err != nil {
		fmt.Println(err)
		return
	}
	attach := func(host string, token int64) {
		result, err := resource.Exec(`
			UPDATE volumes SET attached_to = ?1, token = ?2
			WHERE name = 'data' AND token <= ?2`, host, token)
		if err != nil {
			fmt.Println(err)
			return
		}
		admitted, _ := result.RowsAffected()
		fmt.Printf("token %d: %d row\n", token, admitted)
	}
	attach("host-a", 101) // the first term
	attach("host-b", 102) // the next
	attach("host-a", 101) // the first again, which was paused and missed its end
	attach("host-b", 102)
	// Output:
	// token 101: 1 row
	// token 102: 1 row
	// token 101: 0 row
	// token 102: 1 row
}

// The same table keeps the service's own objects, changed by compare-and-swap.
func ExampleStore() {
	ctx := context.Background()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	key := tenure.Key{Type: "sandbox", ID: "one"}
	created, err := store.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("provisioning")}, tenure.IfAbsent())
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = store.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent())
	fmt.Println("exists:", errors.Is(err, tenure.ErrExists))

	_, err = store.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("ready")}, tenure.IfVersion(created.Version))
	fmt.Println("written:", err)
	_, err = store.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("lost update")}, tenure.IfVersion(created.Version))
	fmt.Println("conflict:", errors.Is(err, tenure.ErrConflict))

	for obj, err := range tenure.List(ctx, store, "sandbox") {
		fmt.Println(obj.Key, string(obj.Payload), err)
	}
	// Output:
	// exists: true
	// written: <nil>
	// conflict: true
	// sandbox/one ready <nil>
}

// A hint says that an object may have changed. It may be lost, so a subscriber also looks from time to time.
func ExampleWatch() {
	ctx := context.Background()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	key := tenure.Key{Type: "sandbox", ID: "one"}
	go func() { // another process
		_, err := store.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("ready")}, tenure.IfAbsent())
		if err == nil {
			err = tenure.Wake(ctx, store, key)
		}
		if err != nil {
			fmt.Println(err)
		}
	}()

	var obj tenure.Object
	sub := tenure.Watch(store, key)
	defer sub.Stop()
	for obj, err = store.Get(ctx, key); errors.Is(err, tenure.ErrNotFound); obj, err = store.Get(ctx, key) {
		select {
		case <-sub.C(): // perhaps without a cause
		case <-time.After(time.Second): // a hint may be lost
		}
	}
	fmt.Println(string(obj.Payload), err)
	// Output: ready <nil>
}

// A job that is safe even while two replicas overlap, or after the database is restored: each
// step is a conditional update, which the second replica finds done. The watch func takes one
// step per event; the sweep catches up on what the watch has missed, even while no replica held
// the lease.
func ExampleCoordinator_monotonicWork() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	db.SetMaxOpenConns(1) // each connection would have a database in memory of its own
	_, err = db.ExecContext(ctx, `
		CREATE TABLE deployments (name TEXT PRIMARY KEY, phase TEXT NOT NULL, healthy INTEGER NOT NULL);
		INSERT INTO deployments VALUES ('api', 'canary', 1), ('web', 'canary', 1), ('cron', 'canary', 0)`)
	if err != nil {
		fmt.Println(err)
		return
	}
	store, err := tenure.NewSQLiteStore(db, tenure.SQLiteConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	if err != nil {
		fmt.Println(err)
		return
	}

	events := make(chan string, 2) // a hint each: a deployment has become healthy
	events <- "web"
	events <- "web" // as brokers do
	watched := make(chan struct{})
	promote := func(ctx context.Context, by, name string) error {
		done, err := db.ExecContext(ctx, `UPDATE deployments SET phase = 'promoted' WHERE name = ? AND healthy AND phase <> 'promoted'`, name)
		if err != nil {
			return err
		}
		if n, err := done.RowsAffected(); err != nil || n == 0 {
			return err // another replica was first, or it is not healthy
		}
		fmt.Println(by, "promotes", name)
		return nil
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Watch: func(ctx context.Context) error {
			for range 2 {
				if err := promote(ctx, "watch", <-events); err != nil {
					return err
				}
			}
			close(watched)
			<-ctx.Done()
			return nil
		},
		Reconcile: tenure.Every(time.Minute, func(ctx context.Context) error {
			<-watched // for the example's sake, so that it always prints the same
			defer stop()
			for _, name := range []string{"api", "cron", "web"} { // in a service: what a query finds
				if err := promote(ctx, "sweep", name); err != nil {
					return err
				}
			}
			return nil
		}),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := coordinator.Run(ctx); err != nil {
		fmt.Println(err)
	}
	// Output:
	// watch promotes web
	// sweep promotes api
}

// A program that runs on SQLite in one place and on Postgres in another: the URL decides.
func ExampleOpen() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	store, err := tenure.Open(ctx, filepath.Join(dir, "tenure.db")) // or postgres://user@host/db
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	fmt.Println("migrated:", store.Migrate(ctx))
	// Output: migrated: <nil>
}

// A store on the program's own pool. Leases open a few connections of their own, with the
// pool's settings.
func ExampleNewPostgresStore() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	store, err := tenure.NewPostgresStore(pool, tenure.PostgresConfig{Schema: "public"})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close() // before the pool
	if err := store.Migrate(ctx); err != nil {
		log.Fatal(err)
	}
}

// One piece of work, for example a migration, by one replica at a time.
func ExampleDo() {
	ctx := context.Background()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "migration"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = tenure.Do(ctx, lease, func(ctx context.Context) error { // waits until this replica holds the lease
		fmt.Println("migrating", tenure.TermFromContext(ctx).Key())
		return nil
	})
	fmt.Println("done:", err)
	// Output:
	// migrating lease/migration
	// done: <nil>
}

// A deployment of one replica needs no database: its coordinator always holds.
func ExampleStatic() {
	lease, err := tenure.NewLease(tenure.Static(), tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = tenure.Do(context.Background(), lease, func(context.Context) error {
		fmt.Println("sweeping")
		return nil
	})
	fmt.Println("done:", err)
	// Output:
	// sweeping
	// done: <nil>
}

// A write of a former holder is refused, even if it does not know yet that it has lost the
// lease.
func ExampleSQLiteStore_Fenced() {
	ctx := context.Background() // in a job, the one that it is given
	id := "api"
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	if _, err := store.DB().Exec("CREATE TABLE deployments (id TEXT, phase TEXT)"); err != nil {
		fmt.Println(err)
		return
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "promoter"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	promote := func(ctx context.Context) error {
		// Commits only if the term is still the lease's.
		return store.Fenced(ctx, nil, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "UPDATE deployments SET phase = 'promoted' WHERE id = ?", id)
			return err
		})
	}
	var former context.Context
	err = tenure.Do(ctx, lease, func(ctx context.Context) error {
		former = context.WithoutCancel(ctx)
		return promote(ctx)
	})
	fmt.Println("in its term:", err)
	fmt.Println("afterwards:", errors.Is(promote(former), tenure.ErrLost))
	// Output:
	// in its term: <nil>
	// afterwards: true
}

// A job writes to its own tables, in the database that has the lease.
func ExamplePostgresStore_Fenced() {
	ctx := context.Background() // in a job, the one that it is given
	id := "api"
	store, err := tenure.OpenPostgres(ctx, os.Getenv("DATABASE_URL"), tenure.PostgresConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	// Commits only if the term is still the lease's.
	err = store.Fenced(ctx, nil, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "UPDATE deployments SET phase = 'promoted' WHERE id = $1", id)
		return err
	})
	if errors.Is(err, tenure.ErrLost) {
		log.Print("the term is over, and nothing was written")
	}
}

// A program that uses database/sql, with any driver, fences its writes on its own *sql.DB.
func ExampleFencedTx() {
	ctx := context.Background() // in a job, the one that it was given
	var store tenure.Database   // of Open, as db is of sql.Open, for the same database
	var db *sql.DB
	id := 1
	err := tenure.FencedTx(ctx, store, tenure.TermFromContext(ctx), db, nil, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE deployments SET phase = 'promoted' WHERE id = $1", id)
		return err
	})
	if errors.Is(err, tenure.ErrLost) {
		log.Print("the term is over, and nothing was written")
	}
}

// A program that writes through an ORM, or in transactions that other code commits, fences them
// with one more statement.
func ExampleFenceError() {
	ctx := context.Background()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	db.SetMaxOpenConns(1)
	store, err := tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	if _, err := db.Exec("CREATE TABLE volumes (attached_to TEXT); INSERT INTO volumes VALUES ('')"); err != nil {
		fmt.Println(err)
		return
	}

	attach := func(ctx context.Context, term *tenure.Term, host string) error {
		fence, args, err := store.FenceStatement(term)
		if err != nil {
			return err
		}
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "UPDATE volumes SET attached_to = ?", host); err != nil {
			return err
		}
		// The last statement before Commit.
		if _, err := tx.ExecContext(ctx, fence, args...); err != nil {
			return tenure.FenceError(err) // ErrLost, if the term is over
		}
		return tenure.FenceError(tx.Commit())
	}

	lease, _ := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	term, err := lease.AcquireOrSteal(ctx) // in a job: tenure.TermFromContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("while the term stands:", attach(ctx, term, "host-a"))

	// As if it had expired and the next holder had come and gone.
	held, err := lease.Read(ctx)
	if err == nil {
		err = store.DeleteIf(ctx, held.Key, tenure.IfVersion(held.Version))
	}
	if err != nil {
		fmt.Println(err)
	}
	fmt.Println("afterwards:", errors.Is(attach(ctx, term, "host-b"), tenure.ErrLost))
	// Output:
	// while the term stands: <nil>
	// afterwards: true
}

// What a server shows of its coordinator.
func ExampleCoordinator_observe() {
	ctx := context.Background()
	var coordinator *tenure.Coordinator                     // of NewCoordinator
	http.Handle("/leases", statuspage.Handler(coordinator)) // a page for people, JSON for programs
	http.HandleFunc("/livez", func(w http.ResponseWriter, r *http.Request) {
		if err := coordinator.Healthy(10 * time.Second); err != nil { // a restart would fix it; a standby is healthy
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	for status := range coordinator.Changes(ctx) { // now, and at each change; a slow reader gets the latest
		log.Printf("%s is %s: %s", status.Lease, status.Role, status.Reason)
	}
}

// A loop of your own whose rounds appear in the status and the metrics.
func ExampleRecordRun() {
	importOnce := func(ctx context.Context) error { return nil }
	job := func(ctx context.Context) error {
		for {
			err := tenure.RecordRun(ctx, "import", importOnce) // ctx is the job's; calls importOnce(ctx)
			if err != nil {
				log.Print(err)
			}
			select {
			case <-time.After(time.Minute):
			case <-ctx.Done():
				return nil
			}
		}
	}
	_ = tenure.CoordinatorConfig{Reconcile: job}
}

// A worker that can't reach the database sends its heartbeats to servers, any of which renews
// the worker's lease.
func ExampleLease_Resume() {
	ctx := context.Background()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "worker", ID: "7"}}) // on each server
	if err != nil {
		fmt.Println(err)
		return
	}
	term, err := lease.TryAcquire(ctx) // the server that the worker greets, and that answers with the ID and the token
	if err != nil {
		fmt.Println(err)
		return
	}
	heartbeat := func(id string, token int64) error { // on any server
		_, err := lease.Resume(ctx, id, token)
		return err // ErrLost: the worker stops
	}
	fmt.Println(heartbeat(term.ID(), term.Token()))
	// Output: <nil>
}

// Where no clock may decide who holds the lease, standbys go by what they observe.
func ExampleExpiryPolicy() {
	store := storetest.NewMem()
	leaseConfig := tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}, TTL: 30 * time.Second, Expiry: tenure.ExpiryObserved}
	config := tenure.CoordinatorConfig{RenewInterval: 10 * time.Second, Confirmations: 3}
	lease, err := tenure.NewLease(store, leaseConfig)
	if err != nil {
		log.Fatal(err)
	}
	coordinator, err := tenure.NewCoordinator(lease, config)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(coordinator.Config().RenewDeadline)
	// Output: 20s
}
