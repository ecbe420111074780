package oteltenure_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/oteltenure"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/storetest"
)

var updateDashboard = flag.Bool("dashboard.update", false, "write dashboard.json anew")

// family is a metric as the Prometheus exporter names it.
type family struct{ name, kind, help string }

// families is a meter that keeps what is created on it.
type families struct {
	noop.Meter
	all []family
}

func (f *families) note(name, kind, unit, help string) {
	name = strings.ReplaceAll(name, ".", "_")
	if unit == "s" {
		name += "_seconds"
	}
	if kind == "counter" {
		name += "_total"
	}
	f.all = append(f.all, family{name, kind, help})
}

func (f *families) Int64ObservableGauge(name string, options ...metric.Int64ObservableGaugeOption) (metric.Int64ObservableGauge, error) {
	c := metric.NewInt64ObservableGaugeConfig(options...)
	f.note(name, "gauge", c.Unit(), c.Description())
	return f.Meter.Int64ObservableGauge(name, options...)
}

func (f *families) Float64ObservableGauge(name string, options ...metric.Float64ObservableGaugeOption) (metric.Float64ObservableGauge, error) {
	c := metric.NewFloat64ObservableGaugeConfig(options...)
	f.note(name, "gauge", c.Unit(), c.Description())
	return f.Meter.Float64ObservableGauge(name, options...)
}

func (f *families) Int64ObservableCounter(name string, options ...metric.Int64ObservableCounterOption) (metric.Int64ObservableCounter, error) {
	c := metric.NewInt64ObservableCounterConfig(options...)
	f.note(name, "counter", c.Unit(), c.Description())
	return f.Meter.Int64ObservableCounter(name, options...)
}

func (f *families) Int64Counter(name string, options ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	c := metric.NewInt64CounterConfig(options...)
	f.note(name, "counter", c.Unit(), c.Description())
	return f.Meter.Int64Counter(name, options...)
}

func (f *families) Float64Histogram(name string, options ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	c := metric.NewFloat64HistogramConfig(options...)
	f.note(name, "histogram", c.Unit(), c.Description())
	return f.Meter.Float64Histogram(name, options...)
}

// expression returns the query of a panel, for the services that its variable selects.
func (f family) expression() string {
	switch f.kind {
	case "counter":
		return fmt.Sprintf(`increase(%s{job=~"$job"}[$__rate_interval])`, f.name)
	case "histogram":
		return fmt.Sprintf(`histogram_quantile(0.99, sum by (le, job, tenure_lease) (rate(%s_bucket{job=~"$job"}[$__rate_interval])))`, f.name)
	}
	return fmt.Sprintf(`%s{job=~"$job"}`, f.name)
}

// dashboard returns the Grafana dashboard: a row each for leases, sessions, shards, schedules and requests, and a panel for each metric.
func dashboard(rows map[string][]family) string {
	type object = map[string]any
	source := object{"type": "prometheus", "uid": "${source}"}
	var panels []object
	id, y := 0, 0
	for _, title := range []string{"Leases", "Sessions and claims", "Shards", "Schedules", "Requests"} {
		id++
		panels = append(panels, object{"id": id, "type": "row", "title": title, "gridPos": object{"h": 1, "w": 24, "x": 0, "y": y}})
		y++
		for i, f := range rows[title] {
			id++
			unit := "short"
			if strings.HasSuffix(f.name, "_seconds") {
				unit = "s"
			}
			if strings.Contains(f.name, "_last_") || f.name == "tenure_schedule_next_seconds" {
				unit = "dateTimeFromNow"
			}
			expression := f.expression()
			if unit == "dateTimeFromNow" {
				expression += " * 1000" // because the unit is milliseconds
			}
			panels = append(panels, object{
				"id": id, "type": "timeseries", "title": f.name, "description": f.help, "datasource": source,
				"gridPos":     object{"h": 7, "w": 8, "x": i % 3 * 8, "y": y + i/3*7},
				"fieldConfig": object{"defaults": object{"unit": unit}, "overrides": []any{}},
				"targets": []object{{"refId": "A", "datasource": source, "expr": expression,
					"legendFormat": "{{tenure_lease}} {{tenure_run}} {{tenure_run_outcome}} {{tenure_term_end}} {{tenure_kind}} {{tenure_outcome}} {{error_type}} {{instance}}"}},
			})
		}
		y += (len(rows[title]) + 2) / 3 * 7
	}
	text, err := json.MarshalIndent(object{
		"title": "Tenure", "uid": "tenure", "schemaVersion": 39, "editable": true, "refresh": "30s", "time": object{"from": "now-3h", "to": "now"},
		"templating": object{"list": []object{
			{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
			{"name": "job", "type": "query", "datasource": source, "query": "label_values({__name__=~\"tenure_.+\"}, job)", "includeAll": true, "multi": true, "allValue": ".*", "current": object{"text": "All", "value": "$__all"}},
		}},
		"panels": panels,
	}, "", "  ")
	if err != nil {
		panic(err)
	}
	return string(text) + "\n"
}

func TestTheDashboardHasAPanelForEachMetric(t *testing.T) {
	rows := map[string][]family{}
	leases, sessions, parts, plans, requests := &families{}, &families{}, &families{}, &families{}, &families{}
	lease, err := tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "any"}})
	must(t, err)
	_, _, err = oteltenure.ObserveLease(leases, lease)
	must(t, err)
	_, err = oteltenure.ObserveSession(sessions, &session{})
	must(t, err)
	_, err = oteltenure.ObserveShards(parts, &part{})
	must(t, err)
	_, err = oteltenure.ObserveSchedule(plans, storetest.NewMem(), tenure.Key{})
	must(t, err)
	_, _, err = oteltenure.ObserveRoute(requests)
	must(t, err)
	rows["Leases"], rows["Sessions and claims"], rows["Shards"], rows["Schedules"], rows["Requests"] = leases.all, sessions.all, parts.all, plans.all, requests.all
	want := dashboard(rows)
	if *updateDashboard {
		must(t, os.WriteFile("dashboard.json", []byte(want), 0o644))
	}
	got, err := os.ReadFile("dashboard.json")
	must(t, err)
	if string(got) != want {
		t.Error("dashboard.json is not that of the metrics: go test -run TestTheDashboard -dashboard.update")
	}
	if len(leases.all) < 16 || len(sessions.all) < 9 || len(parts.all) < 7 || len(plans.all) < 2 || len(requests.all) < 7 {
		t.Errorf("metrics are missing: %d of leases, %d of sessions, %d of shards, %d of schedules, %d of requests", len(leases.all), len(sessions.all), len(parts.all), len(plans.all), len(requests.all))
	}

	// What the exporter exports has these names.
	named := map[string]bool{}
	for _, row := range rows {
		for _, f := range row {
			named[f.name] = true
		}
	}
	synctest.Test(t, func(t *testing.T) {
		r := start(t, storetest.NewMem(), "a", 0)
		time.Sleep(25 * time.Second)
		r.stop()
		ofSession, _ := observeSession(t, &session{status: claims.Status{Kinds: []claims.KindStatus{{Kind: "tenant"}}}})
		ofShards, _ := observeShards(t, &part{shards.Status{Kind: "part", Settled: true}})
		exported := regexp.MustCompile(`(?m)^# TYPE (tenure_\w+)`).FindAllStringSubmatch(r.exposition(t)+ofSession.exposition(t)+ofShards.exposition(t)+routed(t).exposition(t), -1)
		if len(exported) < 20 {
			t.Errorf("found only %q", exported)
		}
		for _, name := range exported {
			if !named[name[1]] {
				t.Errorf("the dashboard has no %s", name[1])
			}
		}
	})

	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is missing: apt-get install prometheus")
	}
	var rules strings.Builder
	rules.WriteString("groups:\n- name: panels\n  rules:\n")
	for _, row := range rows {
		for _, f := range row {
			fmt.Fprintf(&rules, "  - record: 'panel:%s'\n    expr: '%s'\n", f.name, strings.ReplaceAll(f.expression(), "$__rate_interval", "1m"))
		}
	}
	path := filepath.Join(t.TempDir(), "panels.yaml")
	must(t, os.WriteFile(path, []byte(rules.String()), 0o600))
	if out, err := exec.CommandContext(t.Context(), promtool, "check", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("promtool: %v\n%s", err, out)
	}
}
