//go:build unix

package etcdtenure_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

// call is one call of a store and what became of it.
type call struct {
	do      string // "get", "create", "replace" or "delete"
	version int64  // that was expected
	value   string // that was written
	err     error
	read    tenure.Object // or what was written
}

func (c call) unknown() bool {
	return c.err != nil && !slices.ContainsFunc([]error{tenure.ErrNotFound, tenure.ErrExists, tenure.ErrConflict, tenure.ErrSetup},
		func(known error) bool { return errors.Is(c.err, known) })
}

// object is what a key may have, according to the history.
type object struct {
	exists  bool
	unsure  bool  // the write was not answered, so that only a lower bound of the version is known
	version int64 // never goes back, also if the object is deleted
	value   string
}

// at returns the object if it can be at that version.
func (o object) at(version int64) (object, bool) {
	if !o.exists || !o.unsure {
		return o, o.exists && o.version == version
	}
	o.unsure = false
	ok := version > o.version
	o.version = version
	return o, ok
}

// after returns what the key may have after a call; nothing if its answer is impossible.
func (o object) after(c call) []any {
	only := func(o object, ok bool) []any {
		if ok {
			return []any{o}
		}
		return nil
	}
	var conflict *tenure.ConflictError
	switch {
	case c.unknown():
		return append(o.written(c), o)
	case errors.As(c.err, &conflict) && conflict.Current != 0:
		is, ok := o.at(conflict.Current)
		return only(is, ok && conflict.Current != c.version)
	case errors.As(c.err, &conflict), errors.Is(c.err, tenure.ErrNotFound):
		return only(o, !o.exists)
	case errors.Is(c.err, tenure.ErrExists):
		return only(o, o.exists)
	case c.err != nil:
		return only(o, true)
	case c.do == "get":
		is, ok := o.at(c.read.Version)
		return only(is, ok && is.value == string(c.read.Payload))
	}
	return o.written(c)
}

// written returns the object after a call that happened.
func (o object) written(c call) []any {
	switch c.do {
	case "get":
		return nil
	case "create":
		if o.exists {
			return nil
		}
	default:
		is, ok := o.at(c.version)
		if !ok {
			return nil
		}
		o = is
	}
	if c.do == "delete" {
		return []any{object{version: o.version}}
	}
	if c.err != nil {
		return []any{object{exists: true, unsure: true, version: o.version, value: c.value}}
	}
	if c.read.Version <= o.version {
		return nil
	}
	return []any{object{exists: true, version: c.read.Version, value: c.value}}
}

var model = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{object{}} },
	Step: func(state, _, output any) []any { return state.(object).after(output.(call)) },
}).ToModel()

// TestHistoriesUnderFaultsAreLinearizable is of calls on some keys through each server, while
// servers are killed, paused and cut off.
func TestHistoriesUnderFaultsAreLinearizable(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	const keys, callers, enough = 4, 6, 200
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var changes atomic.Int32
	began := time.Now()
	var mu sync.Mutex
	var histories [keys][]porcupine.Operation
	var all sync.WaitGroup
	for caller := range callers {
		urls := c.urls()
		if caller%2 == 0 { // the others have one server each, so that they stay with one that is cut off
			urls = urls[caller/2 : caller/2+1]
		}
		store := open(t, urls...)
		all.Go(func() {
			var known [keys]tenure.Object
			for n := 0; ctx.Err() == nil; n++ {
				k := rand.N(keys)
				key := tenure.Key{Type: "register", ID: fmt.Sprint(k)}
				op := call{value: fmt.Sprint(caller, ".", n), version: known[k].Version}
				limited, cancel := context.WithTimeout(context.Background(), 700*time.Millisecond)
				sent := time.Since(began)
				switch what := rand.N(10); {
				case what < 4 || op.version == 0 && what < 6:
					op.do = "get"
					op.read, op.err = store.Get(limited, key)
				case op.version == 0:
					op.do = "create"
					op.read, op.err = store.PutIf(limited, tenure.Object{Key: key, Payload: []byte(op.value)}, tenure.MustCreate())
				case what < 9:
					op.do = "replace"
					op.read, op.err = store.PutIf(limited, tenure.Object{Key: key, Payload: []byte(op.value)}, tenure.MatchVersion(op.version))
				default:
					op.do = "delete"
					op.err = store.DeleteIf(limited, key, op.version)
				}
				answered := time.Since(began)
				cancel()
				known[k] = op.read
				if op.err == nil && op.do != "get" {
					changes.Add(1)
				}
				if op.unknown() {
					answered = math.MaxInt64 // it may still happen
					if op.do == "get" {
						continue
					}
				}
				mu.Lock()
				histories[k] = append(histories[k], porcupine.Operation{ClientId: caller, Call: int64(sent), Output: op, Return: int64(answered)})
				mu.Unlock()
				time.Sleep(rand.N(4 * time.Millisecond))
			}
		})
	}
	for round := 0; round < 6 || changes.Load() < enough; round++ {
		n := c.leader(t)
		switch round % 3 {
		case 0:
			c.servers[n].kill()
			time.Sleep(300 * time.Millisecond)
			c.servers[n].begin(t)
		case 1:
			c.servers[n].pause(t)
			time.Sleep(time.Second)
			c.servers[n].resume(t)
		case 2:
			c.isolate(n)
			time.Sleep(time.Second)
			c.heal()
		}
		time.Sleep(500 * time.Millisecond)
	}
	cancel()
	all.Wait()
	for k, history := range histories {
		unknown := 0
		for _, op := range history {
			c := op.Output.(call)
			if c.unknown() {
				unknown++
			}
		}
		t.Logf("key %d: %d calls, %d of them without an answer", k, len(history), unknown)
		require.Equal(t, porcupine.Ok, porcupine.CheckOperationsTimeout(model, history, 20*time.Second))
	}
}

func TestAHistoryThatIsNotLinearizableIsNoticed(t *testing.T) {
	wrote := func(do string, expects, version int64, value string) call {
		return call{do: do, version: expects, value: value, read: tenure.Object{Version: version, Payload: []byte(value)}}
	}
	read := func(version int64, value string) call {
		return call{do: "get", read: tenure.Object{Version: version, Payload: []byte(value)}}
	}
	lost := call{do: "replace", version: 1, value: "b", err: errors.New("no answer")}
	for what, test := range map[string]struct {
		want  porcupine.CheckResult
		calls []call
	}{
		"in order":                 {porcupine.Ok, []call{wrote("create", 0, 1, "a"), wrote("replace", 1, 2, "b"), read(2, "b")}},
		"an outdated read":         {porcupine.Illegal, []call{wrote("create", 0, 1, "a"), wrote("replace", 1, 2, "b"), read(1, "a")}},
		"a lost write":             {porcupine.Illegal, []call{wrote("create", 0, 1, "a"), wrote("replace", 1, 2, "b"), wrote("replace", 1, 3, "c")}},
		"a version that goes back": {porcupine.Illegal, []call{wrote("create", 0, 5, "a"), {do: "delete", version: 5}, wrote("create", 0, 4, "b")}},
		"a write without an answer that happened":         {porcupine.Ok, []call{wrote("create", 0, 1, "a"), lost, read(7, "b")}},
		"a write without an answer that did not happen":   {porcupine.Ok, []call{wrote("create", 0, 1, "a"), lost, read(1, "a")}},
		"a write without an answer that happened and not": {porcupine.Illegal, []call{wrote("create", 0, 1, "a"), lost, read(7, "b"), read(1, "a")}},
		"a conflict of a write that happened": {porcupine.Illegal, []call{wrote("create", 0, 1, "a"),
			{do: "replace", version: 1, value: "b", err: &tenure.ConflictError{Wanted: 1, Current: 2}}, read(2, "b")}},
	} {
		var history []porcupine.Operation
		for i, c := range test.calls {
			op := porcupine.Operation{Call: int64(10 * i), Return: int64(10*i + 5), Output: c}
			if c.unknown() {
				op.Return = math.MaxInt64
			}
			history = append(history, op)
		}
		require.Equal(t, test.want, porcupine.CheckOperationsTimeout(model, history, time.Second), what)
	}
}
