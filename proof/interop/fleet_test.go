//go:build unix

// Package interop tests kubetenure beside client-go, on a real API server.
package interop

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/kubetenure"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

const ttl = 3 * time.Second

var key = tenure.Key{Type: "lease", ID: "sweeper"}

// must fails the test if there is an error. It skips it if there is no program of the API server.
func must(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, rig.ErrNotBuilt) && os.Getenv("TENURE_REQUIRE_KUBE") == "" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// start starts an API server and its etcd until the test ends.
func start(t testing.TB) (*rig.Etcd, *rig.Kube) {
	t.Helper()
	dir := t.TempDir()
	etcd, err := rig.NewEtcd(t.Context(), dir, "--unsafe-no-fsync")
	must(t, err)
	kube, err := rig.NewKube(t.Context(), etcd.URL, dir, dir, nil)
	must(t, err)
	t.Cleanup(func() { _ = kube.End(syscall.SIGKILL); _ = etcd.End(syscall.SIGKILL) })
	must(t, etcd.Start(t.Context()))
	must(t, kube.Start(t.Context()))
	return etcd, kube
}

// line is what a replica reaches the API server by. It can be cut.
type line struct {
	to   http.RoundTripper
	cut  atomic.Bool
	sent atomic.Pointer[time.Time] // the last write that was answered

	holder   string      // the replica's name, as its writes have it
	released atomic.Bool // its last write gives the lease up
}

// renewed returns when the last write that was answered was sent.
func (l *line) renewed() (at time.Time) {
	if sent := l.sent.Load(); sent != nil {
		at = *sent
	}
	return at
}

var errCut = errors.New("the line is cut")

// bodyOf returns a copy of the body of a request.
func bodyOf(req *http.Request) ([]byte, error) {
	if req.GetBody == nil {
		return nil, errors.New("it has none that can be read again")
	}
	body, err := req.GetBody()
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

func (l *line) RoundTrip(req *http.Request) (*http.Response, error) {
	if l.cut.Load() {
		return nil, errCut
	}
	if body, err := bodyOf(req); err == nil && req.Method == http.MethodPut {
		l.released.Store(!bytes.Contains(body, []byte(l.holder)))
	}
	now := time.Now()
	resp, err := l.to.RoundTrip(req)
	if err == nil && resp.StatusCode/100 == 2 && (req.Method == http.MethodPut || req.Method == http.MethodPost) {
		l.sent.Store(&now)
	}
	if l.cut.Load() { // the answer does not come through
		if err == nil {
			resp.Body.Close()
		}
		return nil, errCut
	}
	return resp, err
}

func (l *line) sever() {
	l.cut.Store(true)
	l.to.(interface{ CloseIdleConnections() }).CloseIdleConnections()
}

// fleet is the replicas of one Lease, of both kinds.
type fleet struct {
	t    testing.TB
	url  string
	ns   string
	name string // of the Lease

	mu       sync.Mutex
	working  []*member // whose jobs run
	late     []string  // whose jobs worked although their lease had expired: a process that was held up
	lenient  bool      // overlaps are only counted
	overlaps int
	terms    int
	crossed  int // terms that began after one of the other kind
	last     string
	work     chan struct{} // receives when a job has begun
}

// member is a replica, of either kind.
type member struct {
	*fleet
	kind, name string
	line       *line
	stop       context.CancelFunc // tells the replica to stop, and to release
	dead       atomic.Bool        // killed: its job does not work any more
	done       chan struct{}
}

// begins notes that a job works.
func (m *member) begins() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead.Load() {
		return
	}
	for _, other := range m.working {
		m.overlaps++
		if m.lenient {
			continue
		}
		since := time.Since(other.line.renewed())
		switch {
		case other.kind == "client-go" && other.line.released.Load():
			// At its renew deadline client-go gives the lease up first, and then tells the job.
			m.late = append(m.late, fmt.Sprintf("%s worked although client-go had released its lease", other.name))
		case since < ttl:
			m.t.Errorf("%s begins while %s works, %v after its last renewal was sent", m.name, other.name, since)
		default:
			m.late = append(m.late, fmt.Sprintf("%s worked %v after its last renewal", other.name, since))
		}
	}
	m.working = append(m.working, m)
	m.terms++
	if m.last != "" && m.last != m.kind {
		m.crossed++
	}
	m.last = m.kind
	select {
	case m.work <- struct{}{}:
	default:
	}
}

// ends notes that a job works no more.
func (m *member) ends() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, other := range m.working {
		if other == m {
			m.working = append(m.working[:i], m.working[i+1:]...)
			return
		}
	}
}

// job works until its context ends.
func (m *member) job(ctx context.Context) error {
	m.begins()
	<-ctx.Done()
	m.ends()
	return nil
}

var members atomic.Int64

// join starts a replica.
func (f *fleet) join(kind string) *member {
	client := rig.KubeClient(rig.KubeAdmin)
	m := &member{fleet: f, kind: kind, name: fmt.Sprint(kind, "-", members.Add(1)), line: &line{to: client.Transport}, done: make(chan struct{})}
	m.line.holder = m.name
	client.Transport = m.line
	ctx, cancel := context.WithCancel(context.Background())
	m.stop = cancel
	if kind == "tenure" {
		m.runTenure(ctx, client)
	} else {
		m.runClientGo(ctx, client)
	}
	return m
}

func (m *member) runTenure(ctx context.Context, client *http.Client) {
	store, err := kubetenure.New(kubetenure.Config{Namespace: m.ns, URL: m.url, Client: client, Leases: map[tenure.Key]string{key: m.fleet.name}, Logger: testkit.Quiet})
	must(m.t, err)
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Holder: m.name, TTL: ttl, Logger: testkit.Quiet})
	must(m.t, err)
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: m.job})
	must(m.t, err)
	go func() {
		defer close(m.done)
		_ = c.Run(ctx)
		_ = store.Close()
	}()
}

// runClientGo runs a candidate at the ratios of client-go's own defaults. When it is told to stop, its job
// returns before the release, as a careful program sees to; when its term ends otherwise, client-go
// gives it no way to.
func (m *member) runClientGo(ctx context.Context, client *http.Client) {
	api, err := coordination.NewForConfigAndClient(&rest.Config{Host: m.url, QPS: -1}, client)
	must(m.t, err)
	electing, release := context.WithCancel(context.Background())
	go func() {
		<-ctx.Done()
		m.ends()
		release()
	}()
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta: metav1.ObjectMeta{Namespace: m.ns, Name: m.fleet.name}, Client: api,
			LockConfig: resourcelock.ResourceLockConfig{Identity: m.name},
		},
		LeaseDuration: ttl, RenewDeadline: 2 * time.Second, RetryPeriod: 500 * time.Millisecond, ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { m.begins(); <-ctx.Done(); m.ends() },
			OnStoppedLeading: func() {},
		},
	})
	must(m.t, err)
	go func() {
		defer close(m.done)
		for electing.Err() == nil {
			elector.Run(electing)
		}
	}()
}

// kill ends a replica without a word.
func (m *member) kill() {
	m.dead.Store(true)
	m.line.sever()
	m.ends()
	m.stop()
}

// cutOff cuts a replica's line. It works until it finds that out.
func (m *member) cutOff() { m.line.sever() }

var terms = flag.Int("terms", 48, "terms of the mixed fleets")

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	flag.Parse()
	os.Exit(m.Run())
}

func TestMixedFleetsNeverOverlap(t *testing.T) {
	_, kube := start(t)
	const fleets = 8
	var all sync.WaitGroup
	var sum struct {
		sync.Mutex
		terms, crossed, stops, kills, cuts int
		late                               []string
	}
	for n := range fleets {
		all.Go(func() {
			f := &fleet{t: t, url: kube.URL.String(), ns: "default", name: fmt.Sprint("sweeper-", n), work: make(chan struct{}, 1)}
			stops, kills, cuts := f.run((*terms + fleets - 1) / fleets)
			sum.Lock()
			defer sum.Unlock()
			sum.terms, sum.crossed = sum.terms+f.terms, sum.crossed+f.crossed
			sum.late = append(sum.late, f.late...)
			sum.stops, sum.kills, sum.cuts = sum.stops+stops, sum.kills+kills, sum.cuts+cuts
		})
	}
	all.Wait()
	t.Logf("jobs that worked on although their lease had expired: %q", sum.late)
	t.Logf("%d terms, %d of them after one of the other kind; %d stops, %d kills, %d holders cut off", sum.terms, sum.crossed, sum.stops, sum.kills, sum.cuts)
	if sum.terms < *terms || sum.crossed == 0 || sum.stops == 0 || sum.kills == 0 || sum.cuts == 0 {
		t.Error("too little has happened")
	}
}

// run does faults to holders until there have been enough terms.
func (f *fleet) run(enough int) (stops, kills, cuts int) {
	kinds := []string{"tenure", "client-go"}
	var here []*member
	for i := range 4 {
		here = append(here, f.join(kinds[i%2]))
	}
	var gone []*member
	for f.count() < enough && !f.t.Failed() {
		select {
		case <-f.work:
		case <-time.After(time.Minute):
			f.t.Errorf("nobody works on %s", f.name)
			continue
		}
		time.Sleep(rand.N(1500 * time.Millisecond))
		f.mu.Lock()
		var holder *member
		if len(f.working) > 0 {
			holder = f.working[0]
		}
		f.mu.Unlock()
		if holder == nil {
			continue
		}
		switch what := rand.N(10); {
		case what < 5:
			stops++
			holder.stop()
		case what < 8:
			kills++
			holder.kill()
		default:
			cuts++
			holder.cutOff()
		}
		for i, m := range here {
			if m == holder {
				gone = append(gone, m)
				here[i] = f.join(kinds[rand.N(2)])
			}
		}
	}
	for _, m := range append(gone, here...) {
		m.stop()
	}
	for _, m := range append(gone, here...) {
		<-m.done
	}
	return stops, kills, cuts
}

func (f *fleet) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.terms
}
