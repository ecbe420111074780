//go:build linux

package mysqltenure_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/mysqltenure"
	"github.com/tenurelib/tenure/storetest"
)

var widget = tenure.Key{Type: "widget", ID: "a"}

func TestTheStoreKeepsTheContract(t *testing.T) {
	t.Parallel()
	for name, parameters := range map[string]string{
		"prepared":    "",
		"text":        "interpolateParams=true&clientFoundRows=true&charset=latin1",
		"lax":         "sql_mode=''&time_zone='%2B05:30'&interpolateParams=true&tx_isolation='SERIALIZABLE'",
		"strict":      "sql_mode='TRADITIONAL,ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,ONLY_FULL_GROUP_BY,NO_UNSIGNED_SUBTRACTION'&interpolateParams=true&time_zone='%2B00:00'",
		"of a server": "sql_mode='STRICT_ALL_TABLES'&tx_isolation='READ-COMMITTED'&clientFoundRows=true&parseTime=true",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name != "prepared" {
				testkit.Slow(t)
			}
			db := shared(t).db(t, "app", parameters)
			storetest.Run(t, func(t *testing.T) tenure.Store { return openOn(t, db, newTable()) })
		})
	}
	t.Run("connections of its own", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, func(t *testing.T) tenure.Store { return open(t, shared(t), newTable()) })
	})
}

func TestOnlyPublicPackagesAreImported(t *testing.T) { testkit.OnlyPublicImports(t) }

func TestWritersOfOneObject(t *testing.T) {
	table := newTable()
	testkit.RunConcurrentUpdates(t, func(int) *mysqltenure.Store { return open(t, shared(t), table) })
}

func TestNames(t *testing.T) {
	t.Parallel()
	table := newTable()
	testkit.RunNamesMove(t, open(t, shared(t), table))
	other := newTable()
	testkit.RunNamesAreGivenOnce(t, func() *mysqltenure.Store { return open(t, shared(t), other) })
}

func TestKeysAreBytesAndFitTheirColumns(t *testing.T) {
	t.Parallel()
	store := open(t, shared(t), newTable())
	for i, id := range []string{"a", "a ", "A", "ä", "a\u0308", strings.Repeat("x", 1024)} {
		_, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: id}, Payload: fmt.Append(nil, i)}, tenure.IfAbsent())
		require.NoError(t, err)
	}
	for _, obj := range []tenure.Object{
		{Key: tenure.Key{Type: strings.Repeat("x", 256), ID: "a"}}, {Key: tenure.Key{Type: "widget", ID: strings.Repeat("x", 1025)}},
		{Key: widget, Name: strings.Repeat("x", 1025)},
	} {
		_, err := store.PutIf(t.Context(), obj, tenure.Unconditional())
		require.ErrorIs(t, err, tenure.ErrInvalid)
	}
	types, err := store.Types(t.Context(), 10)
	require.NoError(t, err)
	require.Equal(t, []string{"widget"}, types)
	woken := tenure.Key{Type: "widget", ID: "woken"}
	require.NoError(t, store.Wake(t.Context(), woken))
	for key, want := range map[tenure.Key]bool{widget: true, {Type: "widget", ID: "b"}: false, woken: false} {
		known, err := store.EverExisted(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, want, known)
	}
}

// A server whose clock is set back: the sessions of the second store believe that it is the year 2001.
func TestVersionsGoOnWhenTheClockIsSetBack(t *testing.T) {
	t.Parallel()
	table := newTable()
	store := open(t, shared(t), table)
	past := openOn(t, shared(t).db(t, "app", "timestamp=1000000000&interpolateParams=true"), table)
	put := func(in *mysqltenure.Store, cond tenure.WriteCondition) tenure.Object {
		t.Helper()
		obj, err := in.PutIf(t.Context(), tenure.Object{Key: widget, Payload: []byte("x")}, cond)
		require.NoError(t, err)
		return obj
	}
	first := put(store, tenure.IfAbsent())
	require.WithinDuration(t, time.Now(), time.UnixMicro(first.Version), time.Minute)
	second := put(past, tenure.IfVersion(first.Version))
	require.Equal(t, first.Version+1, second.Version)
	is, err := past.Get(t.Context(), widget)
	require.NoError(t, err)
	require.Zero(t, is.Age, "by the clock of the server, as it is now")
	require.Equal(t, second.UpdatedAt, is.UpdatedAt)
	require.Equal(t, first.CreatedAt, is.CreatedAt)

	require.NoError(t, past.DeleteIf(t.Context(), widget, tenure.IfVersion(second.Version)))
	third := put(past, tenure.IfAbsent())
	require.Equal(t, second.Version+1, third.Version, "after a deletion")
	require.Greater(t, put(store, tenure.Unconditional()).Version, third.Version)
}

// An hour in which local time occurs twice. The age is by the server's clock, whatever its time zone is.
func TestSummerTimeChangesNothing(t *testing.T) {
	t.Parallel()
	const ends = 1698541200 // in Berlin, at three o'clock it is two again
	table := newTable()
	at := func(seconds int) *mysqltenure.Store {
		zone := []string{"%2B02:00", "%2B01:00"}[min(max(seconds+1, 0), 1)]
		return openOn(t, shared(t).db(t, "app", fmt.Sprintf("timestamp=%d&time_zone='%s'&interpolateParams=true", ends+seconds, zone)), table)
	}
	obj, err := at(-1800).PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.NoError(t, err)
	require.EqualValues(t, (ends-1800)*1e6, obj.Version)
	is, err := at(1800).Get(t.Context(), widget)
	require.NoError(t, err)
	require.Equal(t, time.Hour, is.Age)
}

func TestNoCallWaitsForALockLongerThanItsContextAllows(t *testing.T) {
	t.Parallel()
	table := newTable()
	store, db := open(t, shared(t), table), shared(t).db(t, "app", "")
	obj := testkit.Put(t, store, tenure.Object{Key: widget})
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer tx.Rollback()
	exec1(t, tx, "SELECT 1 FROM "+table+" FOR UPDATE")
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(began), 3*time.Second)
	_, err = store.Get(t.Context(), widget)
	require.NoError(t, err, "a read waits for nothing")

	began = time.Now()
	err = store.DeleteIf(t.Context(), widget, tenure.IfVersion(obj.Version))
	require.ErrorContains(t, err, "1205", "the session's limit")
	require.False(t, errors.Is(err, tenure.ErrConflict))
	require.Less(t, time.Since(began), 9*time.Second)
}

// The fenced write, a first one, locks its object, and then the record. The other transaction does the opposite, and has written
// more, so the server rolls the fenced write back.
func TestAWriteThatADeadlockHasRolledBackIsMadeAgain(t *testing.T) {
	t.Parallel()
	table := newTable()
	store, db := open(t, shared(t), table), shared(t).db(t, "app", "")
	exec1(t, db, "CREATE TABLE heavy_"+table+" (n INT PRIMARY KEY)")
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
	fenced, err := store.Fence(term)
	require.NoError(t, err)

	tx, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted}) // so that it locks no gap
	require.NoError(t, err)
	defer tx.Rollback()
	exec1(t, tx, "INSERT INTO heavy_"+table+" SELECT seq FROM seq_1_to_1000")
	exec1(t, tx, "SELECT 1 FROM "+table+" WHERE object_type = ? FOR UPDATE", testkit.LeaseKey.Type)
	written := make(chan error, 1)
	go func() {
		_, err := fenced.PutIf(context.Background(), tenure.Object{Key: widget, Payload: []byte("fenced")}, tenure.Unconditional())
		written <- err
	}()
	admin := shared(t).db(t, "admin", "")
	testkit.Await(t, "the fenced write waits", func() bool {
		var n int
		require.NoError(t, admin.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND = 'Query' AND TIME_MS > 100 AND INFO LIKE ?", "SET @tenure_fence%`"+table+"`%").Scan(&n))
		return n >= 1
	})
	exec1(t, tx, "INSERT INTO "+table+" (object_type, id, resource_version, created_at_us, written_at_us) VALUES ('widget', 'a', 0, 0, 0)")
	require.NoError(t, tx.Commit())
	require.NoError(t, <-written)
	require.Equal(t, "fenced", string(testkit.Get(t, store, widget).Payload))
}

func TestMigrateMayBeCalledByManyAtOnce(t *testing.T) {
	t.Parallel()
	table := newTable()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			store, err := mysqltenure.Open(t.Context(), shared(t).DSN("app", ""), mysqltenure.Config{Table: table, Logger: testkit.Quiet})
			if err == nil {
				err = errors.Join(store.Migrate(t.Context()), store.Close())
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	store := open(t, shared(t), database+"."+table)
	require.Contains(t, store.String(), database+"."+table)
	require.Contains(t, store.String(), shared(t).URL.Host)
}

func TestATableThatIsUnfitIsRefused(t *testing.T) {
	t.Parallel()
	db := shared(t).db(t, "app", "")
	for change, want := range map[string]string{
		"ENGINE=MyISAM": "must have InnoDB",
		"MODIFY id VARCHAR(255) CHARACTER SET utf8mb4":    "column id varbinary(1024) not null",
		"MODIFY payload MEDIUMBLOB NOT NULL":              "column payload mediumblob null",
		"DROP COLUMN fences":                              "column fences bigint",
		"DROP PRIMARY KEY, ADD PRIMARY KEY (id)":          "unique key PRIMARY object_type,id",
		"DROP KEY name, ADD KEY name (object_type, name)": "unique key name object_type,name",
	} {
		table := newTable()
		store := open(t, shared(t), table)
		if strings.Contains(change, "MyISAM") {
			exec1(t, db, "DROP TABLE "+table)
			exec1(t, db, "CREATE TABLE "+table+" (id INT) ENGINE=MyISAM")
		} else {
			exec1(t, db, "ALTER TABLE "+table+" "+change)
		}
		err := store.Migrate(t.Context())
		require.ErrorIs(t, err, tenure.ErrSetup, change)
		require.ErrorContains(t, err, want)
	}
}

func TestMigrateWarnsOfWhatLosesLeases(t *testing.T) {
	t.Parallel()
	var lines testkit.SyncBuffer
	logger := slog.New(slog.NewTextHandler(&lines, nil))
	s := start(t, "--log-bin=binlog", "--sync-binlog=0", "--innodb-flush-log-at-trx-commit=2", "--max-allowed-packet=256K")
	store, err := mysqltenure.Open(t.Context(), s.DSN("admin", ""), mysqltenure.Config{Logger: logger})
	require.NoError(t, err)
	require.NoError(t, store.Migrate(t.Context()))
	require.NoError(t, store.Close())
	for _, want := range []string{"sync_binlog", "innodb_flush_log_at_trx_commit", "max_allowed_packet", "the user has ALL PRIVILEGES"} {
		require.Contains(t, lines.String(), want)
	}

	store, err = mysqltenure.Open(t.Context(), s.DSN("app", ""), mysqltenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	defer store.Close()
	large := make([]byte, tenure.MaxPayload)
	for i := range large {
		large[i] = '\'' // is escaped
	}
	_, err = store.PutIf(t.Context(), tenure.Object{Key: widget, Payload: large}, tenure.IfAbsent())
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "max_allowed_packet")
	_, err = store.PutIf(t.Context(), tenure.Object{Key: widget, Payload: large[:64<<10]}, tenure.IfAbsent())
	require.NoError(t, err)

	exec1(t, s.db(t, "admin", ""), "SET GLOBAL binlog_format = 'STATEMENT'")
	store, err = mysqltenure.Open(t.Context(), s.DSN("app", ""), mysqltenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	defer store.Close()
	require.ErrorIs(t, store.Migrate(t.Context()), tenure.ErrSetup)
}

func TestErrorsSayWhatToDoAndNeverQuoteThePassword(t *testing.T) {
	t.Parallel()
	s := shared(t)
	table := newTable()
	open(t, s, table)
	for name, test := range map[string]struct {
		dsn, table string
		err        error
		want       string
	}{
		"no table":            {s.DSN("app", ""), "none", tenure.ErrSetup, "call Migrate once"},
		"no right to write":   {s.DSN("reader", ""), table, tenure.ErrSetup, "GRANT SELECT, INSERT, UPDATE"},
		"a wrong password":    {strings.Replace(s.DSN("app", ""), password, password+"x", 1), "", tenure.ErrSetup, "Access denied"},
		"no such database":    {strings.Replace(s.DSN("admin", ""), "/"+database, "/none", 1), "", tenure.ErrSetup, "none"},
		"no database":         {strings.Replace(s.DSN("app", ""), "/"+database, "/", 1), "", tenure.ErrSetup, "use no database"},
		"autocommit is off":   {s.DSN("app", "autocommit=0"), "", tenure.ErrSetup, "autocommit"},
		"chained":             {s.DSN("app", "completion_type='CHAIN'"), "", tenure.ErrSetup, "completion_type"},
		"two character sets":  {s.DSN("app", "character_set_connection=latin1"), "", tenure.ErrSetup, "use SET NAMES"},
		"empty is NULL":       {s.DSN("app", "sql_mode='EMPTY_STRING_IS_NULL'"), "", tenure.ErrSetup, "EMPTY_STRING_IS_NULL"},
		"assignments at once": {s.DSN("app", "sql_mode='SIMULTANEOUS_ASSIGNMENT'"), "", tenure.ErrSetup, "SIMULTANEOUS_ASSIGNMENT"},
		"a variable":          {s.DSN("app", "nonsense=1"), "", nil, "nonsense"},
		"a URL without a db":  {"mysql://app:" + password + "@" + s.URL.Host, "", tenure.ErrInvalid, "no database"},
		"several hosts":       {"mysql://app:" + password + "@a,b/x", "", tenure.ErrInvalid, "several hosts"},
		"a mistyped password": {"mysql://app:" + password + "/x@h/db", "", tenure.ErrInvalid, "%XX"},
		"not a DSN":           {"app:" + password + "@h", "", tenure.ErrInvalid, "neither a DSN"},
		"a parameter":         {"mysql://h/db?x=1", "", tenure.ErrInvalid, `a parameter "x"`},
		"tls":                 {"mysql://h/db?tls=" + password, "", tenure.ErrInvalid, "tls of the URL"},
		"ca":                  {"mysql://h/db?ca=/dev/null", "", tenure.ErrInvalid, "no certificate"},
		"a table":             {s.DSN("app", ""), "a.b.c", tenure.ErrInvalid, "a.b.c"},
		"nobody listens":      {"mysql://app:" + password + "@127.0.0.1:1/db", "", nil, "connection refused"},
	} {
		store, err := mysqltenure.Open(t.Context(), test.dsn, mysqltenure.Config{Table: test.table, Logger: testkit.Quiet})
		if err == nil {
			_, err = store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
			require.ErrorContains(t, err, widget.String(), name)
			require.NoError(t, store.Close())
		}
		require.ErrorContains(t, err, test.want, name)
		require.NotContains(t, err.Error(), password, name)
		if test.err != nil {
			require.ErrorIs(t, err, test.err, name)
		}
	}
	_, err := mysqltenure.New(t.Context(), nil, mysqltenure.Config{})
	require.ErrorIs(t, err, tenure.ErrInvalid)
}

func TestAURLOpensTheStore(t *testing.T) {
	t.Parallel()
	store, err := mysqltenure.Open(t.Context(), fmt.Sprintf("mysql://app:%s@%s/%s", password, shared(t).URL.Host, database), mysqltenure.Config{Table: newTable(), Logger: testkit.Quiet})
	require.NoError(t, err)
	ready(t, store)
	var limit, idle int
	require.NoError(t, store.DB().QueryRow("SELECT @@innodb_lock_wait_timeout, @@idle_transaction_timeout").Scan(&limit, &idle))
	require.Equal(t, []int{50, 60}, []int{limit, idle}, "the program waits for locks as long as the server lets it")
}

func TestAStoreThatIsClosedSaysSo(t *testing.T) {
	t.Parallel()
	store, err := mysqltenure.Open(t.Context(), shared(t).DSN("app", ""), mysqltenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	sub := store.Watch(widget)
	require.NoError(t, store.Close())
	_, err = store.Get(t.Context(), widget)
	require.ErrorIs(t, err, tenure.ErrClosed)
	require.False(t, sub.Live())
	require.False(t, store.Watch(widget).Live())

	db := shared(t).db(t, "app", "")
	store, err = mysqltenure.New(t.Context(), db, mysqltenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	require.NoError(t, store.Close())
	require.NoError(t, db.Ping(), "it is the caller's")
}

func TestClaimsAreRefused(t *testing.T) {
	t.Parallel()
	store := open(t, shared(t), newTable())
	_, err := store.Fence(claims.Claim{})
	require.ErrorIs(t, err, errors.ErrUnsupported)
	_, _, err = store.FenceStatement(claims.Claim{})
	require.ErrorIs(t, err, errors.ErrUnsupported)
}

func TestWhatIsReadOfAnotherProgramsRowIsWhole(t *testing.T) {
	t.Parallel()
	table := newTable()
	store, db := open(t, shared(t), table), shared(t).db(t, "app", "")
	exec1(t, db, "INSERT INTO "+table+" (object_type, id, labels, payload, resource_version, created_at_us, written_at_us) VALUES ('widget', 'a', 'not JSON', 'p', 7, 0, 0)")
	obj := testkit.Get(t, store, widget)
	require.Equal(t, "p", string(obj.Payload))
	require.Empty(t, obj.Labels)
	require.EqualValues(t, 7, obj.Version)
	_, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfVersion(7))
	require.NoError(t, err)
}

// In this character set the driver's backslash before the quote becomes a part of a character.
func TestNoPayloadIsTakenForSQL(t *testing.T) {
	t.Parallel()
	s := shared(t)
	table := newTable()
	store, err := mysqltenure.Open(t.Context(), s.DSN("app", "charset=gbk"), mysqltenure.Config{Table: table, Logger: testkit.Quiet})
	require.NoError(t, err)
	ready(t, store)
	payload := []byte("\xbf', payload = 'other', labels = '{}' -- ")
	testkit.Put(t, store, tenure.Object{Key: widget, Payload: payload})
	got, err := store.Get(t.Context(), widget)
	require.NoError(t, err)
	require.Equal(t, payload, got.Payload)
	_, err = mysqltenure.New(t.Context(), s.db(t, "app", "charset=gbk"), mysqltenure.Config{Table: table, Logger: testkit.Quiet})
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "use utf8mb4")
}

// A pool's connections may use another database by then, which may have such a table, too.
func TestTheStoreKeepsToItsDatabase(t *testing.T) {
	t.Parallel()
	s := shared(t)
	table := newTable()
	a := open(t, s, table)
	testkit.MustAcquire(t, testkit.NewLease(t, a, tenure.LeaseConfig{}))
	admin := s.db(t, "admin", "")
	exec1(t, admin, "CREATE DATABASE IF NOT EXISTS tenant")
	exec1(t, admin, "CREATE TABLE tenant."+table+" LIKE "+database+"."+table)
	admin.SetMaxOpenConns(1)
	b := openOn(t, admin, table)
	exec1(t, admin, "USE tenant")
	_, err := testkit.NewLease(t, b, tenure.LeaseConfig{}).TryAcquire(t.Context())
	require.ErrorIs(t, err, tenure.ErrHeld)
}

// In some languages, the server's text for a duplicate key does not end with the name of the key.
func TestWhoComesSecondIsToldSoWhateverTheServersLanguage(t *testing.T) {
	t.Parallel()
	table := newTable()
	ready(t, open(t, shared(t), table))
	db := shared(t).db(t, "app", "interpolateParams=true&lc_messages='cs_CZ'")
	stores := []*mysqltenure.Store{openOn(t, db, table), openOn(t, db, table), openOn(t, db, table)}
	for i := range 50 {
		key := tenure.Key{Type: "widget", ID: fmt.Sprint("first ", i)}
		errs := make([]error, len(stores))
		var creating sync.WaitGroup
		for n, store := range stores {
			creating.Go(func() {
				_, errs[n] = store.PutIf(t.Context(), tenure.Object{Key: key, Name: "of " + key.ID}, tenure.IfAbsent())
			})
		}
		creating.Wait()
		created := 0
		for _, err := range errs {
			if err == nil {
				created++
			} else {
				require.ErrorIs(t, err, tenure.ErrExists)
			}
		}
		require.Equal(t, 1, created)
		_, err := stores[0].PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "other"}, Name: "of " + key.ID}, tenure.IfAbsent())
		require.ErrorIs(t, err, tenure.ErrTaken)
	}
}
