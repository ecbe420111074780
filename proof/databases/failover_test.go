package databases_test

import (
	"flag"
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

var (
	failovers   = flag.Int("failovers", 1, "how often each kind of failover is tried")
	failoverTTL = flag.Duration("failovers.ttl", 10*time.Second, "the TTL of leases over a failover: a machine that takes a third of that for a failover ends their terms")
)

// failover is two replicas of a lease on a primary that is about to be lost, with what its standby lacks.
type failover struct {
	*testing.T
	try              int
	bHolds           bool // in the end, so it can't be on the standby
	primary, standby *testkit.PostgresServer
	jobs             testkit.Jobs
	a, b             *failoverReplica
}

type failoverReplica struct {
	*testkit.Replica            // nil until it is started
	to               *rig.Proxy // to the server that it reaches; nil: it is on the standby
}

// addressOf returns where a server listens.
func addressOf(t *testing.T, server *testkit.PostgresServer) string {
	u, err := url.Parse(server.URL())
	require.NoError(t, err)
	return u.Host
}

// replica starts a replica, which reaches the primary in one of several ways.
func (f *failover) replica(name string, way int) *failoverReplica {
	r := &failoverReplica{}
	ways := [...]string{"directly", "through PgBouncer", "on the standby"}
	f.Logf("%s connects %s", name, ways[way])
	at := f.standby.URL() + "&target_session_attrs=any"
	if ways[way] != "on the standby" {
		proxy, err := rig.NewProxy(addressOf(f.T, f.primary), nil)
		require.NoError(f, err)
		f.Cleanup(proxy.Close)
		u, err := url.Parse(f.primary.URL())
		require.NoError(f, err)
		r.to, u.Host = proxy, proxy.Addr()
		at = u.String()
	}
	if ways[way] == "through PgBouncer" {
		at = testkit.StartBouncer(f, at) + "&default_query_exec_mode=exec"
	}
	store := testkit.OpenPostgres(f, at, tenure.PostgresConfig{})
	r.Replica = testkit.StartReplica(f, &f.jobs, store, name, *failoverTTL)
	return r
}

// begin starts the replica that will hold the lease, and then the other.
func (f *failover) begin() {
	f.a = f.replica("a", f.try%2)
	testkit.Await(f, "a holds", f.a.IsHolder)
	way := (f.try + 1) % 3
	if f.bHolds {
		way %= 2
	}
	f.b = f.replica("b", way)
}

func (f *failover) holder() *testkit.Replica { return testkit.Holder(f.a.Replica, f.b.Replica) }

// awaitStandby waits until the standby has what the primary has.
func (f *failover) awaitStandby() { require.NoError(f, f.standby.CatchUp(f.Context(), f.primary)) }

// lag cuts the standby off: what the primary gets from now on will be lost.
func (f *failover) lag() { require.NoError(f, f.standby.CutOff(f.Context())) }

// failOver loses the primary and promotes the standby. Late is how much later than the other the holder
// reaches it.
func (f *failover) failOver(late time.Duration) {
	require.NoError(f, f.primary.Stop("immediate"))
	require.NoError(f, f.standby.Promote())
	if f.b.to != nil {
		f.b.to.Redirect(addressOf(f.T, f.standby))
	}
	if f.a.to == nil {
		return
	}
	if late > 0 {
		f.a.to.Set(rig.Weather{Refuse: true})
		time.Sleep(late)
		f.a.to.Set(rig.Weather{})
	}
	f.a.to.Redirect(addressOf(f.T, f.standby))
}

// A standby is promoted that lacks what the primary has acknowledged. The holder goes on under its term,
// whatever that was, and no other job begins.
func TestOverAFailoverThatLosesCommitsTheHolderGoesOnAlone(t *testing.T) {
	kinds := map[string]struct {
		before func(f *failover) // what survives
		lost   func(f *failover)
		late   time.Duration
	}{
		"an acquire":                             {func(*failover) {}, func(f *failover) { f.begin() }, 0},
		"an acquire, and the holder comes later": {func(*failover) {}, func(f *failover) { f.begin() }, 2 * time.Second},
		"renewals of a TTL":                      {func(f *failover) { f.begin() }, func(*failover) { time.Sleep(*failoverTTL * 5 / 4) }, 0},
		"a handover": {func(f *failover) { f.begin() }, func(f *failover) {
			require.NoError(f, f.a.Lease.RequestHandover(f.Context(), "b"))
			testkit.Await(f, "b holds", f.b.IsHolder)
		}, 0},
	}
	for kind, test := range kinds {
		for try := range *failovers {
			t.Run(fmt.Sprintf("%s/%d", kind, try), func(t *testing.T) {
				t.Parallel()
				f := &failover{T: t, try: try + len(kind), bHolds: kind == "a handover", primary: testkit.StartPostgres(t)}
				testkit.Migrate(t, testkit.OpenPostgres(t, f.primary.URL(), tenure.PostgresConfig{}))
				f.standby, _ = standbyOf(t, f.primary)
				test.before(f)
				f.awaitStandby()
				f.lag()
				test.lost(f)
				require.NotNil(t, f.holder())
				holder, term := f.holder(), (*tenure.Term)(nil)
				testkit.Await(t, "the holder's job runs", func() bool {
					term = f.jobs.Term.Load()
					return term != nil && term.Token() == holder.Status().Token
				})
				f.failOver(test.late)
				for end := time.Now().Add(*failoverTTL*3/2 + test.late); time.Now().Before(end); {
					require.True(t, term.Valid() && holder.IsHolder(), "the holder goes on")
					testkit.Sleep(t.Context(), 20*time.Millisecond)
				}
				require.EqualValues(t, 1, f.jobs.Most.Load(), "jobs at once")
				require.Equal(t, term.ID(), f.jobs.Term.Load().ID())
				obj, err := holder.Store.Get(t.Context(), holder.Lease.Key())
				require.NoError(t, err)
				require.Equal(t, term.Record(), obj.Payload)
				require.Greater(t, obj.Version, term.Token())
			})
		}
	}
}
