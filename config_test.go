package tenure_test

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/claims/queuehttp"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/route"
	"github.com/tenurelib/tenure/schedule"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/storetest"
	"github.com/tenurelib/tenure/witness"
)

func TestConfigReturnsTheDefaultsToo(t *testing.T) {
	lease, err := tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: testkit.LeaseKey, Holder: "a", TTL: time.Minute, Labels: map[string]string{"k": "v"}})
	require.NoError(t, err)
	cfg := lease.Config()
	require.Equal(t, "reconciler_lease/singleton", cfg.Key.String())
	require.Equal(t, 2*time.Second, cfg.Margin)
	cfg.Labels["k"] = "changed" // it is a copy
	require.Equal(t, map[string]string{"k": "v"}, lease.Config().Labels)

	named := testkit.Must(tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: tenure.Key{ID: "sweeper"}}))
	require.Equal(t, tenure.Key{Type: "lease", ID: "sweeper"}, named.Key(), "as tenure status --key sweeper has it")

	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{})
	require.NoError(t, err)
	require.Equal(t, 20*time.Second, coordinator.Config().RenewInterval)
	require.Equal(t, 10*time.Second, coordinator.Config().AcquireInterval)
	require.Equal(t, 40*time.Second, coordinator.Config().RenewDeadline)
}

func TestACoordinatorTakesTheConfigOfAnother(t *testing.T) {
	lease, err := tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: testkit.LeaseKey, Holder: "a"})
	require.NoError(t, err)
	check := func(context.Context, tenure.Role) error { return nil }
	for _, cfg := range []tenure.CoordinatorConfig{{}, {Check: check, Trace: new(tenure.Trace)}} {
		one, err := tenure.NewCoordinator(lease, cfg)
		require.NoError(t, err)
		require.Same(t, cfg.Trace, one.Config().Trace)
		other, err := tenure.NewCoordinator(lease, one.Config())
		require.NoError(t, err)
		require.Equal(t, one.Config().CheckTimeout, other.Config().CheckTimeout)
	}
}

func TestAStoreWithoutHintsIsWatchedInVain(t *testing.T) {
	key := tenure.Key{Type: "t", ID: "i"}
	watch := tenure.Watch(tenure.Static(), key)
	defer watch.Stop()
	require.False(t, watch.Live())
	require.NoError(t, tenure.Wake(t.Context(), tenure.Static(), key))

	store := storetest.NewMem()
	watch = tenure.Watch(store, key)
	defer watch.Stop()
	require.True(t, watch.Live())
	require.NoError(t, tenure.Wake(t.Context(), store, key))
	<-watch.C()
}

// untouched is a store that must not be called.
type untouched struct{ t *testing.T }

func (s untouched) Get(context.Context, tenure.Key) (tenure.Object, error) {
	s.t.Error("the store was read")
	return tenure.Object{}, tenure.ErrNotFound
}

func (s untouched) PutIf(context.Context, tenure.Object, tenure.WriteCondition) (tenure.Object, error) {
	s.t.Error("the store was written")
	return tenure.Object{}, tenure.ErrExists
}

func (s untouched) DeleteIf(context.Context, tenure.Key, tenure.WriteCondition) error {
	s.t.Error("the store was written")
	return tenure.ErrNotFound
}

func (s untouched) Lineage(context.Context) (tenure.Lineage, error) {
	s.t.Error("the store was read")
	return tenure.Lineage{}, nil
}

func (untouched) Traits() tenure.Traits { return tenure.Traits{} }

// Connect makes it a SQLite driver that must not be connected to.
func (s untouched) Connect(context.Context) (driver.Conn, error) {
	s.t.Error("the database was connected to")
	return nil, driver.ErrBadConn
}

func (s untouched) Driver() driver.Driver { return nil }

// untouchedPool is a Postgres that must not be connected to.
func untouchedPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://127.0.0.1:1/none")
	testkit.WantErr(t, err, nil)
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		t.Error("the database was connected to")
		return errors.New("it must not be")
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	testkit.WantErr(t, err, nil)
	t.Cleanup(pool.Close)
	return pool
}

// wantURL is how each error of a connection string ends.
const wantURL = "; want postgres://user:password@host:port/database, with special characters in user and password as %XX"

// wantSetting is how the errors of those end that have a setting with an invalid value.
const wantSetting = "; correct this setting, or remove it from the URL if it is meant for another program"

func TestBadInputIsRefusedBeforeAnyIOByAnErrorThatNamesIt(t *testing.T) {
	ctx := t.Context()
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	late, cancel := context.WithTimeout(ctx, -1)
	defer cancel()

	pool := untouchedPool(t)
	db := sql.OpenDB(untouched{t})
	t.Cleanup(func() { db.Close() })
	type database interface {
		tenure.Store
		tenure.Lister
		tenure.Fencer
		tenure.Watcher
		tenure.Notifier
		Migrate(context.Context) error
		Close() error
	}
	postgres := func(cfg tenure.PostgresConfig) database {
		cfg.Logger = testkit.Quiet
		store := testkit.Must(tenure.NewPostgresStore(pool, cfg))
		t.Cleanup(func() { store.Close() })
		return store
	}
	sqlite := func(cfg tenure.SQLiteConfig) database {
		store := testkit.Must(tenure.NewSQLiteStore(db, cfg))
		t.Cleanup(func() { store.Close() })
		return store
	}
	pg, lite := postgres(tenure.PostgresConfig{}), sqlite(tenure.SQLiteConfig{Shared: true})
	key := tenure.Key{Type: "t", ID: "1"}
	obj := tenure.Object{Key: key}

	mem := storetest.NewMem()
	lease := testkit.NewLease(t, mem, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	foreign := testkit.MustAcquire(t, testkit.NewLease(t, mem, tenure.LeaseConfig{Key: tenure.Key{Type: "other", ID: "lease"}}))
	over := testkit.MustAcquire(t, testkit.NewLease(t, mem, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "over"}}))
	testkit.WantErr(t, testkit.NewLease(t, mem, tenure.LeaseConfig{Key: over.Key()}).Release(ctx, over), nil)
	overFenced, err := mem.Fence(over)
	testkit.WantErr(t, err, nil)
	idle := testkit.NewLease(t, untouched{t}, tenure.LeaseConfig{})
	job := func(context.Context) error { return nil }

	newLease := func(cfg tenure.LeaseConfig) error {
		cfg.Key = cmp.Or(cfg.Key, testkit.LeaseKey)
		_, err := tenure.NewLease(untouched{t}, cfg)
		return err
	}
	newCoordinator := func(cfg tenure.CoordinatorConfig) error { // TTL 30s, Margin 1s
		_, err := tenure.NewCoordinator(idle, cfg)
		return err
	}
	withJob := func(cfg tenure.CoordinatorConfig) error {
		cfg.Watch = job
		return newCoordinator(cfg)
	}
	withCheck := func(cfg tenure.CoordinatorConfig) error {
		cfg.Check = func(context.Context, tenure.Role) error { return nil }
		return withJob(cfg)
	}
	get := func(store tenure.Store, key tenure.Key) error { _, err := store.Get(ctx, key); return err }
	putIf := func(store tenure.Store, obj tenure.Object, cond tenure.WriteCondition) error {
		_, err := store.PutIf(ctx, obj, cond)
		return err
	}
	list := func(store tenure.Lister, objectType, after string, limit int) error {
		_, err := store.List(ctx, objectType, after, limit)
		return err
	}
	listAll := func(store tenure.Store, objectType string) (err error) {
		for _, err = range tenure.List(ctx, store, objectType) {
		}
		return err
	}
	openPostgres := func(url string) error {
		_, err := tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{Logger: testkit.Quiet})
		return err
	}
	openPostgresAs := func(cfg tenure.PostgresConfig) error {
		_, err := tenure.OpenPostgres(ctx, "postgres://127.0.0.1:1/none", cfg)
		return err
	}
	openSQLite := func(path string, cfg tenure.SQLiteConfig) error {
		_, err := tenure.OpenSQLite(ctx, path, cfg)
		return err
	}
	fence := func(store tenure.Store, term *tenure.Term) error {
		_, err := tenure.Fence(store, term)
		return err
	}
	fenced := func(store tenure.Store) tenure.Store {
		fenced, err := tenure.Fence(store, term)
		testkit.WantErr(t, err, nil)
		return fenced
	}
	fencedPostgres := func(term *tenure.Term, fn func(pgx.Tx) error) error {
		return pg.(*tenure.PostgresStore).Fenced(ctx, term, fn)
	}
	fencedSQLite := func(term *tenure.Term, fn func(*sql.Tx) error) error {
		return lite.(*tenure.SQLiteStore).Fenced(ctx, term, fn)
	}
	faulty := func(hook storetest.Hook) func() {
		return func() { storetest.Faulty(mem, hook).Get(ctx, key) }
	}

	type badInput struct {
		what string
		err  error
		is   error
		says string
	}
	tests := []badInput{
		{"a URL that is empty", openPostgres(""), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: the URL is empty"},
		{"a URL whose port is not a number", openPostgres("postgres://u:sEcrEt@host:port/db"), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: cannot parse the connection string: invalid port" + wantURL},
		{"a URL of another database", openPostgres("mysql://u:sEcrEt@host/db"), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: cannot parse the connection string" + wantURL},
		{"a URL that is only a word", openPostgres("localhost"), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: cannot parse the connection string" + wantURL},
		{"keywords whose port is not a number", openPostgres("host=h password=sEcrEt port=x"), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: cannot parse the connection string: invalid port" + wantURL},
		{"a pool without connections", openPostgres("postgres://h/db?pool_max_conns=0"), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: cannot parse the connection string: pool_max_conns too small" + wantSetting},
		{"a pool whose size is not a number", openPostgres("postgres://h/db?pool_max_conns=many"), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: cannot parse the connection string: cannot parse pool_max_conns" + wantSetting},
		{"an unknown sslmode", openPostgres("postgres://h/db?sslmode=maybe"), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: cannot parse the connection string: failed to configure TLS (sslmode is invalid)" + wantSetting},
		{"a timeout that is not a number", openPostgres("postgres://h/db?connect_timeout=soon"), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: cannot parse the connection string: invalid connect_timeout" + wantSetting},
		{"an unknown exec mode", openPostgres("postgres://h/db?default_query_exec_mode=fast"), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: cannot parse the connection string: invalid default_query_exec_mode" + wantSetting},
		{"a ListenURL whose port is not a number", openPostgresAs(tenure.PostgresConfig{ListenURL: "postgres://u:sEcrEt@host:port/db"}), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: ListenURL: cannot parse the connection string: invalid port" + wantURL},
		{"a Postgres table that is not valid text", openPostgresAs(tenure.PostgresConfig{Table: "a\x00b"}), tenure.ErrInvalid,
			`tenure: open Postgres: invalid argument: Table "a\x00b" is not UTF-8 text without NUL`},
		{"a Postgres table of tombstones", openPostgresAs(tenure.PostgresConfig{Table: "objects_tombstones"}), tenure.ErrInvalid,
			`tenure: open Postgres: invalid argument: Table "objects_tombstones" ends in "_tombstones", which is for the tombstones of table "objects"`},
		{"a Postgres table that is too long", openPostgresAs(tenure.PostgresConfig{Table: strings.Repeat("x", 53)}), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: Table \"" + strings.Repeat("x", 53) + "\" is too long by 1 bytes: with the suffix \"_tombstones\" Postgres would truncate it"},
		{"a schema that is too long", openPostgresAs(tenure.PostgresConfig{Schema: strings.Repeat("x", 64)}), tenure.ErrInvalid,
			"tenure: open Postgres: invalid argument: Schema \"" + strings.Repeat("x", 64) + "\" is too long by 1 bytes: Postgres would truncate it"},
		{"a schema that is not valid text", openPostgresAs(tenure.PostgresConfig{Schema: "\xff"}), tenure.ErrInvalid,
			`tenure: open Postgres: invalid argument: Schema "\xff" is not UTF-8 text without NUL`},
		{"a Postgres store whose table is not valid text", testkit.ErrOf(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Schema: "s", Table: "a\x00"})), tenure.ErrInvalid,
			`tenure: new Postgres store: invalid argument: Table "a\x00" is not UTF-8 text without NUL`},
		{"a SQLite store whose table is not valid text", testkit.ErrOf(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Table: "a\x00"})), tenure.ErrInvalid,
			`tenure: new SQLite store: invalid argument: Table "a\x00" is not UTF-8 text without NUL`},
		{"no pool", testkit.ErrOf(tenure.NewPostgresStore(nil, tenure.PostgresConfig{})), tenure.ErrInvalid,
			"tenure: new Postgres store: invalid argument: pool is nil"},

		{"a path that is empty", openSQLite("", tenure.SQLiteConfig{}), tenure.ErrInvalid,
			"tenure: open SQLite: invalid argument: path is empty"},
		{"a path with a NUL", openSQLite("a.db\x00b", tenure.SQLiteConfig{}), tenure.ErrInvalid,
			`tenure: open SQLite: invalid argument: path "a.db\x00b" has a NUL`},
		{"a path that is a URI", openSQLite("file:a.db?mode=ro", tenure.SQLiteConfig{}), tenure.ErrInvalid,
			`tenure: open SQLite: invalid argument: the path is a URI; NewSQLiteStore takes a database opened by one`},
		{"a SQLite table that is not valid text", openSQLite("a.db", tenure.SQLiteConfig{Table: "a\xff"}), tenure.ErrInvalid,
			`tenure: open SQLite a.db: invalid argument: Table "a\xff" is not UTF-8 text without NUL`},
		{"a SQLite table of tombstones", openSQLite("a.db", tenure.SQLiteConfig{Table: "A_Tombstones"}), tenure.ErrInvalid,
			`tenure: open SQLite a.db: invalid argument: Table "A_Tombstones" ends in "_tombstones", which is for the tombstones of table "A"`},
		{"a SQLite table that is SQLite's", openSQLite("a.db", tenure.SQLiteConfig{Table: "SQLite_objects"}), tenure.ErrInvalid,
			`tenure: open SQLite a.db: invalid argument: Table "SQLite_objects" begins with "sqlite_", which SQLite keeps for itself`},
		{"no database", testkit.ErrOf(tenure.NewSQLiteStore(nil, tenure.SQLiteConfig{})), tenure.ErrInvalid,
			"tenure: new SQLite store: invalid argument: db is nil"},

		{"a lease without a store", testkit.ErrOf(tenure.NewLease(nil, tenure.LeaseConfig{Key: testkit.LeaseKey})), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: store is nil"},
		{"a lease over a store that was never set", testkit.ErrOf(tenure.NewLease((*tenure.PostgresStore)(nil), tenure.LeaseConfig{Key: testkit.LeaseKey})), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: store is nil"},
		{"a drain without a store", testkit.ErrOf(tenure.NewDrain(nil, "a", nil)), tenure.ErrInvalid,
			"tenure: new drain: invalid argument: store is nil"},
		{"a drain over a store that was never set", testkit.ErrOf(tenure.NewDrain((*tenure.SQLiteStore)(nil), "a", nil)), tenure.ErrInvalid,
			"tenure: new drain: invalid argument: store is nil"},
		{"to drain without a store", tenure.SetDrain(ctx, nil, tenure.Drained{Replica: "a", Left: time.Hour}), tenure.ErrInvalid,
			"tenure: drain a: invalid argument: store is nil"},
		{"to drain for no time", tenure.SetDrain(ctx, untouched{t}, tenure.Drained{Replica: "a"}), tenure.ErrInvalid,
			"tenure: drain a: invalid argument: a replica can't be drained for 0s"},
		{"to undrain without a store", tenure.ClearDrain(ctx, nil, "a"), tenure.ErrInvalid,
			"tenure: undrain a: invalid argument: store is nil"},
		{"a lease without a key", testkit.ErrOf(tenure.NewLease(untouched{t}, tenure.LeaseConfig{TTL: 1})), tenure.ErrInvalid,
			`tenure: new lease: invalid argument: Key is empty: name the lease, for example Key{ID: "sweeper"}` + "\n" + `invalid argument: TTL 1ns is below 1ms: did you mean 1*time.Second?`},
		{"a lease whose key has no id", newLease(tenure.LeaseConfig{Key: tenure.Key{Type: "x"}}), tenure.ErrInvalid,
			`tenure: new lease: invalid argument: key "x/" has an empty id`},
		{"a lease whose key is not valid text", newLease(tenure.LeaseConfig{Key: tenure.Key{Type: "x", ID: "\xff"}, Name: "x"}), tenure.ErrInvalid,
			`tenure: new lease: invalid argument: key id "\xff" is not UTF-8 text without NUL`},
		{"a lease whose name is not valid text", newLease(tenure.LeaseConfig{Name: "a\x00"}), tenure.ErrInvalid,
			`tenure: new lease: invalid argument: name "a\x00" is not UTF-8 text without NUL`},
		{"a lease whose label is not valid text", newLease(tenure.LeaseConfig{Labels: map[string]string{"addr": "\xff"}}), tenure.ErrInvalid,
			`tenure: new lease: invalid argument: label "addr": "\xff" is not UTF-8 text without NUL`},
		{"a holder that is not valid text", newLease(tenure.LeaseConfig{Holder: "a\x00"}), tenure.ErrInvalid,
			`tenure: new lease: invalid argument: holder "a\x00" is not UTF-8 text without NUL`},
		{"a holder that fits in no line of a log", newLease(tenure.LeaseConfig{Holder: strings.Repeat("x", 257)}), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: holder has 257 bytes, more than 256"},
		{"a TTL that is negative", newLease(tenure.LeaseConfig{TTL: -time.Second}), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: TTL -1s is not between 10ms and 8760h0m0s"},
		{"a TTL that is too short", newLease(tenure.LeaseConfig{TTL: 30}), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: TTL 30ns is below 1ms: did you mean 30*time.Second?"},
		{"a TTL that is too long", newLease(tenure.LeaseConfig{TTL: math.MaxInt64}), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: TTL 2562047h47m16.854775807s is not between 10ms and 8760h0m0s"},
		{"a margin that is negative", newLease(tenure.LeaseConfig{Margin: -1}), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: Margin -1ns is not between 0 and the TTL of 30s"},
		{"a margin that leaves nothing", newLease(tenure.LeaseConfig{TTL: time.Second, Margin: time.Second}), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: Margin 1s is not between 0 and the TTL of 1s"},
		{"an unknown expiry", newLease(tenure.LeaseConfig{Expiry: 7}), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: Expiry 7 is neither ExpiryStoreClock nor ExpiryObserved"},
		{"a unique holder without a name", newLease(tenure.LeaseConfig{AssumeUniqueHolder: true}), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: AssumeUniqueHolder needs a Holder that only this process has, and Holder is empty"},
		{"all of these at once", newLease(tenure.LeaseConfig{Key: tenure.Key{Type: "x"}, TTL: 1, Holder: "\x00", Expiry: 2}), tenure.ErrInvalid,
			"tenure: new lease: invalid argument: key \"x/\" has an empty id\ninvalid argument: holder \"\\x00\" is not UTF-8 text without NUL\ninvalid argument: TTL 1ns is below 1ms: did you mean 1*time.Second?\ninvalid argument: Expiry 2 is neither ExpiryStoreClock nor ExpiryObserved"},

		{"a coordinator without a lease", testkit.ErrOf(tenure.NewCoordinator(nil, tenure.CoordinatorConfig{Watch: job})), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: lease is nil"},
		{"a renewal in the past", withJob(tenure.CoordinatorConfig{RenewInterval: -time.Second}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: RenewInterval -1s is negative"},
		{"a renewal that comes too late", withJob(tenure.CoordinatorConfig{RenewInterval: 25 * time.Second}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: RenewDeadline 20s is not at least 1s above RenewInterval 25s"},
		{"a renewal that never comes", withJob(tenure.CoordinatorConfig{RenewInterval: math.MaxInt64}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: RenewDeadline 20s is not at least 1s above RenewInterval 2562047h47m16.854775807s"},
		{"an attempt in the past", withJob(tenure.CoordinatorConfig{AcquireInterval: -1}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: AcquireInterval -1ns is not between 0 and 8760h0m0s"},
		{"an attempt that never comes", withJob(tenure.CoordinatorConfig{AcquireInterval: math.MaxInt64}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: AcquireInterval 2562047h47m16.854775807s is not between 0 and 8760h0m0s"},
		{"a renewal whose unit is missing", withJob(tenure.CoordinatorConfig{RenewInterval: 10}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: RenewInterval 10ns is below 1ms: did you mean 10*time.Second?"},
		{"a deadline in the past", withJob(tenure.CoordinatorConfig{RenewDeadline: -time.Second}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: RenewDeadline -1s is not at least 1s above RenewInterval 10s"},
		{"a deadline before time began", withJob(tenure.CoordinatorConfig{RenewDeadline: math.MinInt64}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: RenewDeadline -2562047h47m16.854775808s is not at least 1s below TTL 30s less Margin 1s: the job would have no time to return"},
		{"a deadline behind the TTL", withJob(tenure.CoordinatorConfig{RenewDeadline: time.Minute}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: RenewDeadline 1m0s is not at least 1s below TTL 30s less Margin 1s: the job would have no time to return"},
		{"a deadline that never comes", withJob(tenure.CoordinatorConfig{RenewDeadline: math.MaxInt64}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: RenewDeadline 2562047h47m16.854775807s is not at least 1s below TTL 30s less Margin 1s: the job would have no time to return"},
		{"a timeout without a check", withJob(tenure.CoordinatorConfig{CheckTimeout: time.Second}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: CheckTimeout is 1s, and Check is nil"},
		{"failures without a check", withJob(tenure.CoordinatorConfig{CheckFailures: 3}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: CheckFailures is 3, and Check is nil"},
		{"a check of negative time", withCheck(tenure.CoordinatorConfig{CheckTimeout: -time.Second}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: CheckTimeout -1s is not between 0 and the RenewDeadline, 20s: there would be no time for the renewal"},
		{"a check that leaves no time", withCheck(tenure.CoordinatorConfig{CheckTimeout: 20 * time.Second}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: CheckTimeout 20s is not between 0 and the RenewDeadline, 20s: there would be no time for the renewal"},
		{"a negative number of failures", withCheck(tenure.CoordinatorConfig{CheckFailures: -1}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: CheckFailures -1 is negative"},
		{"a negative number of confirmations", withJob(tenure.CoordinatorConfig{Confirmations: -1}), tenure.ErrInvalid,
			"tenure: new coordinator: invalid argument: Confirmations -1 is negative"},

		{"to renew no term", idle.Renew(ctx, nil), tenure.ErrInvalid,
			"tenure: renew reconciler_lease/singleton: invalid argument: no term is given"},
		{"to renew an empty term", idle.Renew(ctx, &tenure.Term{}), tenure.ErrInvalid,
			"tenure: renew reconciler_lease/singleton: invalid argument: no term is given"},
		{"to renew a term of another lease", idle.Renew(ctx, foreign), tenure.ErrInvalid,
			"tenure: renew reconciler_lease/singleton: invalid argument: the term is one of other/lease"},
		{"to release no term", idle.Release(ctx, nil), tenure.ErrInvalid,
			"tenure: release reconciler_lease/singleton: invalid argument: no term is given"},
		{"to release an empty term", idle.Release(ctx, &tenure.Term{}), tenure.ErrInvalid,
			"tenure: release reconciler_lease/singleton: invalid argument: no term is given"},
		{"to release a term of another lease", idle.Release(ctx, foreign), tenure.ErrInvalid,
			"tenure: release reconciler_lease/singleton: invalid argument: the term is one of other/lease"},
		{"the token of no term", testkit.PanicOf(func() { tenure.TermFromContext(ctx).Token() }), testkit.ErrPanicked,
			"panic: tenure: Token of a nil Term; TermFromContext returns one for a context that does not come from a job"},

		{"a fence for no store", fence(nil, term), tenure.ErrInvalid,
			"tenure: fence: invalid argument: store is nil"},
		{"a fence for a store that has none", fence(untouched{t}, term), errors.ErrUnsupported,
			"tenure: fence: unsupported operation: tenure_test.untouched is not a Fencer, and has no method Unwrap() tenure.Store that returns one"},
		{"a fence twice", fence(fenced(pg), term), errors.ErrUnsupported,
			"tenure: fence: unsupported operation: the store is fenced already"},
		{"Fenced on Postgres by no term", fencedPostgres(nil, nil), tenure.ErrInvalid,
			"tenure: fenced: invalid argument: no term or claim is given; see TermFromContext"},
		{"Fenced on Postgres by an empty term", fencedPostgres(&tenure.Term{}, nil), tenure.ErrInvalid,
			"tenure: fenced: invalid argument: no term or claim is given; see TermFromContext"},
		{"Fenced on Postgres by a claim that is nil", pg.(*tenure.PostgresStore).Fenced(ctx, (*claims.Claim)(nil), nil), tenure.ErrInvalid,
			"tenure: fenced: invalid argument: no term or claim is given; see TermFromContext"},
		{"Fenced on Postgres by a term that is over", fencedPostgres(over, nil), tenure.ErrLost,
			"tenure: fenced: term of lease/over: lease lost"},
		{"Fenced on Postgres with nothing to do", fencedPostgres(term, nil), tenure.ErrInvalid,
			"tenure: fenced: invalid argument: fn is nil"},
		{"Fenced on SQLite by no term", fencedSQLite(nil, nil), tenure.ErrInvalid,
			"tenure: fenced: invalid argument: no term or claim is given; see TermFromContext"},
		{"Fenced on SQLite by an empty term", fencedSQLite(&tenure.Term{}, nil), tenure.ErrInvalid,
			"tenure: fenced: invalid argument: no term or claim is given; see TermFromContext"},
		{"Fenced on SQLite by a claim that is nil", lite.(*tenure.SQLiteStore).Fenced(ctx, (*claims.Claim)(nil), nil), tenure.ErrInvalid,
			"tenure: fenced: invalid argument: no term or claim is given; see TermFromContext"},
		{"Fenced on SQLite by a term that is over", fencedSQLite(over, nil), tenure.ErrLost,
			"tenure: fenced: term of lease/over: lease lost"},
		{"Fenced on SQLite with nothing to do", fencedSQLite(term, nil), tenure.ErrInvalid,
			"tenure: fenced: invalid argument: fn is nil"},

		{"a list without a store", listAll(nil, "t"), tenure.ErrInvalid,
			"tenure: list t: invalid argument: store is nil"},
		{"a list of a store that has none", listAll(untouched{t}, "t"), errors.ErrUnsupported,
			"tenure: list t: unsupported operation: tenure_test.untouched is not a Lister"},
		{"to get from a static store", get(tenure.Static(), key), tenure.ErrNotFound,
			"tenure: get t/1: object not found"},
		{"to put into a static store", putIf(tenure.Static(), obj, tenure.IfAbsent()), errors.ErrUnsupported,
			"tenure: put t/1: unsupported operation: a static store keeps nothing"},
		{"to delete from a static store", tenure.Static().DeleteIf(ctx, key, tenure.IfVersion(1)), errors.ErrUnsupported,
			"tenure: delete t/1: unsupported operation: a static store keeps nothing"},
		{"to list a static store", listAll(tenure.Static(), "t"), errors.ErrUnsupported,
			"tenure: list t: unsupported operation: *tenure.static is not a Lister"},
		{"to fence a static store", fence(tenure.Static(), term), errors.ErrUnsupported,
			"tenure: fence: unsupported operation: *tenure.static is not a Fencer, and has no method Unwrap() tenure.Store that returns one"},

		{"to get nothing from memory", get(mem, tenure.Key{}), tenure.ErrInvalid,
			`storetest: get /: invalid argument: key "/" has an empty type`},
		{"to put into memory at version 0", putIf(mem, obj, tenure.IfVersion(0)), tenure.ErrInvalid,
			"storetest: put t/1: invalid argument: version 0 is not positive"},
		{"to list none from memory", list(mem, "t", "", 0), tenure.ErrInvalid,
			"storetest: list t: invalid argument: limit 0 is not positive"},
		{"a fence in memory of no term", testkit.ErrOf(mem.Fence(nil)), tenure.ErrInvalid,
			"storetest: fence: invalid argument: no term is given"},
		{"to put into memory by a fence of a term that is over", putIf(overFenced, obj, tenure.IfAbsent()), tenure.ErrLost,
			"storetest: put t/1: term of lease/over: lease lost"},
		{"faults without a store", testkit.PanicOf(func() { storetest.Faulty(nil, nil) }), testkit.ErrPanicked,
			"panic: storetest: Faulty: store is nil"},
		{"a hook that asks twice", testkit.PanicOf(faulty(func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			do(ctx)
			return do(ctx)
		})), testkit.ErrPanicked,
			"panic: storetest: a hook called do twice"},
		{"a hook that does not ask", testkit.PanicOf(faulty(func(context.Context, storetest.Call, func(context.Context) error) error { return nil })), testkit.ErrPanicked,
			"panic: storetest: a hook returned nil before do had"},
	}
	for _, store := range []database{pg, lite} {
		large := tenure.Object{Key: key, Payload: make([]byte, tenure.MaxPayload+1)}
		everywhere := []badInput{
			{"to get nothing", get(store, tenure.Key{}), tenure.ErrInvalid,
				`tenure: get /: invalid argument: key "/" has an empty type`},
			{"to get of no type", get(store, tenure.Key{ID: "1"}), tenure.ErrInvalid,
				`tenure: get /1: invalid argument: key "/1" has an empty type`},
			{"to get of no id", get(store, tenure.Key{Type: "t"}), tenure.ErrInvalid,
				`tenure: get t/: invalid argument: key "t/" has an empty id`},
			{"to get a key that is not valid text", get(store, tenure.Key{Type: "t\x00", ID: "\xff"}), tenure.ErrInvalid,
				"tenure: get t\x00/\xff: invalid argument: key type \"t\\x00\" is not UTF-8 text without NUL\ninvalid argument: key id \"\\xff\" is not UTF-8 text without NUL"},
			{"to put nothing", putIf(store, tenure.Object{}, tenure.Unconditional()), tenure.ErrInvalid,
				`tenure: put /: invalid argument: key "/" has an empty type`},
			{"to put a name that is not valid text", putIf(store, tenure.Object{Key: key, Name: "\xff"}, tenure.IfAbsent()), tenure.ErrInvalid,
				`tenure: put t/1: invalid argument: name "\xff" is not UTF-8 text without NUL`},
			{"to put a label that is not valid text", putIf(store, tenure.Object{Key: key, Labels: map[string]string{"a\x00": "b"}}, tenure.IfAbsent()), tenure.ErrInvalid,
				`tenure: put t/1: invalid argument: label "a\x00" is not UTF-8 text without NUL`},
			{"to put a label's value that is not valid text", putIf(store, tenure.Object{Key: key, Labels: map[string]string{"a": "\x00"}}, tenure.IfAbsent()), tenure.ErrInvalid,
				`tenure: put t/1: invalid argument: label "a": "\x00" is not UTF-8 text without NUL`},
			{"to put a payload that is too large", putIf(store, large, tenure.IfAbsent()), tenure.ErrInvalid,
				"tenure: put t/1: invalid argument: payload of t/1 has 1048577 bytes, more than 1048576"},
			{"to put at version 0", putIf(store, obj, tenure.IfVersion(0)), tenure.ErrInvalid,
				"tenure: put t/1: invalid argument: version 0 is not positive"},
			{"to put at a negative version", putIf(store, obj, tenure.IfVersion(-7)), tenure.ErrInvalid,
				"tenure: put t/1: invalid argument: version -7 is not positive"},
			{"to put too much at version 0", putIf(store, large, tenure.IfVersion(0)), tenure.ErrInvalid,
				"tenure: put t/1: invalid argument: payload of t/1 has 1048577 bytes, more than 1048576\ninvalid argument: version 0 is not positive"},
			{"to put the lease through its fence", putIf(fenced(store), tenure.Object{Key: term.Key()}, tenure.Unconditional()), tenure.ErrInvalid,
				"tenure: put reconciler_lease/singleton: invalid argument: the lease's own object can't be written through its fence"},
			{"to delete nothing", store.DeleteIf(ctx, tenure.Key{}, tenure.IfVersion(1)), tenure.ErrInvalid,
				`tenure: delete /: invalid argument: key "/" has an empty type`},
			{"to delete version 0", store.DeleteIf(ctx, key, tenure.IfVersion(0)), tenure.ErrInvalid,
				"tenure: delete t/1: invalid argument: version 0 is not positive"},
			{"to delete a negative version", store.DeleteAndWake(ctx, key, tenure.IfVersion(-1)), tenure.ErrInvalid,
				"tenure: delete t/1: invalid argument: version -1 is not positive"},
			{"to delete the lease through its fence", fenced(store).DeleteIf(ctx, term.Key(), tenure.IfVersion(1)), tenure.ErrInvalid,
				"tenure: delete reconciler_lease/singleton: invalid argument: the lease's own object can't be written through its fence"},
			{"to list none", list(store, "t", "", 0), tenure.ErrInvalid,
				"tenure: list t/: invalid argument: limit 0 is not positive"},
			{"to list less than none", list(store, "t", "", -1), tenure.ErrInvalid,
				"tenure: list t/: invalid argument: limit -1 is not positive"},
			{"to list no type", listAll(store, ""), tenure.ErrInvalid,
				"tenure: list /: invalid argument: the object type is empty"},
			{"to list a type that is not valid text", list(store, "\xff", "", 1), tenure.ErrInvalid,
				"tenure: list \xff/: invalid argument: object type \"\\xff\" is not UTF-8 text without NUL"},
			{"to list after an ID that is not valid text", list(store, "t", "\x00", 1), tenure.ErrInvalid,
				`tenure: list t/: invalid argument: after "\x00" is not UTF-8 text without NUL`},
			{"a fence of nothing", testkit.ErrOf(store.Fence(nil)), tenure.ErrInvalid,
				"tenure: fence: invalid argument: no term or claim is given; see TermFromContext"},
			{"a fence of no term", testkit.ErrOf(store.Fence(tenure.TermFromContext(ctx))), tenure.ErrInvalid,
				"tenure: fence: invalid argument: no term or claim is given; see TermFromContext"},
			{"a fence of a claim that is nil", testkit.ErrOf(store.Fence((*claims.Claim)(nil))), tenure.ErrInvalid,
				"tenure: fence: invalid argument: no term or claim is given; see TermFromContext"},
			{"a fence of no claim", testkit.ErrOf(store.Fence(claims.Claim{Key: key})), tenure.ErrInvalid,
				`tenure: fence: invalid argument: no claim is given: "t/1" has no session or no token`},
			{"a fence of an empty term", testkit.ErrOf(store.Fence(&tenure.Term{})), tenure.ErrInvalid,
				"tenure: fence: invalid argument: no term or claim is given; see TermFromContext"},
			{"a fence of a term that is over", fence(store, over), tenure.ErrLost,
				"tenure: fence: term of lease/over: lease lost"},
			{"to get when it was cancelled", testkit.ErrOf(store.Get(canceled, key)), context.Canceled,
				"tenure: get t/1: context canceled"},
			{"to put when it was cancelled", testkit.ErrOf(store.PutIf(canceled, obj, tenure.IfVersion(1))), context.Canceled,
				"tenure: put t/1: context canceled"},
			{"to delete when it is too late", store.DeleteIf(late, key, tenure.IfVersion(1)), context.DeadlineExceeded,
				"tenure: delete t/1: context deadline exceeded"},
			{"to list when it is too late", testkit.ErrOf(store.List(late, "t", "", 1)), context.DeadlineExceeded,
				"tenure: list t/: context deadline exceeded"},
			{"to migrate when it was cancelled", store.Migrate(canceled), context.Canceled,
				`tenure: migrate "objects": context canceled`},
		}
		for _, test := range everywhere {
			test.what += fmt.Sprintf(" (%T)", store)
			tests = append(tests, test)
		}
	}
	for _, test := range tests {
		if !errors.Is(test.err, test.is) {
			t.Errorf("%s: got %v, want by errors.Is %v", test.what, test.err, test.is)
		}
		if got := fmt.Sprint(test.err); got != test.says {
			t.Errorf("%s:\n got %s\nwant %s", test.what, got, test.says)
		}
	}
}

func TestATermOfNothingIsNeverValid(t *testing.T) {
	for _, term := range []*tenure.Term{nil, {}} {
		if term.Valid() || term.Remaining() != 0 {
			t.Errorf("%v: valid %v, remaining %v", term, term.Valid(), term.Remaining())
		}
	}
}

func TestACoordinatorWhoseContextHasEndedAsksNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	coordinator, err := tenure.NewCoordinator(testkit.NewLease(t, untouched{t}, tenure.LeaseConfig{}), tenure.CoordinatorConfig{
		Watch: func(context.Context) error {
			t.Error("the job began")
			return nil
		},
		Check: func(context.Context, tenure.Role) error {
			t.Error("the check was called")
			return nil
		},
		Logger: testkit.Quiet,
	})
	testkit.WantErr(t, err, nil)
	testkit.WantErr(t, coordinator.Run(ctx), nil)
	testkit.WantErr(t, coordinator.Resign(ctx), nil) // there is nothing to resign from
}

// If nothing keeps a key unique, two replicas would both create the lease's object, and both
// hold it.
func TestATableWhoseKeyMayBeThereTwiceIsRefused(t *testing.T) {
	const columns = `object_type %[1]s, id %[1]s, name %[1]s, labels %[2]s, payload %[3]s NOT NULL,
		resource_version bigint, created_at_ms bigint, updated_at_ms bigint`
	tables := map[string]bool{ // whether they are accepted
		`CREATE TABLE objects (` + columns + `)`:                                                                   false,
		`CREATE TABLE objects (` + columns + `); CREATE INDEX i ON objects (object_type, id)`:                      false,
		`CREATE TABLE objects (` + columns + `, UNIQUE (object_type, name))`:                                       false,
		`CREATE TABLE objects (` + columns + `, UNIQUE (object_type, id, name))`:                                   false,
		`CREATE TABLE objects (` + columns + `); CREATE UNIQUE INDEX i ON objects (id) WHERE name <> ''`:           false,
		`CREATE TABLE objects (` + columns + `); CREATE UNIQUE INDEX i ON objects (id, lower(name))`:               false,
		`CREATE TABLE tables (` + columns + `, UNIQUE (id)); CREATE VIEW objects AS SELECT * FROM tables`:          false,
		`CREATE TABLE objects (` + columns + `, PRIMARY KEY (object_type, id))`:                                    true,
		`CREATE TABLE objects (` + columns + `, PRIMARY KEY (id))`:                                                 true,
		`CREATE TABLE objects (` + columns + `, UNIQUE (id, object_type))`:                                         true,
		`CREATE TABLE objects (` + columns + `); CREATE UNIQUE INDEX i ON objects (object_type, id)`:               true,
		`CREATE TABLE objects (` + columns + `, more %[1]s PRIMARY KEY, UNIQUE (name), UNIQUE (object_type, id));`: true,
	}
	judge := func(t *testing.T, ddl string, accepted bool, err error) {
		t.Helper()
		if accepted && err != nil {
			t.Errorf("%s: got %v, want no error", ddl, err)
		}
		says := regexp.MustCompile(`no unique key on \((object_type, id|id,object_type)\), nor on \(id\)`)
		if strings.Contains(ddl, "CREATE VIEW") {
			says = regexp.MustCompile("is a view")
		}
		if !accepted && (!errors.Is(err, tenure.ErrSetup) || !says.MatchString(err.Error())) {
			t.Errorf("%s: got %v, want ErrSetup that says %q", ddl, err, says)
		}
	}
	t.Run("sqlite", func(t *testing.T) {
		for ddl, accepted := range tables {
			db := testkit.OpenSQL(t, "sqlite", ":memory:")
			db.SetMaxOpenConns(1)
			testkit.ExecSQL(t, db, fmt.Sprintf(ddl, "TEXT", "TEXT", "BLOB"))
			judge(t, ddl, accepted, testkit.Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{})).Migrate(t.Context()))
		}
	})
	t.Run("postgres", func(t *testing.T) {
		pool := testkit.PostgresPool(t, testkit.PostgresURL(t))
		for ddl, accepted := range tables {
			testkit.ExecPostgres(t, pool, fmt.Sprintf("DROP SCHEMA public CASCADE; CREATE SCHEMA public; "+ddl, "text", "jsonb", "bytea"))
			store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
			judge(t, ddl, accepted, store.Migrate(t.Context()))
			store.Close()
		}
	})
}

// An unset variable of a concrete type is not a nil interface.
func TestAStoreThatWasNeverSetIsInvalidEverywhere(t *testing.T) {
	ctx, term := t.Context(), testkit.MustAcquire(t, testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{}))
	db := sql.OpenDB(untouched{t})
	t.Cleanup(func() { db.Close() })
	claim := claims.Claim{Key: tenure.Key{Type: "t", ID: "1"}, Session: "s", Token: 1}
	key, fn := claim.Key, func(*sql.Tx) error { return nil }
	for _, store := range []tenure.SQLStore{nil, (*tenure.PostgresStore)(nil), (*tenure.SQLiteStore)(nil)} {
		var plain tenure.Store
		if store != nil {
			plain = store
		}
		var listed error
		for _, err := range tenure.List(ctx, plain, "t") {
			listed = err
		}
		for what, err := range map[string]error{
			"NewLease": testkit.ErrOf(tenure.NewLease(plain, tenure.LeaseConfig{Key: testkit.LeaseKey})), "List": listed,
			"Fence": testkit.ErrOf(tenure.Fence(plain, term)), "FencedTx": tenure.FencedTx(ctx, store, term, db, nil, fn),
			"claims.NewSession": testkit.ErrOf(claims.NewSession(plain, claims.SessionConfig{})), "Fence by a claim": testkit.ErrOf(tenure.Fence(plain, claim)),
			"FencedTx by a claim":    tenure.FencedTx(ctx, store, claim, db, nil, fn),
			"claims.ReleaseDetached": claims.ReleaseDetached(ctx, plain, claim),
			"schedule.New": testkit.ErrOf(schedule.New(schedule.Config{Store: plain, Key: key, Plan: schedule.Interval(time.Hour, 0),
				Do: func(context.Context, schedule.Slot) error { return nil }})),
		} {
			if !errors.Is(err, tenure.ErrInvalid) || !strings.Contains(err.Error(), " is nil") {
				t.Errorf("%s(%T): %v", what, store, err)
			}
		}
		testkit.WantErr(t, testkit.PanicOf(func() { storetest.Faulty(plain, nil) }), testkit.ErrPanicked)
	}
}

// A field of type time.Duration that is set to 10 means ten nanoseconds.
func TestADurationWithoutAUnitIsRefusedWithTheLikelyOne(t *testing.T) {
	store := testkit.OpenSQLite(t, ":memory:")
	lease := testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{})
	session := testkit.Must(claims.NewSession(store, claims.SessionConfig{Labels: map[string]string{"address": "127.0.0.1:1"}, Logger: testkit.Quiet}))
	keys := testkit.Must(claims.NewKeys(session, "k"))
	queue := testkit.Must(claims.NewQueue(store, claims.QueueConfig{Table: "t", NotBefore: "n"}))
	for _, config := range []struct {
		cfg any
		new func(cfg any) error
	}{
		{tenure.LeaseConfig{Key: testkit.LeaseKey}, func(cfg any) error {
			return testkit.ErrOf(tenure.NewLease(storetest.NewMem(), cfg.(tenure.LeaseConfig)))
		}},
		{tenure.CoordinatorConfig{Check: func(context.Context, tenure.Role) error { return nil }, Outranks: func(tenure.Holding) bool { return false }},
			func(cfg any) error {
				return testkit.ErrOf(tenure.NewCoordinator(lease, cfg.(tenure.CoordinatorConfig)))
			}},
		{claims.SessionConfig{}, func(cfg any) error { return testkit.ErrOf(claims.NewSession(store, cfg.(claims.SessionConfig))) }},
		{claims.QueueConfig{Table: "t", NotBefore: "n"}, func(cfg any) error { return testkit.ErrOf(claims.NewQueue(store, cfg.(claims.QueueConfig))) }},
		{queuehttp.Config{}, func(cfg any) error { return testkit.ErrOf(queuehttp.NewHandler(store, queue, cfg.(queuehttp.Config))) }},
		{route.Config{}, func(cfg any) error {
			return testkit.ErrOf(route.Keys(keys, func(*http.Request) string { return "" }, cfg.(route.Config)))
		}},
		{schedule.Config{Store: store, Key: tenure.Key{Type: "t", ID: "1"}, Plan: schedule.Interval(time.Hour, 0), Do: func(context.Context, schedule.Slot) error { return nil }},
			func(cfg any) error { return testkit.ErrOf(schedule.New(cfg.(schedule.Config))) }},
		{shards.Config{Kind: "k", Count: 1, Work: func(context.Context, string) error { return nil }},
			func(cfg any) error { return testkit.ErrOf(shards.New(session, cfg.(shards.Config))) }},
		{witness.Config{Open: func(context.Context) (tenure.Store, error) { return store, nil }},
			func(cfg any) error { return testkit.ErrOf(witness.Run(cfg.(witness.Config), "/no/such/program")) }},
	} {
		if _, ok := config.cfg.(witness.Config); ok && runtime.GOOS != "linux" {
			continue // it is unsupported
		}
		for _, field := range reflect.VisibleFields(reflect.TypeOf(config.cfg)) {
			if field.Type != reflect.TypeFor[time.Duration]() {
				continue
			}
			for d, meant := range map[time.Duration]string{10: "10*time.Second", 5000: "5000*time.Millisecond"} {
				cfg := reflect.New(reflect.TypeOf(config.cfg)).Elem()
				cfg.Set(reflect.ValueOf(config.cfg))
				cfg.FieldByIndex(field.Index).SetInt(int64(d))
				err, want := config.new(cfg.Interface()), fmt.Sprintf("%s %v is below 1ms: did you mean %s?", field.Name, d, meant)
				if !errors.Is(err, tenure.ErrInvalid) || !strings.Contains(fmt.Sprint(err), want) {
					t.Errorf("%T with %s %v: %v, not %q", config.cfg, field.Name, d, err, want)
				}
			}
		}
	}
	for want, misread := range map[string]func(){
		"did you mean 10*time.Second?": func() { tenure.Every(10, testkit.Succeeds) },
		"did you mean 24*time.Hour?":   func() { schedule.Interval(24, 3*time.Hour) },
		"did you mean 3*time.Hour?":    func() { schedule.Interval(24*time.Hour, 3) },
	} {
		if err := testkit.PanicOf(misread); !strings.Contains(err.Error(), want) {
			t.Errorf("%v, not %q", err, want)
		}
	}
}

func TestAReplicaIsNamedByTheFirstVariableThatIsSetElseByItsHost(t *testing.T) {
	host, err := os.Hostname()
	require.NoError(t, err)
	names := []string{"TENURE_REPLICA_ID", "HOSTNAME"}
	for _, name := range names {
		t.Setenv(name, "by "+name)
	}
	for _, name := range names {
		require.Equal(t, "by "+name, tenure.ReplicaID())
		t.Setenv(name, "")
	}
	require.Equal(t, host, tenure.ReplicaID())
}
