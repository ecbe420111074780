//go:build linux

package mysqltenure_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/mysqltenure"
)

// replicas starts replicas of one lease, each with a store of its own, the first of which holds.
func replicas(t *testing.T, n int, ttl time.Duration, open func() *mysqltenure.Store) (jobs *testkit.Jobs, all []*testkit.Replica) {
	t.Helper()
	jobs = new(testkit.Jobs)
	for i := range n {
		all = append(all, testkit.StartReplica(t, jobs, open(), fmt.Sprint("replica-", i), ttl))
		testkit.Await(t, "the first holds", all[0].IsHolder)
	}
	for _, r := range all {
		testkit.Await(t, "all know the first", func() bool { return r.Status().Holder == "replica-0" })
	}
	return jobs, all
}

// handovers stops the holder n times, and returns how long the next one took to hold.
func handovers(t *testing.T, standbys, n int, open func() *mysqltenure.Store) (took []time.Duration) {
	t.Helper()
	const ttl = 60 * time.Second
	jobs, all := replicas(t, standbys+1, ttl, open)
	for range n {
		settle(t, all)
		first := testkit.Holder(all...)
		began := time.Now()
		go func() { _ = first.Resign(context.Background()) }()
		for testkit.Holder(all...) == nil || testkit.Holder(all...) == first {
			require.Less(t, time.Since(began), ttl/2)
			time.Sleep(50 * time.Microsecond)
		}
		took = append(took, time.Since(began))
		t.Log(time.Since(began))
	}
	require.EqualValues(t, 1, jobs.Most.Load())
	return took
}

// settle waits until the replicas have nothing to do.
func settle(t *testing.T, all []*testkit.Replica) {
	t.Helper()
	testkit.Await(t, "one holds", func() bool { return testkit.Holder(all...) != nil })
	holder := testkit.Holder(all...).Status().Replica
	for _, r := range all {
		testkit.Await(t, "all know the holder", func() bool { return r.Status().Holder == holder })
	}
	time.Sleep(300 * time.Millisecond)
}

func TestAReleaseWakesTheStandby(t *testing.T) {
	for _, standbys := range []int{1, 10} {
		table := newTable()
		took := handovers(t, standbys, 12, func() *mysqltenure.Store { return open(t, shared(t), table) })
		p50 := testkit.Percentile(took, 50)
		t.Logf("handover to one of %d: p50 %v, longest %v", standbys, p50, took[len(took)-1])
		require.Less(t, p50, 200*time.Millisecond, "by polling it would take a second")
	}
}

func TestAStoreWithoutBellsIsPolled(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	table := newTable()
	took := handovers(t, 1, 1, func() *mysqltenure.Store {
		db := shared(t).db(t, "app", "interpolateParams=true")
		db.SetMaxOpenConns(8)
		store := openOn(t, db, table)
		sub := store.Watch(widget)
		require.False(t, sub.Live())
		sub.Stop()
		return store
	})
	t.Log(took)
}

// awaitHint waits for a hint within the given time.
func awaitHint(t *testing.T, sub tenure.Subscription, within time.Duration) {
	t.Helper()
	select {
	case <-sub.C():
	case <-time.After(within):
		t.Fatal("no hint within ", within)
	}
}

func drain(sub tenure.Subscription) {
	for len(sub.C()) > 0 {
		<-sub.C()
	}
}

// watched returns two stores that watch an object which the first has written and whose bell it has.
func watched(t *testing.T, s *server) (table string, first, second *mysqltenure.Store, own, other tenure.Subscription, obj tenure.Object) {
	t.Helper()
	table = newTable()
	first, second = open(t, s, table), open(t, s, table)
	own, other = first.Watch(widget), second.Watch(widget)
	t.Cleanup(own.Stop)
	t.Cleanup(other.Stop)
	testkit.Await(t, "the watches are live", func() bool { return own.Live() && other.Live() })
	obj = testkit.Put(t, first, tenure.Object{Key: widget, Payload: []byte("x")})
	admin := s.db(t, "admin", "")
	testkit.Await(t, "the second waits for the bell", func() bool {
		var n int
		require.NoError(t, admin.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User lock' AND INFO LIKE '%GET_LOCK%'").Scan(&n))
		return n >= 1 && other.Live()
	})
	return table, first, second, own, other, obj
}

func TestARequestReachesTheHolderWithinASecond(t *testing.T) {
	_, first, second, own, other, obj := watched(t, shared(t))
	time.Sleep(100 * time.Millisecond)
	drain(own)
	require.NoError(t, second.Wake(t.Context(), widget))
	awaitHint(t, own, 2*time.Second)
	drain(other)
	require.NoError(t, first.Wake(t.Context(), widget))
	awaitHint(t, other, 8*time.Second)

	drain(own)
	_, err := second.PutIf(t.Context(), tenure.Object{Key: widget, Payload: obj.Payload, Labels: map[string]string{"request": "x"}}, tenure.IfVersion(obj.Version))
	require.NoError(t, err)
	awaitHint(t, own, 2*time.Second)
}

func TestAHolderThatDiesRings(t *testing.T) {
	s := start(t)
	_, _, _, _, other, _ := watched(t, s)
	time.Sleep(100 * time.Millisecond)
	drain(other)
	admin := s.db(t, "admin", "")
	var holder int
	rows, err := admin.Query("SELECT ID FROM information_schema.PROCESSLIST WHERE USER = 'app' AND COMMAND = 'Sleep'")
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		require.NoError(t, rows.Scan(&holder))
		_, _ = s.db(t, "admin", "").Exec(fmt.Sprint("KILL ", holder))
	}
	began := time.Now()
	awaitHint(t, other, 3*time.Second)
	t.Log(time.Since(began))
	testkit.Await(t, "the watch is live again", other.Live)
}

func TestWatchesLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	s := start(t)
	store := open(t, s, newTable())
	admin := s.db(t, "admin", "")
	connections := func() (n int) {
		require.NoError(t, admin.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE USER = 'app'").Scan(&n))
		return n
	}
	before := connections()
	var subs []tenure.Subscription
	for i := range 6 {
		key := tenure.Key{Type: "widget", ID: fmt.Sprint(i)}
		subs = append(subs, store.Watch(key), store.Watch(key))
	}
	live := func() (n int) {
		for _, sub := range subs {
			if sub.Live() {
				n++
			}
		}
		return n
	}
	testkit.Await(t, "four of six are live", func() bool { return live() == 8 })
	for _, sub := range subs {
		sub.Stop()
		sub.Stop()
	}
	testkit.Await(t, "their connections are closed", func() bool { return connections() <= before })
	sub := store.Watch(widget)
	testkit.Await(t, "there is room for others", sub.Live)
	sub.Stop()
}
