package natstenure_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
)

func TestAReleaseWakesTheStandby(t *testing.T) {
	t.Parallel()
	url := start(t).ClientURL()
	var jobs testkit.Jobs
	const ttl = time.Second
	a := testkit.StartReplica(t, &jobs, open(t, url), "a", ttl)
	testkit.Await(t, "a holds", a.IsHolder)
	b := testkit.StartReplica(t, &jobs, open(t, url), "b", ttl)
	testkit.Await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	time.Sleep(ttl)
	released := time.Now()
	a.Stop()
	testkit.Await(t, "b holds", b.IsHolder)
	require.Less(t, time.Since(released), ttl/2)
	require.EqualValues(t, 1, jobs.Most.Load())
}

func TestReplicasSurviveARestartOfTheServer(t *testing.T) {
	for name, restart := range map[string]func(c *child){
		"killed":  (*child).kill,
		"stopped": func(c *child) { _ = c.stdin.Close(); _ = c.cmd.Wait() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := startChild(t)
			var jobs testkit.Jobs
			const ttl = 3 * time.Second
			a, b := testkit.StartReplica(t, &jobs, open(t, c.url), "a", ttl), testkit.StartReplica(t, &jobs, open(t, c.url), "b", ttl)
			testkit.RunRestarts(t, &jobs, a, b, 3, func() { restart(c); c.start(t) })
		})
	}
}

func TestAWatchThatBreaksIsNotLiveAndTellsThePresentStateWhenItIsAgain(t *testing.T) {
	t.Parallel()
	c := startChild(t)
	key := tenure.Key{Type: "widget", ID: "a"}
	store := open(t, c.url)
	watch := store.Watch(key).(tenure.ChangeSubscription)
	defer watch.Stop()
	testkit.Await(t, "the watch is live", watch.Live)
	change, _ := watch.Last()
	require.True(t, change.Deleted)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent())
	require.NoError(t, err)
	testkit.Await(t, "the change has arrived", func() bool { change, ok := watch.Last(); return ok && change.Object.Version == obj.Version })
	for len(watch.C()) > 0 {
		<-watch.C()
	}

	c.kill()
	select {
	case <-watch.C():
	case <-time.After(10 * time.Second):
		t.Fatal("no hint that the watch broke")
	}
	require.False(t, watch.Live())
	c.start(t)
	other := open(t, c.url)
	obj, err = other.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfVersion(obj.Version))
	require.NoError(t, err)
	began := time.Now()
	testkit.Await(t, "the watch tells the present state", func() bool { change, ok := watch.Last(); return ok && change.Object.Version == obj.Version })
	require.Less(t, time.Since(began), 5*time.Second)
}

func TestAWatchWhoseConsumerIsRemovedMakesAnother(t *testing.T) {
	t.Parallel()
	url := start(t).ClientURL()
	js, store := connect(t, url), open(t, url)
	watch := store.Watch(tenure.Key{Type: "widget", ID: "a"}).(tenure.ChangeSubscription)
	defer watch.Stop()
	testkit.Await(t, "the watch is live", watch.Live)
	stream, err := js.Stream(t.Context(), "TENURE")
	require.NoError(t, err)
	consumers := func() (names []string) {
		for name := range stream.ConsumerNames(t.Context()).Name() {
			names = append(names, name)
		}
		return names
	}
	removed := consumers()
	require.Len(t, removed, 1)
	require.NoError(t, stream.DeleteConsumer(t.Context(), removed[0]))
	testkit.Await(t, "another consumer takes its place", func() bool {
		now := consumers()
		return len(now) == 1 && now[0] != removed[0] && watch.Live()
	})
	watch.Stop()
	stopped := time.Now()
	testkit.Await(t, "its consumer is removed", func() bool {
		info, err := stream.Info(t.Context())
		return err == nil && info.State.Consumers == 0
	})
	require.Less(t, time.Since(stopped), 20*time.Second, "after 30 s the server removes it by itself")
}

func TestTokensGoOnAboveThoseOfAStreamThatWasRemoved(t *testing.T) {
	url := start(t).ClientURL()
	js, store := connect(t, url), open(t, url)
	a, b := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"}), testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "b"})
	before, err := a.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, js.DeleteStream(t.Context(), "TENURE"))
	require.Error(t, a.Renew(t.Context(), before))
	require.NoError(t, store.Migrate(t.Context()))
	require.ErrorIs(t, a.Renew(t.Context(), before), tenure.ErrLost)
	after, err := b.TryAcquire(t.Context())
	require.NoError(t, err)
	require.Greater(t, after.Token(), before.Token())
}

func TestAStreamThatCountsFromOneAgainIsRefusedByThoseThatKnowAGreaterToken(t *testing.T) {
	url := start(t).ClientURL()
	js, store := connect(t, url), open(t, url)
	holder, witness := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"}), testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "b"})
	term, err := holder.TryAcquire(t.Context())
	require.NoError(t, err)
	_, err = witness.TryAcquire(t.Context())
	require.ErrorIs(t, err, tenure.ErrHeld)

	require.NoError(t, js.DeleteStream(t.Context(), "TENURE"))
	_, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "TENURE", Subjects: []string{"TENURE.>"}, AllowAtomicPublish: true, MaxMsgsPerSubject: 1})
	require.NoError(t, err)
	require.ErrorIs(t, holder.Renew(t.Context(), term), tenure.ErrLost)
	for _, lease := range []*tenure.Lease{witness, holder} {
		_, err = lease.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, "fencing token")
	}
	stream, err := js.Stream(t.Context(), "TENURE")
	require.NoError(t, err)
	require.NoError(t, stream.Purge(t.Context(), jetstream.WithPurgeSequence(uint64(term.Token())+1))) // as the error says
	next, err := witness.AcquireOrSteal(t.Context())
	require.NoError(t, err)
	require.Greater(t, next.Token(), term.Token())
}

func TestTheJobOfAHolderThatIsCutOffHasEndedBeforeTheNextOneBegins(t *testing.T) {
	t.Parallel()
	url := start(t).ClientURL()
	testkit.RunCutOff(t, open(t, url), open(t, url), 3*time.Second)
}

func TestOfAThousandForcedRacesNoStaleWriteIsAccepted(t *testing.T) {
	url := start(t).ClientURL()
	testkit.RunForcedRaces(t, 4, 250, func(int) *natstenure.Store { return open(t, url) })
}
