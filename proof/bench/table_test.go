package main

import (
	"strings"
	"testing"
)

func TestATableHasARatioWhereTheFloorHasTheMetric(t *testing.T) {
	records := []record{
		{"renew", "etcd", "renew p50", 1, "ms", 10},
		{"renew", "tenure", "renew p50", 0.3, "ms", 10},
		{"renew", "tenure", "only ours", 12345, "", 10},
		{"renew", "floor", "renew p50", 0.25, "ms", 10},
	}
	var b strings.Builder
	if err := writeTable(&b, records, []note{{"renew", "etcd", "has a cold"}}); err != nil {
		t.Fatal(err)
	}
	want := `
|        | renew p50, ms | only ours |
|--------|--------------:|----------:|
| floor  |          0.25 |         – |
| tenure |   0.3 (1.20×) |     12345 |
| etcd   |        1 (4×) |         – |

- etcd: has a cold
`
	if got := b.String(); got != strings.TrimPrefix(want, "\n") {
		t.Errorf("got\n%s\nwant%s", got, want)
	}
}

func TestFiguresHaveThreeDigitsThatCount(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 3: "3", 0.0123456: "0.0123", 0.5: "0.5", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 12345.6: "12346", -1.5: "-1.50",
	} {
		if got := figure(v); got != want {
			t.Errorf("%v: got %s, want %s", v, got, want)
		}
	}
}
