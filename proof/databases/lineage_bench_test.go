package databases_test

import (
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// BenchmarkRenewalThatNamesTheServer compares the write of a renewal with and without the server on which it was decided,
// in turn, by their medians. It is to cost at most 2 %.
func BenchmarkRenewalThatNamesTheServer(b *testing.B) {
	store := testkit.OpenPostgres(b, testkit.PostgresURL(b), tenure.PostgresConfig{})
	testkit.Migrate(b, store)
	lease := testkit.NewLease(b, store, tenure.LeaseConfig{TTL: time.Hour})
	term := testkit.MustAcquire(b, lease)
	on, err := store.Lineage(b.Context())
	require.NoError(b, err)
	obj, err := store.Get(b.Context(), lease.Key())
	require.NoError(b, err)
	took := map[string][]time.Duration{}
	for b.Loop() {
		for name, server := range map[string]string{"without": "", "with": on.Server} { // in random order
			began := time.Now()
			obj, err = store.PutIf(b.Context(), obj, tenure.IfVersion(obj.Version).OnServer(server, obj.Version))
			took[name] = append(took[name], time.Since(began))
			require.NoError(b, err)
		}
	}
	require.True(b, term.Valid())
	for name, all := range took {
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)/2].Microseconds()), name+"-µs")
	}
}

// BenchmarkSwitchover measures for how long a holder that tries to renew all the time has no answer over a planned switchover,
// and how much of that comes after the promotion.
func BenchmarkSwitchover(b *testing.B) {
	var gap, after time.Duration
	for b.Loop() {
		primary := testkit.StartPostgres(b)
		testkit.Migrate(b, testkit.OpenPostgres(b, primary.URL(), tenure.PostgresConfig{}))
		standby, err := primary.Standby()
		require.NoError(b, err)
		at := testkit.Must(url.Parse(primary.URL()))
		was, is := at.Host, testkit.Must(url.Parse(standby.URL())).Host
		proxy, err := rig.NewProxy(was, nil)
		require.NoError(b, err)
		at.Host = proxy.Addr()
		lease := testkit.NewLease(b, testkit.OpenPostgres(b, at.String(), tenure.PostgresConfig{}), tenure.LeaseConfig{TTL: time.Hour})
		term := testkit.MustAcquire(b, lease)
		require.NoError(b, lease.Renew(b.Context(), term))
		last := time.Now()
		require.NoError(b, primary.Stop("fast")) // when the standby has received all
		require.NoError(b, standby.Promote())
		promoted := time.Now()
		proxy.Redirect(is)
		for lease.Renew(b.Context(), term) != nil {
			require.True(b, term.Valid())
		}
		gap, after = gap+time.Since(last), after+time.Since(promoted)
		proxy.Close()
		require.NoError(b, standby.Close())
	}
	b.ReportMetric(float64(gap.Milliseconds())/float64(b.N), "gap-ms/op")
	b.ReportMetric(float64(after.Milliseconds())/float64(b.N), "after-promotion-ms/op")
}
