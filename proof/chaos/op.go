package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

const (
	leaseType    = "reconciler_lease"
	registerType = "register"
	onceType     = "once"   // objects that are created once and never touched again
	fencedType   = "fenced" // objects that are written through a fence
	unfencedType = "unfenced"
	hurriedType  = "hurried"
)

// Operations on a register, and their outcomes.
const (
	get     = "get"
	create  = "create"
	replace = "replace"
	put     = "put"
	remove  = "delete"

	done     = "done"
	exists   = "exists"
	notFound = "not found"
	conflict = "conflict"
	refused  = "refused" // the store reports that it has not written
	unknown  = "unknown" // it may have happened, or happen later
)

// op is one operation on a register: an object that all replicas write.
type op struct {
	ID      int64  `json:"id"`
	Do      string `json:"do,omitempty"`
	Key     string `json:"key,omitempty"`
	Version int64  `json:"version,omitempty"` // the version that it is conditional on
	Value   string `json:"value,omitempty"`   // the value that it writes; each operation writes a different one

	Outcome string `json:"outcome,omitempty"`
	Now     int64  `json:"now,omitempty"`  // the version after it, or for a conflict the version that was found
	Read    string `json:"read,omitempty"` // the value that was read
	Error   string `json:"error,omitempty"`
}

func (o op) String() string {
	return fmt.Sprintf("%s %s version=%d value=%s -> %s now=%d read=%s %s", o.Do, o.Key, o.Version, o.Value, o.Outcome, o.Now, o.Read, o.Error)
}

// call returns the operation as its judge knows it.
func (o op) call() testkit.HistoryCall {
	c := testkit.HistoryCall{Do: o.Do, Version: o.Version, Value: o.Value, Read: tenure.Object{Version: o.Now, Payload: []byte(o.Read)}}
	switch o.Outcome {
	case exists:
		c.Err = tenure.ErrExists
	case notFound:
		c.Err = tenure.ErrNotFound
	case conflict:
		c.Err = &objects.Conflict{Wanted: o.Version, Current: o.Now}
	case refused:
		c.Err = tenure.ErrSetup
	case unknown:
		c.Err = errors.New(o.Error)
	}
	return c
}

// run does the operation, records its outcome, and returns the error.
func (o *op) run(ctx context.Context, store tenure.Store) error {
	obj := tenure.Object{Key: tenure.Key{Type: registerType, ID: o.Key}, Payload: []byte(o.Value)}
	var err error
	switch o.Do {
	case get:
		obj, err = store.Get(ctx, obj.Key)
		o.Read = string(obj.Payload)
	case create:
		obj, err = store.PutIf(ctx, obj, tenure.IfAbsent())
	case replace:
		obj, err = store.PutIf(ctx, obj, tenure.IfVersion(o.Version))
	case put:
		obj, err = store.PutIf(ctx, obj, tenure.Unconditional())
	case remove:
		err = store.DeleteIf(ctx, obj.Key, tenure.IfVersion(o.Version))
	}
	var mismatch *objects.Conflict
	switch {
	case err == nil:
		o.Outcome, o.Now = done, obj.Version
		return nil
	case errors.As(err, &mismatch):
		o.Outcome, o.Now = conflict, mismatch.Current
	case errors.Is(err, tenure.ErrExists):
		o.Outcome = exists
	case errors.Is(err, tenure.ErrNotFound):
		o.Outcome = notFound
	case errors.Is(err, tenure.ErrSetup), errors.Is(err, tenure.ErrTaken):
		o.Outcome = refused
	default:
		o.Outcome = unknown
	}
	o.Error = err.Error()
	return err
}
