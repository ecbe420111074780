package databases_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// A role without the rights to see the timeline, or one of them, has another lineage after each restart.
func TestAPromotionMarksTheTableAgainAndARestartDoesNot(t *testing.T) {
	t.Parallel()
	primary := testkit.StartPostgres(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, primary.URL(), tenure.PostgresConfig{}))
	look := func(server *testkit.PostgresServer) (on tenure.Lineage) {
		store := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
		defer store.Close()
		on, err := store.Lineage(t.Context())
		require.NoError(t, err)
		return on
	}
	first := look(primary)
	require.Greater(t, first.Age, 1000*time.Hour, "nothing can have been lost")
	require.Equal(t, first.Server, look(primary).Server)
	require.NoError(t, primary.Restart("immediate"))
	again := look(primary)
	require.NotEqual(t, first.Server, again.Server)
	require.Equal(t, first.Mark, again.Mark)

	standby, _ := standbyOf(t, primary)
	store := testkit.OpenPostgres(t, standby.URL()+"&target_session_attrs=any", tenure.PostgresConfig{})
	_, err := store.Lineage(t.Context())
	require.ErrorContains(t, err, "the server is a standby")
	require.NoError(t, primary.Stop("immediate"))
	require.NoError(t, standby.Promote())
	promoted := look(standby)
	require.NotEqual(t, first.Mark, promoted.Mark)
	require.Less(t, promoted.Age, testkit.Patience)
	kept, err := store.Lineage(t.Context()) // on a connection that was opened before
	require.NoError(t, err)
	require.Equal(t, promoted.Mark, kept.Mark)
	require.Equal(t, promoted.Server, kept.Server)

	testkit.ExecPostgres(t, testkit.PostgresPool(t, standby.URL()), `REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC; CREATE ROLE worker LOGIN;
		GRANT ALL ON ALL TABLES IN SCHEMA public TO worker`)
	denied := testkit.OpenPostgres(t, strings.Replace(standby.URL(), "postgres@", "worker@", 1), tenure.PostgresConfig{})
	was, err := denied.Lineage(t.Context())
	require.NoError(t, err)
	require.Equal(t, promoted.Mark, was.Mark, "of the same start")
	require.NoError(t, standby.Restart("fast"))
	testkit.Await(t, "it has looked again", func() bool {
		_, _ = denied.Get(objects.WithLeaseCall(t.Context()), testkit.LeaseKey)
		is, err := denied.Lineage(t.Context())
		return err == nil && is.Mark != was.Mark
	})
}

// What each function of a look at the lineage says, to a role that may do nothing but use the tables: on a primary, on a
// standby, and on one that was promoted, where no checkpoint need have followed.
func TestAnyRoleSeesAPromotionAtOnceOnConnectionsThatAreOlder(t *testing.T) {
	t.Parallel()
	primary := testkit.StartPostgres(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, primary.URL(), tenure.PostgresConfig{}))
	testkit.ExecPostgres(t, testkit.PostgresPool(t, primary.URL()), `CREATE ROLE worker LOGIN; GRANT ALL ON objects, objects_tombstones TO worker`)
	standby, _ := standbyOf(t, primary)
	asWorker := func(server *testkit.PostgresServer) (string, *pgx.Conn) {
		at := strings.Replace(server.URL(), "postgres@", "worker@", 1) + "&target_session_attrs=any"
		conn, err := pgx.Connect(t.Context(), at)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close(context.Background()) })
		return at, conn
	}
	_, onPrimary := asWorker(primary)
	at, onStandby := asWorker(standby)
	store := testkit.OpenPostgres(t, at, tenure.PostgresConfig{})
	look := func(conn *pgx.Conn) (start time.Time, system string, timeline *string) {
		err := conn.QueryRow(t.Context(), `SELECT pg_postmaster_start_time(), (pg_control_system()).system_identifier::text,
			CASE WHEN NOT pg_is_in_recovery() THEN substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8) END`).Scan(&start, &system, &timeline)
		require.NoError(t, err)
		return start, system, timeline
	}
	start, system, timeline := look(onPrimary)
	require.Equal(t, "00000001", *timeline)
	startOfStandby, same, none := look(onStandby)
	require.NotEqual(t, start, startOfStandby)
	require.Equal(t, system, same)
	require.Nil(t, none)
	_, err := store.Lineage(t.Context())
	require.ErrorContains(t, err, "the server is a standby")

	require.NoError(t, primary.Stop("immediate"))
	require.NoError(t, standby.Promote())
	again, same, timeline := look(onStandby)
	require.Equal(t, startOfStandby, again)
	require.Equal(t, system, same)
	require.Equal(t, "00000002", *timeline)
	on, err := store.Lineage(t.Context())
	require.NoError(t, err)
	require.Less(t, on.Age, testkit.Patience)
	mark, err := store.Get(t.Context(), tenure.Key{Type: objects.LineageType, ID: objects.LineageType})
	require.NoError(t, err)
	require.Contains(t, string(mark.Payload), `"lineage":"`+system+`/00000002"`)
}

func TestWithoutARightToSeeTheTimelineEachStartIsALineage(t *testing.T) {
	server := testkit.StartPostgres(t)
	admin := testkit.PostgresPool(t, server.URL())
	testkit.Migrate(t, testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}))
	testkit.ExecPostgres(t, admin, `CREATE ROLE worker LOGIN; GRANT ALL ON objects, objects_tombstones TO worker`)
	for _, function := range []string{"pg_control_system()", "pg_walfile_name(pg_lsn)", "pg_current_wal_insert_lsn()"} {
		testkit.ExecPostgres(t, admin, `REVOKE EXECUTE ON FUNCTION `+function+` FROM PUBLIC`)
		testkit.ExecPostgres(t, admin, `DELETE FROM objects`)
		var log testkit.SyncBuffer
		store := testkit.OpenPostgres(t, strings.Replace(server.URL(), "postgres@", "worker@", 1), tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		on, err := store.Lineage(t.Context())
		require.NoError(t, err, function)
		require.Less(t, on.Age, testkit.Patience, "a restart may have been a failover")
		mark, err := store.Get(t.Context(), tenure.Key{Type: objects.LineageType, ID: objects.LineageType})
		require.NoError(t, err)
		require.Contains(t, string(mark.Payload), `"lineage":"start/`+on.Server+`"`, function)
		require.Contains(t, log.String(), "the role can't see the timeline of the server")
		testkit.ExecPostgres(t, admin, `GRANT EXECUTE ON FUNCTION `+function+` TO PUBLIC`)
	}
}

// A new table does not say that nothing was lost: a failover may have lost an earlier one, with a lease in it. The timeline
// says so, on a server without fsync too, where each start counts as a lineage. On Aurora nothing does, but Lossless.
func TestWhereTheTimelineCannotBeSeenANewTableIsWaitedFor(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t, "fsync=off")
	admin := testkit.PostgresPool(t, server.URL())
	first := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
	testkit.Migrate(t, first)
	testkit.MustAcquire(t, testkit.NewLease(t, first, tenure.LeaseConfig{}))

	testkit.ExecPostgres(t, admin, `CREATE ROLE worker LOGIN; GRANT CREATE ON SCHEMA public TO worker; REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC`)
	sees := testkit.OpenPostgres(t, strings.Replace(server.URL(), "postgres@", "worker@", 1), tenure.PostgresConfig{Table: "timeline"})
	testkit.Migrate(t, sees)
	testkit.MustAcquire(t, testkit.NewLease(t, sees, tenure.LeaseConfig{Expiry: tenure.ExpiryObserved}))

	testkit.ExecPostgres(t, admin, `SET allow_system_table_mods = on; ALTER FUNCTION pg_catalog.pg_current_wal_insert_lsn() RENAME TO was;
		CREATE FUNCTION pg_catalog.pg_current_wal_insert_lsn() RETURNS pg_lsn LANGUAGE plpgsql AS $$ BEGIN
			RAISE 'wal_level must be set to logical' USING ERRCODE = '55000'; END $$`)
	second := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{Table: "others"})
	testkit.Migrate(t, second)
	_, err := testkit.NewLease(t, second, tenure.LeaseConfig{TTL: time.Hour}).TryAcquire(t.Context())
	require.ErrorIs(t, err, tenure.ErrHeld)
	lossless := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{Table: "more", Lossless: true})
	testkit.Migrate(t, lossless)
	testkit.MustAcquire(t, testkit.NewLease(t, lossless, tenure.LeaseConfig{TTL: time.Hour}))
	third := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
	on, err := third.Lineage(t.Context())
	require.NoError(t, err)
	was, err := first.Lineage(t.Context())
	require.NoError(t, err)
	require.Equal(t, was.Mark, on.Mark, "a process that sees less of the same start does not mark it again")
}

// A failover loses the table with the lease that was acquired in it, and another process migrates the new primary. With and
// without the privilege to see which server that is, the holder goes on alone.
func TestATableThatAFailoverHasLostIsNoNewOne(t *testing.T) {
	t.Parallel()
	primary := testkit.StartPostgres(t)
	testkit.ExecPostgres(t, testkit.PostgresPool(t, primary.URL()), `CREATE ROLE worker LOGIN; GRANT CREATE ON SCHEMA public TO worker; GRANT CREATE ON DATABASE postgres TO worker;
		REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC`)
	standby, _ := standbyOf(t, primary)
	f := &failover{T: t, primary: primary, standby: standby}
	f.awaitStandby()
	f.lag()
	proxy, err := rig.NewProxy(addressOf(t, primary), nil)
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	behind := testkit.Must(url.Parse(primary.URL()))
	behind.Host = proxy.Addr()
	roles := []string{"postgres", "worker"}
	lease := func(at, role string) *tenure.Lease { // in a table of its own
		store := testkit.OpenPostgres(t, strings.Replace(at, "postgres@", role+"@", 1), tenure.PostgresConfig{Schema: "of_" + role, PollOnly: true})
		testkit.Migrate(t, store)
		return testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
	}
	holders, terms := map[string]*tenure.Lease{}, map[string]*tenure.Term{}
	for _, role := range roles {
		holders[role] = lease(behind.String(), role)
		terms[role] = testkit.MustAcquire(t, holders[role])
	}
	require.NoError(t, primary.Stop("immediate"))
	require.NoError(t, standby.Promote())
	for _, role := range roles {
		_, err := lease(standby.URL(), role).TryAcquire(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld, role)
	}
	proxy.Redirect(addressOf(t, standby))
	for _, role := range roles {
		testkit.Await(t, role+" goes on", func() bool { return holders[role].Renew(t.Context(), terms[role]) == nil })
	}
}

// A base backup that archive recovery makes a primary begins a timeline, so nothing that came after the backup is taken
// for free at once.
func TestABaseBackupThatBeginsATimelineIsWaitedFor(t *testing.T) {
	t.Parallel()
	primary := testkit.StartPostgres(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, primary.URL(), tenure.PostgresConfig{}))
	backup, _ := standbyOf(t, primary)
	f := &failover{T: t, primary: primary, standby: backup}
	f.awaitStandby()
	f.lag()
	lease := func(server *testkit.PostgresServer) *tenure.Lease {
		return testkit.NewLease(t, testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}), tenure.LeaseConfig{TTL: time.Hour})
	}
	testkit.MustAcquire(t, lease(primary)) // after the backup
	conn, err := pgx.Connect(t.Context(), backup.URL())
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `ALTER SYSTEM SET restore_command = 'false'`)
	require.NoError(t, err)
	var dir string
	require.NoError(t, conn.QueryRow(t.Context(), `SHOW data_directory`).Scan(&dir))
	require.NoError(t, conn.Close(t.Context()))
	require.NoError(t, errors.Join(primary.Stop("fast"), backup.Stop("fast")))
	require.NoError(t, os.Rename(filepath.Join(dir, "standby.signal"), filepath.Join(dir, "recovery.signal")))
	require.NoError(t, backup.Start())
	_, err = lease(backup).TryAcquire(t.Context())
	require.ErrorIs(t, err, tenure.ErrHeld)
}

func TestAFencedStoreSaysThatItsTermIsLostAlsoAfterARestart(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t)
	store := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
	term := testkit.MustAcquire(t, lease)
	fenced, err := tenure.Fence(store, term)
	require.NoError(t, err)
	require.NoError(t, server.Restart("fast"))
	testkit.Await(t, "renewed", func() bool { return lease.Renew(t.Context(), term) == nil })
	testkit.ExecPostgres(t, testkit.PostgresPool(t, server.URL()), `UPDATE objects SET payload = '{"holder":"b","term":"x"}' WHERE id = '`+testkit.LeaseKey.ID+`'`)
	testkit.Await(t, "refused", func() bool { // once the connections of before the restart are gone
		_, err := fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.Unconditional())
		require.Error(t, err)
		return errors.Is(err, tenure.ErrLost)
	})
	require.False(t, term.Valid())
}

// A standby is promoted while the primary lives on. A replica that has been on the new one, and comes to the old one,
// believes nothing there.
func TestAnOldPrimaryThatStillAnswersIsLeft(t *testing.T) {
	t.Parallel()
	primary := testkit.StartPostgres(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, primary.URL(), tenure.PostgresConfig{}))
	standby, _ := standbyOf(t, primary)
	first := testkit.NewLease(t, testkit.OpenPostgres(t, primary.URL(), tenure.PostgresConfig{}), tenure.LeaseConfig{TTL: time.Hour, Holder: "first"})
	testkit.MustAcquire(t, first)
	f := &failover{T: t, primary: primary, standby: standby}
	f.awaitStandby()
	require.NoError(t, standby.Promote())

	proxy, err := rig.NewProxy(addressOf(t, standby), nil)
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	var at atomic.Pointer[string] // where new connections lead
	leadTo := func(address string) { at.Store(&address) }
	leadTo(proxy.Addr())
	config := testkit.Must(pgxpool.ParseConfig(primary.URL()))
	config.ConnConfig.DialFunc = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, *at.Load())
	}
	pool := testkit.Must(pgxpool.NewWithConfig(t.Context(), config))
	t.Cleanup(pool.Close)
	log := new(testkit.SyncBuffer)
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(log, nil)), PollOnly: true}))
	t.Cleanup(func() { _ = store.Close() })
	other := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "other"}, TTL: 5 * time.Second})
	var term *tenure.Term
	testkit.Await(t, "it is settled", func() bool { term, err = other.TryAcquire(t.Context()); return err == nil })
	require.NoError(t, other.Release(t.Context(), term))
	now, err := store.Lineage(t.Context())
	require.NoError(t, err)

	both := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Second})
	leadTo(addressOf(t, primary))
	proxy.Cut()
	said := func() bool { return strings.Contains(log.String(), "level=ERROR msg=\"an old primary still answers\"") }
	testkit.Await(t, "it has come to the old primary", func() bool { _, err = both.AcquireOrSteal(t.Context()); return said() })
	require.ErrorContains(t, err, "an old primary still answers")
	_, err = other.TryAcquire(t.Context())
	require.ErrorContains(t, err, "an old primary still answers", "a lease that was free there is not taken")
	leadTo(addressOf(t, standby)) // the connections to the old one live, and are given up
	testkit.Await(t, "it has come back", func() bool {
		is, err := store.Lineage(t.Context())
		return err == nil && is.Mark == now.Mark
	})
	require.Equal(t, 1, strings.Count(log.String(), "an old primary still answers"))
}

// On a database that loses nothing, a promotion is like a restart.
func TestWhereAFailoverLosesNothingNobodyWaits(t *testing.T) {
	t.Parallel()
	primary := testkit.StartPostgres(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, primary.URL(), tenure.PostgresConfig{}))
	standby, _ := standbyOf(t, primary)
	lease := func(server *testkit.PostgresServer) *tenure.Lease {
		store := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{Lossless: true})
		return testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
	}
	before := lease(primary)
	term, err := before.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, before.Release(t.Context(), term))
	f := &failover{T: t, primary: primary, standby: standby}
	f.awaitStandby()
	require.NoError(t, primary.Stop("immediate"))
	require.NoError(t, standby.Promote())
	after := lease(standby)
	next, err := after.TryAcquire(t.Context())
	require.NoError(t, err)
	require.Greater(t, next.Token(), term.Token())
	require.NoError(t, after.Renew(t.Context(), next))
	_, err = lease(standby).Resume(t.Context(), next.ID(), next.Token())
	require.NoError(t, err)
}

// A write of a lost record was given up, and comes after another term has begun and was released.
func TestARecordIsNotWrittenAgainAfterALaterOneWasDeleted(t *testing.T) {
	t.Parallel()
	store := testkit.OpenPostgres(t, testkit.PostgresURL(t), tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	on, err := store.Lineage(t.Context())
	require.NoError(t, err)
	table, id := store.Backend().(objects.Table), objects.ID{Type: "lease", ID: "a"}
	write := func(least int64) (objects.Row, error) {
		cond := objects.Condition{Kind: objects.IfAbsent, Server: on.Server, Least: least, Again: true}
		return table.Put(t.Context(), objects.Row{ID: id, Labels: []byte("{}"), Payload: []byte("lost")}, cond, nil)
	}
	later, err := write(1)
	require.NoError(t, err)
	require.NoError(t, table.Delete(t.Context(), id, objects.Condition{Kind: objects.IfVersion, Version: later.Version}, nil, false))
	_, err = write(later.Version - 1)
	require.ErrorIs(t, err, objects.ErrExists)
	_, err = write(later.Version)
	require.NoError(t, err)
}
