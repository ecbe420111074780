package shards

import (
	"slices"
	"time"
)

// settled is the number of settling times after which a member counts even if others keep joining.
const settled = 4

// shares returns how many shards each member should have, given how many each has now, the oldest member
// first. All members get the same number, and some get one more. Members that already have one more come
// first, so that no shard moves without need. Then come the youngest, because in a rolling restart the old
// members are about to leave. The result stays the same while members stop and claim shards accordingly.
//
// Each event moves as few shards as it can while all members have the same number, or one more. Let S shards be
// spread over N members: each has f = ⌊S/N⌋, and r of them have one more. A leave moves the shards of that
// member, f or f + 1; the join of its successor moves f. If every member that stops in a rolling restart has
// one more, that is N · (2f + 1) = 2S − 2r + N moves: more than 2S if r < N/2, so some shard moves three times,
// and one shard on 10 members would move 10 times. It therefore matters which members have one more. A rule
// that knows only which members exist and for how long cannot choose well: the newest must not have one more,
// or a join would move a shard too many, so the oldest always has it. This rule also sees which members have
// one more already. Some shards still move twice: a member gets them from one that stopped, and then stops
// itself, which no rule can know beforehand.
func shares(shards int, has []int) []int {
	each, more := shards/len(has), shards%len(has)
	result := make([]int, len(has))
	for _, keeps := range []bool{true, false} {
		for i, n := range slices.Backward(has) {
			if (n > each) != keeps {
				continue
			}
			if result[i] = each; more > 0 {
				result[i]++
				more--
			}
		}
	}
	return result
}

// counted returns how many members count, given the members' ages, the oldest first. A member counts if some
// member, itself or a younger one, joined and no other joined for the settling time after that. It also counts
// if it is old. Every member gets the same result at the same time, and the members that count are always the
// oldest. in is the time until more may count; 0: all count.
func counted(ages []time.Duration, settle time.Duration) (n int, in time.Duration) {
	for i, age := range ages {
		var next time.Duration // the age of the member that joined next
		if i+1 < len(ages) {
			next = ages[i+1]
		}
		// A negative age means that the database's clock was set back, so it says nothing.
		if age-next >= settle || age >= settled*settle || age < 0 {
			n = i + 1
		}
	}
	if n < len(ages) {
		in = min(settle-ages[len(ages)-1], settled*settle-ages[n])
	}
	return n, in
}

// view is what a member bases its decisions on.
type view struct {
	shards  int // in all
	members int // that are present
	counted int // how many of these count
	rank    int // of this member among them, by age; -1: it is not present

	share int // how many shards this member should have; 0 while it does not count
	least int // how many it should have if all members counted

	mine    int // shards that this process has, including those that were told to stop
	running int // shards that were not told to stop
}

// newView returns the view of the member of that rank, given how many shards each member has, the oldest
// first, and how many members count.
func newView(shards int, has []int, counted, rank int) view {
	v := view{shards: shards, members: len(has), counted: counted, rank: rank}
	if v.counts() {
		v.share, v.least = shares(shards, has[:counted])[rank], shares(shards, has)[rank]
	}
	return v
}

func (v view) counts() bool { return v.rank >= 0 && v.rank < v.counted }

// surplus returns how many shards this member has to stop.
func (v view) surplus() int {
	if !v.counts() {
		return 0
	}
	return max(0, v.running-v.share)
}

// room returns how many free shards this member claims now, and how many later, once they have been free
// for the settling time. At first it leaves some shards to members that do not count yet, which would
// otherwise move twice.
func (v view) room() (now, later int) { return max(0, v.least-v.mine), max(0, v.share-v.mine) }

// owners are the sessions that own shards.
type owners struct {
	of    map[string]string
	count map[string]int
}

// sightings is what a member remembers from one look to the next.
type sightings struct {
	free    map[string]time.Time // the time since which each free shard has been free, while this member counts
	members []string             // the sessions that the last look found
	tries   int                  // looks in a row after which not all wanted shards could be claimed
	other   bool                 // a shard that this member is not configured with has been logged
}

// note notes which shards are free: no other session owns them, and no func runs for them in this process.
// The row of a free shard may still name this session, if the answer to a claim was lost.
func (s *sightings) note(ids []string, owned owners, me string, runs map[string]bool, counts bool, now time.Time) {
	if s.free == nil || !counts {
		s.free = make(map[string]time.Time)
	}
	if !counts {
		return
	}
	for _, id := range ids {
		by, isOwned := owned.of[id]
		if isOwned && by != me || runs[id] {
			delete(s.free, id)
		} else if _, noted := s.free[id]; !noted {
			s.free[id] = now
		}
	}
}

// wanted returns the free shards that a member claims, and the time until there may be more; 0: never.
func (s *sightings) wanted(ids []string, v view, begin int, now time.Time, settle time.Duration) (wanted []string, in time.Duration) {
	room, later := v.room()
	var free []string
	for _, id := range ids {
		if _, ok := s.free[id]; ok {
			free = append(free, id)
		}
	}
	free = slices.Concat(free[begin:], free[:begin])
	for _, id := range free {
		since := now.Sub(s.free[id])
		switch {
		case len(wanted) < room, len(wanted) < later && since >= settle:
			wanted = append(wanted, id)
		case len(wanted) < later && (in == 0 || settle-since < in):
			in = settle - since
		}
	}
	return wanted, in
}
