package main

import (
	"math"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// register is what one object may be, as far as its history tells.
type register struct {
	exists  bool
	unsure  bool  // the version: it was written, but the answer never came
	version int64 // the last one; where unsure, it is a later one
	value   string
}

// at returns the register at a version, or false where it can't be there.
func (r register) at(version int64) (register, bool) {
	if r.unsure {
		ok := version > r.version
		r.unsure, r.version = false, version
		return r, ok
	}
	return r, r.version == version
}

// written returns the register after a write. Versions never go back, over
// deletes too.
func (r register) written(o op) (register, bool) {
	if o.Outcome != done { // nobody knows at what version
		return register{exists: true, unsure: true, version: r.version, value: o.Value}, true
	}
	ok := o.Now > r.version
	return register{exists: true, version: o.Now, value: o.Value}, ok
}

// after returns what the register may be after an operation that ended as it did;
// nothing where it can't have ended so.
func (r register) after(o op) []any {
	switch o.Outcome {
	case refused:
		return []any{r}
	case unknown:
		return append(r.happened(o), r) // it has happened or not
	case exists:
		return only(r, r.exists)
	case notFound:
		return only(r, !r.exists)
	case conflict:
		if o.Now == 0 {
			return only(r, !r.exists)
		}
		now, ok := r.at(o.Now)
		return only(now, ok && r.exists && o.Now != o.Version)
	}
	if o.Do == get {
		now, ok := r.at(o.Now)
		return only(now, ok && r.exists && r.value == o.Read)
	}
	return r.happened(o)
}

// happened returns what the register may be where the operation has happened.
func (r register) happened(o op) []any {
	switch o.Do {
	case create:
		if r.exists {
			return nil
		}
	case replace, remove:
		now, ok := r.at(o.Version)
		if !ok || !r.exists {
			return nil
		}
		r = now
	}
	if o.Do == remove {
		r.exists, r.value = false, ""
		return []any{r}
	}
	return only(r.written(o))
}

func only(r register, ok bool) []any {
	if !ok {
		return nil
	}
	return []any{r}
}

var registerModel = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{register{}} },
	Step: func(state, _, output any) []any { return state.(register).after(output.(op)) },
}).ToModel()

// forever is when an operation returns whose outcome nobody knows: it may still
// happen.
const forever = time.Duration(math.MaxInt64)

// judge tells whether a history of one register is linearizable.
func judge(history []porcupine.Operation) porcupine.CheckResult {
	const longest = 30 * time.Second
	// Most operations of unknown outcome have left no trace, and to leave them out
	// is one of the things that may have happened.
	seen := map[string]bool{}
	for _, o := range history {
		seen[o.Output.(op).Read] = true
	}
	traced := slices.DeleteFunc(slices.Clone(history), func(o porcupine.Operation) bool {
		out := o.Output.(op)
		return out.Outcome == unknown && !seen[out.Value]
	})
	if porcupine.CheckOperationsTimeout(registerModel, traced, longest) == porcupine.Ok {
		return porcupine.Ok
	}
	return porcupine.CheckOperationsTimeout(registerModel, history, longest)
}
