package main

import (
	"encoding/xml"
	"errors"
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
		"a failover in no time": {
			{"failover", "tenure", "beyond the TTL p50", -1, "ms", 1},
			{"failover", "tenure", "beyond the TTL p99", 0, "ms", 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			svg := string(drawPlot(records, facts{Postgres: "15.1 <&>", CPUs: 2}))
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
		})
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
