package main

import (
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"time"
)

// model is a system that is explored: its first state, and what can happen in each.
type model[S comparable] struct {
	start S

	// next calls emit for each state that can follow. label says what has happened, and bad what is
	// violated by it; empty: nothing.
	next func(s S, emit func(label func() string, to S, bad string))

	// same returns the representative of all states that differ only in what does not matter.
	same func(S) S

	// recovers reports whether everything is well in the end if no further fault occurs.
	recovers func(S) bool
}

// found is what an exploration has seen.
type found struct {
	states, depth int
	bad           string   // what is violated; empty: nothing was found
	story         []string // the steps that lead to it
	complete      bool     // all states were seen
}

const stuck = "nobody ever holds, however well all goes on"

// search goes through all states, nearest first, until it has seen most of them. So the story that it
// finds is a shortest one.
func (m *model[S]) search(most int) (f found) {
	type print [2]uint64
	type origin struct {
		from print
		step int // which of the states that can follow
	}
	a, b := maphash.MakeSeed(), maphash.MakeSeed()
	of := func(s S) print { return print{maphash.Comparable(a, s), maphash.Comparable(b, s)} }
	first := m.same(m.start)
	seen := map[print]origin{of(first): {}}
	wave := []S{first}
	for depth := 1; len(wave) > 0; depth++ {
		var following []S
		for _, s := range wave {
			at, step := of(s), 0
			m.next(s, func(_ func() string, to S, bad string) {
				step++
				if f.bad != "" {
					return
				}
				to = m.same(to)
				p := of(to)
				if _, known := seen[p]; !known {
					seen[p] = origin{at, step}
					if bad == "" && !m.recovers(to) {
						bad = stuck
					}
				} else if bad == "" {
					return
				}
				f.states, f.depth, f.bad = len(seen), depth, bad
				if bad == "" {
					following = append(following, to)
					return
				}
				steps := []int{step}
				for p := at; p != of(first); p = seen[p].from {
					steps = append(steps, seen[p].step)
				}
				f.story = m.tell(first, steps)
			})
			if f.bad != "" || len(seen) > most {
				return f
			}
		}
		wave = following
	}
	f.complete = true
	return f
}

// tell returns what happens in steps, of which the last one is the first in the list.
func (m *model[S]) tell(s S, steps []int) (story []string) {
	for i := len(steps) - 1; i >= 0; i-- {
		step := 0
		m.next(s, func(label func() string, to S, bad string) {
			if step++; step != steps[i] {
				return
			}
			if story = append(story, label()); bad != "" {
				story = append(story, bad)
			}
			s = m.same(to)
		})
	}
	return story
}

// walk takes random steps, of which a walk has up to 60, until the time is up: many more than a search
// reaches.
func (m *model[S]) walk(d time.Duration) (f found) {
	for end := time.Now().Add(d); time.Now().Before(end) && f.bad == ""; {
		s := m.start
		var story []string
		for n := range 60 {
			type step struct {
				label func() string
				to    S
				bad   string
			}
			var steps []step
			m.next(s, func(label func() string, to S, bad string) { steps = append(steps, step{label, to, bad}) })
			if len(steps) == 0 {
				break
			}
			taken := steps[rand.N(len(steps))]
			if rand.N(5) == 0 {
				taken = steps[0] // time passes
			}
			for _, each := range steps {
				if each.bad != "" {
					taken = each
				}
			}
			story = append(story, taken.label())
			s, f.states, f.depth = m.same(taken.to), f.states+1, max(f.depth, n)
			if f.bad = taken.bad; f.bad == "" && n%10 == 9 && !m.recovers(s) {
				f.bad = stuck
			}
			if f.bad != "" {
				f.story = append(story, f.bad)
				break
			}
		}
	}
	return f
}

// closeUp takes shift from all versions. Of those that are then less than limit only the order counts, so they
// become the numbers below it.
func closeUp[T int32 | uint16](versions []*T, shift, limit int) {
	var low []T
	for _, v := range versions {
		if int(*v)-shift < limit {
			low = append(low, *v)
		}
	}
	slices.Sort(low)
	low = slices.Compact(low)
	for _, v := range versions {
		if at, ok := slices.BinarySearch(low, *v); ok {
			*v = T(limit - len(low) + at)
		} else {
			*v -= T(shift)
		}
	}
}
