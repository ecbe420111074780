package main

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
)

func TestThePlotIsWellFormedWhateverWasMeasured(t *testing.T) {
	for name, records := range map[string][]record{
		"nothing": nil,
		"handover alone": {
			{"handover", "tenure", "1 standby p50", 1.5, "ms", 200},
			{"handover", "tenure", "1 standby p99", 3, "ms", 200},
		},
		"both, and a peer with a strange name": {
			{"handover", "a<b>&c", "1 standby p50", 0.3, "ms", 200},
			{"handover", "a<b>&c", "1 standby p99", 30_000, "ms", 200},
			{"failover", "tenure", "beyond the TTL p50", 12, "ms", 100},
			{"failover", "tenure", "beyond the TTL p99", 12, "ms", 100},
		},
		"one point of a curve": {{"scale", "a<b>", "1 workers", 5000, "pairs/s", 1}},
		"two curves": {
			{"scale", "tenure", "1 workers", 900, "pairs/s", 1},
			{"scale", "tenure", "16 workers", 7000, "pairs/s", 1},
			{"short-ttl", "tenure, TTL 300ms, 0 busy loops", "beyond the TTL p99", 12, "ms", 1},
		},
		"a failover in no time": {
			{"failover", "tenure", "beyond the TTL p50", -1, "ms", 1},
			{"failover", "tenure", "beyond the TTL p99", 0, "ms", 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := facts{Postgres: "15.1 <&>", CPUs: 2}
			wellFormed(t, string(drawPlot(records, f)))
			wellFormed(t, string(drawCurves(records, f)))
		})
	}
}

func wellFormed(t *testing.T, svg string) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
	}
	for _, bad := range []string{"NaN", "Inf", "%!"} {
		if strings.Contains(svg, bad) {
			t.Errorf("%s in\n%s", bad, svg)
		}
	}
}

func TestEachFigureIsOnItsLine(t *testing.T) {
	records := []record{
		{"scale", "tenure", "16 workers", 7000, "pairs/s", 1},
		{"scale", "claims", "release 1000 keys", 80_000, "keys/s", 1},
		{"short-ttl", "tenure-etcd, TTL 300ms, 4 busy loops", "beyond the TTL p99", 12, "ms", 1},
	}
	want := []string{"tenure 16", "release 1000", "tenure-etcd, CPUs busy 300"}
	for i, p := range curvePlots {
		for j, r := range records {
			if line, x, ok := p.point(r); ok != (i == j) || ok && fmt.Sprint(line, " ", x) != want[i] {
				t.Errorf("%s: %+v is on %s at %v: %v", p.title, r, line, x, ok)
			}
		}
	}
}

func TestTheAxisIsLogarithmic(t *testing.T) {
	a := axis{-1, 3}
	for v, want := range map[float64]float64{0.1: 10, 10: 10 + plotPanel/2, 1000: 10 + plotPanel} {
		if got := a.x(10, v); math.Abs(got-want) > 0.001 {
			t.Errorf("%v: got %v, want %v", v, got, want)
		}
	}
}
