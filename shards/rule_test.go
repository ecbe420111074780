package shards

import (
	"flag"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

var ruleRuns = flag.Int("shards.rule", 60, "how many random histories the model of the rule goes through")

// From any numbers, members that stop and claim shards until they have their shares, one after another and some
// at a time, compute the same shares all along, so none stops a shard that it has just claimed. From a balanced
// state, a join gives no other member more, and a leave takes nothing from any.
func TestSharesAreEvenAndStayWhileShardsMove(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 6))
	even := func(shards int, has []int) {
		sum := 0
		for _, n := range has {
			require.Contains(t, []int{shards / len(has), (shards + len(has) - 1) / len(has)}, n)
			sum += n
		}
		require.Equal(t, shards, sum)
	}
	for range 3000 {
		shards, has := random.IntN(40), make([]int, 1+random.IntN(8))
		free := shards
		for i := range has {
			has[i] = random.IntN(free + 1)
			free -= has[i]
		}
		random.Shuffle(len(has), func(i, j int) { has[i], has[j] = has[j], has[i] })
		want := shares(shards, has)
		even(shards, want)
		for i, n := range shares(shards, append(slices.Clone(has), 0))[:len(has)] {
			require.LessOrEqual(t, n, want[i], "no member claims what it gives up when the next one counts")
		}
		for !slices.Equal(has, want) {
			i := random.IntN(len(has))
			step := want[i] - has[i]
			if step > 0 {
				step = min(free, random.IntN(step+1))
			} else if step < 0 {
				step = -random.IntN(-step + 1)
			}
			has[i] += step
			free -= step
			require.Equal(t, want, shares(shards, has))
		}

		joined := shares(shards, append(slices.Clone(has), 0))
		even(shards, joined)
		require.Equal(t, shards/len(joined), joined[len(has)], "a join moves the fewest")
		for i, n := range has {
			require.LessOrEqual(t, joined[i], n)
		}
		if len(has) > 1 {
			gone := random.IntN(len(has))
			rest := slices.Delete(slices.Clone(has), gone, gone+1)
			for i, n := range shares(shards, rest) {
				require.GreaterOrEqual(t, n, rest[i])
			}
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
		{"there are none", nil, 0, 0},
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
		has                 []int // the oldest first
		counted, rank       int
		mine, running       int
		surplus, now, later int
	}{
		{"it is not there", []int{5, 2}, 2, -1, 3, 3, 0, 0, 0},
		{"it does not count yet", []int{5, 3}, 1, 1, 3, 3, 0, 0, 0},
		{"it is alone", []int{4}, 1, 0, 4, 4, 0, 6, 6},
		{"another one does not count yet", []int{4, 0}, 1, 0, 4, 4, 0, 1, 6},
		{"it has what it should have, and leaves the rest to another", []int{10, 0}, 1, 0, 10, 10, 0, 0, 0},
		{"another one counts", []int{10, 0}, 2, 0, 10, 10, 5, 0, 0},
		{"some stop already", []int{10, 0}, 2, 0, 10, 7, 2, 0, 0},
		{"one that hangs takes the place of another", []int{5, 5}, 2, 0, 5, 4, 0, 0, 0},
		{"it has one more, and keeps it", []int{4, 3, 3}, 3, 0, 4, 4, 0, 0, 0},
		{"no member has one more yet, and it is the youngest", []int{3, 3, 3}, 3, 2, 3, 3, 0, 1, 1},
		{"no member has one more yet, and it is not the youngest", []int{3, 3, 3}, 3, 1, 3, 3, 0, 0, 0},
		{"all have more, and it is not the youngest", []int{5, 5, 0}, 3, 0, 5, 5, 2, 0, 0},
		{"all have more, and it is the youngest of them", []int{5, 5, 0}, 3, 1, 5, 5, 1, 0, 0},
	} {
		v := newView(10, test.has, test.counted, test.rank)
		v.mine, v.running = test.mine, test.running
		require.Equal(t, test.surplus, v.surplus(), test.name)
		now, later := v.room()
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

// look lets a member do what Member.look does. It reports whether it did anything.
func (g *group) look(n *node) (did bool) {
	var ages []time.Duration
	for _, m := range g.members {
		ages = append(ages, g.now.Sub(m.joined))
	}
	c, _ := counted(ages, g.settle)
	v := newView(g.shards, g.has(), c, slices.Index(g.members, n))
	v.mine, v.running = len(n.own), len(n.own)
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
		ids[i] = strconv.Itoa(i)
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
		i, _ := strconv.Atoi(id)
		if g.last[i] != nil && g.last[i] != n {
			g.moves++
			g.movesOf[i]++
		}
		g.owner[i], g.last[i] = n, n
		n.own, did = append(n.own, i), true
	}
	return did
}

func (g *group) has() (has []int) {
	for _, m := range g.members {
		has = append(has, len(m.own))
	}
	return has
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
	has := g.has()
	require.Equal(g.t, shares(g.shards, has), has)
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

// A rolling restart replaces one process after another. No shard moves more than twice if the oldest go first,
// or if each new process joins before an old one leaves. Otherwise a few move a third time.
func TestARollingRestart(t *testing.T) {
	testkit.Slow(t)
	for _, test := range []struct {
		name  string
		surge bool // a new process joins before an old one leaves, and not after
		order func(random *rand.Rand, members []*node)
		most  int
	}{
		{"the oldest first", false, func(*rand.Rand, []*node) {}, 2},
		{"the youngest first", false, func(_ *rand.Rand, members []*node) { slices.Reverse(members) }, 3},
		{"in any order", false, shuffle, 3},
		{"the oldest first, after a join", true, func(*rand.Rand, []*node) {}, 2},
		{"the youngest first, after a join", true, func(_ *rand.Rand, members []*node) { slices.Reverse(members) }, 2},
		{"in any order, after a join", true, shuffle, 2},
	} {
		worst, all, total, more := 0, 0, 0, 0
		for seed := range uint64((*ruleRuns + 2) / 3) {
			random := rand.New(rand.NewPCG(seed, 9))
			g := newGroup(t, random, 1+random.IntN(60))
			for range 2 + random.IntN(9) {
				g.join()
			}
			g.pass(6 * g.settle)
			g.movesOf = make([]int, g.shards)
			g.moves = 0
			old := slices.Clone(g.members)
			test.order(random, old)
			for _, n := range old {
				if test.surge {
					g.join()
					g.pass(6 * g.settle)
					g.leave(n)
				} else {
					g.leave(n)
					g.pass(g.settle)
					g.join()
				}
				g.pass(6 * g.settle)
			}
			g.balanced()
			for _, n := range g.movesOf {
				worst = max(worst, n)
				if n > 2 {
					more++
				}
			}
			all += g.moves
			total += g.shards
		}
		t.Logf("%s: %.2f moves per shard, at most %d; %d of %d shards more than twice", test.name, float64(all)/float64(total), worst, more, total)
		require.LessOrEqual(t, all, 2*total)
		require.LessOrEqual(t, worst, test.most, test.name)
		require.LessOrEqual(t, 20*more, total)
	}
}

func shuffle(random *rand.Rand, members []*node) {
	random.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
}

// A process that crashes again and again, each time after it has settled, moves the same shards
// there and back. No other shard notices.
func TestACrashLoopMovesTheSameShards(t *testing.T) {
	for seed := range uint64(*ruleRuns) {
		random := rand.New(rand.NewPCG(seed, 10))
		g := newGroup(t, random, 1+random.IntN(60))
		for range 1 + random.IntN(8) {
			g.join()
		}
		g.pass(6 * g.settle)
		g.movesOf = make([]int, g.shards)
		g.moves = 0
		const lives = 20
		for range lives {
			n := g.join()
			g.pass(2 * g.settle)
			g.leave(n)
			g.pass(2 * g.settle)
		}
		part := g.shards / (len(g.members) + 1)
		moved := 0
		for _, n := range g.movesOf {
			if n > 0 {
				moved++
			}
		}
		require.Equal(t, 2*part*lives, g.moves, "seed %d", seed)
		require.Equal(t, part, moved, "seed %d", seed)
	}
}
