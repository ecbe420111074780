package witness

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// mostKeys is how many keys are kept at least. Of a program that has competed for more, the witness forgets those that
// the program has not named for longest.
const mostKeys = 100_000

// keys is what the program competes for.
type keys struct {
	latest, before map[tenure.Key]*naming // two generations
	last           int                    // the number of the last naming
	wakes          map[tenure.Key]bool    // woken when a session is released
}

// naming is what the program has said of a key.
type naming struct {
	key        tenure.Key
	number     int       // of the last acquire; the numbers grow
	unanswered time.Time // when the program sent that acquire; zero if it was answered, or if the program does not say so
}

func newKeys() *keys {
	return &keys{latest: make(map[tenure.Key]*naming), wakes: make(map[tenure.Key]bool)}
}

// acquires notes that the program is about to send an acquire, and whether it will say that the acquire was answered.
func (k *keys) acquires(key tenure.Key, answers bool) {
	if len(k.latest) == mostKeys {
		k.before, k.latest = k.latest, make(map[tenure.Key]*naming)
	}
	k.last++
	n := &naming{key: key, number: k.last}
	if answers {
		n.unanswered = time.Now()
	}
	delete(k.before, key)
	k.latest[key] = n
}

// answered notes that an acquire was answered.
func (k *keys) answered(key tenure.Key) {
	if n := cmp.Or(k.latest[key], k.before[key]); n != nil {
		n.unanswered = time.Time{}
	}
}

// all returns sessions, each of which stands for many keys, and then the other keys, each beginning with the last that
// the program has named: there may not be enough time for all, and the program has probably released the first.
func (k *keys) all() []*naming {
	order := func(n *naming) int {
		if n.key.Type == objects.SessionType {
			return n.number + k.last
		}
		return n.number
	}
	all := slices.AppendSeq(slices.Collect(maps.Values(k.latest)), maps.Values(k.before))
	slices.SortFunc(all, func(a, b *naming) int { return cmp.Compare(order(b), order(a)) })
	return all
}
