package integrations

import (
	"context"
	"errors"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

// controllers is a job that runs the controllers of one term.
func controllers(cfg *rest.Config, shared cache.Cache, setup func(manager.Manager) error) func(context.Context) error {
	return func(ctx context.Context) error {
		mgr, err := manager.New(cfg, manager.Options{
			LeaderElection: false,
			NewCache:       func(*rest.Config, cache.Options) (cache.Cache, error) { return running{shared}, nil },
			Metrics:        server.Options{BindAddress: "0"},
			Controller:     config.Controller{SkipNameValidation: ptr.To(true)}, // each term creates them again
		})
		if err != nil {
			return err
		}
		if err := setup(mgr); err != nil {
			return err
		}
		return mgr.Start(ctx)
	}
}

// running is a cache that is already started.
type running struct{ cache.Cache }

func (running) Start(ctx context.Context) error { <-ctx.Done(); return nil }

// stamp marks an object as written under the term, for the policy.
func stamp(ctx context.Context, obj client.Object) {
	annotations := obj.GetAnnotations()
	if annotations == nil {
		annotations = make(map[string]string)
	}
	annotations["tenurelib.dev/token"] = strconv.FormatInt(tenure.TermFromContext(ctx).Token(), 10)
	obj.SetAnnotations(annotations)
}

// The controllers stamp each ConfigMap with the token of the term in which they run.
func TestAManagerIsAJobThatLosesAndRegainsItsLeaseWithinOneProcess(t *testing.T) {
	cfg := kubernetes(t)
	ctx, stop := context.WithCancel(limited(t))
	defer stop()
	httpClient, err := rest.HTTPClientFor(cfg)
	must(t, err)
	store, err := kubetenure.New(kubetenure.Config{URL: cfg.Host, Client: httpClient, Namespace: "default"})
	must(t, err)
	defer store.Close()
	must(t, store.Migrate(ctx))
	shared, err := cache.New(cfg, cache.Options{})
	must(t, err)
	api, err := client.New(cfg, client.Options{})
	must(t, err)

	key := tenure.Key{Type: "lease", ID: "controllers"}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, TTL: 15 * time.Second})
	must(t, err)
	job := func(ctx context.Context) error {
		return controllers(cfg, shared, func(mgr manager.Manager) error {
			return builder.ControllerManagedBy(mgr).For(&corev1.ConfigMap{}).Complete(reconcile.Func(func(_ context.Context, req reconcile.Request) (reconcile.Result, error) {
				var m corev1.ConfigMap
				if err := mgr.GetClient().Get(ctx, req.NamespacedName, &m); err != nil {
					return reconcile.Result{}, client.IgnoreNotFound(err)
				}
				before := m.Annotations["tenurelib.dev/token"]
				stamp(ctx, &m)
				if before == m.Annotations["tenurelib.dev/token"] {
					return reconcile.Result{}, nil
				}
				return reconcile.Result{}, mgr.GetClient().Update(ctx, &m)
			}))
		})(ctx)
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: job})
	must(t, err)
	var all sync.WaitGroup
	defer all.Wait()
	defer stop()
	all.Go(func() { _ = shared.Start(ctx) })
	all.Go(func() { must(t, coordinator.Run(ctx)) })

	must(t, api.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "work", Namespace: "default"}}))
	last := int64(0)
	for range 3 {
		for before := last; last == before; time.Sleep(20 * time.Millisecond) { // until the ctx ends
			var m corev1.ConfigMap
			must(t, api.Get(ctx, client.ObjectKey{Namespace: "default", Name: "work"}, &m))
			if text := m.Annotations["tenurelib.dev/token"]; text != "" {
				last, err = strconv.ParseInt(text, 10, 64)
				must(t, err)
			}
			if last < before {
				t.Fatal("a former term has written")
			}
		}
		// Another replica takes the lease away.
		obj, err := store.Get(ctx, key)
		must(t, err)
		must(t, store.DeleteIf(ctx, key, tenure.IfVersion(obj.Version)))
	}
}

// kubernetes starts an API server until the test ends. It skips the test if the program is missing.
func kubernetes(t *testing.T) *rest.Config {
	t.Helper()
	dir := t.TempDir()
	etcd, err := rig.NewEtcd(t.Context(), dir, "--unsafe-no-fsync")
	must(t, err)
	kube, err := rig.NewKube(t.Context(), etcd.URL, dir, dir, nil)
	if errors.Is(err, rig.ErrNotBuilt) && os.Getenv("TENURE_REQUIRE_KUBE") == "" {
		t.Skip(err)
	}
	must(t, err)
	t.Cleanup(func() { _ = kube.End(syscall.SIGKILL); _ = etcd.End(syscall.SIGKILL) })
	must(t, etcd.Start(t.Context()))
	must(t, kube.Start(t.Context()))
	return &rest.Config{Host: kube.URL.String(), BearerToken: rig.KubeAdmin, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}
