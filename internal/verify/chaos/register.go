package main

import (
	"math"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// register is a possible state of one object according to its history.
type register struct {
	exists  bool
	unsure  bool  // the version is unknown, because the write was never answered
	version int64 // the last known one; if unsure, the actual one is greater
	value   string
}

// at returns the register at a version, or false if it can't be at that version.
func (r register) at(version int64) (register, bool) {
	if r.unsure {
		ok := version > r.version
		r.unsure, r.version = false, version
		return r, ok
	}
	return r, r.version == version
}

// written returns the register after a write. Versions never go back, not even after a
// deletion.
func (r register) written(o op) (register, bool) {
	if o.Outcome != done { // the version is unknown
		return register{exists: true, unsure: true, version: r.version, value: o.Value}, true
	}
	ok := o.Now > r.version
	return register{exists: true, version: o.Now, value: o.Value}, ok
}

// after returns the possible states after an operation with that outcome; none if the
// outcome is impossible.
func (r register) after(o op) []any {
	switch o.Outcome {
	case refused:
		return []any{r}
	case unknown:
		return append(r.happened(o), r) // it may have happened or not
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

// happened returns the possible states if the operation happened.
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

// forever is the return time of an operation whose outcome is unknown: it may still
// happen.
const forever = time.Duration(math.MaxInt64)

// judge checks whether the history of one register is linearizable.
func judge(history []porcupine.Operation) porcupine.CheckResult {
	const longest = 30 * time.Second
	// Most operations with an unknown outcome left no trace. They can be left out, because
	// they may never have happened.
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
