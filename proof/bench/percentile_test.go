package main

import (
	"testing"
	"time"
)

func TestAPercentileIsOneOfTheTimes(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(100 - i) // 100 … 1
	}
	for _, test := range []struct {
		name  string
		times []time.Duration
		p     int
		want  time.Duration
	}{
		{"none", nil, 50, 0},
		{"one", []time.Duration{7}, 99, 7},
		{"the lower of the two in the middle", []time.Duration{4, 1, 2, 3}, 50, 2},
		{"the middle of three", []time.Duration{3, 1, 2}, 50, 2},
		{"of a hundred, the 99th", hundred, 99, 99},
		{"of a hundred, the greatest", hundred, 100, 100},
		{"of twenty, the greatest", hundred[:20], 99, 100},
	} {
		if got := percentile(test.times, test.p); got != test.want {
			t.Errorf("%s: got %d, want %d", test.name, got, test.want)
		}
	}
	if hundred[0] != 100 {
		t.Error("the times were put in another order")
	}
}
