package testkit

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

// RNG returns a separate source for each actor, so that what one draws does not depend on
// when another draws.
func RNG(seed uint64, actor int) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(actor))) }

// Dice is a source of randomness for several goroutines.
type Dice struct {
	mu  sync.Mutex
	rng *rand.Rand
}

// NewDice returns the dice of an actor.
func NewDice(seed uint64, actor int) *Dice { return &Dice{rng: RNG(seed, actor)} }

// One returns true once in that many times, on average.
func (d *Dice) One(in int) bool { return d.N(in) == 0 }

// N returns a random number below n.
func (d *Dice) N(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.IntN(n)
}

// UpTo returns a random duration of at most most. Short ones are more likely than long ones.
func (d *Dice) UpTo(most time.Duration) time.Duration {
	return Scale(most, float64(1+d.N(1000))/1000/float64(int(1)<<d.N(6)))
}

// Scale multiplies a duration.
func Scale(d time.Duration, by float64) time.Duration {
	if by == 1 {
		return d
	}
	return time.Duration(float64(d) * by)
}

// Count adds 1 to a counter in a map, which it creates if it is nil.
func Count(m *map[string]int, what string) {
	if *m == nil {
		*m = make(map[string]int)
	}
	(*m)[what]++
}

// MergeCounts adds all counters of from to those of another map, which it creates if it is nil.
func MergeCounts(to *map[string]int, from map[string]int) {
	if *to == nil {
		*to = make(map[string]int)
	}
	for what, n := range from {
		(*to)[what] += n
	}
}

// FormatCounts returns the sum of the counters, followed by each of them.
func FormatCounts(m map[string]int) string {
	total := 0
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(m)) {
		total += m[what]
		parts = append(parts, fmt.Sprintf("%s %d", what, m[what]))
	}
	if len(parts) == 0 {
		return "0"
	}
	return fmt.Sprintf("%d (%s)", total, strings.Join(parts, ", "))
}
