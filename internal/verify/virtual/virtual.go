// Package virtual holds what the simulations in virtual time share: a timeline to read after
// a failure, randomness that follows from a seed, the clocks of machines, and the weather
// between a process and its database.
package virtual

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

// One is true once in that many times.
func (d *Dice) One(in int) bool { return d.N(in) == 0 }

// N returns a random number below n.
func (d *Dice) N(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.IntN(n)
}

// UpTo returns a random duration; short ones are at least as likely as long ones.
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

// Count adds 1 to a counter of a map that may be nil.
func Count(m *map[string]int, what string) {
	if *m == nil {
		*m = make(map[string]int)
	}
	(*m)[what]++
}

// Merge adds counters to those of another map, which may be nil.
func Merge(to *map[string]int, from map[string]int) {
	if *to == nil {
		*to = make(map[string]int)
	}
	for what, n := range from {
		(*to)[what] += n
	}
}

// Counts returns the sum of counters, and each of them.
func Counts(m map[string]int) string {
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
