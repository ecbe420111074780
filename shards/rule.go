package shards

import "time"

// settled is how many settling times after its join a member counts, even if others keep
// joining.
const settled = 4

// quota returns how many of the shards are for the member of that rank. All have the same
// number, and the first have one more. It never grows when a member joins behind, and never
// shrinks when one leaves, so no shard moves that need not.
func quota(shards, members, rank int) int {
	if rank < 0 || rank >= members {
		return 0
	}
	return (shards - rank + members - 1) / members
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

	mine    int // shards that this process has, also those that stop
	running int // those that have not been told to stop
}

func (v view) counts() bool { return v.rank >= 0 && v.rank < v.counted }

// share is how many shards this member has when the others have taken theirs.
func (v view) share() int { return quota(v.shards, v.counted, v.rank) }

// surplus returns how many shards this member stops.
func (v view) surplus() int {
	if !v.counts() {
		return 0
	}
	return max(0, v.running-v.share())
}

// room returns how many free shards this member claims, and how many when nobody has claimed
// them for the settling time. At first it leaves some to those that do not count yet; if it
// did not, they would move twice.
func (v view) room() (now, later int) {
	if !v.counts() {
		return 0, 0
	}
	return max(0, quota(v.shards, v.members, v.rank)-v.mine), max(0, v.share()-v.mine)
}
