package main

import (
	"slices"
	"time"
)

// percentile returns the smallest of the times that is not below p percent of
// them: always one that was measured, none in between. Of none it is 0.
func percentile(times []time.Duration, p int) time.Duration {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
