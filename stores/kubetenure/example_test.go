//go:build unix

package kubetenure_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

// runReplica runs the job in one pod at a time.
func runReplica(ctx context.Context, cfg kubetenure.Config, job func(context.Context) error) error {
	store, err := kubetenure.New(cfg) // in a pod, kubetenure.Config{} is enough
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil { // reports what is missing, and writes nothing
		return err
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}, TTL: 15 * time.Second})
	if err != nil {
		return err
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: job})
	if err != nil {
		return err
	}
	return coordinator.Run(ctx)
}

// shared uses the Lease of candidates of client-go's leaderelection.
func shared(url string, client *http.Client, namespace string) (*kubetenure.Store, error) {
	return kubetenure.New(kubetenure.Config{
		URL: url, Client: client, Namespace: namespace,
		Leases: map[tenure.Key]string{{Type: "lease", ID: "sweeper"}: "the-old-name"},
	})
}

func TestTheExampleOfTheREADME(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	worked := errors.New("nothing has worked")
	err := runReplica(ctx, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Client: c.kube.Client}, func(ctx context.Context) error {
		worked = nil
		stop()
		<-ctx.Done()
		return ctx.Err()
	})
	require.NoError(t, errors.Join(err, worked))
	require.Equal(t, []string{"sweeper.lease"}, c.names(t, ns))
	store, err := shared(c.kube.URL.String(), c.kube.Client, ns)
	require.NoError(t, err)
	defer store.Close()
	_, err = store.PutIf(t.Context(), tenure.Object{Key: sweeper}, tenure.IfAbsent())
	require.NoError(t, err)
	require.Equal(t, []string{"sweeper.lease", "the-old-name"}, c.names(t, ns), fmt.Sprint(store))
}
