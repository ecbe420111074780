//go:build linux

package mysqltenure_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/mysqltenure"
)

// handovers stops the holder of a lease n times, and returns how long the next one took to hold. Each replica has a store
// of its own, and one that was stopped is replaced.
func handovers(t *testing.T, standbys, n int, open func() *mysqltenure.Store) (took []time.Duration) {
	t.Helper()
	const ttl = 60 * time.Second
	var jobs testkit.Jobs
	var all []*testkit.Replica
	for begun := 0; len(took) < n; begun++ {
		all = append(all, testkit.StartReplica(t, &jobs, open(), fmt.Sprint("replica-", begun), ttl))
		testkit.Await(t, "one holds", func() bool { return testkit.Holder(all...) != nil })
		if len(all) <= standbys {
			continue
		}
		first := testkit.Holder(all...)
		for _, r := range all {
			testkit.Await(t, "all know the holder", func() bool { return r.Status().Holder == first.Status().Replica })
		}
		time.Sleep(300 * time.Millisecond) // what they may still be doing is over
		all = slices.DeleteFunc(all, func(r *testkit.Replica) bool { return r == first })
		began := time.Now()
		go first.Stop()
		for testkit.Holder(all...) == nil {
			require.Less(t, time.Since(began), ttl/2)
			time.Sleep(50 * time.Microsecond)
		}
		took = append(took, time.Since(began))
		first.Stop()
	}
	require.EqualValues(t, 1, jobs.Most.Load())
	return took
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
	took := handovers(t, 1, 4, func() *mysqltenure.Store {
		db := shared(t).db(t, "app", "interpolateParams=true")
		db.SetMaxOpenConns(8)
		store := openOn(t, db, table)
		return store
	})
	t.Logf("handover by polling: %v", took)
	require.Less(t, took[len(took)-1], 3*time.Second)
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
	awaitBell(t, s)
	return table, first, second, own, other, obj
}

func TestARequestReachesTheHolderWithinASecond(t *testing.T) {
	_, first, second, own, other, obj := watched(t, start(t))
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

// The first holder is cut off, and keeps its bell. The second takes over, and has another one.
func TestABellIsThatOfOnePayload(t *testing.T) {
	t.Parallel()
	s := start(t)
	table := newTable()
	proxy, first := proxied(t, s, table)
	second, third := open(t, s, table), open(t, s, table)
	for _, store := range []*mysqltenure.Store{first, second} {
		sub := store.Watch(widget)
		t.Cleanup(sub.Stop)
		testkit.Await(t, "the watch is live", sub.Live)
	}
	obj := testkit.Put(t, first, tenure.Object{Key: widget, Payload: []byte("first")})
	awaitBell(t, s) // the second waits for it
	proxy.Set(rig.Weather{HangRequests: true, HangAnswers: true})
	obj, err := second.PutIf(t.Context(), tenure.Object{Key: widget, Payload: []byte("second")}, tenure.IfVersion(obj.Version))
	require.NoError(t, err)
	time.Sleep(6 * time.Second) // it no longer waits for the first one's
	sub := third.Watch(widget)
	t.Cleanup(sub.Stop)
	testkit.Await(t, "the watch is live", sub.Live)
	awaitBell(t, s)
	time.Sleep(100 * time.Millisecond)
	drain(sub)
	require.NoError(t, second.DeleteIf(t.Context(), widget, tenure.IfVersion(obj.Version)))
	awaitHint(t, sub, 500*time.Millisecond)
	proxy.Set(rig.Weather{})
}

func TestAnObjectThatHasComeAndGoneSinceTheLastLookIsNoticed(t *testing.T) {
	t.Parallel()
	table := newTable()
	first, second := open(t, shared(t), table), open(t, shared(t), table)
	sub := second.Watch(widget)
	t.Cleanup(sub.Stop)
	testkit.Await(t, "the watch is live", sub.Live)
	time.Sleep(100 * time.Millisecond)
	for range 2 {
		drain(sub)
		obj := testkit.Put(t, first, tenure.Object{Key: widget})
		require.NoError(t, first.DeleteIf(t.Context(), widget, tenure.IfVersion(obj.Version)))
		awaitHint(t, sub, 3*time.Second)
	}
}

func TestAWatchWhoseConnectionIsKilledComesBack(t *testing.T) {
	t.Parallel()
	s := start(t)
	_, first, _, own, other, obj := watched(t, s)
	kill(t, s)
	testkit.Await(t, "the watches are live again", func() bool { return own.Live() && other.Live() })
	awaitBell(t, s)
	time.Sleep(100 * time.Millisecond)
	drain(other)
	require.NoError(t, first.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)))
	began := time.Now()
	awaitHint(t, other, 5*time.Second)
	require.Less(t, time.Since(began), 500*time.Millisecond)
}

// kill ends the connections of all stores.
func kill(t *testing.T, s *server) {
	t.Helper()
	admin := s.db(t, "admin", "")
	rows, err := admin.Query("SELECT ID FROM information_schema.PROCESSLIST WHERE USER = 'app'")
	require.NoError(t, err)
	var ids []int
	for rows.Next() {
		var id int
		require.NoError(t, rows.Scan(&id))
		ids = append(ids, id)
	}
	require.NoError(t, rows.Err())
	for _, id := range ids {
		_, _ = admin.Exec(fmt.Sprint("KILL ", id)) // it may have ended
	}
}

// awaitBell waits until a connection waits for a bell.
func awaitBell(t *testing.T, s *server) {
	t.Helper()
	admin := s.db(t, "admin", "")
	testkit.Await(t, "one waits for the bell", func() bool {
		var n int
		require.NoError(t, admin.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User lock' AND TIME_MS > 50 AND INFO LIKE '%GET_LOCK%'").Scan(&n))
		return n >= 1
	})
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
	var subs []tenure.Subscription
	for i := range 6 {
		key := tenure.Key{Type: "widget", ID: fmt.Sprint(i)}
		subs = append(subs, store.Watch(key), store.Watch(key))
	}
	for _, sub := range subs {
		testkit.Await(t, "it is live", sub.Live)
	}
	require.LessOrEqual(t, connections(), 4+4, "four have one, and the calls")
	for _, sub := range subs {
		sub.Stop()
		sub.Stop()
	}
	testkit.Await(t, "their connections are closed", func() bool { return connections() <= 4 })
	sub := store.Watch(widget)
	testkit.Await(t, "there is room for others", sub.Live)
	sub.Stop()
}

// Who has written to another's record, as a request for a handover does, still waits for the bell of whoever wrote it before.
func TestWhoHasAskedForAHandoverHearsOfItAtOnce(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	s := start(t)
	var rounds sync.WaitGroup
	for i := range 6 {
		_, first, second, _, other, obj := watched(t, s)
		obj, err := second.PutIf(t.Context(), tenure.Object{Key: obj.Key, Labels: map[string]string{"asks": "me"}, Payload: obj.Payload}, tenure.IfVersion(obj.Version))
		require.NoError(t, err)
		rounds.Go(func() {
			time.Sleep(7*time.Second + time.Duration(i)*230*time.Millisecond)
			drain(other)
			began := time.Now()
			if err := first.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)); err != nil {
				t.Error(err)
				return
			}
			select {
			case <-other.C():
			case <-time.After(5 * time.Second):
			}
			if took := time.Since(began); took > 900*time.Millisecond { // otherwise half of them take a second
				t.Errorf("hint after %v", took)
			}
		})
	}
	rounds.Wait()
}

func TestAWatchLeavesAServerThatHasBecomeReadOnly(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	s := start(t)
	table, first, _, _, _, _ := watched(t, s)
	admin := s.db(t, "admin", "")
	connections := func(which string) (ids []int) {
		rows, err := admin.Query("SELECT ID FROM information_schema.PROCESSLIST WHERE USER = 'app'" + which)
		require.NoError(t, err)
		defer rows.Close()
		for rows.Next() {
			var id int
			require.NoError(t, rows.Scan(&id))
			ids = append(ids, id)
		}
		return ids
	}
	before := connections(" AND INFO LIKE '%GET_LOCK%'")
	require.NotEmpty(t, before)
	exec1(t, admin, "SET GLOBAL read_only = ON")
	testkit.Await(t, "it connects again", func() bool {
		now := connections("")
		return !slices.ContainsFunc(before, func(id int) bool { return slices.Contains(now, id) })
	})
	exec1(t, admin, "SET GLOBAL read_only = OFF")
	third := open(t, s, table)
	sub := third.Watch(widget)
	defer sub.Stop()
	testkit.Await(t, "watches work", sub.Live)
	drain(sub)
	testkit.Put(t, first, tenure.Object{Key: widget, Payload: []byte("y")})
	awaitHint(t, sub, 10*time.Second)
}
