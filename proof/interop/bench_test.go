//go:build unix

package interop

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

var measure = flag.Bool("measure", false, "measure kubetenure beside client-go and bare requests, for some minutes")

// sorted are durations of one kind.
type sorted []time.Duration

func (s sorted) String() string {
	slices.Sort(s)
	at := func(of float64) float64 { return float64(s[min(len(s)-1, int(of*float64(len(s))))]) / 1e6 }
	return fmt.Sprintf("p50 %.1f ms, p99 %.1f ms, n %d", at(0.5), at(0.99), len(s))
}

func timed(n int, do func()) (all sorted) {
	for range n {
		began := time.Now()
		do()
		all = append(all, time.Since(began))
	}
	return all
}

// bare is a Lease that is written by requests of a few lines.
type bare struct {
	t       testing.TB
	client  *http.Client
	url     string
	name    string
	version string

	annotations map[string]string
}

func (b *bare) do(method string, body map[string]any) {
	text, _ := json.Marshal(body)
	req, err := http.NewRequest(method, b.url+"/apis/coordination.k8s.io/v1/namespaces/default/leases/"+b.name, bytes.NewReader(text))
	must(b.t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := b.client.Do(req)
	must(b.t, err)
	defer resp.Body.Close()
	var answer struct {
		Metadata struct{ ResourceVersion string }
	}
	answered, _ := io.ReadAll(resp.Body)
	must(b.t, json.Unmarshal(answered, &answer))
	if resp.StatusCode/100 != 2 {
		b.t.Errorf("%s: %s", resp.Status, answered)
	}
	b.version = answer.Metadata.ResourceVersion
}

func (b *bare) put(holder string) {
	meta := map[string]any{"name": b.name, "annotations": b.annotations}
	if b.version != "" {
		meta["resourceVersion"] = b.version
	}
	b.do("PUT", map[string]any{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": map[string]any{
		"holderIdentity": holder, "leaseDurationSeconds": 4, "renewTime": time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")}})
}

// cpu returns the CPU time that a process has used.
func cpu(t testing.TB, pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	must(t, err)
	_, rest, _ := strings.Cut(string(text), ") ")
	var user, system int64
	fields := strings.Fields(rest)
	_, err = fmt.Sscan(fields[11]+" "+fields[12], &user, &system)
	must(t, err)
	return time.Duration(user+system) * 10 * time.Millisecond
}

func TestMeasure(t *testing.T) {
	if !*measure {
		t.Skip("-measure is not given")
	}
	etcd, kube := start(t)
	url := kube.URL.String()
	leaseOf := func(id string, client *http.Client) *tenure.Lease {
		store, err := kubetenure.New(kubetenure.Config{Namespace: "default", URL: url, Client: client, Logger: testkit.Quiet})
		must(t, err)
		t.Cleanup(func() { _ = store.Close() })
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: id}, Holder: "a", Logger: testkit.Quiet})
		must(t, err)
		return lease
	}
	t.Run("requests", func(t *testing.T) {
		b := &bare{t: t, client: rig.KubeClient(rig.KubeAdmin), url: url, name: "bare"}
		lease := leaseOf("one", rig.KubeClient(rig.KubeAdmin))
		term, err := lease.TryAcquire(t.Context())
		must(t, err)
		b.put("a")
		same := &bare{t: t, client: b.client, url: url, name: "same", annotations: map[string]string{
			"tenurelib.dev/object": strings.Repeat("x", 250), "tenurelib.dev/payload": strings.Repeat("x", 120)}}
		same.put("a")
		var puts, puts2, gets, renewals, reads sorted
		for range 10 { // side by side
			puts = append(puts, timed(50, func() { b.put("a") })...)
			puts2 = append(puts2, timed(50, func() { same.put("a") })...)
			renewals = append(renewals, timed(50, func() { must(t, lease.Renew(t.Context(), term)) })...)
			gets = append(gets, timed(50, func() { b.do("GET", nil) })...)
			reads = append(reads, timed(50, func() { _, err := lease.Read(t.Context()); must(t, err) })...)
		}
		t.Logf("one PUT: bare %v; as long as ours %v; renewal %v", puts, puts2, renewals)
		t.Logf("one GET: bare %v; Read %v", gets, reads)
		must(t, lease.Release(t.Context(), term))
		var pairs, ours sorted
		for range 10 {
			pairs = append(pairs, timed(30, func() { b.put(""); b.put("a") })...)
			ours = append(ours, timed(30, func() {
				term, err := lease.TryAcquire(t.Context())
				must(t, err)
				must(t, lease.Release(t.Context(), term))
			})...)
		}
		t.Logf("release + acquire: bare %v; tenure %v", pairs, ours)
		workers := func(what string, make func(i int) func()) {
			const length = 6 * time.Second
			var all sync.WaitGroup
			var n atomic.Int64
			apiBefore, etcdBefore, began := cpu(t, kube.PID()), cpu(t, etcd.PID()), time.Now()
			for i := range 16 {
				do := make(i)
				all.Go(func() {
					for time.Since(began) < length {
						do()
						n.Add(1)
					}
				})
			}
			all.Wait()
			per := func(d time.Duration) float64 { return float64(d) / 1e6 / float64(n.Load()) }
			t.Logf("16 workers, %s: %.0f per second, CPU of the API server %.2f ms and of etcd %.2f ms each", what,
				float64(n.Load())/time.Since(began).Seconds(), per(cpu(t, kube.PID())-apiBefore), per(cpu(t, etcd.PID())-etcdBefore))
		}
		for round := range 2 {
			workers("bare pairs", func(i int) func() {
				b := &bare{t: t, client: b.client, url: url, name: fmt.Sprint("pair-", round, "-", i)}
				return func() { b.put(""); b.put("a") }
			})
			client := rig.KubeClient(rig.KubeAdmin)
			workers("pairs of tenure", func(i int) func() {
				lease := leaseOf(fmt.Sprint("pairs-", i), client)
				return func() {
					term, err := lease.TryAcquire(t.Context())
					must(t, err)
					must(t, lease.Release(t.Context(), term))
				}
			})
			workers("renewals of tenure", func(i int) func() {
				lease := leaseOf(fmt.Sprint("renewals-", round, "-", i), client)
				term, err := lease.AcquireOrSteal(t.Context())
				must(t, err)
				return func() { must(t, lease.Renew(t.Context(), term)) }
			})
		}

	})
	t.Run("handovers", func(t *testing.T) {
		for _, standbys := range []int{1, 10} {
			for _, kind := range []string{"tenure", "client-go"} {
				f := &fleet{t: t, url: url, ns: "default", name: fmt.Sprint("handover-", kind, "-", standbys), work: make(chan struct{}, 1)}
				members := []*member{f.join(kind)}
				<-f.work
				for range standbys {
					members = append(members, f.join(kind))
				}
				var took sorted
				for range 60 {
					time.Sleep(300 * time.Millisecond) // a standby has seen the new holder
					holder := f.holder()
					began := time.Now()
					holder.stop()
					<-f.work
					took = append(took, time.Since(began))
					members = append(members, f.join(kind))
				}
				t.Logf("handover to one of %d, %s: %v", standbys, kind, took)
				f.end(members)
			}
		}

	})
	t.Run("failovers", func(t *testing.T) { // on several Leases at once
		for _, kind := range []string{"tenure", "client-go"} {
			for _, cut := range []bool{false, true} {
				var mu sync.Mutex
				var beyond sorted
				overlaps := 0
				var all sync.WaitGroup
				for n := range 10 {
					all.Go(func() {
						f := &fleet{t: t, url: url, ns: "default", name: fmt.Sprint("failover-", kind, "-", cut, "-", n), work: make(chan struct{}, 1), lenient: true}
						members := []*member{f.join(kind)}
						<-f.work
						members = append(members, f.join(kind))
						time.Sleep(ttl / 2) // in which the standby sees a renewal
						for range 10 {
							holder := f.holder()
							if cut {
								holder.cutOff()
							} else {
								holder.kill()
							}
							<-f.work
							mu.Lock()
							beyond = append(beyond, time.Since(holder.line.renewed())-ttl)
							mu.Unlock()
							members = append(members, f.join(kind))
							time.Sleep(ttl / 2)
						}
						f.end(members)
						mu.Lock()
						overlaps += f.overlaps
						mu.Unlock()
					})
				}
				all.Wait()
				t.Logf("%s, holder cut off %t: beyond the TTL %v; jobs that overlapped: %d", kind, cut, beyond, overlaps)
			}
		}

	})
	t.Run("defaults", func(t *testing.T) {
		count := func(what string, n *atomic.Int64, length time.Duration) {
			before := n.Load()
			time.Sleep(length)
			t.Logf("requests per second at a TTL of %v, %s: %.3f", tenure.DefaultTTL, what, float64(n.Load()-before)/length.Seconds())
		}
		var holders, standbys atomic.Int64
		begin := func(n *atomic.Int64) *tenure.Coordinator {
			client := rig.KubeClient(rig.KubeAdmin)
			client.Transport = counting{client.Transport, n}
			c, err := tenure.NewCoordinator(leaseOf("defaults", client), tenure.CoordinatorConfig{Reconcile: testkit.UntilDone, Logger: testkit.Quiet})
			must(t, err)
			testkit.RunCoordinator(t, context.Background(), c)
			return c
		}
		a := begin(&holders)
		testkit.Await(t, "a holds", a.IsHolder)
		begin(&standbys)
		time.Sleep(2 * time.Second)
		count("holder", &holders, 40*time.Second)
		t.Logf("standby meanwhile: %d in all", standbys.Load())
	})
}

type counting struct {
	to http.RoundTripper
	n  *atomic.Int64
}

func (c counting) RoundTrip(req *http.Request) (*http.Response, error) {
	c.n.Add(1)
	return c.to.RoundTrip(req)
}

func (f *fleet) holder() *member {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.working[len(f.working)-1]
}

func (f *fleet) end(members []*member) {
	for _, m := range members {
		m.stop()
	}
	for _, m := range members {
		<-m.done
	}
}
