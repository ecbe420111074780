package databases_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// foreignStores runs a test on such a table of both databases.
func foreignStores(t *testing.T, test func(t *testing.T, store tenure.Store, db *sql.DB)) {
	t.Run("postgres", func(t *testing.T) {
		store, db := foreignPostgres(t)
		test(t, store, db)
	})
	t.Run("sqlite", func(t *testing.T) {
		store, db := foreignSQLite(t)
		test(t, store, db)
	})
}

func foreignPostgres(t *testing.T) (tenure.Store, *sql.DB) {
	t.Helper()
	url := testkit.PostgresURL(t)
	db := testkit.OpenSQL(t, "pgx", url)
	testkit.ExecSQL(t, db, fmt.Sprintf(testkit.ForeignTable, "BYTEA", "JSONB"))
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	return store, db
}

func foreignSQLite(t *testing.T) (tenure.Store, *sql.DB) {
	t.Helper()
	path := t.TempDir() + "/foreign.db"
	store := testkit.OpenSQLite(t, path)
	db := testkit.OpenSQL(t, "sqlite", "file:"+path+"?_pragma=busy_timeout(5000)")
	testkit.ExecSQL(t, db, fmt.Sprintf(testkit.ForeignTable, "BLOB", "TEXT"))
	testkit.Migrate(t, store)
	return store, db
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
	if testkit.ExecSQL(p.t, p.db, `INSERT INTO objects (object_type, id, name, payload, resource_version, created_at_ms, updated_at_ms)
		VALUES ($1, $2, 'reconciler-lease', $3, 1, $4, $4) ON CONFLICT DO NOTHING`, testkit.LeaseKey.Type, testkit.LeaseKey.ID, payload, now) == 1 {
		p.version = 1
		return true
	}
	var version, updated int64
	err := p.db.QueryRow(`SELECT resource_version, updated_at_ms FROM objects WHERE object_type = $1 AND id = $2`,
		testkit.LeaseKey.Type, testkit.LeaseKey.ID).Scan(&version, &updated)
	testkit.WantErr(p.t, err, nil)
	if now-updated < p.ttl.Milliseconds() {
		return false
	}
	p.version = version + 1
	return testkit.ExecSQL(p.t, p.db, `UPDATE objects SET payload = $1, resource_version = resource_version + 1, updated_at_ms = $2
		WHERE object_type = $3 AND id = $4 AND resource_version = $5`, payload, now, testkit.LeaseKey.Type, testkit.LeaseKey.ID, version) == 1
}

func (p *peer) renew() bool {
	p.t.Helper()
	p.version++
	return testkit.ExecSQL(p.t, p.db, `UPDATE objects SET resource_version = resource_version + 1, updated_at_ms = $1
		WHERE object_type = $2 AND id = $3 AND resource_version = $4`, time.Now().UnixMilli(), testkit.LeaseKey.Type, testkit.LeaseKey.ID, p.version-1) == 1
}

func (p *peer) release() bool {
	p.t.Helper()
	return testkit.ExecSQL(p.t, p.db, `DELETE FROM objects WHERE object_type = $1 AND id = $2 AND resource_version = $3`,
		testkit.LeaseKey.Type, testkit.LeaseKey.ID, p.version) == 1
}

func TestReplicasOfBothKindsTakeTheLeaseFromEachOther(t *testing.T) {
	testkit.Slow(t)
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
			ours := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "ours", TTL: theirs.ttl})
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
			term := testkit.MustAcquire(t, ours)
			follows(term)
			if theirs.acquire() {
				t.Fatal("the peer acquired a held lease")
			}
			if theirs.renew() || theirs.release() {
				t.Fatal("the peer's stale write hit our term")
			}
			testkit.WantErr(t, ours.Renew(ctx, term), nil)
			testkit.WantErr(t, ours.Release(ctx, term), nil)

			// By expiry: ours is watched by its stamp, theirs by standing still.
			ours, stale, ttl := testkit.AcquireBriefly(t, store, tenure.LeaseConfig{Holder: "ours", TTL: 100 * time.Millisecond})
			follows(stale)
			theirs.ttl = ttl
			for !theirs.acquire() {
				if time.Since(stale.AcquiredAt()) > testkit.Patience {
					t.Fatal("the peer cannot steal an expired lease")
				}
			}
			if stale.Valid() {
				t.Fatal("the peer stole from a term that was valid")
			}
			err = ours.Renew(ctx, stale)
			if !errors.Is(err, tenure.ErrLost) || !strings.Contains(err.Error(), "is held by peer") {
				t.Errorf("stale renewal: got %v, want it lost to peer", err)
			}
			testkit.WantErr(t, ours.Release(ctx, stale), tenure.ErrLost)

			renewed := time.Now()
			if !theirs.renew() {
				t.Fatal("the peer cannot renew")
			}
			term, err = stealInTime(ours, renewed)
			testkit.WantErr(t, err, nil)
			if waited := time.Since(renewed); waited < ttl {
				t.Errorf("stole after %v, before the TTL", waited)
			}
			lastToken = max(lastToken, term.Token())
			if theirs.renew() || theirs.release() {
				t.Fatal("the peer's stale write hit our term")
			}
			testkit.WantErr(t, ours.Release(ctx, term), nil)
		}
	})
}

// stealInTime begins a term when the peer's has expired. A steal that was answered too late has
// given the lease back.
func stealInTime(ours *tenure.Lease, renewed time.Time) (*tenure.Term, error) {
	for steal := ours.StealExpired; ; {
		term, err := steal(context.Background())
		switch {
		case time.Since(renewed) > testkit.Patience:
			return term, err
		case errors.Is(err, tenure.ErrDeadline):
			steal = ours.AcquireOrSteal
		case !errors.Is(err, tenure.ErrHeld):
			return term, err
		}
	}
}

// Its versions repeat, so that the version alone does not show that a record was
// rewritten.
func TestAnotherProgramsLeaseThatWasReleasedAndTakenAgainHasNotStoodStill(t *testing.T) {
	const ttl = 200 * time.Millisecond
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		ours := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: ttl})
		theirs := &peer{t: t, db: db, ttl: ttl}
		if !theirs.acquire() {
			t.Fatal("the peer cannot acquire a free lease")
		}
		_, err := ours.StealExpired(t.Context())
		testkit.WantErr(t, err, tenure.ErrHeld)
		time.Sleep(ttl / 2)
		again := time.Now()
		if !theirs.release() || !theirs.acquire() {
			t.Fatal("the peer cannot release and acquire")
		}
		_, err = stealInTime(ours, again)
		testkit.WantErr(t, err, nil)
		if waited := time.Since(again); waited < ttl {
			t.Errorf("stolen %v after it was written", waited)
		}
	})
}

func TestAForeignTableKeepsTheContract(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	for name, open := range map[string]func(*testing.T) (tenure.Store, *sql.DB){"postgres": foreignPostgres, "sqlite": foreignSQLite} {
		t.Run(name, func(t *testing.T) {
			// A database for each rule: a write that one has cancelled may still land.
			storetest.Run(t, func(t *testing.T) tenure.Store { store, _ := open(t); return store })
		})
	}
}

func TestAnIDThatIsAnotherTypesIsAClearError(t *testing.T) {
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		testkit.ExecSQL(t, db, `INSERT INTO objects (object_type, id, payload, created_at_ms, updated_at_ms) VALUES ('widget', $1, $2, 0, 0)`,
			testkit.LeaseKey.ID, []byte{})
		_, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
		if !errors.Is(err, tenure.ErrTaken) || !strings.Contains(err.Error(), "widget/singleton") {
			t.Errorf("got %v, want ErrTaken that names widget/singleton", err)
		}
		_, err = store.PutIf(t.Context(), tenure.Object{Key: testkit.LeaseKey}, tenure.Unconditional())
		testkit.WantErr(t, err, tenure.ErrTaken)
	})
}

func TestAnotherProgramsOddLabelsDoNotHideItsLease(t *testing.T) {
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		for _, labels := range []string{`[1]`, `"x"`, `null`, `{"a":1,"b":{"c":"d"},"e":"f"}`} {
			testkit.ExecSQL(t, db, `DELETE FROM objects`)
			testkit.ExecSQL(t, db, `INSERT INTO objects (object_type, id, payload, labels, created_at_ms, updated_at_ms) VALUES ($1, $2, $3, $4, 0, 0)`,
				testkit.LeaseKey.Type, testkit.LeaseKey.ID, []byte(`{"holder":"peer"}`), labels)
			h, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).Read(t.Context())
			if err != nil || h.Holder != "peer" {
				t.Errorf("labels %s: got %+v, %v", labels, h, err)
			}
			if strings.HasPrefix(labels, "{") && (h.Labels["e"] != "f" || h.Labels["a"] != "1") {
				t.Errorf("labels %s: got %v", labels, h.Labels)
			}
		}
	})
}

// wantRowTakenOver checks that a row of any content under the lease's key can be read and
// replaced, and as a lease is held until it expires. insert puts it there.
func wantRowTakenOver(t *testing.T, store tenure.Store, insert func()) {
	t.Helper()
	ctx := t.Context()
	get := func() tenure.Object {
		t.Helper()
		obj, err := store.Get(ctx, testkit.LeaseKey)
		if err != nil || obj.Version <= 0 {
			t.Fatalf("got %+v, %v; want an object with a positive version", obj, err)
		}
		return obj
	}
	wantVersion := func(what string, version int64, err error) {
		t.Helper()
		if err != nil || version <= 0 || version > 1<<62 {
			t.Fatalf("%s: got version %d, %v; want one that can be counted on", what, version, err)
		}
	}
	free := func(version int64) {
		t.Helper()
		testkit.WantErr(t, store.DeleteIf(ctx, testkit.LeaseKey, tenure.IfVersion(version)), nil)
	}

	insert()
	obj := get()
	found := 0
	for listed, err := range tenure.List(ctx, store, testkit.LeaseKey.Type) {
		found++
		if err != nil || listed.Key != testkit.LeaseKey || listed.Version != obj.Version {
			t.Errorf("the list has %+v, %v; want %+v", listed, err, obj)
		}
	}
	if found != 1 {
		t.Errorf("the list has %d objects, want 1", found)
	}
	other := obj.Version ^ 1<<40
	_, err := store.PutIf(ctx, tenure.Object{Key: testkit.LeaseKey}, tenure.IfAbsent())
	testkit.WantErr(t, err, tenure.ErrExists)
	_, err = store.PutIf(ctx, tenure.Object{Key: testkit.LeaseKey}, tenure.IfVersion(other))
	testkit.WantErr(t, err, tenure.ErrConflict)
	testkit.WantErr(t, store.DeleteIf(ctx, testkit.LeaseKey, tenure.IfVersion(other)), tenure.ErrConflict)
	free(obj.Version)
	created, err := store.PutIf(ctx, tenure.Object{Key: testkit.LeaseKey}, tenure.IfAbsent())
	wantVersion("created after the row was deleted", created.Version, err)
	free(created.Version)

	insert()
	put, err := store.PutIf(ctx, tenure.Object{Key: testkit.LeaseKey}, tenure.Unconditional())
	wantVersion("put in its place", put.Version, err)
	free(put.Version)

	insert()
	const ttl = 50 * time.Millisecond
	acquire := func(lease *tenure.Lease) *tenure.Term {
		t.Helper()
		term, err := lease.AcquireOrSteal(ctx)
		for began := time.Now(); errors.Is(err, tenure.ErrHeld) || errors.Is(err, tenure.ErrDeadline); { // the latter on a slow machine
			if time.Since(began) > time.Minute {
				break
			}
			time.Sleep(ttl / 10)
			term, err = lease.AcquireOrSteal(ctx)
		}
		if err != nil {
			t.Fatal(err)
		}
		wantVersion("taken over", term.Token(), err)
		if now := get().Version; now != term.Token() {
			t.Errorf("the token is %d, the version %d", term.Token(), now)
		}
		return term
	}
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a", TTL: ttl})
	witness := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "b", TTL: ttl})
	holding, err := witness.Read(ctx)
	testkit.WantErr(t, err, nil)
	if holding.TTL > ttl {
		t.Skip("it would take too long to expire")
	}
	term := acquire(lease)
	if err := lease.Renew(ctx, term); !errors.Is(err, tenure.ErrDeadline) {
		testkit.WantErr(t, err, nil)
	}
	testkit.WantErr(t, lease.Release(ctx, term), nil)
	next := acquire(witness)
	if next.Token() <= term.Token() {
		t.Errorf("token %d follows %d", next.Token(), term.Token())
	}
	testkit.WantErr(t, witness.Release(ctx, next), nil)
}

// Versions that other programs may have, and records: without a term and with one.
var (
	oddVersions = []int64{0, 1, -1, math.MinInt64, math.MaxInt64, math.MaxInt64 - 1, 1<<62 - 2, 1 << 62, 1<<62 + 1, 1 << 61, -1 << 62, -1<<62 - 1}
	peerRecords = []string{`{"holder":"peer"}`, `{"holder":"peer","term":"4bb2c0c5","ttl_ms":20,"acquired_at_ms":1}`, "\xff"}
)

// sqliteClass is a storage class of SQLite.
type sqliteClass = byte

const (
	sqliteNull sqliteClass = iota
	sqliteInteger
	sqliteReal
	sqliteText
	sqliteBlob
)

// sqliteValue is a value of a class: of the number, or of the text.
func sqliteValue(class sqliteClass, number float64, text string) any {
	switch class % (sqliteBlob + 1) {
	case sqliteNull:
		return nil
	case sqliteInteger:
		n, _ := strconv.ParseInt(text, 10, 64)
		return n
	case sqliteReal:
		return number
	case sqliteText:
		return text
	default:
		return []byte(text)
	}
}

func FuzzASQLiteRowOfAnyContentIsTakenOver(f *testing.F) {
	now := fmt.Sprint(time.Now().UnixMilli())
	for _, version := range oddVersions {
		f.Add(sqliteInteger, 0.0, fmt.Sprint(version), sqliteInteger, 0.0, now, sqliteText, peerRecords[1])
	}
	for _, version := range []float64{0, 1.5, -1.5, 9.3e18, -9.3e18, 1e300, math.Inf(1), math.Inf(-1), 1e17} {
		f.Add(sqliteReal, version, "", sqliteReal, 1.7e12+0.25, "", sqliteBlob, peerRecords[1])
	}
	for _, version := range []string{"seven", "", "7", "-7", "7.5", "99999999999999999999", fmt.Sprint(math.MaxInt64), "0x10", "\x00", "\xff"} {
		f.Add(sqliteText, 0.0, version, sqliteText, 0.0, now, sqliteText, peerRecords[1])
	}
	for _, payload := range peerRecords {
		f.Add(sqliteBlob, 0.0, "7", sqliteText, 0.0, "2026-01-01 00:00:00", sqliteBlob, payload)
		f.Add(sqliteBlob, 0.0, "\x00\xff", sqliteBlob, 0.0, now, sqliteText, payload)
		f.Add(sqliteNull, 0.0, "", sqliteNull, 0.0, "", sqliteNull, payload)
		f.Add(sqliteInteger, 0.0, "7", sqliteInteger, 0.0, fmt.Sprint(math.MinInt64), sqliteInteger, payload)
		f.Add(sqliteInteger, 0.0, "7", sqliteInteger, 0.0, fmt.Sprint(math.MaxInt64), sqliteReal, payload)
		f.Add(sqliteInteger, 0.0, "7", sqliteReal, 1e300, "", sqliteReal, payload)
	}
	f.Fuzz(func(t *testing.T, versionClass byte, version float64, versionText string, otherClass byte, other float64, otherText string,
		payloadClass byte, payload string) {
		// What is stored depends on the column's type as well.
		for _, columns := range []string{
			`object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms`,
			`object_type TEXT, id TEXT, name TEXT, labels TEXT, payload BLOB, resource_version INTEGER, created_at_ms INTEGER, updated_at_ms INTEGER`,
			`object_type TEXT, id TEXT, name DATETIME, labels BOOLEAN, payload TEXT, resource_version TEXT, created_at_ms DATETIME, updated_at_ms TEXT`,
			`object_type TEXT, id TEXT, name BOOLEAN, labels DATE, payload TIMESTAMP, resource_version NUMERIC, created_at_ms REAL, updated_at_ms BOOLEAN`,
		} {
			synctest.Test(t, func(t *testing.T) {
				store := testkit.OpenSQLite(t, ":memory:")
				testkit.ExecSQL(t, store.DB(), `CREATE TABLE objects (`+columns+`, UNIQUE (object_type, id))`)
				testkit.Migrate(t, store)
				wantRowTakenOver(t, store, func() {
					other := sqliteValue(otherClass, other, otherText)
					testkit.ExecSQL(t, store.DB(), `INSERT INTO objects VALUES ($1, $2, $3, $3, $4, $5, $3, $3)`, testkit.LeaseKey.Type, testkit.LeaseKey.ID, other,
						sqliteValue(payloadClass, version, payload), sqliteValue(versionClass, version, versionText))
				})
			})
		}
	})
}

func FuzzAPostgresRowOfAnyContentIsTakenOver(f *testing.F) {
	url := testkit.PostgresURL(f)
	pool := testkit.PostgresPool(f, url)
	testkit.ExecPostgres(f, pool, `CREATE TABLE objects (object_type text, id text, name text, labels jsonb, payload bytea,
		resource_version bigint, created_at_ms bigint, updated_at_ms bigint, UNIQUE (object_type, id))`)
	store := testkit.OpenPostgres(f, url, tenure.PostgresConfig{})
	testkit.Migrate(f, store)
	const noVersion, noTimes, noPayload = 1, 2, 4
	for _, version := range oddVersions {
		f.Add(version, time.Now().UnixMilli(), byte(0), []byte(peerRecords[1]), `{}`)
	}
	for _, payload := range peerRecords {
		f.Add(int64(0), int64(math.MinInt64), byte(0), []byte(payload), `[]`)
		f.Add(int64(math.MaxInt64), int64(math.MaxInt64), byte(0), []byte(payload), `{"tenure.release":"{}"}`)
		f.Add(int64(7), int64(0), byte(noTimes), []byte(payload), ``)
		f.Add(int64(0), int64(0), byte(noVersion|noTimes), []byte(payload), `null`)
	}
	f.Add(int64(0), int64(0), byte(noVersion|noTimes|noPayload), []byte(nil), ``)
	f.Fuzz(func(t *testing.T, version, times int64, without byte, payload []byte, labels string) {
		unless := func(bit byte, value any) any {
			if without&bit != 0 {
				return nil
			}
			return value
		}
		wantRowTakenOver(t, store, func() {
			t.Helper()
			testkit.ExecPostgres(t, pool, `TRUNCATE objects`)
			_, err := pool.Exec(t.Context(), `INSERT INTO objects VALUES ($1, $2, NULL, nullif($3, '')::jsonb, $4, $5, $6, $6)`, testkit.LeaseKey.Type, testkit.LeaseKey.ID,
				labels, unless(noPayload, payload), unless(noVersion, version), unless(noTimes, times))
			if err != nil {
				t.Skip(err) // labels that are not JSON
			}
		})
	})
}

// Without a stamp nothing tells how old a record is, and its holder may be well.
func TestALeaseWithoutAStampIsNotOld(t *testing.T) {
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		term := testkit.MustAcquire(t, lease)
		alter, stamps := `SELECT 1`, []string{`'2026-01-01 00:00:00'`, `x'00'`}
		if _, postgres := store.(*tenure.PostgresStore); postgres {
			alter, stamps = `ALTER TABLE objects ALTER updated_at_ms DROP NOT NULL`, []string{`NULL`}
		}
		testkit.ExecSQL(t, db, alter)
		for _, stamp := range stamps {
			testkit.ExecSQL(t, db, `UPDATE objects SET updated_at_ms = `+stamp)
			_, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
			testkit.WantErr(t, err, tenure.ErrHeld)
			testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
		}
	})
}

// An ID that no key can have is nothing that anybody could ask for.
func TestOnSQLiteIDsThatAreNoTextAreNotListed(t *testing.T) {
	path := t.TempDir() + "/t.db"
	store := testkit.OpenSQLite(t, path)
	db := testkit.OpenSQL(t, "sqlite", "file:"+path+"?_pragma=busy_timeout(5000)")
	testkit.ExecSQL(t, db, `CREATE TABLE objects (object_type TEXT, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms, UNIQUE (object_type, id))`)
	testkit.Migrate(t, store)
	for _, id := range []any{nil, int64(5), 5.5, []byte("b"), []byte("\xff"), "", "a\x00", "b\xff", "n", "z"} {
		testkit.ExecSQL(t, db, `INSERT INTO objects (object_type, id) VALUES ('t', $1)`, id)
	}
	for i := range 600 { // more than one page
		testkit.ExecSQL(t, db, `INSERT INTO objects (object_type, id) VALUES ('t', $1)`, fmt.Sprintf("c%d\xff", i))
	}
	var ids []string
	for obj, err := range tenure.List(t.Context(), store, "t") {
		testkit.WantErr(t, err, nil)
		ids = append(ids, obj.Key.ID)
	}
	if !slices.Equal(ids, []string{"n", "z"}) {
		t.Errorf("got %q, want n and z", ids)
	}
	first, err := store.List(t.Context(), "t", "", 1)
	if err != nil || len(first) != 1 || first[0].Key.ID != "n" {
		t.Errorf("the first: got %v, %v; want n", first, err)
	}
}

// A version that nothing can follow must not be remembered, nor make forgotten what was.
func TestATombstoneIsNotPoisonedByAVersionThatNothingCanFollow(t *testing.T) {
	foreignStores(t, func(t *testing.T, store tenure.Store, db *sql.DB) {
		ctx := t.Context()
		bury := func(version int64) { // as if written while the clock was ahead, or by another program
			t.Helper()
			obj, err := store.PutIf(ctx, tenure.Object{Key: testkit.LeaseKey}, tenure.Unconditional())
			testkit.WantErr(t, err, nil)
			testkit.ExecSQL(t, db, `UPDATE objects SET resource_version = $1`, version)
			obj, err = store.Get(ctx, testkit.LeaseKey)
			testkit.WantErr(t, err, nil)
			testkit.WantErr(t, store.DeleteIf(ctx, testkit.LeaseKey, tenure.IfVersion(obj.Version)), nil)
		}
		wantAbove := func(ahead int64) {
			t.Helper()
			obj, err := store.PutIf(ctx, tenure.Object{Key: testkit.LeaseKey}, tenure.IfAbsent())
			if err != nil || obj.Version <= ahead || obj.Version >= 1<<62 {
				t.Errorf("created at version %d, %v; want one above %d", obj.Version, err, ahead)
			}
			testkit.WantErr(t, store.DeleteIf(ctx, testkit.LeaseKey, tenure.IfVersion(obj.Version)), nil)
		}
		bury(math.MaxInt64)
		wantAbove(0)
		ahead := time.Now().Add(72 * time.Hour).UnixMicro()
		bury(ahead)
		bury(math.MaxInt64)
		wantAbove(ahead)

		testkit.ExecSQL(t, db, `UPDATE objects_tombstones SET resource_version = $1`, int64(math.MaxInt64)) // from an older version of this module
		wantAbove(0)
		testkit.ExecSQL(t, db, `UPDATE objects_tombstones SET resource_version = $1`, int64(math.MaxInt64))
		ahead += time.Hour.Microseconds()
		bury(ahead)
		wantAbove(ahead)
	})
}
