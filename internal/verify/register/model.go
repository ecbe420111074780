// Package register takes histories of calls of a store and says which of them a store may have
// given. A checker of linearizability judges them by its [Step]; the package itself imports
// none, so that the library's module does not need one.
package register

import (
	"errors"
	"slices"

	"github.com/tenurelib/tenure"
)

// Call is one call of a store on one of two objects, and what became of it.
type Call struct {
	Lease   bool   // it was on the lease, not on the object that the lease guards
	Do      string // "get", "create", "replace" or "delete"
	Version int64  // that was expected
	Fence   int64  // the token of the term that fences the call; 0: none
	Value   string // that was written
	Err     error
	Read    tenure.Object // or what was written
}

// Unknown reports whether the call was not answered, so that a write may have happened, or
// still happen.
func (c Call) Unknown() bool {
	return c.Err != nil && !slices.ContainsFunc([]error{tenure.ErrNotFound, tenure.ErrExists, tenure.ErrConflict, tenure.ErrSetup, tenure.ErrLost},
		func(known error) bool { return errors.Is(c.Err, known) })
}

// State is what a lease and the object that it guards may be, according to a history.
type State struct{ lease, guarded object }

// Init returns the states in which a history may begin.
func Init() []any { return []any{State{}} }

// Step returns the states that may follow a [State] when a [Call] has been answered so; none
// if that answer is impossible.
func Step(state, _, call any) (next []any) {
	s, c := state.(State), call.(Call)
	if c.Lease {
		for _, lease := range s.lease.after(c) {
			next = append(next, State{lease, s.guarded})
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
	case c.Err != nil && !c.Unknown(): // a refusal for another reason says nothing of the lease
		lease, stands = s.lease, true
	case c.Unknown():
		next = append(next, s)
	}
	if !stands {
		return next
	}
	for _, guarded := range s.guarded.after(c) {
		next = append(next, State{lease, guarded})
	}
	return next
}

// object is what a key may have.
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

// after returns what the key may have after a call.
func (o object) after(c Call) []object {
	var conflict *tenure.ConflictError
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

// written returns what the key has after a call that happened.
func (o object) written(c Call) []object {
	switch c.Do {
	case "get":
		return nil
	case "create":
		if o.exists {
			return nil
		}
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
