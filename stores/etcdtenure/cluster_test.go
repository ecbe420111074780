//go:build unix

package etcdtenure_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/etcdtenure"
	"github.com/tenurelib/tenure/storetest"
)

// cluster has three servers that reach each other through proxies.
type cluster struct {
	servers []*server
	links   []*proxy // to each server's peer address
	ids     []string // of the members
}

func startCluster(t testing.TB) *cluster {
	t.Helper()
	c := new(cluster)
	var members []string
	for i := range 3 {
		s := newServer(t)
		link := newProxy(t, s.Peer)
		c.servers, c.links = append(c.servers, s), append(c.links, link)
		members = append(members, fmt.Sprintf("test%d=%s", i, link.url))
	}
	for i, s := range c.servers {
		s.Args = []string{"--unsafe-no-fsync", "--name", fmt.Sprint("test", i), "--initial-advertise-peer-urls", c.links[i].url, "--initial-cluster", strings.Join(members, ",")}
		s.begin(t)
	}
	for _, s := range c.servers {
		s.awaitHealth(t)
		is, err := connect(t, s.client).Status(t.Context(), s.client)
		require.NoError(t, err)
		c.ids = append(c.ids, fmt.Sprintf("%x", is.Header.MemberId))
	}
	return c
}

func (c *cluster) urls() (all []string) {
	for _, s := range c.servers {
		all = append(all, s.client)
	}
	return all
}

// others returns the addresses for clients of all servers but one.
func (c *cluster) others(but int) (all []string) {
	for i, s := range c.servers {
		if i != but {
			all = append(all, s.client)
		}
	}
	return all
}

// leader returns the number of the server that leads.
func (c *cluster) leader(t testing.TB) (n int) {
	t.Helper()
	client := connect(t, c.urls()...)
	testkit.Await(t, "the cluster has a leader", func() bool {
		for i, s := range c.servers {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			is, err := client.Status(ctx, s.client)
			cancel()
			if err == nil && is.Leader == is.Header.MemberId {
				n = i
				return true
			}
		}
		return false
	})
	return n
}

// isolate cuts a server off from the others, but not from its clients.
func (c *cluster) isolate(n int) {
	for i, link := range c.links {
		link.refuse(func(from string) bool { return i == n || from == c.ids[n] })
	}
}

func (c *cluster) heal() {
	for _, link := range c.links {
		link.restore()
	}
}

func TestAReplicatedStore(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	stores := 0
	next := func() etcdtenure.Config {
		stores++
		return etcdtenure.Config{Prefix: fmt.Sprint("s", stores, "/")}
	}
	t.Run("keeps the contract", func(t *testing.T) {
		client := connect(t, c.urls()...)
		storetest.Run(t, func(t *testing.T) tenure.Store { return openOn(t, client, next()) })
	})
	t.Run("loses no update of an object", func(t *testing.T) {
		cfg := next()
		testkit.RunConcurrentUpdates(t, func(i int) *etcdtenure.Store { return openOn(t, connect(t, c.servers[i%3].client), cfg) })
	})
	t.Run("accepts no stale write of 150 forced races", func(t *testing.T) {
		cfg := next()
		testkit.RunForcedRaces(t, 3, 50, func(i int) *etcdtenure.Store { return openOn(t, connect(t, c.servers[i%3].client), cfg) })
	})
}

// The leader is cut off, with the holder's connection and writes: it stops, or it sees no other
// server while its clients still see it. It follows again when another server leads and another
// replica holds.
func TestALeaderThatIsCutOffAcceptsNothingOfTheHolderThatIsCutOffWithIt(t *testing.T) {
	for what, fault := range map[string]struct {
		cut, heal func(*testing.T, *cluster, int)
	}{
		"paused": {
			func(t *testing.T, c *cluster, n int) { c.servers[n].pause(t) },
			func(t *testing.T, c *cluster, n int) { c.servers[n].resume(t) },
		},
		"partitioned": {
			func(_ *testing.T, c *cluster, n int) { c.isolate(n) },
			func(_ *testing.T, c *cluster, _ int) { c.heal() },
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c := startCluster(t)
			var jobs testkit.Jobs
			const ttl = 2 * time.Second
			n := c.leader(t)
			a := testkit.StartReplica(t, &jobs, open(t, c.servers[n].client), "a", ttl)
			testkit.Await(t, "a holds", a.IsHolder)
			b := testkit.StartReplica(t, &jobs, open(t, c.others(n)...), "b", ttl)
			testkit.Await(t, "b waits", func() bool { return b.Status().Holder == "a" })
			term, key := a.Status().Token, tenure.Key{Type: "widget", ID: "a"}
			before, err := b.Store.PutIf(t.Context(), tenure.Object{Key: key, Payload: []byte("before")}, tenure.IfAbsent())
			require.NoError(t, err)
			fence := a.Fence(t)

			fault.cut(t, c, n)
			stale := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
				defer cancel()
				_, err := fence.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("stale")}, tenure.IfVersion(before.Version))
				stale <- err
			}()
			testkit.Await(t, "b holds", b.IsHolder)
			require.False(t, a.IsHolder())
			testkit.Await(t, "b's job runs", func() bool { return jobs.Term.Load().Token() > term })
			after, err := b.Fence(t).PutIf(t.Context(), tenure.Object{Key: key, Payload: []byte("after")}, tenure.Unconditional())
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = a.Store.Get(ctx, key)
			require.Error(t, err, "an outdated read")
			fault.heal(t, c, n)
			require.Error(t, <-stale)
			testkit.Await(t, "the server follows", func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				is, err := a.Store.Get(ctx, key)
				return err == nil && is.Version == after.Version
			})
			require.Greater(t, b.Status().Token, term)
			require.EqualValues(t, 1, jobs.Most.Load())
			b.Stop()
			testkit.Await(t, "a holds again", a.IsHolder)
			require.EqualValues(t, 1, jobs.Most.Load())
		})
	}
}

// A follower that is cut off still answers its clients. It must refuse their requests, and a watch
// on it must not seem live for long.
func TestAServerWithoutALeaderRefusesRequestsAndEndsWatches(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	n := (c.leader(t) + 1) % 3
	key := tenure.Key{Type: "widget", ID: "a"}
	cut, other := open(t, c.servers[n].client), open(t, c.others(n)...)
	watch := cut.Watch(key).(tenure.ChangeSubscription)
	defer watch.Stop()
	testkit.Await(t, "the watch is live", watch.Live)
	c.isolate(n)
	obj, err := other.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent())
	require.NoError(t, err)
	testkit.Await(t, "the watch has broken", func() bool { return !watch.Live() })
	testkit.Await(t, "requests are refused", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err := cut.Get(ctx, key)
		return errors.Is(err, rpctypes.ErrNoLeader)
	})
	c.heal()
	awaitChange(t, watch, obj.Version)
}

// The watches of a store share a stream. When its server falls silent, they find another one,
// although they do not all leave it at once.
func TestWatchesLeaveAServerThatIsSilent(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	store := open(t, c.urls()...)
	var watches []tenure.ChangeSubscription
	var keys []tenure.Key
	for i := range 5 {
		key := tenure.Key{Type: "widget", ID: fmt.Sprint(i)}
		watch := store.Watch(key).(tenure.ChangeSubscription)
		defer watch.Stop()
		keys, watches = append(keys, key), append(watches, watch)
	}
	for n, s := range c.servers {
		for _, watch := range watches {
			testkit.Await(t, "the watch is live", watch.Live)
		}
		s.pause(t)
		other := open(t, c.others(n)...)
		for i, watch := range watches {
			var obj tenure.Object
			testkit.Await(t, "the others elect a leader", func() (ok bool) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				var err error
				obj, err = other.PutIf(ctx, tenure.Object{Key: keys[i]}, tenure.Unconditional())
				return err == nil
			})
			awaitChange(t, watch, obj.Version)
		}
		s.resume(t)
	}
}

// A client that has all addresses carries on by itself when one server is killed.
func TestAHolderSurvivesTheLossOfAnyServer(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	var jobs testkit.Jobs
	const ttl = 9 * time.Second
	a := testkit.StartReplica(t, &jobs, open(t, c.urls()...), "a", ttl)
	testkit.Await(t, "a holds", a.IsHolder)
	b := testkit.StartReplica(t, &jobs, open(t, c.urls()...), "b", ttl)
	testkit.Await(t, "b waits", func() bool { return b.Status().Holder == "a" })
	token := a.Status().Token
	for _, s := range c.servers {
		s.kill()
		for renewed, term := jobs.Term.Load().Deadline(), jobs.Term.Load(); !term.Deadline().After(renewed); time.Sleep(5 * time.Millisecond) {
			require.True(t, a.IsHolder())
		}
		s.begin(t)
		s.awaitHealth(t)
	}
	require.Equal(t, token, a.Status().Token)
	require.EqualValues(t, 1, jobs.Most.Load())
}
