//go:build unix

package natstenure_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
	"github.com/tenurelib/tenure/storetest"
)

func openReplicated(t *testing.T, url string) *natstenure.Store {
	return openOn(t, connect(t, url), natstenure.Config{Replicas: 3})
}

func TestAReplicatedStore(t *testing.T) {
	t.Parallel()
	cluster := startCluster(t)
	streams := 0
	next := func() natstenure.Config {
		streams++
		return natstenure.Config{Stream: fmt.Sprint("S", streams), Replicas: 3}
	}
	t.Run("keeps the contract", func(t *testing.T) {
		js := connect(t, cluster.servers[0].url)
		storetest.Run(t, func(t *testing.T) tenure.Store { return openOn(t, js, next()) })
	})
	t.Run("keeps the contract in a bucket", func(t *testing.T) {
		js := connect(t, cluster.servers[0].url)
		storetest.Run(t, func(t *testing.T) tenure.Store {
			streams++
			return openOn(t, js, natstenure.Config{Bucket: fmt.Sprint("b", streams), Replicas: 3})
		})
	})
	t.Run("gives a name of a bucket once", func(t *testing.T) {
		testkit.RunNamesAreGivenOnce(t, func() *natstenure.Store {
			return openOn(t, connect(t, cluster.servers[0].url), natstenure.Config{Bucket: "names", Replicas: 3})
		})
	})
	t.Run("loses no update of an object in a bucket", func(t *testing.T) {
		testkit.RunConcurrentUpdates(t, func(i int) *natstenure.Store {
			return openOn(t, connect(t, cluster.servers[i%3].url), natstenure.Config{Bucket: "updates", Replicas: 3})
		})
	})
	// If two writes of one object are under way to its replicas at once, the server refuses one
	// before it knows whether the other will succeed.
	t.Run("loses no update of an object", func(t *testing.T) {
		cfg := next()
		testkit.RunConcurrentUpdates(t, func(i int) *natstenure.Store { return openOn(t, connect(t, cluster.servers[i%3].url), cfg) })
	})
	t.Run("believes no refusal of a server that leads no longer", func(t *testing.T) { deposed(t, cluster, next()) })
	t.Run("believes no such refusal in a bucket", func(t *testing.T) {
		deposed(t, cluster, natstenure.Config{Bucket: "deposed", Replicas: 3})
	})
	t.Run("accepts no stale write of 300 forced races", func(t *testing.T) {
		cfg := next()
		testkit.RunForcedRaces(t, 3, 100, func(i int) *natstenure.Store { return openOn(t, connect(t, cluster.servers[i%3].url), cfg) })
	})
}

// A separate client plays a server that was deposed while it was cut off. It refuses what the
// present leader stores, and answers faster than the leader, which has to ask the other servers. If
// the message is sent again before those have answered, the leader says so.
func deposed(t *testing.T, cluster *cluster, cfg natstenure.Config) {
	store := openOn(t, connect(t, cluster.servers[0].url), cfg)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	stream, subjects, fenced := cfg.Stream, cfg.Stream+".o.widget.>", tenure.Store(store)
	if cfg.Bucket != "" {
		stream, subjects = "KV_"+cfg.Bucket, "$KV."+cfg.Bucket+".o.widget.>"
	} else {
		fenced, err = store.Fence(term)
		require.NoError(t, err)
	}
	key := tenure.Key{Type: "widget", ID: "a"}
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent())
	require.NoError(t, err)
	nc, err := nats.Connect(cluster.servers[0].url)
	require.NoError(t, err)
	defer nc.Close()
	const stale, inFlight = `"code":400,"err_code":10071,"description":"wrong last sequence: 1"`, `"code":409,"err_code":10158,"description":"duplicate message id is in process"`
	var answers, given atomic.Int32
	var says atomic.Value
	_, err = nc.Subscribe(subjects, func(msg *nats.Msg) {
		if msg.Reply != "" && answers.Add(-1) >= 0 {
			given.Add(1)
			_ = msg.Respond(fmt.Appendf(nil, `{"error":{%s},"stream":%q,"seq":0}`, says.Load(), stream))
		}
	})
	require.NoError(t, err)
	require.NoError(t, nc.Flush())
	for n := range 10 {
		for _, test := range []struct {
			store   tenure.Store
			says    string
			answers int32
		}{{store, stale, 1}, {store, stale, 100}, {store, inFlight, 1}, {fenced, stale, 1}} {
			says.Store(test.says)
			answers.Store(test.answers)
			is, err := test.store.PutIf(t.Context(), tenure.Object{Key: key, Payload: fmt.Append(nil, n)}, tenure.IfVersion(obj.Version))
			require.NoError(t, err)
			require.Greater(t, is.Version, obj.Version)
			obj, err = store.Get(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, is, obj)
		}
	}
	require.GreaterOrEqual(t, given.Load(), int32(40))
}

// The stream's leader pauses for a while, with the holder's connection and writes, and resumes when
// another server leads and another replica holds.
func TestAPausedLeaderAcceptsNothingOfTheHolderThatItPausedWith(t *testing.T) {
	t.Parallel()
	cluster := startCluster(t)
	var jobs testkit.Jobs
	const ttl = 2 * time.Second
	openReplicated(t, cluster.servers[0].url)
	paused := cluster.leader(t)
	stays, err := nats.Connect(paused.url, nats.NoReconnect(), nats.PingInterval(time.Hour))
	require.NoError(t, err)
	t.Cleanup(stays.Close) // once the replicas have stopped
	js, err := jetstream.New(stays)
	require.NoError(t, err)
	a := testkit.StartReplica(t, &jobs, openOn(t, js, natstenure.Config{Replicas: 3}), "a", ttl)
	testkit.Await(t, "a holds", a.IsHolder)
	b := testkit.StartReplica(t, &jobs, openReplicated(t, cluster.others(paused)), "b", ttl)
	testkit.Await(t, "b waits", func() bool { return b.Status().Holder == "a" })
	term, key := a.Status().Token, tenure.Key{Type: "widget", ID: "a"}
	before, err := b.Store.PutIf(t.Context(), tenure.Object{Key: key, Payload: []byte("before")}, tenure.IfAbsent())
	require.NoError(t, err)
	fence := a.Fence(t)

	pause(t, paused)
	stale := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 25*time.Second)
		defer cancel()
		_, err := fence.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("stale")}, tenure.IfVersion(before.Version))
		stale <- err
	}()
	testkit.Await(t, "b holds", b.IsHolder)
	require.False(t, a.IsHolder())
	resume(t, paused)
	require.Error(t, <-stale)
	testkit.Await(t, "the paused server follows", func() bool { return cluster.leads(t) != nil })
	var is tenure.Object
	testkit.Await(t, "the servers answer", func() bool { is, err = b.Store.Get(t.Context(), key); return err == nil })
	require.Equal(t, before.Version, is.Version)
	require.Greater(t, b.Status().Token, term)
	require.EqualValues(t, 1, jobs.Most.Load())
}

func pause(t *testing.T, c *child) {
	t.Helper()
	testkit.PauseProcess(t, c.cmd.Process)
	t.Cleanup(func() { _ = c.cmd.Process.Signal(syscall.SIGCONT) })
}

func resume(t *testing.T, c *child) { t.Helper(); testkit.ResumeProcess(t, c.cmd.Process) }
