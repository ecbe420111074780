package databases_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A row that a write returns is read before the write is committed. Where the context
// ends at that moment, database/sql closes the rows, and drops the error of a commit
// that comes with it.
func TestAWriteOnSQLiteThatWasUndoneIsNotReportedAsDone(t *testing.T) {
	// What another program may have put beside the table. Unlike a full disk, it makes
	// each commit fail.
	const refuseUpdates = `
		CREATE TABLE parent (id INTEGER PRIMARY KEY);
		CREATE TABLE child (id INTEGER REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED);
		CREATE TRIGGER refuse AFTER UPDATE ON objects BEGIN INSERT INTO child VALUES (1); END`
	key := tenure.Key{Type: "t", ID: "1"}
	calls := map[string]func(context.Context, *tenure.SQLiteStore, *tenure.Term, int64) error{
		"replace": func(ctx context.Context, store *tenure.SQLiteStore, _ *tenure.Term, version int64) error {
			_, err := store.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("new")}, tenure.IfVersion(version))
			return err
		},
		"put": func(ctx context.Context, store *tenure.SQLiteStore, _ *tenure.Term, _ int64) error {
			_, err := store.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("new")}, tenure.Unconditional())
			return err
		},
		"fenced replace": func(ctx context.Context, store *tenure.SQLiteStore, term *tenure.Term, version int64) error {
			fenced, err := tenure.Fence(store, term)
			testkit.WantErr(t, err, nil)
			_, err = fenced.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("new")}, tenure.IfVersion(version))
			return err
		},
		"fenced": func(ctx context.Context, store *tenure.SQLiteStore, term *tenure.Term, _ int64) error {
			return store.Fenced(ctx, term, func(tx *sql.Tx) error {
				var version int64
				return tx.QueryRowContext(ctx, `UPDATE objects SET payload = 'new' WHERE id = '1' RETURNING resource_version`).Scan(&version)
			})
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "t.db")
			testkit.Migrate(t, testkit.OpenSQLite(t, path))
			ender := &contextEnder{}
			db := sql.OpenDB(endingConnector{
				dsn: "file:" + path + "?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=foreign_keys(1)", ender: ender})
			defer db.Close()
			store := testkit.Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true}))
			term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
			old := testkit.Put(t, store, tenure.Object{Key: key, Payload: []byte("old")})
			testkit.ExecSQL(t, db, refuseUpdates)

			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ender.arm(cancel)
			if err := call(ctx, store, term, old.Version); err == nil {
				t.Error("it was reported as done")
			}
			if ender.disarm() != nil {
				t.Error("the context did not end while the row was read; the test tests nothing")
			}
			obj, err := store.Get(t.Context(), key)
			if err != nil || string(obj.Payload) != "old" {
				t.Errorf("got %q, %v; want what was there before", obj.Payload, err)
			}

			err = call(t.Context(), store, term, old.Version)
			if err == nil || !strings.Contains(err.Error(), "FOREIGN KEY") {
				t.Errorf("without an end of the context: got %v, want the database's error", err)
			}
			testkit.ExecSQL(t, db, `DROP TRIGGER refuse`)
			testkit.WantErr(t, call(t.Context(), store, term, old.Version), nil)
			obj, err = testkit.OpenSQLite(t, path).Get(t.Context(), key) // another connection sees what was committed
			if err != nil || string(obj.Payload) != "new" {
				t.Errorf("once nothing is in the way: got %q, %v; want what was written", obj.Payload, err)
			}
		})
	}
}

// contextEnder ends a context while a row that a write has returned is scanned, and
// waits until database/sql is about to close the rows for it.
type contextEnder struct {
	mu  sync.Mutex
	end context.CancelFunc
}

func (e *contextEnder) arm(end context.CancelFunc) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.end = end
}

// disarm returns nil where it has been done.
func (e *contextEnder) disarm() context.CancelFunc {
	e.mu.Lock()
	defer e.mu.Unlock()
	end := e.end
	e.end = nil
	return end
}

type endingConnector struct {
	dsn   string
	ender *contextEnder
}

func (c endingConnector) Driver() driver.Driver {
	db, err := sql.Open("sqlite", c.dsn)
	if err != nil {
		panic(err)
	}
	defer db.Close()
	return db.Driver()
}

func (c endingConnector) Connect(context.Context) (driver.Conn, error) {
	conn, err := c.Driver().Open(c.dsn)
	if err != nil {
		return nil, err
	}
	return endingConn{conn.(sqliteConn), c.ender}, nil
}

type sqliteConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.SessionResetter
	driver.Validator
}

type endingConn struct {
	sqliteConn
	ender *contextEnder
}

func (c endingConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := c.sqliteConn.QueryContext(ctx, query, args)
	if err == nil && strings.Contains(query, "RETURNING") {
		rows = endingRows{rows, c.ender}
	}
	return rows, err
}

type endingRows struct {
	driver.Rows
	ender *contextEnder
}

func (r endingRows) Next(row []driver.Value) error {
	err := r.Rows.Next(row)
	if err == nil {
		row[0] = endingValue{row[0], r.ender}
	}
	return err
}

// endingValue is a value that database/sql formats to scan it.
type endingValue struct {
	value driver.Value
	ender *contextEnder
}

func (v endingValue) String() string {
	if end := v.ender.disarm(); end != nil {
		end()
		for deadline := time.Now().Add(10 * time.Second); !rowsAreClosing() && time.Now().Before(deadline); {
			runtime.Gosched()
		}
	}
	return fmt.Sprint(v.value)
}

// rowsAreClosing reports whether the goroutine that watches the context of the rows
// which this one reads has seen its end and waits to close them; or there is none.
func rowsAreClosing() bool {
	buf := make([]byte, 1<<20)
	stacks := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	id, _, _ := strings.Cut(strings.TrimPrefix(stacks[0], "goroutine "), " ") // this one comes first
	watches := slices.DeleteFunc(stacks, func(stack string) bool {
		return !strings.Contains(stack, "database/sql.(*Rows).awaitDone(") || !strings.HasSuffix(firstLineOf(stack, "created by "), " in goroutine "+id)
	})
	return !slices.ContainsFunc(watches, func(stack string) bool { return !strings.Contains(stack, "database/sql.(*Rows).close(") })
}

func firstLineOf(stack, prefix string) string {
	for line := range strings.Lines(stack) {
		if strings.HasPrefix(line, prefix) {
			return strings.TrimSpace(line)
		}
	}
	return ""
}
