//go:build unix

package kubetenure_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/kubetenure"
	"github.com/tenurelib/tenure/storetest"
)

// replica starts a replica on a store.
func replica(t *testing.T, jobs *testkit.Jobs, store *kubetenure.Store, name string, ttl time.Duration) *testkit.Replica {
	t.Helper()
	return testkit.StartReplica(t, jobs, unfenced{store}, name, ttl)
}

func TestAReleaseWakesTheStandby(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	var jobs testkit.Jobs
	const ttl = 40 * time.Second
	a := replica(t, &jobs, c.store(t, ns), "a", ttl)
	testkit.Await(t, "a holds", a.IsHolder)
	b := replica(t, &jobs, c.store(t, ns), "b", ttl)
	testkit.Await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	time.Sleep(200 * time.Millisecond) // what b may still be doing is over
	released := time.Now()
	a.Stop()
	testkit.Await(t, "b holds", b.IsHolder)
	require.Less(t, time.Since(released), ttl/2)
	require.EqualValues(t, 1, jobs.Most.Load())
}

func TestAStandbyNeitherPollsNorReadsWhileTheHolderRenews(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	var jobs testkit.Jobs
	begin := func(name string, count *atomic.Int32) *tenure.Coordinator {
		counted := storetest.Faulty(c.store(t, ns), func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			count.Add(1)
			return do(ctx)
		})
		cd, err := tenure.NewCoordinator(testkit.NewLease(t, counted, tenure.LeaseConfig{Holder: name, TTL: 12 * time.Second}),
			tenure.CoordinatorConfig{Reconcile: jobs.Run, RenewInterval: 200 * time.Millisecond, Logger: testkit.Quiet})
		require.NoError(t, err)
		testkit.RunCoordinator(t, context.Background(), cd)
		return cd
	}
	var writes, calls atomic.Int32
	a := begin("a", &writes)
	testkit.Await(t, "a holds", a.IsHolder)
	b := begin("b", &calls)
	testkit.Await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	quiet := false
	for range 5 { // on a busy machine it is not always
		before, written := calls.Load(), writes.Load()
		time.Sleep(5 * time.Second) // more than two AcquireIntervals
		if quiet = calls.Load() == before && writes.Load() > written+5; quiet {
			break
		}
	}
	require.True(t, quiet, "the standby reads nothing while the holder writes")
}

// takesOver stops a holder's requests by fault, and waits until the other replica holds the lease.
// Jobs never overlap.
func takesOver(t *testing.T, jobs *testkit.Jobs, a, b *testkit.Replica, fault func()) {
	t.Helper()
	token := a.Status().Token
	fault()
	testkit.Await(t, "the other replica holds", b.IsHolder)
	require.Greater(t, b.Status().Token, token)
	require.EqualValues(t, 1, jobs.Most.Load())
}

func TestTheJobOfAHolderThatIsCutOffHasEndedBeforeTheNextOneBegins(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	proxy, err := rig.NewProxy(c.kube.URL.Host, nil)
	require.NoError(t, err)
	defer proxy.Close()
	for what, weather := range map[string]rig.Weather{"hangs": {HangRequests: true, HangAnswers: true}, "is refused": {Refuse: true}} {
		t.Run(what, func(t *testing.T) {
			var jobs testkit.Jobs
			const ttl = 2 * time.Second
			behind := open(t, kubetenure.Config{Namespace: ns, URL: "https://" + proxy.Addr()})
			a := replica(t, &jobs, behind, "a", ttl)
			testkit.Await(t, "a holds", a.IsHolder)
			b := replica(t, &jobs, c.store(t, ns), "b", ttl)
			testkit.Await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
			takesOver(t, &jobs, a, b, func() { proxy.Set(weather) })
			require.False(t, a.IsHolder())
			proxy.Set(rig.Weather{})
			testkit.Await(t, "a knows b", func() bool { return a.Status().Holder == "b" })
		})
	}
}

func TestReplicasSurviveARestartOfTheAPIServerAndOfEtcd(t *testing.T) {
	t.Parallel()
	c := start(t)
	ns := c.namespace(t)
	var jobs testkit.Jobs
	const ttl = 3 * time.Second
	a, b := replica(t, &jobs, c.store(t, ns), "a", ttl), replica(t, &jobs, c.store(t, ns), "b", ttl)
	last := int64(0)
	holds := func() bool {
		holder := testkit.Holder(a, b)
		if holder == nil {
			return false
		}
		token := holder.Status().Token
		require.GreaterOrEqual(t, token, last)
		last = token
		return true
	}
	testkit.Await(t, "one holds", holds)
	for what, fault := range map[string]func(){
		"the API server is killed": func() {
			require.NoError(t, c.kube.End(syscall.SIGKILL))
			require.NoError(t, c.kube.Start(t.Context()))
		},
		"the API server pauses": func() { c.pause(t, c.kube.PID(), &jobs) },
		"etcd pauses":           func() { c.pause(t, c.etcd.PID(), &jobs) },
		"etcd is stopped": func() {
			require.NoError(t, c.etcd.End(syscall.SIGTERM)) // it does not sync, so it must not be killed
			require.NoError(t, c.etcd.Start(t.Context()))
		},
	} {
		fault()
		testkit.Await(t, "one holds after "+what, holds)
		time.Sleep(ttl / 2)
		testkit.Await(t, "one holds after "+what, holds)
	}
	require.EqualValues(t, 1, jobs.Most.Load())
}

// pause stops a process until no job runs.
func (c *cluster) pause(t *testing.T, pid int, jobs *testkit.Jobs) {
	t.Helper()
	process, err := os.FindProcess(pid)
	require.NoError(t, err)
	testkit.PauseProcess(t, process)
	testkit.Await(t, "no job runs", func() bool { return jobs.Running.Load() == 0 })
	testkit.ResumeProcess(t, process)
}

func TestAWatchThatBreaksTellsThePresentStateWhenItIsLiveAgain(t *testing.T) {
	t.Parallel()
	c := start(t)
	ns := c.namespace(t)
	store := c.store(t, ns)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.NoError(t, err)
	watch := live(t, store, widget)
	require.NoError(t, c.kube.End(syscall.SIGKILL))
	testkit.Await(t, "the watch is not live", func() bool { return !watch.Live() })
	require.NoError(t, c.kube.Start(t.Context()))
	obj, err = c.store(t, ns).PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
	require.NoError(t, err)
	awaitChange(t, watch, obj.Version)
}

// second starts another API server on the etcd server of a cluster, to which it connects at that
// address.
func (c *cluster) second(t *testing.T, etcd string) *rig.Kube {
	t.Helper()
	at := *c.etcd.URL
	at.Host = etcd
	other, err := rig.NewKube(t.Context(), &at, c.dir, t.TempDir(), users)
	require.NoError(t, err)
	t.Cleanup(func() { _ = other.End(syscall.SIGKILL) })
	require.NoError(t, other.Start(t.Context()))
	return other
}

func TestOfTwoAPIServersOneMayBeKilled(t *testing.T) {
	t.Parallel()
	c := start(t)
	other := c.second(t, c.etcd.URL.Host)
	ns := c.namespace(t)
	balancer, err := rig.NewProxy(other.URL.Host, nil)
	require.NoError(t, err)
	defer balancer.Close()
	var jobs testkit.Jobs
	const ttl = 15 * time.Second
	a := replica(t, &jobs, open(t, kubetenure.Config{Namespace: ns, URL: "https://" + balancer.Addr()}), "a", ttl)
	testkit.Await(t, "a holds", a.IsHolder)
	b := replica(t, &jobs, c.store(t, ns), "b", ttl)
	testkit.Await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	token := a.Status().Token
	for range 2 {
		require.NoError(t, other.End(syscall.SIGKILL))
		balancer.Redirect(c.kube.URL.Host)
		time.Sleep(ttl)
		require.True(t, a.IsHolder())
		require.Equal(t, token, a.Status().Token, "the term goes on")
		require.NoError(t, other.Start(t.Context()))
		balancer.Redirect(other.URL.Host)
	}
}

// An API server whose connection to etcd hangs answers no request, and its watches are silent, but
// its connections are fine. Whoever knows more goes to another one.
func TestAWatchOfAnAPIServerThatLagsIsLeft(t *testing.T) {
	t.Parallel()
	c := start(t)
	toEtcd, err := rig.NewProxy(c.etcd.URL.Host, nil)
	require.NoError(t, err)
	defer toEtcd.Close()
	lagging := c.second(t, toEtcd.Addr())
	ns := c.namespace(t)
	balancer, err := rig.NewProxy(lagging.URL.Host, nil)
	require.NoError(t, err)
	defer balancer.Close()
	store := open(t, kubetenure.Config{Namespace: ns, URL: "https://" + balancer.Addr()})
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.NoError(t, err)
	watch := live(t, store, widget)
	toEtcd.Set(rig.Weather{HangAnswers: true})
	obj, err = c.store(t, ns).PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
	require.NoError(t, err)
	balancer.Divert(c.kube.URL.Host) // only new connections
	testkit.Await(t, "another API server answers", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		is, err := store.Get(ctx, widget)
		return err == nil && is.Version == obj.Version
	})
	awaitChange(t, watch, obj.Version)
	toEtcd.Set(rig.Weather{})
}

// Etcd was restored from a snapshot that does not have the last terms. With the bump that Kubernetes
// advises, tokens go on. Without it, a replica that knows a greater token refuses to begin a term,
// and its log names the repair.
func TestTokensDoNotRepeatAfterEtcdWasRestored(t *testing.T) {
	for what, bump := range map[string]bool{"with a bump": true, "without": false} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c := start(t)
			ns := c.namespace(t)
			var log syncBuffer
			store := open(t, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Logger: slog.New(slog.NewTextHandler(&log, nil))})
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "a", TTL: 2 * time.Second})
			acquire := func(times int) (token int64) {
				t.Helper()
				for range times {
					term, err := lease.TryAcquire(t.Context())
					require.NoError(t, err)
					token = term.Token()
					require.NoError(t, lease.Release(t.Context(), term))
				}
				return token
			}
			acquire(2)
			watch := live(t, store, sweeper)
			snapshot := filepath.Join(t.TempDir(), "snapshot")
			stopped := func(do func()) {
				t.Helper()
				require.NoError(t, c.kube.End(syscall.SIGKILL))
				require.NoError(t, c.etcd.End(syscall.SIGTERM))
				do()
				require.NoError(t, c.etcd.Start(t.Context()))
				require.NoError(t, c.kube.Start(t.Context()))
			}
			stopped(func() {
				db, err := os.ReadFile(filepath.Join(c.etcd.Data, "member", "snap", "db"))
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(snapshot, db, 0o600))
			})
			testkit.Await(t, "the watch is live", watch.Live)
			last := acquire(5)
			args := []string{"--skip-hash-check"}
			if bump {
				args = append(args, "--bump-revision=1000000000", "--mark-compacted")
			}
			stopped(func() { require.NoError(t, c.etcd.Restore(t.Context(), snapshot, "another", args...)) })
			testkit.Await(t, "the watch is live", watch.Live)
			if !bump {
				_, err := lease.TryAcquire(t.Context())
				require.ErrorIs(t, err, tenure.ErrSetup)
				require.ErrorContains(t, err, "raise them above")
				repair := regexp.MustCompile(`kubectl annotate --overwrite lease sweeper.lease -n ` + ns + ` tenurelib.dev/above=(\d+)`).FindStringSubmatch(log.String())
				require.NotNil(t, repair, log.String())
				c.do(t, "PATCH", leases(ns)+"/sweeper.lease", `{"metadata": {"annotations": {"tenurelib.dev/above": "`+repair[1]+`"}}}`)
				testkit.Await(t, "the refused term is gone", func() bool { _, err := lease.Read(t.Context()); return errors.Is(err, tenure.ErrNotFound) })
			}
			require.Greater(t, acquire(1), last)
			is, err := store.PutIf(t.Context(), tenure.Object{Key: sweeper}, tenure.IfAbsent())
			require.NoError(t, err)
			awaitChange(t, watch, is.Version)
		})
	}
}

// syncBuffer is safe for concurrent use.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func TestHistoriesUnderFaultsAreLinearizable(t *testing.T) {
	t.Parallel()
	c := start(t)
	other := c.second(t, c.etcd.URL.Host)
	ns := c.namespace(t)
	const callers, enough = 6, 200
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	log := testkit.NewHistory()
	proxies := []*rig.Proxy{}
	for _, server := range []*rig.Kube{c.kube, other} {
		proxy, err := rig.NewProxy(server.URL.Host, nil)
		require.NoError(t, err)
		defer proxy.Close()
		proxies = append(proxies, proxy)
	}
	var all sync.WaitGroup
	for caller := range callers {
		store := open(t, kubetenure.Config{Namespace: ns, URL: "https://" + proxies[caller%2].Addr()})
		all.Go(func() { log.Use(ctx, caller, unfenced{store}) })
	}
	for round := 0; round < 6 || log.Changes() < enough; round++ {
		switch round % 3 {
		case 0:
			require.NoError(t, other.End(syscall.SIGKILL))
			time.Sleep(300 * time.Millisecond)
			require.NoError(t, other.Start(t.Context()))
		case 1:
			process, err := os.FindProcess(c.etcd.PID())
			require.NoError(t, err)
			testkit.PauseProcess(t, process)
			time.Sleep(time.Second)
			testkit.ResumeProcess(t, process)
		case 2:
			proxies[round/3%2].Set(rig.Weather{HangAnswers: true})
			time.Sleep(time.Second)
			proxies[round/3%2].Set(rig.Weather{})
		}
		time.Sleep(500 * time.Millisecond)
	}
	cancel()
	all.Wait()
	judgeAll(t, log)
}

// Only the cluster's own words say which policy it was.
func TestAPolicyThatRefusesLeasesIsNamed(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	store := c.store(t, ns)
	policies := "/apis/admissionregistration.k8s.io/v1"
	c.do(t, "POST", policies+"/validatingadmissionpolicies", `{"metadata": {"name": "no-leases"}, "spec": {
		"matchConstraints": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "`+ns+`"}},
			"resourceRules": [{"apiGroups": ["coordination.k8s.io"], "apiVersions": ["v1"], "resources": ["leases"], "operations": ["CREATE", "UPDATE"]}]},
		"validations": [{"expression": "false", "message": "ask the platform team", "reason": "Invalid"}]}}`)
	c.do(t, "POST", policies+"/validatingadmissionpolicybindings", `{"metadata": {"name": "no-leases"}, "spec": {"policyName": "no-leases", "validationActions": ["Deny"]}}`)
	defer c.do(t, "DELETE", policies+"/validatingadmissionpolicies/no-leases", nil)
	defer c.do(t, "DELETE", policies+"/validatingadmissionpolicybindings/no-leases", nil)
	testkit.Await(t, "the policy works", func() bool { return store.Migrate(t.Context()) != nil })
	err := store.Migrate(t.Context())
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.NotErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "ask the platform team")
	require.NotContains(t, err.Error(), "%!")
}

// A webhook or policy that changes who has the Lease, or for how long, could have two replicas hold it. The term is not
// begun, and the error says what to do.
func TestALeaseThatAPolicyChangesIsNoticed(t *testing.T) {
	t.Parallel()
	c := running(t)
	for name, patch := range map[string]string{
		"annotations-removed": `{op: \"remove\", path: \"/metadata/annotations\"}`,
		"payload-removed":     `{op: \"remove\", path: \"/metadata/annotations/tenurelib.dev~1payload\"}`,
		"payload-changed":     `{op: \"replace\", path: \"/metadata/annotations/tenurelib.dev~1payload\", value: \"x\"}`,
		"holder-changed":      `{op: \"replace\", path: \"/spec/holderIdentity\", value: object.spec.holderIdentity + \"-x\"}`,
		"duration-changed":    `{op: \"replace\", path: \"/spec/leaseDurationSeconds\", value: 1}`,
	} {
		t.Run(name, func(t *testing.T) { aLeaseThatIsChangedIsNoticed(t, c, name, patch) })
	}
}

func aLeaseThatIsChangedIsNoticed(t *testing.T, c *cluster, name, patch string) {
	ns := c.namespace(t)
	store := c.store(t, ns)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "a", TTL: time.Minute})
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	policies := "/apis/admissionregistration.k8s.io/v1"
	c.do(t, "POST", policies+"/mutatingadmissionpolicies", `{"metadata": {"name": "`+name+`"}, "spec": {
		"matchConstraints": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "`+ns+`"}},
			"resourceRules": [{"apiGroups": ["coordination.k8s.io"], "apiVersions": ["v1"], "resources": ["leases"], "operations": ["CREATE", "UPDATE"]}]},
		"failurePolicy": "Fail", "reinvocationPolicy": "Never",
		"mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": "[JSONPatch`+patch+`]"}}]}}`)
	c.do(t, "POST", policies+"/mutatingadmissionpolicybindings", `{"metadata": {"name": "`+name+`"}, "spec": {"policyName": "`+name+`"}}`)
	defer c.do(t, "DELETE", policies+"/mutatingadmissionpolicies/"+name, nil)
	defer c.do(t, "DELETE", policies+"/mutatingadmissionpolicybindings/"+name, nil)
	testkit.Await(t, "the policy works", func() bool {
		err := store.Migrate(t.Context())
		return err != nil
	})
	err = store.Migrate(t.Context())
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "exclude Leases from the admission webhook")
	err = lease.Renew(t.Context(), term)
	require.ErrorContains(t, err, "exclude Leases from the admission webhook")
	require.False(t, storeAnswered(err), "it was written, though not as it was sent")
	require.Error(t, lease.Renew(t.Context(), term))
	require.False(t, term.Valid() && lease.Renew(t.Context(), term) == nil)
}
