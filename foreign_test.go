package tenure_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// foreignTable is how another program made its objects: the id alone is the
// key, and there are columns that we know nothing of.
const foreignTable = `
	CREATE TABLE objects (
		id               TEXT PRIMARY KEY,
		object_type      TEXT NOT NULL,
		scope            TEXT NOT NULL DEFAULT 'global',
		version          BIGINT NOT NULL DEFAULT 1,
		status           TEXT,
		dedup_key        TEXT,
		hit_count        BIGINT NOT NULL DEFAULT 0,
		workspace        TEXT NOT NULL DEFAULT '',
		name             TEXT,
		payload          %s NOT NULL,
		labels           %s,
		resource_version BIGINT NOT NULL DEFAULT 1,
		created_at_ms    BIGINT NOT NULL,
		updated_at_ms    BIGINT NOT NULL
	);
	CREATE UNIQUE INDEX objects_names ON objects (object_type, workspace, name) WHERE name IS NOT NULL;
	CREATE INDEX objects_scopes ON objects (object_type, scope, version) WHERE scope <> '';
	CREATE UNIQUE INDEX objects_dedup ON objects (object_type, dedup_key) WHERE dedup_key IS NOT NULL`

// foreignStores runs a test on such a table of both databases.
func foreignStores(t *testing.T, test func(t *testing.T, store tenure.Store, db *sql.DB)) {
	t.Run("postgres", func(t *testing.T) {
		url := postgresURL(t)
		db := openSQL(t, "pgx", url)
		execSQL(t, db, fmt.Sprintf(foreignTable, "BYTEA", "JSONB"))
		store := openPostgres(t, url, tenure.PostgresConfig{})
		migrate(t, store)
		test(t, store, db)
	})
	t.Run("sqlite", func(t *testing.T) {
		path := t.TempDir() + "/foreign.db"
		store := openSQLite(t, path)
		db := openSQL(t, "sqlite", "file:"+path+"?_pragma=busy_timeout(5000)")
		execSQL(t, db, fmt.Sprintf(foreignTable, "BLOB", "TEXT"))
		migrate(t, store)
		test(t, store, db)
	})
}

func openSQL(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	wantErr(t, err, nil)
	t.Cleanup(func() { db.Close() })
	return db
}

func execSQL(t *testing.T, db *sql.DB, query string, args ...any) (changed int64) {
	t.Helper()
	result, err := db.ExecContext(context.Background(), query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	changed, _ = result.RowsAffected()
	return changed
}

// peer is a replica of the other program: it stamps rows by its own clock, and
// starts its versions at 1.
type peer struct {
	t       *testing.T
	db      *sql.DB
	ttl     time.Duration
	version int64
}

func (p *peer) acquire() bool {
	p.t.Helper()
	now := time.Now().UnixMilli()
	payload := []byte(fmt.Sprintf(`{"holder":"peer","acquired_at_ms":%d}`, now))
	if execSQL(p.t, p.db, `INSERT INTO objects (object_type, id, name, payload, resource_version, created_at_ms, updated_at_ms)
		VALUES ($1, $2, 'reconciler-lease', $3, 1, $4, $4) ON CONFLICT DO NOTHING`, leaseKey.Type, leaseKey.ID, payload, now) == 1 {
		p.version = 1
		return true
	}
	var version, updated int64
	err := p.db.QueryRow(`SELECT resource_version, updated_at_ms FROM objects WHERE object_type = $1 AND id = $2`,
		leaseKey.Type, leaseKey.ID).Scan(&version, &updated)
	wantErr(p.t, err, nil)
	if now-updated < p.ttl.Milliseconds() {
		return false
	}
	p.version = version + 1
	return execSQL(p.t, p.db, `UPDATE objects SET payload = $1, resource_version = resource_version + 1, updated_at_ms = $2
		WHERE object_type = $3 AND id = $4 AND resource_version = $5`, payload, now, leaseKey.Type, leaseKey.ID, version) == 1
}

func (p *peer) renew() bool {
	p.t.Helper()
	p.version++
	return execSQL(p.t, p.db, `UPDATE objects SET resource_version = resource_version + 1, updated_at_ms = $1
		WHERE object_type = $2 AND id = $3 AND resource_version = $4`, time.Now().UnixMilli(), leaseKey.Type, leaseKey.ID, p.version-1) == 1
}

func (p *peer) release() bool {
	p.t.Helper()
	return execSQL(p.t, p.db, `DELETE FROM objects WHERE object_type = $1 AND id = $2 AND resource_version = $3`,
		leaseKey.Type, leaseKey.ID, p.version) == 1
}

func TestReplicasOfBothKindsTakeTheLeaseFromEachOther(t *testing.T) {
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		ctx := t.Context()
		theirs := &peer{t: t, db: db}
		var lastToken int64
		follows := func(term *tenure.Term) {
			t.Helper()
			if term.Token() <= lastToken {
				t.Errorf("token %d follows %d", term.Token(), lastToken)
			}
			lastToken = term.Token()
		}

		for range 3 {
			// By release, both ways.
			theirs.ttl = time.Hour
			ours := newLease(t, store, tenure.LeaseConfig{Holder: "ours", TTL: theirs.ttl})
			if !theirs.acquire() {
				t.Fatal("the peer cannot acquire a free lease")
			}
			_, err := ours.AcquireOrSteal(ctx)
			var held *tenure.HeldError
			if !errors.As(err, &held) || held.Holding.Holder != "peer" {
				t.Fatalf("got %v, want it held by peer", err)
			}
			if !theirs.renew() || !theirs.release() {
				t.Fatal("the peer cannot renew and release")
			}
			term := mustAcquire(t, ours)
			follows(term)
			if theirs.acquire() {
				t.Fatal("the peer acquired a held lease")
			}
			if theirs.renew() || theirs.release() {
				t.Fatal("the peer's stale write hit our term")
			}
			wantErr(t, ours.Renew(ctx, term), nil)
			wantErr(t, ours.Release(ctx, term), nil)

			// By expiry: ours is watched by its stamp, theirs by standing still.
			ours, stale, ttl := acquireBriefly(t, store, tenure.LeaseConfig{Holder: "ours", TTL: 100 * time.Millisecond})
			follows(stale)
			theirs.ttl = ttl
			for !theirs.acquire() {
				if time.Since(stale.AcquiredAt()) > patience {
					t.Fatal("the peer cannot steal an expired lease")
				}
			}
			if stale.Valid() {
				t.Fatal("the peer stole from a term that was valid")
			}
			err = ours.Renew(ctx, stale)
			var lost *tenure.LostError
			if !errors.As(err, &lost) || lost.To.Holder != "peer" {
				t.Errorf("stale renewal: got %v, want it lost to peer", err)
			}
			wantErr(t, ours.Release(ctx, stale), tenure.ErrLost)

			renewed := time.Now()
			if !theirs.renew() {
				t.Fatal("the peer cannot renew")
			}
			term, err = ours.StealExpired(ctx)
			for (errors.Is(err, tenure.ErrHeld) || errors.Is(err, tenure.ErrDeadline)) && time.Since(renewed) < patience {
				term, err = ours.StealExpired(ctx)
			}
			wantErr(t, err, nil)
			if waited := time.Since(renewed); waited < ttl {
				t.Errorf("stole after %v, before the TTL", waited)
			}
			lastToken = max(lastToken, term.Token())
			if theirs.renew() || theirs.release() {
				t.Fatal("the peer's stale write hit our term")
			}
			wantErr(t, ours.Release(ctx, term), nil)
		}
	})
}

// Its versions repeat, so that the version alone does not show that a record was
// written anew.
func TestAnotherProgramsLeaseThatWasReleasedAndTakenAgainHasNotStoodStill(t *testing.T) {
	const ttl = 200 * time.Millisecond
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		ours := newLease(t, store, tenure.LeaseConfig{TTL: ttl})
		theirs := &peer{t: t, db: db, ttl: ttl}
		if !theirs.acquire() {
			t.Fatal("the peer cannot acquire a free lease")
		}
		_, err := ours.StealExpired(t.Context())
		wantErr(t, err, tenure.ErrHeld)
		time.Sleep(ttl / 2)
		again := time.Now()
		if !theirs.release() || !theirs.acquire() {
			t.Fatal("the peer cannot release and acquire")
		}
		for err = tenure.ErrHeld; (errors.Is(err, tenure.ErrHeld) || errors.Is(err, tenure.ErrDeadline)) && time.Since(again) < patience; {
			_, err = ours.StealExpired(t.Context())
		}
		wantErr(t, err, nil)
		if waited := time.Since(again); waited < ttl {
			t.Errorf("stolen %v after it was written", waited)
		}
	})
}

func TestAForeignTableKeepsTheContract(t *testing.T) {
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		storetest.Run(t, func(t *testing.T) tenure.Store {
			execSQL(t, db, `DELETE FROM objects`)
			execSQL(t, db, `DELETE FROM objects_tombstones`)
			return store
		})
	})
}

func TestAnIDThatIsAnotherTypesIsAClearError(t *testing.T) {
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		execSQL(t, db, `INSERT INTO objects (object_type, id, payload, created_at_ms, updated_at_ms) VALUES ('widget', $1, $2, 0, 0)`,
			leaseKey.ID, []byte{})
		_, err := newLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
		if !errors.Is(err, tenure.ErrTaken) || !strings.Contains(err.Error(), "widget/singleton") {
			t.Errorf("got %v, want ErrTaken that names widget/singleton", err)
		}
		_, err = store.PutIf(t.Context(), tenure.Object{Key: leaseKey}, tenure.Unconditional())
		wantErr(t, err, tenure.ErrTaken)
	})
}

func TestAnotherProgramsOddLabelsDoNotHideItsLease(t *testing.T) {
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		for _, labels := range []string{`[1]`, `"x"`, `null`, `{"a":1,"b":{"c":"d"},"e":"f"}`} {
			execSQL(t, db, `DELETE FROM objects`)
			execSQL(t, db, `INSERT INTO objects (object_type, id, payload, labels, created_at_ms, updated_at_ms) VALUES ($1, $2, $3, $4, 0, 0)`,
				leaseKey.Type, leaseKey.ID, []byte(`{"holder":"peer"}`), labels)
			h, err := newLease(t, store, tenure.LeaseConfig{}).Read(t.Context())
			if err != nil || h.Holder != "peer" {
				t.Errorf("labels %s: got %+v, %v", labels, h, err)
			}
			if strings.HasPrefix(labels, "{") && (h.Labels["e"] != "f" || h.Labels["a"] != "1") {
				t.Errorf("labels %s: got %v", labels, h.Labels)
			}
		}
	})
}
