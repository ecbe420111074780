package oteltenure_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	otelmetric "go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/sdk/metric"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/oteltenure"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/storetest"
)

// replica is a process as Prometheus sees it: a running coordinator and an endpoint to
// scrape.
type replica struct {
	*tenure.Coordinator
	store    *storetest.FaultyStore
	trace    *tenure.Trace
	metrics  otelmetric.Registration
	endpoint http.Handler
	terms    atomic.Pointer[tenure.Term] // the last
	stop     func()                      // also waits until Run has returned
}

func start(t *testing.T, store tenure.Store, name string, drain time.Duration) *replica {
	t.Helper()
	return startSweeping(t, store, name, drain, func(context.Context) error { return nil })
}

func startSweeping(t *testing.T, store tenure.Store, name string, drain time.Duration, sweep func(context.Context) error) *replica {
	t.Helper()
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	must(t, err)
	provider := metric.NewMeterProvider(metric.WithReader(exporter))
	r := &replica{store: storetest.Faulty(store, nil), endpoint: promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError})}
	lease, err := tenure.NewLease(r.store, tenure.LeaseConfig{Key: tenure.Key{Type: "reconciler_lease", ID: "singleton"}, Holder: name, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	r.trace, r.metrics, err = oteltenure.ObserveLease(provider.Meter("test"), lease, attribute.String("zone", "north"))
	must(t, err)
	r.Coordinator, err = tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Watch: tenure.Every(time.Minute, sweep),
		Reconcile: func(ctx context.Context) error {
			r.terms.Store(tenure.TermFromContext(ctx))
			<-ctx.Done()
			time.Sleep(drain)
			return nil
		},
		Trace: r.trace,
	})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	r.stop = func() { cancel(); running.Wait() }
	t.Cleanup(r.stop)
	return r
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// listener is a network of one in-memory connection, because virtual time stands still while a real
// one is read.
type listener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}
func (l *listener) Close() error   { close(l.closed); return nil }
func (l *listener) Addr() net.Addr { return &net.TCPAddr{} }

func (r *replica) scrape(t *testing.T) scrape {
	t.Helper()
	return parse(t, r.exposition(t))
}

// exposition scrapes an endpoint over HTTP, as Prometheus does.
func (r *replica) exposition(t *testing.T) string {
	t.Helper()
	l := &listener{conns: make(chan net.Conn), closed: make(chan struct{})}
	server := &http.Server{Handler: r.endpoint}
	var serving sync.WaitGroup
	serving.Go(func() { server.Serve(l) })
	defer serving.Wait()
	defer server.Close()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		client, conn := net.Pipe()
		l.conns <- conn
		return client, nil
	}}
	response, err := (&http.Client{Transport: transport}).Get("http://replica/metrics")
	must(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	must(t, err)
	if response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s", response.Status, body)
	}
	return string(body)
}

// scrape has the samples of one scrape, by name and the labels that matter here.
type scrape map[string]float64

var (
	sample = regexp.MustCompile(`^([a-zA-Z_:]+)\{(.*)\} (\S+)$`)
	label  = regexp.MustCompile(`([a-zA-Z_]+)="([^"]*)"`)
)

func parse(t *testing.T, text string) scrape {
	t.Helper()
	samples := scrape{}
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
		line := sample.FindStringSubmatch(lines.Text())
		if line == nil || !strings.HasPrefix(line[1], "tenure_") {
			continue
		}
		name, labels := line[1], map[string]string{}
		for _, l := range label.FindAllStringSubmatch(line[2], -1) {
			labels[l[1]] = l[2]
		}
		if labels["tenure_lease"] != "reconciler_lease/singleton" || labels["zone"] != "north" {
			t.Errorf("without its lease or the caller's attribute: %s", lines.Text())
		}
		for _, key := range []string{"tenure_term_end", "tenure_run", "tenure_run_outcome", "tenure_record_lost", "error_type", "le"} {
			if value, ok := labels[key]; ok {
				name += "{" + value + "}"
			}
		}
		value, err := strconv.ParseFloat(line[3], 64)
		must(t, err)
		samples[name] = value
	}
	return samples
}

func (s scrape) want(t *testing.T, when string, want scrape) {
	t.Helper()
	for name, value := range want {
		if got, ok := s[name]; !ok || math.Abs(got-value) > 1e-9 {
			t.Errorf("%s: %s is %v (exported: %v), want %v", when, name, got, ok, value)
		}
	}
}

func (s scrape) wantNone(t *testing.T, when string, names ...string) {
	t.Helper()
	for _, name := range names {
		if got, ok := s[name]; ok {
			t.Errorf("%s: %s is exported, as %v", when, name, got)
		}
	}
}

func slowly(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
	time.Sleep(40 * time.Millisecond)
	return do(ctx)
}

func TestAScrapeReportsWhatHappened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a := start(t, store, "a", 2*time.Second)
		synctest.Wait()
		b := start(t, store, "b", 0)
		synctest.Wait()
		a.store.SetHook(slowly)
		time.Sleep(35 * time.Second) // renewals at 10, 20 and 30 s

		ofA, ofB := a.scrape(t), b.scrape(t)
		ofA.want(t, "a holds", scrape{
			"tenure_is_holder":                              1,
			"tenure_token":                                  float64(a.Status().Token),
			"tenure_trust_duration_seconds":                 29,
			"tenure_trust_margin_seconds":                   18.96, // 29 s, minus 10.04 s until the answer to a renewal came
			"tenure_renewal_duration_seconds_count":         3,
			"tenure_renewal_duration_seconds_sum":           0.12,
			"tenure_renewal_duration_seconds_bucket{0.025}": 0,
			"tenure_renewal_duration_seconds_bucket{0.05}":  3,
			"tenure_terms_total{shutdown}":                  0,
		})
		ofB.want(t, "b stands by", scrape{"tenure_is_holder": 0, "tenure_terms_total{deadline}": 0})
		ofB.wantNone(t, "b stands by", "tenure_token", "tenure_trust_margin_seconds", "tenure_renewal_duration_seconds_count")

		time.Sleep(time.Second)
		a.scrape(t).want(t, "a second later", scrape{"tenure_trust_margin_seconds": 23}) // the last renewal was 6 s ago

		refused := 0
		a.store.SetHook(func(_ context.Context, call storetest.Call, _ func(context.Context) error) error {
			if a.IsHolder() && call.Op == "put" {
				if refused++; refused == 1 {
					return context.DeadlineExceeded
				}
			}
			return errors.New("connection refused")
		})
		time.Sleep(14*time.Second - time.Millisecond)
		before := a.scrape(t)
		before.want(t, "a's trust ends", scrape{
			"tenure_is_holder":                     1,
			"tenure_trust_margin_seconds":          9.001, // at 9 s the job is told to return
			"tenure_renewal_errors_total{timeout}": 1,
			"tenure_renewal_errors_total{_OTHER}":  float64(refused - 1),
		})
		if renewals := before["tenure_renewal_duration_seconds_count"]; renewals != 3 || refused < 3 {
			t.Errorf("%v successful renewals are counted, and %d failed; want 3, and at least 3", renewals, refused)
		}
		time.Sleep(time.Second)
		a.scrape(t).want(t, "a's job drains", scrape{"tenure_terms_total{deadline}": 1})
		time.Sleep(30 * time.Second)
		ofA, ofB = a.scrape(t), b.scrape(t)
		ofA.want(t, "a lost the lease", scrape{
			"tenure_is_holder":                        0,
			"tenure_terms_total{deadline}":            1,
			"tenure_job_drain_duration_seconds_count": 1,
			"tenure_job_drain_duration_seconds_sum":   2,
		})
		ofA.wantNone(t, "a lost the lease", "tenure_trust_margin_seconds", "tenure_takeover_gap_seconds_count")
		ofB.want(t, "b has taken over", scrape{
			"tenure_is_holder":                  1,
			"tenure_token":                      float64(b.Status().Token),
			"tenure_takeover_gap_seconds_count": 1,
		})
		if gap := ofB["tenure_takeover_gap_seconds_sum"]; gap < 30 || gap > 30.01 {
			t.Errorf("b took over %v s after a's last renewal, want 30", gap)
		}

		a.store.SetHook(nil)
		time.Sleep(time.Minute)
		must(t, b.Resign(t.Context()))
		synctest.Wait()
		b.scrape(t).want(t, "b resigned", scrape{"tenure_is_holder": 0, "tenure_terms_total{resigned}": 1, "tenure_terms_total{shutdown}": 0})
		time.Sleep(time.Second) // a yields for some milliseconds, because its term ended badly
		if !a.IsHolder() {
			t.Fatal("a does not hold the lease: the test would prove nothing")
		}
		a.stop()
		a.scrape(t).want(t, "a shut down", scrape{
			"tenure_is_holder":                        0,
			"tenure_terms_total{shutdown}":            1,
			"tenure_terms_total{deadline}":            1,
			"tenure_job_drain_duration_seconds_count": 2,
			"tenure_job_drain_duration_seconds_sum":   4,
		})
		must(t, a.metrics.Unregister())
		ofA = a.scrape(t)
		ofA.wantNone(t, "a is unregistered", "tenure_is_holder", "tenure_token")
		ofA.want(t, "a is unregistered", scrape{"tenure_terms_total{shutdown}": 1})
	})
}

func TestTheAlertRulesNameOnlyMetricsAndLabelsThatAreExported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, storetest.NewMem(), "a", 0)
		time.Sleep(35 * time.Second)
		r.store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error { return errors.New("refused") })
		time.Sleep(10 * time.Second)
		r.store.SetHook(nil)

		exported := map[string]bool{}
		name := regexp.MustCompile(`\btenure_[a-z_]+`)
		ofSession, _ := observeSession(t, &session{status: claims.Status{Kinds: []claims.KindStatus{{Kind: "tenant"}}}})
		ofShards, _ := observeShards(t, &part{shards.Status{Kind: "part", Settled: true}})
		plans := storetest.NewMem()
		_, err := plans.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "schedule", ID: "nightly"}, Payload: []byte(`{"done":"2026-11-28T03:00:00Z","next":"2026-11-29T03:00:00Z"}`)}, tenure.IfAbsent())
		must(t, err)
		ofSchedule, _ := observeSchedule(t, plans)
		for line := range strings.Lines(r.exposition(t) + ofSession.exposition(t) + ofShards.exposition(t) + ofSchedule.exposition(t)) {
			if !strings.HasPrefix(line, "#") {
				for _, name := range name.FindAllString(line, -1) {
					exported[strings.TrimSuffix(name, "_bucket")] = true // the name of the histogram itself
				}
			}
		}
		rules, err := os.ReadFile("alerts.yaml")
		must(t, err)
		names := name.FindAllString(string(rules), -1)
		if len(names) < 6 {
			t.Errorf("found only %q", names)
		}
		for _, name := range names {
			if !exported[name] {
				t.Errorf("alerts.yaml names %s, which is not exported", name)
			}
		}
	})
}

func TestTheRunsOfAJobAreCountedAndDated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := float64(time.Now().Unix())
		sweeps := 0
		r := startSweeping(t, storetest.NewMem(), "a", 0, func(ctx context.Context) error {
			switch sweeps++; sweeps {
			case 3:
				time.Sleep(time.Second)
				return nil
			case 4:
				<-ctx.Done()
				return ctx.Err()
			default:
				time.Sleep(time.Second)
				return errors.New("no such table")
			}
		})
		time.Sleep(61*time.Second + time.Millisecond)
		r.scrape(t).want(t, "the second run has begun", scrape{
			"tenure_runs_total{watch}{failed}": 1, "tenure_runs_total{watch}{succeeded}": 0, "tenure_runs_total{watch}{interrupted}": 0,
			"tenure_run_last_start_seconds{watch}": began + 61, "tenure_run_last_success_seconds{watch}": 0, "tenure_run_running_seconds{watch}": 0.001,
		})
		time.Sleep(70 * time.Second)
		r.scrape(t).want(t, "the third run has succeeded", scrape{
			"tenure_runs_total{watch}{failed}": 2, "tenure_runs_total{watch}{succeeded}": 1,
			"tenure_run_last_start_seconds{watch}": began + 122, "tenure_run_last_success_seconds{watch}": began + 123, "tenure_run_running_seconds{watch}": 0,
		})
		time.Sleep(time.Minute)
		r.scrape(t).want(t, "the fourth run hangs", scrape{"tenure_run_running_seconds{watch}": 8.001})
		r.stop()
		r.scrape(t).want(t, "the fourth run was interrupted", scrape{
			"tenure_runs_total{watch}{failed}": 2, "tenure_runs_total{watch}{succeeded}": 1, "tenure_runs_total{watch}{interrupted}": 1,
			"tenure_run_last_start_seconds{watch}": began + 183, "tenure_run_running_seconds{watch}": 0,
		})
	})
}

func TestAFuncThatReturnsAnErrorIsCountedButHasNoRunsToDate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, storetest.NewMem(), "a", 0)
		r.trace.JobRun(tenure.JobRun{Name: "reconcile", Outcome: tenure.RunFailed, Began: time.Now(), Ended: time.Now(), Err: errors.New("refused")})
		got := r.scrape(t)
		got.want(t, "after its error", scrape{"tenure_runs_total{reconcile}{failed}": 1, "tenure_runs_total{reconcile}{succeeded}": 0})
		got.wantNone(t, "after its error", "tenure_run_last_start_seconds{reconcile}", "tenure_run_last_success_seconds{reconcile}", "tenure_run_running_seconds{reconcile}")
	})
}

// A trace may lose calls; the next call corrects the state.
func TestARunWhoseEndIsNotToldDoesNotHangForGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, storetest.NewMem(), "a", 0)
		r.trace.JobRun(tenure.JobRun{Name: "import", Outcome: tenure.RunBegan, Began: time.Now(), Oldest: time.Now()})
		time.Sleep(time.Hour)
		r.scrape(t).want(t, "an hour later", scrape{"tenure_run_running_seconds{import}": 3600})
		r.trace.JobRun(tenure.JobRun{Name: "import", Outcome: tenure.RunBegan, Began: time.Now(), Oldest: time.Now()})
		time.Sleep(time.Second)
		r.scrape(t).want(t, "after another run's begin", scrape{"tenure_run_running_seconds{import}": 1})
	})
}

func TestTheAttemptsOfAStandbyThatFailAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMem()
		start(t, mem, "a", 0)
		synctest.Wait()
		b := start(t, mem, "b", 0)
		time.Sleep(5 * time.Minute)
		none := scrape{"tenure_acquire_errors_total{setup}": 0, "tenure_acquire_errors_total{timeout}": 0, "tenure_acquire_errors_total{_OTHER}": 0}
		b.scrape(t).want(t, "the lease was held at each attempt", none)
		var attempts atomic.Int32
		b.store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error {
			attempts.Add(1)
			return fmt.Errorf("%w: permission denied", tenure.ErrSetup)
		})
		time.Sleep(10 * time.Minute)
		failed := attempts.Load()
		if failed < 6 { // what TenureStandbyFails needs
			t.Errorf("only %d attempts in ten minutes", failed)
		}
		b.scrape(t).want(t, "b lacks a privilege", scrape{"tenure_acquire_errors_total{setup}": float64(failed), "tenure_acquire_errors_total{_OTHER}": 0})
		b.store.SetHook(nil)
		time.Sleep(5 * time.Minute)
		b.stop()
		b.scrape(t).want(t, "b has shut down", scrape{"tenure_acquire_errors_total{setup}": float64(failed), "tenure_acquire_errors_total{_OTHER}": 0})
	})
}

func TestAReplicaWithAStuckJobIsNotAHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, storetest.NewMem(), "a", time.Hour)
		time.Sleep(time.Second)
		r.scrape(t).want(t, "a holds", scrape{"tenure_job_stuck": 0})
		r.store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error { return errors.New("refused") })
		time.Sleep(time.Minute)
		if !r.Status().Stuck {
			t.Fatal("the job is not stuck: the test would prove nothing")
		}
		r.scrape(t).want(t, "a is stuck", scrape{"tenure_is_holder": 0, "tenure_job_stuck": 1})
		time.Sleep(time.Hour)
		r.scrape(t).want(t, "a's job has returned", scrape{"tenure_job_stuck": 0})
	})
}

func TestATermReleasedAfterItsDeadlineIsCountedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, storetest.NewMem(), "a", 0)
		time.Sleep(time.Second)
		r.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "put" {
				return errors.New("disk full")
			}
			return do(ctx)
		})
		time.Sleep(time.Minute)
		r.scrape(t).want(t, "a could not renew", scrape{
			"tenure_terms_total{deadline}": 1, "tenure_terms_total{lost}": 0, "tenure_terms_total{shutdown}": 0,
		})
	})
}

func TestPrometheusAcceptsTheAlertRulesAndTheyFireWhenTheyShould(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		if os.Getenv("TENURE_REQUIRE_PROMTOOL") == "1" {
			t.Fatal("promtool is missing")
		}
		t.Skip("promtool is missing: apt-get install prometheus")
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yaml"}, {"test", "rules", "alerts_test.yaml"}} {
		out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput()
		t.Logf("promtool %s\n%s", strings.Join(args, " "), out)
		if err != nil {
			t.Error(err)
		}
	}
}

func TestTheMetricsAreRightAlthoughCallsOfTheTraceWereDroppedOrLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, storetest.NewMem(), "a", 0)
		time.Sleep(25 * time.Second) // and it was renewed
		term := termOf(t, r)
		late := start(t, storetest.NewMem(), "b", 0)
		late.stop()
		told := late.trace
		told.JobStuck(termOf(t, start(t, storetest.NewMem(), "c", 0)), 0) // the call that reported its end was dropped
		told.Renewed(term, 0, 20*time.Second)                             // the call that reported its beginning was dropped
		late.scrape(t).want(t, "renewed", scrape{"tenure_job_stuck": 0, "tenure_trust_duration_seconds": 29, "tenure_token": float64(term.Token())})
		told.Acquired(term, nil)
		told.JobStarted(term)
		late.scrape(t).want(t, "told late", scrape{"tenure_is_holder": 1, "tenure_trust_duration_seconds": 29})
	})
}

// termOf returns the term for which a replica's job runs.
func termOf(t *testing.T, r *replica) *tenure.Term {
	t.Helper()
	time.Sleep(time.Second)
	if term := r.terms.Load(); term != nil {
		return term
	}
	t.Fatal("it holds nothing")
	return nil
}

// moving is a store that moves from one server to the next.
type moving struct{ atomic.Pointer[storetest.Mem] }

func (m *moving) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	return m.Load().Get(ctx, key)
}

func (m *moving) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	return m.Load().PutIf(ctx, obj, cond)
}

func (m *moving) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return m.Load().DeleteIf(ctx, key, cond)
}

func (m *moving) Lineage(ctx context.Context) (tenure.Lineage, error) { return m.Load().Lineage(ctx) }

func (m *moving) Traits() tenure.Traits { return m.Load().Traits() }

func TestAFailoverOverWhichTheTermGoesOnIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMem()
		mem.Lineages = true
		before := mem.Fork() // without the acquire
		store := new(moving)
		store.Store(mem)
		a := start(t, store, "a", 0)
		synctest.Wait()
		a.scrape(t).want(t, "a holds", scrape{"tenure_failovers_total{true}": 0, "tenure_failovers_total{false}": 0})
		store.Store(before)
		time.Sleep(11 * time.Second)
		a.scrape(t).want(t, "its record was lost", scrape{"tenure_failovers_total{true}": 1, "tenure_failovers_total{false}": 0, "tenure_is_holder": 1})
		store.Store(before.Fork())
		time.Sleep(11 * time.Second)
		a.scrape(t).want(t, "nothing was lost", scrape{"tenure_failovers_total{true}": 1, "tenure_failovers_total{false}": 1})
	})
}
