package shards

import (
	"slices"
	"time"
)

// settled is how many settling times after its join a member counts, even if others keep
// joining.
const settled = 4

// shares returns how many of the shards are for each member, given how many each has, the oldest
// member first. All get the same number, and some one more: those that have one more already, so
// that no shard moves that need not, and then the youngest, because in a rolling restart the old
// ones are about to go. While members stop and claim what they come to, the result stays the same.
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

// counted returns how many members count, given their ages, the oldest first: all up to the
// last join after which nobody else has joined for the settling time, and those that are old.
// Every member comes to the same result at the same time, and those that count are always the
// first. In says when there may be more; 0: all count.
func counted(ages []time.Duration, settle time.Duration) (n int, in time.Duration) {
	for i, age := range ages {
		var next time.Duration // the age of the one that joined next
		if i+1 < len(ages) {
			next = ages[i+1]
		}
		// An age is negative if the database's clock was set back. It says nothing then.
		if age-next >= settle || age >= settled*settle || age < 0 {
			n = i + 1
		}
	}
	if n < len(ages) {
		in = min(settle-ages[len(ages)-1], settled*settle-ages[n])
	}
	return n, in
}

// view is what a member decides by.
type view struct {
	shards  int // of all
	members int // that are there
	counted int // of these
	rank    int // of this member among them, by age; -1: it is not there

	share int // how many shards are for this member, among those that count; 0: it does not
	least int // and if those that do not count yet did

	mine    int // shards that this process has, also those that stop
	running int // those that have not been told to stop
}

// newView returns the view of the member of that rank, given how many shards each member has,
// the oldest first, and how many of them count.
func newView(shards int, has []int, counted, rank int) view {
	v := view{shards: shards, members: len(has), counted: counted, rank: rank}
	if v.counts() {
		v.share, v.least = shares(shards, has[:counted])[rank], shares(shards, has)[rank]
	}
	return v
}

func (v view) counts() bool { return v.rank >= 0 && v.rank < v.counted }

// surplus returns how many shards this member stops.
func (v view) surplus() int {
	if !v.counts() {
		return 0
	}
	return max(0, v.running-v.share)
}

// room returns how many free shards this member claims, and how many when nobody has claimed
// them for the settling time. At first it leaves some to those that do not count yet; if it
// did not, they would move twice.
func (v view) room() (now, later int) { return max(0, v.least-v.mine), max(0, v.share-v.mine) }
