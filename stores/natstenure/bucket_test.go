package natstenure_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
	"github.com/tenurelib/tenure/storetest"
)

// keepsContract tests stores in buckets of a server.
func keepsContract(t *testing.T, url string) {
	js := connect(t, url)
	buckets := 0
	next := func() natstenure.Config {
		buckets++
		return natstenure.Config{Bucket: fmt.Sprint("b", buckets)}
	}
	t.Run("contract", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) tenure.Store { return openOn(t, js, next()) })
	})
	t.Run("names move", func(t *testing.T) { testkit.RunNamesMove(t, openOn(t, js, next())) })
	t.Run("names are given once", func(t *testing.T) {
		cfg := next()
		testkit.RunNamesAreGivenOnce(t, func() *natstenure.Store { return openOn(t, connect(t, url), cfg) })
	})
	t.Run("keys are listed", func(t *testing.T) { testkit.RunKeysAreListed(t, openOn(t, js, next())) })
	t.Run("updates", func(t *testing.T) {
		cfg := next()
		testkit.RunConcurrentUpdates(t, func(int) *natstenure.Store { return openOn(t, connect(t, url), cfg) })
	})
}

func TestAStoreInABucketKeepsTheContract(t *testing.T) {
	t.Parallel()
	keepsContract(t, start(t).ClientURL())
}

// The oldest version that is accepted, and one that is refused.
const (
	oldest = "v2.11.2"
	tooOld = "v2.10.27"
)

func TestABucketOnAnOlderServerKeepsTheContract(t *testing.T) {
	t.Parallel()
	c := &child{binary: oldBinary(t, oldest), dir: quickDir(t)}
	c.start(t)
	t.Cleanup(c.kill)
	keepsContract(t, c.url)

	store, err := natstenure.New(connect(t, c.url), natstenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	defer store.Close()
	err = store.Migrate(t.Context())
	require.ErrorIs(t, err, tenure.ErrSetup, "a stream of the store's own layout needs atomic batches")
	require.ErrorContains(t, err, "with Config.Bucket, 2.11.2 is enough")

	// The first entry of the bucket, which the lease never writes again, is where older servers lose all of them.
	kept := openOn(t, connect(t, c.url), natstenure.Config{Bucket: "kept"})
	lease := testkit.NewLease(t, kept, tenure.LeaseConfig{TTL: time.Hour})
	term := testkit.MustAcquire(t, lease)
	require.NoError(t, lease.Renew(t.Context(), term))
	c.kill()
	c.start(t)
	testkit.Await(t, "the lease is renewed", func() bool { return lease.Renew(t.Context(), term) == nil })

	var jobs testkit.Jobs
	const ttl = 3 * time.Second
	cfg := natstenure.Config{Bucket: "leases"}
	a, b := testkit.StartReplica(t, &jobs, openOn(t, connect(t, c.url), cfg), "a", ttl), testkit.StartReplica(t, &jobs, openOn(t, connect(t, c.url), cfg), "b", ttl)
	testkit.RunRestarts(t, &jobs, a, b, 2, func() { c.kill(); c.start(t) })
}

func TestAReplicatedBucketOn211LosesNoUpdate(t *testing.T) {
	cluster := startClusterOf(t, oldBinary(t, oldest))
	testkit.RunConcurrentUpdates(t, func(i int) *natstenure.Store {
		return openOn(t, connect(t, cluster.servers[i%3].url), natstenure.Config{Bucket: "b", Replicas: 3})
	})
	testkit.RunNamesMove(t, openOn(t, connect(t, cluster.servers[0].url), natstenure.Config{Bucket: "c", Replicas: 3}))
}

// The client reaches a new server, but a 2.10 server has the bucket.
func TestABucketOfAServerThatIsTooOldIsRefusedWhereverTheClientIs(t *testing.T) {
	t.Parallel()
	leafs := freePort(t)
	old := &child{binary: oldBinary(t, tooOld), dir: quickDir(t), more: "jetstream: {domain: old}\nleafnodes: {listen: \"127.0.0.1:" + leafs + "\"}\n"}
	old.start(t)
	t.Cleanup(old.kill)
	leaf := startWith(t, &server.Options{LeafNode: server.LeafNodeOpts{
		Remotes: []*server.RemoteLeafOpts{{URLs: []*url.URL{{Scheme: "nats", Host: "127.0.0.1:" + leafs}}}},
	}})
	js, err := jetstream.NewWithDomain(connect(t, leaf.ClientURL()).Conn(), "old")
	require.NoError(t, err)
	testkit.Await(t, "the old server answers", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := js.AccountInfo(ctx)
		return err == nil
	})
	store, err := natstenure.New(js, natstenure.Config{Bucket: "b", Logger: testkit.Quiet})
	require.NoError(t, err)
	defer store.Close()
	err = store.Migrate(t.Context())
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "must have a leader of version 2.11")
	_, err = store.Get(t.Context(), tenure.Key{Type: "a", ID: "b"})
	require.ErrorContains(t, err, "must have a leader of version 2.11")
}

// leaseKey is the key of the default lease's entry.
const leaseKey = "o.reconciler_lease.singleton"

func TestTheKVClientReadsWhatABucketKeeps(t *testing.T) {
	t.Parallel()
	js := connect(t, start(t).ClientURL())
	store := openOn(t, js, natstenure.Config{Bucket: "leases"})
	kv, err := js.KeyValue(t.Context(), "leases")
	require.NoError(t, err)
	watch, err := kv.Watch(t.Context(), leaseKey)
	require.NoError(t, err)
	defer watch.Stop()
	require.Nil(t, <-watch.Updates(), "there is no entry yet")
	next := func() jetstream.KeyValueEntry {
		select {
		case entry := <-watch.Updates():
			return entry
		case <-time.After(10 * time.Second):
			t.Fatal("the watch delivers no change")
			return nil
		}
	}

	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "replica-a"})
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, term.Token(), next().Revision())
	require.NoError(t, lease.Renew(t.Context(), term))
	renewed := next()
	require.Equal(t, jetstream.KeyValuePut, renewed.Operation())
	entry, err := kv.Get(t.Context(), leaseKey)
	require.NoError(t, err)
	require.Equal(t, renewed.Revision(), entry.Revision())
	require.Contains(t, string(entry.Value()), `"holder":"replica-a"`)
	keys, err := kv.Keys(t.Context())
	require.NoError(t, err)
	require.ElementsMatch(t, []string{leaseKey, "n.reconciler_lease.singleton"}, keys)

	require.NoError(t, lease.Release(t.Context(), term))
	released := next()
	require.Contains(t, string(released.Value()), `"deleted":true`)
	require.NoError(t, kv.PurgeDeletes(t.Context(), jetstream.DeleteMarkersOlderThan(-1)))
	entry, err = kv.Get(t.Context(), leaseKey) // `nats kv compact` leaves it, so it can't remove the next term's
	require.NoError(t, err)
	require.Equal(t, released.Revision(), entry.Revision())
	status, err := kv.Status(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, status.History())
}

func TestTheKeysAndValuesOfABucketStayAsTheyAre(t *testing.T) {
	t.Parallel()
	js := connect(t, start(t).ClientURL())
	store := openOn(t, js, natstenure.Config{Bucket: "leases"})
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{
		Key: tenure.Key{Type: "lease", ID: "nightly report"}, Holder: "replica-a", Labels: map[string]string{"address": "10.0.0.1:8080"},
	})
	require.NoError(t, err)
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, lease.Renew(t.Context(), term))
	gone, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "7"}, Name: "b"}, tenure.IfAbsent())
	require.NoError(t, err)
	require.NoError(t, store.DeleteIf(t.Context(), gone.Key, tenure.IfVersion(gone.Version)))
	_, err = store.PutIf(t.Context(), tenure.Object{Key: gone.Key, Name: "größe", Payload: []byte("a payload")}, tenure.IfAbsent())
	require.NoError(t, err)
	gone, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "8"}}, tenure.IfAbsent())
	require.NoError(t, err)
	require.NoError(t, store.DeleteIf(t.Context(), gone.Key, tenure.IfVersion(gone.Version)))
	compareMessages(t, js, "KV_leases", "bucket")
}

// A bucket made by `nats kv add` is good enough, unless its settings could lose a write.
func TestABucketOfSomebodyElseIsUsedOrRefusedAndNeverRepeatsAToken(t *testing.T) {
	t.Parallel()
	js := connect(t, start(t).ClientURL())
	_, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "source"})
	require.NoError(t, err)
	buckets := 0
	for what, test := range map[string]struct {
		cfg   jetstream.KeyValueConfig
		wants string // of the error; empty: there is none
	}{
		"history 1":    {jetstream.KeyValueConfig{History: 1}, ""},
		"history 5":    {jetstream.KeyValueConfig{History: 5}, ""},
		"marker TTL":   {jetstream.KeyValueConfig{LimitMarkerTTL: time.Second}, ""},
		"compression":  {jetstream.KeyValueConfig{Compression: true, MaxBytes: 1 << 20}, ""},
		"large values": {jetstream.KeyValueConfig{MaxValueSize: 100 << 10}, ""},
		"TTL":          {jetstream.KeyValueConfig{TTL: time.Hour}, "must have no maximum age, which is a bucket's TTL"},
		"small values": {jetstream.KeyValueConfig{MaxValueSize: 8 << 10}, "maximum value size"},
		"memory":       {jetstream.KeyValueConfig{Storage: jetstream.MemoryStorage}, "must have file storage"},
		"mirror":       {jetstream.KeyValueConfig{Mirror: &jetstream.StreamSource{Name: "source"}}, "no mirror"},
		"sources":      {jetstream.KeyValueConfig{Sources: []*jetstream.StreamSource{{Name: "source"}}}, "no mirror, sources"},
	} {
		t.Run(what, func(t *testing.T) {
			buckets++
			test.cfg.Bucket = fmt.Sprint("b", buckets)
			kv, err := js.CreateKeyValue(t.Context(), test.cfg)
			require.NoError(t, err)
			store, err := natstenure.New(js, natstenure.Config{Bucket: test.cfg.Bucket, Logger: testkit.Quiet})
			require.NoError(t, err)
			defer store.Close()
			err = store.Migrate(t.Context())
			if test.wants != "" {
				require.ErrorIs(t, err, tenure.ErrSetup)
				require.ErrorContains(t, err, test.wants)
				_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "a", ID: "b"}}, tenure.IfAbsent())
				require.ErrorIs(t, err, tenure.ErrSetup)
				return
			}
			require.NoError(t, err)
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
			var last int64
			for i := range 8 { // more than the history
				term, err := lease.TryAcquire(t.Context())
				require.NoError(t, err)
				require.Greater(t, term.Token(), last)
				require.NoError(t, lease.Renew(t.Context(), term))
				last = term.Token()
				require.NoError(t, lease.Release(t.Context(), term))
				if i%3 == 2 { // nothing is left of the lease
					require.NoError(t, kv.Purge(t.Context(), leaseKey))
					require.NoError(t, kv.PurgeDeletes(t.Context(), jetstream.DeleteMarkersOlderThan(-1)))
					_, err := kv.History(t.Context(), leaseKey)
					require.ErrorIs(t, err, jetstream.ErrKeyNotFound)
				}
			}
			if test.cfg.MaxValueSize > 0 {
				_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "a", ID: "b"}, Payload: make([]byte, test.cfg.MaxValueSize)}, tenure.IfAbsent())
				require.ErrorIs(t, err, tenure.ErrInvalid)
				require.ErrorContains(t, err, "raise the bucket's maximum value size")
			}
		})
	}
}

// An operator deletes or purges the entry of a held lease, and the holder does not know that yet.
func TestAnEntryThatIsDeletedByHandIsNotReleased(t *testing.T) {
	t.Parallel()
	js := connect(t, start(t).ClientURL())
	for what, remove := range map[string]func(kv jetstream.KeyValue) error{
		"deleted": func(kv jetstream.KeyValue) error { return kv.Delete(t.Context(), leaseKey) },
		"purged":  func(kv jetstream.KeyValue) error { return kv.Purge(t.Context(), leaseKey) },
		"put":     func(kv jetstream.KeyValue) error { _, err := kv.PutString(t.Context(), leaseKey, ""); return err },
	} {
		t.Run(what, func(t *testing.T) {
			cfg := natstenure.Config{Bucket: what}
			const ttl = time.Second
			a := testkit.NewLease(t, openOn(t, js, cfg), tenure.LeaseConfig{Holder: "a", TTL: ttl})
			b := testkit.NewLease(t, openOn(t, js, cfg), tenure.LeaseConfig{Holder: "b", TTL: ttl})
			term, err := a.TryAcquire(t.Context())
			require.NoError(t, err)
			kv, err := js.KeyValue(t.Context(), what)
			require.NoError(t, err)
			require.NoError(t, remove(kv))
			removed := time.Now()
			_, err = b.AcquireOrSteal(t.Context())
			require.ErrorIs(t, err, tenure.ErrHeld)
			require.ErrorIs(t, a.Renew(t.Context(), term), tenure.ErrLost)
			var next *tenure.Term
			testkit.Await(t, "b holds", func() bool { next, err = b.AcquireOrSteal(t.Context()); return err == nil })
			require.GreaterOrEqual(t, time.Since(removed), ttl)
			require.Greater(t, next.Token(), term.Token())
		})
	}
}

// Any server with a copy may answer a direct get, even one that lags behind.
func TestOnlyAnOutdatedStoreReadsByDirectGets(t *testing.T) {
	t.Parallel()
	url := start(t).ClientURL()
	spy, err := nats.Connect(url)
	require.NoError(t, err)
	defer spy.Close()
	var direct atomic.Int32
	_, err = spy.Subscribe("$JS.API.DIRECT.GET.>", func(*nats.Msg) { direct.Add(1) })
	require.NoError(t, err)
	require.NoError(t, spy.Flush())
	cfg := natstenure.Config{Bucket: "b"}
	var jobs testkit.Jobs
	const ttl = time.Second
	a := testkit.StartReplica(t, &jobs, openOn(t, connect(t, url), cfg), "a", ttl)
	testkit.Await(t, "a holds", a.IsHolder)
	b := testkit.StartReplica(t, &jobs, openOn(t, connect(t, url), cfg), "b", ttl)
	testkit.Await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	a.Stop()
	testkit.Await(t, "b holds", b.IsHolder)
	store := openOn(t, connect(t, url), cfg)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}, Name: "a", Payload: []byte("a")}, tenure.Unconditional())
	require.NoError(t, err)
	_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "b"}, Name: "a"}, tenure.IfAbsent())
	require.ErrorIs(t, err, tenure.ErrTaken)
	_, err = store.List(t.Context(), "widget", "", 10)
	require.NoError(t, err)
	_, err = store.EverExisted(t.Context(), obj.Key)
	require.NoError(t, err)
	require.NoError(t, spy.Flush())
	require.Zero(t, direct.Load())

	look := store.Outdated()
	is, err := look.Get(t.Context(), obj.Key)
	require.NoError(t, err)
	require.Equal(t, obj, is)
	found, err := look.List(t.Context(), "widget", "", 10)
	require.NoError(t, err)
	require.Equal(t, []tenure.Object{obj}, found)
	testkit.Await(t, "both have read by direct gets", func() bool { return direct.Load() == 2 })
	_, err = look.PutIf(t.Context(), obj, tenure.Unconditional())
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorIs(t, look.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), errors.ErrUnsupported)
	_, err = testkit.NewLease(t, look, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "other"}}).TryAcquire(t.Context())
	require.ErrorIs(t, err, errors.ErrUnsupported)
}

func TestAFencedStoreThatMayReadWhatIsOutdatedDoesNotWrite(t *testing.T) {
	t.Parallel()
	store := open(t, start(t).ClientURL())
	term, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).TryAcquire(t.Context())
	require.NoError(t, err)
	fenced, err := store.Outdated().Fence(term)
	require.NoError(t, err)
	_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "a", ID: "b"}}, tenure.IfAbsent())
	require.ErrorIs(t, err, errors.ErrUnsupported)
}

// A process claims a name in a bucket and dies, or is slow, before it writes the object.
func TestANameThatIsOnlyClaimedIsGivenToAnother(t *testing.T) {
	t.Parallel()
	js := connect(t, start(t).ClientURL())
	store := openOn(t, js, natstenure.Config{Bucket: "b"})
	a, b := tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}, Name: "y", Payload: []byte("a")}, tenure.Object{Key: tenure.Key{Type: "widget", ID: "b"}, Name: "x"}
	claim := func(at int64) {
		t.Helper()
		_, err := js.Publish(t.Context(), "$KV.b.n.widget.x", fmt.Appendf(nil, `{"id":"a","at":%d}`, at))
		require.NoError(t, err)
	}
	write := func(at int64) error { // the write that the claim was for
		_, err := js.Publish(t.Context(), "$KV.b.o.widget.a", []byte(`{"type":"widget","id":"a","name":"x"}`+"\n"), jetstream.WithExpectLastSequencePerSubject(uint64(at)))
		return err
	}

	claim(0)
	is, err := store.PutIf(t.Context(), b, tenure.IfAbsent())
	require.NoError(t, err)
	require.Error(t, write(0))
	_, err = store.Get(t.Context(), a.Key)
	require.ErrorIs(t, err, tenure.ErrNotFound)
	require.NoError(t, store.DeleteIf(t.Context(), b.Key, tenure.IfVersion(is.Version)))

	// An existing object is not written for the sake of another's name.
	was, err := store.PutIf(t.Context(), a, tenure.IfAbsent())
	require.NoError(t, err)
	claim(was.Version)
	b.Key.ID = "c"
	_, err = store.PutIf(t.Context(), b, tenure.IfAbsent())
	require.ErrorIs(t, err, tenure.ErrTaken)
	require.ErrorContains(t, err, "until that is written again")
	is, err = store.Get(t.Context(), a.Key)
	require.NoError(t, err)
	require.Equal(t, was, is)
	_, err = store.PutIf(t.Context(), a, tenure.IfVersion(was.Version))
	require.NoError(t, err)
	require.Error(t, write(was.Version))
	_, err = store.PutIf(t.Context(), b, tenure.IfAbsent())
	require.NoError(t, err)
}
