package shards

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var ruleRuns = flag.Int("shards.rule", 60, "how many random histories the model of the rule goes through")

func TestQuotasAreEvenAndAddUp(t *testing.T) {
	for shards := range 40 {
		for members := 1; members < 12; members++ {
			sum := 0
			for rank := range members {
				q := quota(shards, members, rank)
				require.LessOrEqual(t, q, quota(shards, members, 0))
				require.GreaterOrEqual(t, q, quota(shards, members, 0)-1)
				require.GreaterOrEqual(t, q, quota(shards, members+1, rank), "a join takes shards, and gives none")
				if rank > 0 {
					require.LessOrEqual(t, q, quota(shards, members-1, rank-1), "a leave gives shards, and takes none")
				}
				sum += q
			}
			require.Equal(t, shards, sum)
			require.Zero(t, quota(shards, members, members))
			require.Zero(t, quota(shards, members, -1))
		}
	}
}

func TestWhoCounts(t *testing.T) {
	const s = time.Second
	for _, test := range []struct {
		name string
		ages []time.Duration // in tenths of a second
		n    int
		in   time.Duration
	}{
		{"nobody is there", nil, 0, 0},
		{"it has just begun", []time.Duration{0}, 0, 10},
		{"it has settled", []time.Duration{10}, 1, 0},
		{"all have begun together", []time.Duration{11, 10, 10}, 3, 0},
		{"the last has not settled, nor had those before when it came", []time.Duration{11, 10, 9}, 0, 1},
		{"the first had settled when the second came", []time.Duration{14, 4}, 1, 6},
		{"others keep coming, and the oldest are old", []time.Duration{41, 35, 30, 22, 15, 8, 1}, 1, 5},
		{"the others came within a settling time, twice", []time.Duration{100, 60, 55, 20, 15, 6}, 3, 4},
		{"the clock was set back", []time.Duration{10, 5, -600}, 3, 0},
	} {
		var ages []time.Duration
		for _, age := range test.ages {
			ages = append(ages, age*s/10)
		}
		n, in := counted(ages, s)
		require.Equal(t, test.n, n, test.name)
		require.Equal(t, test.in*s/10, in, test.name)
	}
}

func TestWhatAMemberStopsAndClaims(t *testing.T) {
	for _, test := range []struct {
		name                string
		view                view
		surplus, now, later int
	}{
		{"it is not there", view{shards: 10, members: 2, counted: 2, rank: -1, mine: 3, running: 3}, 0, 0, 0},
		{"it does not count yet", view{shards: 10, members: 2, counted: 1, rank: 1, mine: 3, running: 3}, 0, 0, 0},
		{"it is alone", view{shards: 10, members: 1, counted: 1, rank: 0, mine: 4, running: 4}, 0, 6, 6},
		{"another one does not count yet", view{shards: 10, members: 2, counted: 1, rank: 0, mine: 4, running: 4}, 0, 1, 6},
		{"it has what it should have, and leaves the rest to another", view{shards: 10, members: 2, counted: 1, rank: 0, mine: 10, running: 10}, 0, 0, 0},
		{"another one counts", view{shards: 10, members: 2, counted: 2, rank: 0, mine: 10, running: 10}, 5, 0, 0},
		{"some stop already", view{shards: 10, members: 2, counted: 2, rank: 0, mine: 10, running: 7}, 2, 0, 0},
		{"one that hangs takes the place of another", view{shards: 10, members: 2, counted: 2, rank: 0, mine: 5, running: 4}, 0, 0, 0},
	} {
		require.Equal(t, test.surplus, test.view.surplus(), test.name)
		now, later := test.view.room()
		require.Equal(t, []int{test.now, test.later}, []int{now, later}, test.name)
	}
}

// group is a model of processes that share shards: their looks are what they are in reality,
// and their funcs return at once.
type group struct {
	t       *testing.T
	random  *rand.Rand
	now     time.Time
	settle  time.Duration
	shards  int
	members []*node // by age
	owner   []*node // of each shard; nil: it is free
	last    []*node // who owned it last
	moves   int
	movesOf []int // of each shard
}

func newGroup(t *testing.T, random *rand.Rand, shards int) *group {
	return &group{t: t, random: random, now: time.Unix(1, 0), settle: time.Second, shards: shards,
		owner: make([]*node, shards), last: make([]*node, shards), movesOf: make([]int, shards)}
}

type node struct {
	joined time.Time
	own    []int             // the newest last
	free   map[int]time.Time // since when it has seen shards free
}

// look lets a member do what Shards.look does. It reports whether it did anything.
func (g *group) look(n *node) (did bool) {
	var ages []time.Duration
	for _, m := range g.members {
		ages = append(ages, g.now.Sub(m.joined))
	}
	c, _ := counted(ages, g.settle)
	v := view{shards: g.shards, members: len(g.members), counted: c, rank: slices.Index(g.members, n), mine: len(n.own), running: len(n.own)}
	for range v.surplus() {
		last := len(n.own) - 1
		g.owner[n.own[last]] = nil
		n.own, did = n.own[:last], true
	}
	v.mine, v.running = len(n.own), len(n.own)
	var s sightings
	if s.free = map[string]time.Time{}; !v.counts() || n.free == nil {
		n.free = map[int]time.Time{}
	}
	ids := make([]string, g.shards)
	for i := range ids {
		ids[i] = fmt.Sprint(i)
		_, noted := n.free[i]
		switch {
		case g.owner[i] != nil:
			delete(n.free, i)
		case !noted && v.counts():
			n.free[i] = g.now
		}
		if since, ok := n.free[i]; ok {
			s.free[ids[i]] = since
		}
	}
	wanted, _ := s.wanted(ids, v, g.random.IntN(len(s.free)+1), g.now, g.settle)
	for _, id := range wanted {
		i := slices.Index(ids, id)
		if g.last[i] != nil && g.last[i] != n {
			g.moves++
			g.movesOf[i]++
		}
		g.owner[i], g.last[i] = n, n
		n.own, did = append(n.own, i), true
	}
	return did
}

func (g *group) join() *node {
	n := &node{joined: g.now}
	g.members = append(g.members, n)
	return n
}

func (g *group) leave(n *node) {
	g.members = slices.DeleteFunc(g.members, func(m *node) bool { return m == n })
	for _, i := range n.own {
		g.owner[i] = nil
	}
}

// pass lets a time pass in which all look again and again, in any order.
func (g *group) pass(d time.Duration) {
	for end := g.now.Add(d); g.now.Before(end); g.now = g.now.Add(g.settle / 8) {
		for did := true; did; {
			did = false
			for _, i := range g.random.Perm(len(g.members)) {
				did = g.look(g.members[i]) || did
			}
		}
	}
}

// balanced checks that all have what they should, after everything has settled.
func (g *group) balanced() {
	g.t.Helper()
	for i, m := range g.members {
		require.Len(g.t, m.own, quota(g.shards, len(g.members), i))
	}
}

// From a balanced state, one join, leave or crash moves the fewest shards that make it
// balanced again, and processes that begin together move none.
func TestMovesAreTheMinimum(t *testing.T) {
	events := 0
	for seed := range uint64(*ruleRuns) {
		random := rand.New(rand.NewPCG(seed, 7))
		g := newGroup(t, random, random.IntN(30))
		for range 1 + random.IntN(8) {
			g.join()
			g.pass(g.settle / 8)
		}
		g.pass(6 * g.settle)
		g.balanced()
		require.Zero(t, g.moves, "cold start, seed %d", seed)
		for range 20 {
			before, fewest := g.moves, 0
			if len(g.members) > 1 && random.IntN(2) == 0 {
				n := g.members[random.IntN(len(g.members))]
				fewest = len(n.own)
				g.leave(n)
			} else if len(g.members) < 10 {
				g.join()
				fewest = g.shards / len(g.members)
			}
			g.pass(6 * g.settle)
			g.balanced()
			require.Equal(t, fewest, g.moves-before, "seed %d", seed)
			events++
		}
	}
	t.Logf("%d events", events)
}

// Whatever happens, when it is over all shards are owned, evenly, 4 settling times later. Members
// that come and go within the settling time move nothing.
func TestAnyChurnEndsEvenly(t *testing.T) {
	for seed := range uint64(*ruleRuns) {
		random := rand.New(rand.NewPCG(seed, 8))
		g := newGroup(t, random, random.IntN(30))
		g.join()
		for range 40 {
			if len(g.members) > 1 && random.IntN(2) == 0 {
				g.leave(g.members[random.IntN(len(g.members))])
			} else {
				g.join()
			}
			g.pass(time.Duration(random.IntN(1500)) * time.Millisecond)
		}
		g.pass(6 * g.settle)
		g.balanced()
		require.NotContains(t, g.owner, (*node)(nil))

		before := g.moves
		for range 10 {
			n := g.join()
			g.pass(g.settle / 2)
			g.leave(n)
			g.pass(time.Duration(random.IntN(2000)) * time.Millisecond)
		}
		require.Equal(t, before, g.moves, "seed %d", seed)
	}
}

// A rolling restart replaces one process after another. It moves each shard twice or less on
// average; single ones move more often, because quotas differ by one.
func TestARollingRestart(t *testing.T) {
	for _, surge := range []bool{false, true} {
		worst, all, total := 0, 0, 0
		for seed := range uint64(*ruleRuns) {
			random := rand.New(rand.NewPCG(seed, 9))
			g := newGroup(t, random, random.IntN(60))
			replicas := 2 + random.IntN(8)
			for range replicas {
				g.join()
			}
			g.pass(6 * g.settle)
			g.movesOf = make([]int, g.shards)
			g.moves = 0
			for _, old := range slices.Clone(g.members) {
				if surge {
					g.join()
					g.pass(6 * g.settle)
					g.leave(old)
				} else {
					g.leave(old)
					g.pass(g.settle)
					g.join()
				}
				g.pass(6 * g.settle)
			}
			g.balanced()
			for _, n := range g.movesOf {
				worst = max(worst, n)
			}
			all += g.moves
			total += g.shards
		}
		t.Logf("surge %t: %.2f moves per shard, at most %d", surge, float64(all)/float64(total), worst)
		require.LessOrEqual(t, all, 2*total)
		require.LessOrEqual(t, worst, 5)
	}
}
