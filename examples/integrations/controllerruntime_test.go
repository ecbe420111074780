package integrations

import (
	"context"
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/tenurelib/tenure"
)

// runnable makes a coordinator a part of a manager of controller-runtime. It needs no leader
// election of the manager's, because the lease decides which replica works: it is in the
// database that the job writes to, which can therefore refuse a former holder's writes.
type runnable struct{ *tenure.Coordinator }

var _ manager.LeaderElectionRunnable = runnable{}

func (r runnable) Start(ctx context.Context) error { return r.Run(ctx) }
func (runnable) NeedLeaderElection() bool          { return false }

func TestAManagerRunsACoordinatorAndWaitsForIt(t *testing.T) {
	store := newStore()
	defer store.Close()
	ctx, stop := context.WithCancel(limited(t))
	returned := false
	coordinator := newCoordinator(store, "manager", func(ctx context.Context) error {
		stop()
		<-ctx.Done()
		returned = true
		return nil
	})

	noServer := &rest.Config{Host: "http://127.0.0.1:1"} // so nothing that needs the manager's election is started
	mgr, err := manager.New(noServer, manager.Options{
		LeaderElection:          true,
		LeaderElectionID:        "example",
		LeaderElectionNamespace: "default",
		Metrics:                 server.Options{BindAddress: "0"},
	})
	must(t, err)
	must(t, mgr.Add(runnable{coordinator}))
	must(t, mgr.Start(ctx))
	if !returned || coordinator.IsHolder() {
		t.Error("the manager has not waited for the job and the release")
	}
}
