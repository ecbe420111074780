package storetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

const (
	rounds     = 5
	contenders = 32
)

func oneCreateSucceeds(t *testing.T, store *watched) {
	for round := range rounds {
		key := widget(fmt.Sprintf("round-%d", round))
		var answers [contenders]tenure.Object
		var errs [contenders]error
		together(contenders, func(i int) {
			answers[i], errs[i] = store.PutIf(t.Context(), numbered(key.ID, i), tenure.IfAbsent())
		})
		won := winner(t, errs[:])
		for i, err := range errs {
			if i != won {
				wantError(t, fmt.Sprintf("one of %d concurrent PutIf(%s, %s)", contenders, key, tenure.IfAbsent()), err, tenure.ErrExists)
			}
		}
		sameContent(t, "the answer of the create that succeeded,", answers[won], numbered(key.ID, won))
		same(t, "after concurrent creates,", get(t, store, key), answers[won])
	}
}

// Even-numbered contenders write. Odd-numbered ones write in the first rounds and
// delete in the later ones.
func oneOfAVersionSucceeds(t *testing.T, store *watched) {
	for round := range 2 * rounds {
		deletes := func(i int) bool { return round >= rounds && i%2 == 1 }
		base := put(t, store, numbered(fmt.Sprintf("round-%d", round), -1), tenure.IfAbsent())
		var answers [contenders]tenure.Object
		var errs [contenders]error
		together(contenders, func(i int) {
			if deletes(i) {
				errs[i] = store.DeleteIf(t.Context(), base.Key, tenure.IfVersion(base.Version))
			} else {
				answers[i], errs[i] = store.PutIf(t.Context(), numbered(base.Key.ID, i), tenure.IfVersion(base.Version))
			}
		})
		won := winner(t, errs[:])
		conflict := &objects.Conflict{ID: objects.ID(base.Key), Wanted: base.Version, Current: answers[won].Version}
		for i, err := range errs {
			switch {
			case i == won:
			case deletes(i) && deletes(won):
				wantError(t, "a concurrent DeleteIf of a version that another deleted", err, tenure.ErrNotFound)
			case deletes(i):
				wantError(t, "a concurrent DeleteIf of a version that another replaced", err, conflict)
			default:
				wantError(t, "a concurrent PutIf of a version that another replaced or deleted", err, conflict)
			}
		}
		if deletes(won) {
			getFails(t, store, base.Key, tenure.ErrNotFound)
		} else {
			same(t, "after concurrent writes,", get(t, store, base.Key), answers[won])
		}
	}
}

func oneCreateUnderANameSucceeds(t *testing.T, store *watched) {
	needsNames(t, store)
	for round := range rounds {
		keys := make([]tenure.Key, 8)
		for i := range keys {
			keys[i] = widget(fmt.Sprintf("round-%d-%d", round, i))
		}
		name := fmt.Sprintf("name-%d", round)
		errs := make([]error, len(keys))
		together(len(keys), func(i int) {
			_, errs[i] = store.PutIf(t.Context(), named(keys[i], name), tenure.IfAbsent())
		})
		won := winner(t, errs)
		for i, err := range errs {
			if i != won {
				wantError(t, "a concurrent create with a name that another took", err, tenure.ErrTaken)
				getFails(t, store, keys[i], tenure.ErrNotFound)
			}
		}
		sameContent(t, "after concurrent creates under one name,", get(t, store, keys[won]), named(keys[won], name))
	}
}

func versionsRiseUnderConcurrency(t *testing.T, store *watched) {
	const (
		workers = 8
		calls   = 60
	)
	keys := []tenure.Key{widget("a"), widget("b"), widget("c")}
	together(workers, func(worker int) {
		rng := rand.New(rand.NewPCG(uint64(worker), 0))
		last := make(map[tenure.Key]int64) // the version that this worker saw last
		for n := range calls {
			key := keys[rng.IntN(len(keys))]
			obj := numbered(key.ID, worker*calls+n)
			known := max(last[key], 1)
			var err error
			switch rng.IntN(6) {
			case 0:
				obj, err = store.PutIf(t.Context(), obj, tenure.IfAbsent())
			case 1, 2:
				obj, err = store.PutIf(t.Context(), obj, tenure.IfVersion(known))
			case 3:
				obj, err = store.PutIf(t.Context(), obj, tenure.Unconditional())
			case 4:
				obj, err = store.Get(t.Context(), key)
			case 5:
				obj, err = tenure.Object{}, store.DeleteIf(t.Context(), key, tenure.IfVersion(known))
			}
			var conflict *objects.Conflict
			switch {
			case err == nil:
				last[key] = obj.Version
			case errors.As(err, &conflict):
				last[key] = conflict.Current
			case errors.Is(err, tenure.ErrExists), errors.Is(err, tenure.ErrNotFound):
			default:
				t.Errorf("a concurrent call on %s failed: %v", key, err)
				return
			}
		}
	})
}
