//go:build linux

package mysqltenure_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/storekit"
	"github.com/tenurelib/tenure/stores/mysqltenure"
)

func TestReplicasSurviveARestartOfTheServer(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	for name, test := range map[string]struct {
		signal os.Signal
		rounds int
	}{"killed": {syscall.SIGKILL, 3}, "stopped": {syscall.SIGTERM, 1}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t)
			var jobs testkit.Jobs
			const ttl = 4 * time.Second
			a, b := testkit.StartReplica(t, &jobs, open(t, s, ""), "a", ttl), testkit.StartReplica(t, &jobs, open(t, s, ""), "b", ttl)
			testkit.RunRestarts(t, &jobs, a, b, test.rounds, func() {
				require.NoError(t, s.Signal(test.signal))
				_ = s.Wait() // its exit status does not matter
				require.NoError(t, s.Start(t.Context()))
			})
		})
	}
}

// A server that is paused for longer than the TTL then executes what it was sent before. By then no process may rely on
// the term.
func TestAServerThatPausesEndsTheTrustInTheTerm(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	s := start(t)
	var jobs testkit.Jobs
	const ttl = time.Second
	a, b := testkit.StartReplica(t, &jobs, open(t, s, ""), "a", ttl), testkit.StartReplica(t, &jobs, open(t, s, ""), "b", ttl)
	testkit.Await(t, "one holds", func() bool { return testkit.Holder(a, b) != nil })
	for range 2 {
		first := testkit.Holder(a, b).Status().Token
		testkit.PauseProcess(t, s.process(t))
		testkit.Await(t, "nobody holds", func() bool { return testkit.Holder(a, b) == nil && jobs.Running.Load() == 0 })
		time.Sleep(ttl / 2)
		testkit.ResumeProcess(t, s.process(t))
		testkit.Await(t, "one holds", func() bool { return testkit.Holder(a, b) != nil })
		require.GreaterOrEqual(t, testkit.Holder(a, b).Status().Token, first)
	}
	require.EqualValues(t, 1, jobs.Most.Load())
}

func TestOneProcessThatIsCutOffEndsItsJobsBeforeTheNextBegin(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	table := newTable()
	testkit.RunCutOff(t, open(t, shared(t), table), open(t, shared(t), table), 4*time.Second)
}

// proxied returns a proxy to the server, and a store behind it.
func proxied(t *testing.T, s *server, table string) (*rig.Proxy, *mysqltenure.Store) {
	t.Helper()
	proxy, err := rig.NewProxy(s.URL.Host, nil)
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	return proxy, openAt(t, proxy.Addr(), table)
}

// A holder whose process is paused, or that is cut off, keeps its bell: the server does not see that its connection is
// dead. Its lease expires all the same.
func TestAHolderThatIsSilentIsFollowedAfterItsTTL(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	table := newTable()
	proxy, first := proxied(t, shared(t), table)
	var jobs testkit.Jobs
	const ttl = 3 * time.Second
	a := testkit.StartReplica(t, &jobs, first, "a", ttl)
	testkit.Await(t, "a holds", a.IsHolder)
	b := testkit.StartReplica(t, &jobs, open(t, shared(t), table), "b", ttl)
	testkit.Await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	time.Sleep(ttl / 3)
	proxy.Set(rig.Weather{HangRequests: true, HangAnswers: true})
	began := time.Now()
	testkit.Await(t, "b holds", b.IsHolder)
	require.Less(t, time.Since(began), ttl+500*time.Millisecond)
	proxy.Set(rig.Weather{})
	testkit.Await(t, "a knows b", func() bool { return a.Status().Holder == "b" })
	require.EqualValues(t, 1, jobs.Most.Load())
}

// Answers are lost, with their connections, also those of writes that have taken effect.
func TestReplicasBehindAProxyThatLosesAnswersNeverOverlap(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	table := newTable()
	proxy, first := proxied(t, shared(t), table)
	other, second := proxied(t, shared(t), table)
	lossy := rig.Weather{Lose: func([]byte) bool { return rand.IntN(3) == 0 }}
	proxy.Set(lossy)
	other.Set(lossy)
	var jobs testkit.Jobs
	const ttl = time.Second
	a, b := testkit.StartReplica(t, &jobs, first, "a", ttl), testkit.StartReplica(t, &jobs, second, "b", ttl)
	tokens := make(map[int64]bool)
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if holder := testkit.Holder(a, b); holder != nil {
			tokens[holder.Status().Token] = true
		}
	}
	t.Logf("%d terms", len(tokens))
	require.NotEmpty(t, tokens)
	require.EqualValues(t, 1, jobs.Most.Load())
}

func TestAnAnswerThatIsLostLeavesTheWriteInDoubt(t *testing.T) {
	t.Parallel()
	table := newTable()
	proxy, store := proxied(t, shared(t), table)
	obj := testkit.Put(t, store, tenure.Object{Key: widget})
	proxy.Set(rig.Weather{Lose: func([]byte) bool { return true }})
	_, err := store.PutIf(t.Context(), tenure.Object{Key: widget, Payload: []byte("x")}, tenure.IfVersion(obj.Version))
	require.Error(t, err)
	require.False(t, storekit.Refusal(err), "%v", err)
	proxy.Set(rig.Weather{})
	testkit.Await(t, "it has taken effect", func() bool { return string(testkit.Get(t, store, widget).Payload) == "x" })
}

// The connection breaks before the COMMIT of a fenced transaction arrives, or before its answer does.
func TestACommitWhoseConnectionBreaksHappensWhollyOrNotAtAll(t *testing.T) {
	t.Parallel()
	for what, test := range map[string]struct {
		lose func(proxy *rig.Proxy)
		want int
	}{
		"the request": {func(proxy *rig.Proxy) { proxy.Cut() }, 0},
		"the answer": {func(proxy *rig.Proxy) {
			proxy.Set(rig.Weather{Lose: func(piece []byte) bool { return bytes.HasPrefix(piece, []byte{7, 0, 0, 1, 0, 0}) }}) // OK to the COMMIT
		}, 1},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			table := newTable()
			proxy, store := proxied(t, shared(t), table)
			exec1(t, store.DB(), "CREATE TABLE mine_"+table+" (n INT)")
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
			term := testkit.MustAcquire(t, lease)
			fence, args, err := store.FenceStatement(term)
			require.NoError(t, err)
			tx, err := store.DB().BeginTx(t.Context(), nil)
			require.NoError(t, err)
			exec1(t, tx, "INSERT INTO mine_"+table+" VALUES (1)")
			exec1(t, tx, fence, args...)
			test.lose(proxy)
			require.Error(t, tx.Commit())
			proxy.Set(rig.Weather{})

			direct := open(t, shared(t), table)
			record := testkit.Get(t, direct, lease.Key())
			record.Payload = []byte("next")
			_, err = direct.PutIf(t.Context(), record, tenure.IfVersion(record.Version)) // it waits until the transaction has ended
			require.NoError(t, err)
			var n int
			require.NoError(t, direct.DB().QueryRow("SELECT COUNT(*) FROM mine_"+table).Scan(&n))
			require.Equal(t, test.want, n)
		})
	}
}

// Another server was promoted, and this one is read-only.
func TestAStoreLeavesAServerThatWasDemoted(t *testing.T) {
	t.Parallel()
	old, promoted := start(t), start(t)
	proxy, store := proxied(t, old, "")
	open(t, promoted, "")
	obj := testkit.Put(t, store, tenure.Object{Key: widget})
	exec1(t, old.db(t, "admin", ""), "SET GLOBAL read_only = 1")
	_, err := store.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
	require.ErrorContains(t, err, "read-only")
	require.False(t, storekit.Refusal(err), "%v", err)
	proxy.Divert(promoted.URL.Host) // as a name that leads to another address; existing connections stay
	_, err = store.PutIf(t.Context(), obj, tenure.Unconditional())
	require.NoError(t, err)
	testkit.Get(t, open(t, promoted, ""), widget)
}

// This is the limit of read_only, of which the store warns.
func TestAUserWithReadOnlyAdminWritesToAServerThatWasDemoted(t *testing.T) {
	t.Parallel()
	s := start(t)
	var logged testkit.SyncBuffer
	store, err := mysqltenure.Open(t.Context(), s.DSN("admin", ""), mysqltenure.Config{Logger: slog.New(slog.NewTextHandler(&logged, nil))})
	require.NoError(t, err)
	testkit.Put(t, ready(t, store), tenure.Object{Key: widget})
	exec1(t, s.db(t, "admin", ""), "SET GLOBAL read_only = 1")
	testkit.Put(t, store, tenure.Object{Key: widget, Payload: []byte("x")})
	testkit.Await(t, "it warns", func() bool { return strings.Contains(logged.String(), "two replicas may hold") })
	_, err = openOn(t, s.db(t, "app", ""), "").PutIf(t.Context(), tenure.Object{Key: widget}, tenure.Unconditional())
	require.ErrorContains(t, err, "1290")
}

// A replica is promoted that lacks a term. That one may still work for up to its RenewDeadline, but it writes nothing fenced,
// and the next one's token is above its own.
func TestAReplicaThatLagsGoesOnAboveTheTokensThatItLacks(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	old, promoted := start(t, "--log-bin=binlog", "--sync-binlog=1", "--server-id=1"), start(t, "--server-id=2")
	proxy, store := proxied(t, old, "")
	admin := promoted.db(t, "admin", "")
	exec1(t, admin, fmt.Sprintf("CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT=%s, MASTER_USER='admin', MASTER_PASSWORD='%s', MASTER_USE_GTID=slave_pos", old.URL.Port(), password))
	exec1(t, admin, "START SLAVE")
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	require.NoError(t, lease.Release(t.Context(), testkit.MustAcquire(t, lease)))
	testkit.Put(t, store, tenure.Object{Key: widget})
	there := open(t, promoted, "")
	testkit.Await(t, "the replica has it", func() bool {
		_, err := there.Get(t.Context(), widget)
		return err == nil
	})
	exec1(t, admin, "STOP SLAVE")
	former := testkit.MustAcquire(t, lease)
	require.NoError(t, old.End(syscall.SIGKILL))
	proxy.Redirect(promoted.URL.Host)
	next := testkit.MustAcquire(t, testkit.NewLease(t, there, tenure.LeaseConfig{Holder: "b"}))
	require.Greater(t, next.Token(), former.Token())
	require.True(t, former.Valid(), "which the page on MySQL says")
	require.ErrorIs(t, store.Fenced(t.Context(), former, func(*sql.Tx) error { return nil }), tenure.ErrLost)
	require.ErrorIs(t, lease.Renew(t.Context(), former), tenure.ErrLost)
}

// A pool of the caller's without rejectReadOnly says what the server says.
func TestAServerThatIsReadOnlyRefusesNothingForGood(t *testing.T) {
	t.Parallel()
	s := start(t)
	store := openOn(t, s.db(t, "app", ""), "")
	var jobs testkit.Jobs
	r := testkit.StartReplica(t, &jobs, store, "a", 20*time.Second)
	testkit.Await(t, "it holds", r.IsHolder)
	token := r.Status().Token
	admin := s.db(t, "admin", "")
	exec1(t, admin, "SET GLOBAL read_only = 1")
	_, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.ErrorContains(t, err, "1290")
	require.False(t, storekit.Refusal(err))
	exec1(t, admin, "SET GLOBAL read_only = 0")
	testkit.Put(t, store, tenure.Object{Key: widget})
	require.True(t, r.IsHolder())
	require.Equal(t, token, r.Status().Token)
}

// The holder's process is paused right after its fence, within its transaction: the record is locked until the server
// ends the transaction.
func TestATransactionThatIdlesAfterItsFenceIsEnded(t *testing.T) {
	t.Parallel()
	table := newTable()
	db := shared(t).db(t, "app", "idle_transaction_timeout=1")
	store := openOn(t, db, table)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	record := testkit.Get(t, store, lease.Key())
	fence, args, err := store.FenceStatement(term)
	require.NoError(t, err)
	tx, err := db.BeginTx(t.Context(), &sql.TxOptions{})
	require.NoError(t, err)
	defer tx.Rollback()
	exec1(t, tx, fence, args...)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	began := time.Now()
	_, err = open(t, shared(t), table).PutIf(ctx, record, tenure.IfVersion(record.Version))
	require.NoError(t, err)
	require.Greater(t, time.Since(began), 500*time.Millisecond)
	require.Error(t, tx.Commit())
}
