package witness

import (
	"cmp"
	"maps"
	"slices"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// mostKeys is how many keys are kept at least. Of a program that has competed for more, the witness forgets those that
// the program has not named for longest.
const mostKeys = 100_000

// keys is what the program competes for.
type keys struct {
	named map[tenure.Key]naming
	last  int                 // the number of the last naming
	wakes map[tenure.Key]bool // woken when a session is released
}

// naming is what the program has said of a key.
type naming struct {
	number   int // of the last time; the numbers grow
	underWay int // acquires that the store has not answered, as far as the program has said
}

func newKeys() *keys {
	return &keys{named: make(map[tenure.Key]naming), wakes: make(map[tenure.Key]bool)}
}

// acquires notes that the program is about to send an acquire.
func (k *keys) acquires(key tenure.Key) {
	if len(k.named) == 2*mostKeys {
		for _, old := range k.all()[mostKeys:] {
			delete(k.named, old)
		}
	}
	k.last++
	k.named[key] = naming{k.last, k.named[key].underWay + 1}
}

// answered notes that an acquire is no longer under way.
func (k *keys) answered(key tenure.Key) {
	if n, ok := k.named[key]; ok {
		k.named[key] = naming{n.number, n.underWay - 1}
	}
}

// all returns sessions, each of which stands for many keys, and then the other keys, each beginning with the last that
// the program has named: there may not be enough time for all, and the program has probably released the first.
func (k *keys) all() []tenure.Key {
	order := func(key tenure.Key) int {
		if key.Type == objects.SessionType {
			return k.named[key].number + k.last
		}
		return k.named[key].number
	}
	return slices.SortedFunc(maps.Keys(k.named), func(a, b tenure.Key) int { return cmp.Compare(order(b), order(a)) })
}
