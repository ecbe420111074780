package tenure_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

func TestConfigReturnsTheDefaultsToo(t *testing.T) {
	lease, err := tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: kit.LeaseKey, Holder: "a", TTL: time.Minute, Labels: map[string]string{"k": "v"}})
	require.NoError(t, err)
	cfg := lease.Config()
	require.Equal(t, "reconciler_lease/singleton", cfg.Key.String())
	require.Equal(t, 2*time.Second, cfg.Margin)
	cfg.Labels["k"] = "changed" // it is a copy
	require.Equal(t, map[string]string{"k": "v"}, lease.Config().Labels)

	named := kit.Must(tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: tenure.Key{ID: "sweeper"}}))
	require.Equal(t, tenure.Key{Type: "lease", ID: "sweeper"}, named.Key(), "as tenure status -key sweeper has it")

	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{})
	require.NoError(t, err)
	require.Equal(t, 20*time.Second, coordinator.Config().RenewInterval)
	require.Equal(t, 10*time.Second, coordinator.Config().AcquireInterval)
	require.Equal(t, 40*time.Second, coordinator.Config().RenewDeadline)
}

func TestACoordinatorTakesTheConfigOfAnother(t *testing.T) {
	lease, err := tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: kit.LeaseKey, Holder: "a"})
	require.NoError(t, err)
	check := func(context.Context, tenure.Role) error { return nil }
	for _, cfg := range []tenure.CoordinatorConfig{{}, {Check: check, Trace: new(tenure.Trace)}} {
		one, err := tenure.NewCoordinator(lease, cfg)
		require.NoError(t, err)
		require.Same(t, cfg.Trace, one.Config().Trace)
		other, err := tenure.NewCoordinator(lease, one.Config())
		require.NoError(t, err)
		require.Equal(t, one.Config().CheckTimeout, other.Config().CheckTimeout)
	}
}

func TestAStoreWithoutHintsIsWatchedInVain(t *testing.T) {
	key := tenure.Key{Type: "t", ID: "i"}
	watch := tenure.Watch(tenure.Static(), key)
	defer watch.Stop()
	require.False(t, watch.Live())
	require.NoError(t, tenure.Wake(t.Context(), tenure.Static(), key))

	store := storetest.NewMem()
	watch = tenure.Watch(store, key)
	defer watch.Stop()
	require.True(t, watch.Live())
	require.NoError(t, tenure.Wake(t.Context(), store, key))
	<-watch.C()
}
