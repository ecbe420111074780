package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// sqlite is a file that all replicas share. It is on a small file system of its own if that
// can be mounted, otherwise in an ordinary directory.
type sqlite struct {
	dir     string
	mounted bool
	file    string
	books   *sql.DB // one connection that stays open, so that it still sees a removed file
	audited *audit  // the audit before the file was removed
}

// The ledger is in the order of its row IDs, because there is one writer at a time.
const sqliteSchema = `
CREATE TABLE ledger (seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT, lease TEXT, term TEXT, token INTEGER, note TEXT);
CREATE TRIGGER term AFTER INSERT ON objects WHEN NEW.object_type = 'reconciler_lease' BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('begin', NEW.id, json_extract(CAST(NEW.payload AS TEXT), '$.term'), NEW.resource_version, '');
END;
CREATE TRIGGER next_term AFTER UPDATE ON objects WHEN NEW.object_type = 'reconciler_lease' AND NEW.payload <> OLD.payload BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('begin', NEW.id, json_extract(CAST(NEW.payload AS TEXT), '$.term'), NEW.resource_version, '');
END;
CREATE TRIGGER term_numbered AFTER UPDATE ON objects WHEN NEW.object_type = 'reconciler_lease' AND OLD.created_at_ms = 0 BEGIN
	UPDATE ledger SET token = NEW.resource_version WHERE kind = 'begin' AND term = json_extract(CAST(NEW.payload AS TEXT), '$.term');
END;
CREATE TRIGGER term_end AFTER DELETE ON objects WHEN OLD.object_type = 'reconciler_lease' BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('end', OLD.id, json_extract(CAST(OLD.payload AS TEXT), '$.term'), OLD.resource_version, '');
END;
CREATE TRIGGER renewed AFTER UPDATE ON objects WHEN NEW.object_type = 'reconciler_lease' AND NEW.payload = OLD.payload AND OLD.created_at_ms <> 0 BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('renewed', NEW.id, json_extract(CAST(NEW.payload AS TEXT), '$.term'), NEW.resource_version, NEW.updated_at_ms);
END;
CREATE TRIGGER version AFTER INSERT ON objects WHEN NEW.object_type = 'reconciler_lease' AND NEW.created_at_ms <> 0 BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('version', NEW.id, json_extract(CAST(NEW.payload AS TEXT), '$.term'), NEW.resource_version,
		json_object('at', CAST(unixepoch('subsec') * 1000000 AS INTEGER), 'stamp', NEW.updated_at_ms,
			'payload', CAST(NEW.payload AS TEXT), 'request', NEW.labels->>'$."tenure.release"'));
END;
CREATE TRIGGER next_version AFTER UPDATE ON objects WHEN NEW.object_type = 'reconciler_lease' AND NEW.created_at_ms <> 0 BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('version', NEW.id, json_extract(CAST(NEW.payload AS TEXT), '$.term'), NEW.resource_version,
		json_object('at', CAST(unixepoch('subsec') * 1000000 AS INTEGER), 'stamp', NEW.updated_at_ms,
			'over', iif(OLD.created_at_ms <> 0, OLD.resource_version, 0),
			'payload', CAST(NEW.payload AS TEXT), 'request', NEW.labels->>'$."tenure.release"'));
END;
CREATE TRIGGER no_version AFTER DELETE ON objects WHEN OLD.object_type = 'reconciler_lease' BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('version', OLD.id, json_extract(CAST(OLD.payload AS TEXT), '$.term'), OLD.resource_version,
		json_object('at', CAST(unixepoch('subsec') * 1000000 AS INTEGER), 'over', OLD.resource_version));
END;
CREATE TRIGGER hurried AFTER INSERT ON objects WHEN NEW.object_type = 'hurried' BEGIN
	INSERT INTO ledger (kind, term, token, note) VALUES ('hurried', '', NEW.resource_version, CAST(NEW.payload AS TEXT));
END;
CREATE TRIGGER hurried_again AFTER UPDATE ON objects WHEN NEW.object_type = 'hurried' AND NEW.payload <> OLD.payload BEGIN
	INSERT INTO ledger (kind, term, token, note) VALUES ('hurried', '', NEW.resource_version, CAST(NEW.payload AS TEXT));
END;
CREATE TRIGGER new_claim AFTER INSERT ON objects_claims WHEN NEW.id LIKE 'actor-%' OR NEW.kind LIKE 'slots/%' BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('claim begin', NEW.id, NEW.session || '.' || NEW.token || '.' || NEW.id, NEW.token, '');
END;
CREATE TRIGGER claim AFTER UPDATE ON objects_claims WHEN NEW.session IS NOT OLD.session AND (NEW.id LIKE 'actor-%' OR NEW.kind LIKE 'slots/%') BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES (
		iif(NEW.session IS NULL, 'claim end', 'claim begin'), NEW.id, coalesce(NEW.session, OLD.session) || '.' || NEW.token || '.' || NEW.id, NEW.token, '');
END;
CREATE TRIGGER wrong_claim AFTER UPDATE ON objects_claims WHEN NEW.session <> OLD.session AND NEW.kind NOT LIKE 'tenure.attach/%'
	AND EXISTS (SELECT 1 FROM objects WHERE object_type = 'tenure.session' AND objects.id = OLD.session)
	AND NOT EXISTS (SELECT 1 FROM objects_claims w -- its owner has offered it to who attaches
		WHERE w.kind = 'tenure.attach/' || NEW.kind AND w.id = OLD.session || '/' || OLD.token || '/' || NEW.id AND w.session = OLD.session) BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('wrong', NEW.id, NEW.session, NEW.token,
		'the claim of ' || OLD.session || ' with token ' || OLD.token || ' was taken over while its session had a record');
END;
CREATE TRIGGER wrong_token AFTER UPDATE ON objects_claims WHEN NEW.session IS NOT OLD.session AND NEW.session IS NOT NULL AND NEW.token <= OLD.token BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('wrong', NEW.id, NEW.session, NEW.token, 'it comes after token ' || OLD.token);
END;
CREATE TRIGGER fenced AFTER INSERT ON objects WHEN NEW.object_type = 'fenced' BEGIN
	INSERT INTO ledger (kind, term, token, note) SELECT 'fenced', p->>'term', p->>'token', p->>'note' FROM (SELECT CAST(NEW.payload AS TEXT) p);
END;
CREATE TRIGGER fenced_again AFTER UPDATE ON objects WHEN NEW.object_type = 'fenced' AND NEW.payload <> OLD.payload BEGIN
	INSERT INTO ledger (kind, term, token, note) SELECT 'fenced', p->>'term', p->>'token', p->>'note' FROM (SELECT CAST(NEW.payload AS TEXT) p);
END;
`

const sqliteWork = `
CREATE TABLE work (id INTEGER PRIMARY KEY, status TEXT NOT NULL);
%s
CREATE TRIGGER rows AFTER UPDATE ON work WHEN NEW.session IS NOT OLD.session BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES (
		CASE WHEN NEW.session IS NOT NULL THEN 'row begin' WHEN NEW.status = 'done' THEN 'row done' ELSE 'row free' END,
		NEW.id, coalesce(NEW.session, OLD.session) || '.' || NEW.token || '.' || NEW.id, NEW.token, NEW.attempts);
END;
CREATE TRIGGER wrong_row AFTER UPDATE ON work WHEN NEW.session IS OLD.session BEGIN
	INSERT INTO ledger (kind, lease, term, token, note) VALUES ('wrong', NEW.id, NEW.session, NEW.token, 'the row changed, and not its owner');
END;
`

func newSQLite(ctx context.Context) (db *sqlite, err error) {
	db = &sqlite{}
	defer func() {
		if err != nil {
			db.close()
		}
	}()
	if db.dir, err = os.MkdirTemp("", "tenure-chaos-sqlite-"); err != nil {
		return db, err
	}
	db.mounted = unix.Mount("tenure-chaos", db.dir, "tmpfs", 0, "size=32m") == nil
	db.file = filepath.Join(db.dir, "tenure.db")
	db.books, err = db.create(ctx)
	return db, err
}

// create creates the file and its tables, and returns a connection to it.
func (db *sqlite) create(ctx context.Context) (*sql.DB, error) {
	store, err := tenure.OpenSQLite(ctx, db.file, tenure.SQLiteConfig{Shared: true})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(migrate(ctx, store), store.Close()); err != nil {
		return nil, err
	}
	books, err := sql.Open("sqlite", sqliteDSN(db.file, 5*time.Second))
	if err != nil {
		return nil, err
	}
	books.SetMaxOpenConns(1)
	books.SetConnMaxLifetime(0)
	ddl, err := workedOn.SQLiteDDL()
	if err == nil {
		_, err = books.ExecContext(ctx, sqliteSchema+fmt.Sprintf(sqliteWork, ddl))
	}
	if err != nil {
		return nil, errors.Join(err, books.Close())
	}
	return books, nil
}

func (db *sqlite) replica(_ int, cfg replicaConfig) (replicaConfig, *rig.Proxy, error) {
	cfg.File, cfg.Pace, cfg.Crowd, cfg.Hurry = db.file, 150*time.Millisecond, 2, true
	return cfg, nil, nil
}

func (db *sqlite) texts(ctx context.Context, query string) (texts []string, err error) {
	rows, err := db.books.QueryContext(ctx, query)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var text string
		if err := rows.Scan(&text); err != nil {
			return nil, err
		}
		texts = append(texts, text)
	}
	return texts, rows.Err()
}

func (db *sqlite) close() error {
	var err error
	if db.books != nil {
		err = db.books.Close()
	}
	if db.mounted {
		err = errors.Join(err, unix.Unmount(db.dir, 0))
	}
	return errors.Join(err, os.RemoveAll(db.dir))
}

func (db *sqlite) audit(ctx context.Context) (*audit, error) {
	now, err := db.read(ctx)
	if err != nil || db.audited == nil {
		return now, err
	}
	db.audited.replaced = now.ledger
	return db.audited, nil
}

func (db *sqlite) read(ctx context.Context) (*audit, error) {
	a := &audit{versions: true}
	rows, err := db.books.QueryContext(ctx, `SELECT kind, coalesce(lease, ''), term, token, note, seq FROM ledger ORDER BY seq`)
	if err != nil {
		return nil, err
	}
	for rows.Next() {
		var e entry
		if err := rows.Scan(&e.kind, &e.lease, &e.term, &e.token, &e.note, &e.at); err != nil {
			return nil, errors.Join(err, rows.Close())
		}
		a.ledger = append(a.ledger, e)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, err
	}
	store, err := tenure.NewSQLiteStore(db.books, tenure.SQLiteConfig{Shared: true})
	if err != nil {
		return nil, err
	}
	return a, a.readObjects(ctx, store)
}

const fileRemoved = "file removed"

func (db *sqlite) kinds() []faultKind {
	kinds := []faultKind{
		{name: renewedByCopy, group: "file", weight: 3, begin: renewByCopy(db.renewAsCopy)},
		{name: "file locked by somebody", group: "file", weight: 4, begin: db.lock},
		{name: "files may not grow (RLIMIT_FSIZE)", group: "file", weight: 4, begin: limit},
	}
	if db.mounted {
		kinds = append(kinds,
			faultKind{name: "disk full (tmpfs)", group: "file", weight: 4, begin: db.fill(0, false)},
			faultKind{name: "disk nearly full (tmpfs)", group: "file", weight: 2, begin: db.fill(64<<10, false)},
			faultKind{name: "disk full by turns (tmpfs)", group: "file", weight: 2, begin: db.fill(64<<10, true)})
	}
	return kinds
}

// isLocked reports whether a replica that was paused at the same time has the file's write lock.
func isLocked(err error) bool {
	return err != nil && strings.Contains(err.Error(), "SQLITE_BUSY")
}

// lock takes the file's only write lock.
func (db *sqlite) lock(ctx context.Context, _ *phase) (string, ending, error) {
	tx, err := db.books.BeginTx(ctx, nil)
	if isLocked(err) {
		return "nobody", func() (time.Duration, error) { return 0, nil }, nil
	}
	if err != nil {
		return "", nil, err
	}
	return "all", func() (time.Duration, error) { return 0, tx.Rollback() }, nil
}

// renewAsCopy renews the lease's record without changing its payload, and returns its term and version.
func (db *sqlite) renewAsCopy(ctx context.Context) (term string, version int64, err error) {
	now := time.Now()
	err = db.books.QueryRowContext(ctx, `UPDATE objects SET resource_version = max(resource_version + 1, ?1), updated_at_ms = ?2
		WHERE object_type = 'reconciler_lease' AND id = 'singleton'
		RETURNING json_extract(CAST(payload AS TEXT), '$.term'), resource_version`, now.UnixMicro(), now.UnixMilli()).Scan(&term, &version)
	if errors.Is(err, sql.ErrNoRows) || isLocked(err) {
		err = nil
	}
	return term, version, err
}

// fill fills the disk except for at most free bytes; with byTurns it takes and returns them
// repeatedly. It empties the write-ahead log first, because SQLite could otherwise keep
// writing to the space that the log already has.
func (db *sqlite) fill(free int64, byTurns bool) func(context.Context, *phase) (string, ending, error) {
	return func(ctx context.Context, p *phase) (string, ending, error) {
		if _, err := db.books.ExecContext(ctx, `PRAGMA wal_checkpoint(TRUNCATE)`); err != nil {
			return "", nil, err
		}
		ballast, err := os.Create(filepath.Join(db.dir, "ballast"))
		if err != nil {
			return "", nil, err
		}
		give := func() error {
			stat, err := ballast.Stat()
			if err != nil || free == 0 {
				return err
			}
			return ballast.Truncate(max(0, stat.Size()-rand.Int64N(free)))
		}
		filling, stop := context.WithCancel(ctx)
		var done sync.WaitGroup
		err = errors.Join(inflate(ballast), give())
		if byTurns {
			done.Go(func() {
				for err == nil && pause(filling, rand.N(20*time.Millisecond)) {
					err = inflate(ballast)
					if err == nil && pause(filling, rand.N(20*time.Millisecond)) {
						err = give()
					}
				}
			})
		}
		return "all", func() (time.Duration, error) {
			stop()
			done.Wait()
			return 0, errors.Join(err, ballast.Close(), os.Remove(ballast.Name()))
		}, nil
	}
}

// inflate makes a file as large as the disk allows.
func inflate(file *os.File) error {
	if _, err := file.Seek(0, io.SeekEnd); err != nil {
		return err
	}
	for size := 1 << 20; size > 0; {
		switch _, err := file.Write(make([]byte, size)); {
		case errors.Is(err, unix.ENOSPC):
			size /= 2
		case err != nil:
			return err
		}
	}
	return nil
}

// limit forbids replicas to write beyond the first bytes of a file.
func limit(_ context.Context, p *phase) (string, ending, error) {
	victims := p.victims(1 + p.rand.IntN(replicas))
	limit := func(size uint64) error {
		for _, v := range victims {
			if !v.Runs() {
				continue
			}
			if err := unix.Prlimit(v.PID(), unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: size, Max: unix.RLIM_INFINITY}, nil); err != nil {
				return fmt.Errorf("limit %s: %w", v.name(), err)
			}
		}
		return nil
	}
	err := limit(4096)
	return names(victims), func() (time.Duration, error) { return 0, limit(unix.RLIM_INFINITY) }, err
}

// final removes the file while all replicas use it. A replica that starts afterwards
// creates a new one, while the others still have the old one: there are two leases until
// all replicas have been restarted.
func (db *sqlite) final(ctx context.Context, p *phase) (err error) {
	f := &fault{kind: fileRemoved, target: "all", from: monotonic(), episode: -1}
	p.note([]*fault{f})
	old := db.books
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(db.file + suffix); err != nil {
			return err
		}
	}
	if db.books, err = db.create(ctx); err != nil {
		return err
	}
	victims := p.victims(2)
	standby := victims[len(victims)-1]
	if _, err := standby.kill(); err != nil {
		return err
	}
	if err := standby.start(); err != nil {
		return err
	}
	pause(ctx, 2*p.ttl)
	for _, process := range p.processes {
		if _, err := process.kill(); err != nil {
			return err
		}
	}
	db.audited, err = (&sqlite{books: old}).read(ctx)
	if err = errors.Join(err, old.Close()); err != nil {
		return err
	}
	db.audited.until = int64(f.from)
	if err := startAll(p.processes); err != nil {
		return err
	}
	f.to = monotonic()
	p.log("%s: %s of %s for %v", p.name, f.kind, f.target, (f.to - f.from).Round(time.Millisecond))
	p.awaitHolder(ctx, 6*p.ttl)
	return nil
}
