package main

import (
	"slices"
	"time"
)

// percentile returns the p-th percentile by nearest rank: always one of the measured times,
// never a value in between. It returns 0 if there are none.
func percentile(times []time.Duration, p int) time.Duration {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
