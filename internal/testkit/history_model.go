package testkit

import (
	"errors"
	"slices"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// HistoryCall is one call of a store on a lease or the object that it guards, and its outcome.
type HistoryCall struct {
	Lease   bool   // the call was on the lease, not on the object that the lease guards
	Do      string // "get", "create", "replace", "put" for an unconditional write, or "delete"
	Version int64  // the version that was expected
	Fence   int64  // the token of the term that fences the call, or 0
	Value   string // the value that was written
	Err     error
	Read    tenure.Object // the object that was read or written
}

// Unknown reports whether the call was not answered, so that a write may have happened, or
// still happen.
func (c HistoryCall) Unknown() bool {
	return c.Err != nil && !slices.ContainsFunc([]error{tenure.ErrNotFound, tenure.ErrExists, tenure.ErrConflict, tenure.ErrSetup, tenure.ErrLost},
		func(known error) bool { return errors.Is(c.Err, known) })
}

// HistoryState is a possible state of a lease and the object that it guards.
type HistoryState struct{ lease, guarded object }

// HistoryInit returns the states in which a history may begin.
func HistoryInit() []any { return []any{HistoryState{}} }

// HistoryStep returns the states that may follow a [HistoryState] after a [HistoryCall] with its
// answer. There are none if that answer is impossible.
func HistoryStep(state, _, call any) (next []any) {
	s, c := state.(HistoryState), call.(HistoryCall)
	if c.Lease {
		for _, lease := range s.lease.after(c) {
			next = append(next, HistoryState{lease, s.guarded})
		}
		return next
	}
	lease, stands := s.lease, true
	if c.Fence != 0 {
		lease, stands = s.lease.at(c.Fence)
	}
	switch {
	case errors.Is(c.Err, tenure.ErrLost):
		if !stands || s.lease.unsure {
			return []any{s}
		}
		return nil
	case c.Err != nil && !c.Unknown(): // a refusal for another reason says nothing about the lease
		lease, stands = s.lease, true
	case c.Unknown():
		next = append(next, s)
	}
	if !stands {
		return next
	}
	for _, guarded := range s.guarded.after(c) {
		next = append(next, HistoryState{lease, guarded})
	}
	return next
}

// object is a possible state of a key.
type object struct {
	exists  bool
	unsure  bool  // the write was not answered, so that only a lower bound of the version is known
	version int64 // never goes back, even if the object is deleted
	value   string
}

// at returns the object at that version, and whether it can be at that version.
func (o object) at(version int64) (object, bool) {
	if !o.exists || !o.unsure {
		return o, o.exists && o.version == version
	}
	o.unsure = false
	ok := version > o.version
	o.version = version
	return o, ok
}

// after returns the possible states of the key after a call.
func (o object) after(c HistoryCall) []object {
	var conflict *objects.Conflict
	switch {
	case c.Unknown():
		return append(o.written(c), o)
	case errors.As(c.Err, &conflict) && conflict.Current != 0:
		is, ok := o.at(conflict.Current)
		return only(is, ok && conflict.Current != c.Version)
	case errors.As(c.Err, &conflict), errors.Is(c.Err, tenure.ErrNotFound):
		return only(o, !o.exists)
	case errors.Is(c.Err, tenure.ErrExists):
		return only(o, o.exists)
	case c.Err != nil:
		return only(o, true)
	case c.Do == "get":
		is, ok := o.at(c.Read.Version)
		return only(is, ok && is.value == string(c.Read.Payload))
	}
	return o.written(c)
}

// written returns the state of the key after a call that took effect.
func (o object) written(c HistoryCall) []object {
	switch c.Do {
	case "get":
		return nil
	case "create":
		if o.exists {
			return nil
		}
	case "put":
	default:
		is, ok := o.at(c.Version)
		if !ok {
			return nil
		}
		o = is
	}
	if c.Do == "delete" {
		return only(object{version: o.version}, true)
	}
	if c.Err != nil {
		return only(object{exists: true, unsure: true, version: o.version, value: c.Value}, true)
	}
	return only(object{exists: true, version: c.Read.Version, value: c.Value}, c.Read.Version > o.version)
}

func only(o object, ok bool) []object {
	if !ok {
		return nil
	}
	return []object{o}
}
