package schedule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
)

// State is the state of a schedule in the store.
type State struct {
	Done  time.Time `json:"done"`           // the last finished slot; before the first one, the time when the schedule was first run
	Begun time.Time `json:"begun,omitzero"` // the slot that was begun last; later than Done if it failed, was interrupted, or is running

	// Location is the name of the Location that the schedule uses. It is empty if only an
	// earlier version of this package has written the state.
	Location string `json:"location,omitempty"`

	// Next is the first slot that has not been done. It is zero if the plan has ended, or if only an earlier version
	// of this package has written the state.
	Next time.Time `json:"next,omitzero"`
}

// stored is what the store keeps.
type stored struct {
	State

	// From is when the plan last changed. Its slots before that were not missed: another plan was in force.
	From time.Time `json:"from,omitzero"`
}

// since returns the time after which the plan's slots are to be done.
func (s stored) since() time.Time {
	if s.From.After(s.Done) {
		return s.From
	}
	return s.Done
}

// record is a schedule's object in the store.
type record struct {
	stored
	key     tenure.Key
	version int64     // 0: there is no object
	now     time.Time // the store's time when it was read or written
}

// ReadState reads the state of the schedule with a key. It returns [tenure.ErrNotFound] before the first run, and
// [tenure.ErrInvalid] if the object under the key is something else.
func ReadState(ctx context.Context, store tenure.Store, key tenure.Key) (State, error) {
	r, err := read(ctx, store, key)
	return r.State, err
}

// RunAgain has the last finished slot of the schedule with a key run again, by whichever replica holds the lease: for
// an operator whose job has done the wrong thing. It returns the state as it is then, in which the slot counts as begun
// and not as done. If a slot runs, or waits to be run again, or none has been done yet, it returns
// [tenure.ErrInvalid]. The replica begins within five minutes, and at once if the store is a [tenure.Notifier].
func RunAgain(ctx context.Context, store tenure.Store, key tenure.Key) (State, error) {
	r, err := read(ctx, store, key)
	switch {
	case err != nil:
		return State{}, err
	case r.Begun.IsZero():
		return State{}, fmt.Errorf("schedule: run again %s: %w: no slot has been run yet: give the schedule a plan that is due sooner", key, tenure.ErrInvalid)
	case r.Begun.After(r.Done):
		return State{}, fmt.Errorf("schedule: run again %s: %w: the slot of %v is running, or waits to be run again", key, tenure.ErrInvalid, r.Begun)
	}
	r.Done, r.Begun = r.Done.Add(-1), r.Done
	if r.since().Equal(r.Done) { // otherwise the plan has changed since then, and Next is a slot of the new one
		r.Next = r.Begun
	}
	if r, err = r.write(ctx, store); err != nil {
		return State{}, err
	}
	_ = tenure.Wake(ctx, store, key) // without it, the replica looks later
	return r.State, nil
}

func read(ctx context.Context, store tenure.Store, key tenure.Key) (record, error) {
	obj, err := store.Get(ctx, key)
	return decode(key, obj, err)
}

// write replaces the record that was read.
func (r record) write(ctx context.Context, store tenure.Store) (record, error) {
	cond := tenure.IfAbsent()
	if r.version != 0 {
		cond = tenure.IfVersion(r.version)
	}
	obj, err := store.PutIf(ctx, r.object(), cond)
	return decode(r.key, obj, err)
}

// decode decodes what a call to the store has returned.
func decode(key tenure.Key, obj tenure.Object, err error) (record, error) {
	r := record{key: key, version: obj.Version, now: obj.UpdatedAt.Add(obj.Age)}
	if err != nil {
		return record{key: key}, err
	}
	var has struct { // otherwise a lease's record, for one, would be read as an empty state and written over
		Done *time.Time `json:"done"`
	}
	if err = json.Unmarshal(obj.Payload, &has); err == nil {
		err = json.Unmarshal(obj.Payload, &r.stored)
	}
	if err != nil || has.Done == nil {
		return record{}, fmt.Errorf("schedule: %s is not the state of a schedule, delete it or choose another key: %w", key, errors.Join(tenure.ErrInvalid, err))
	}
	if r.Done.IsZero() { // no slot is done yet: the first one is the first after this time
		r.Done = obj.CreatedAt
	}
	return r, nil
}

func (r record) object() tenure.Object {
	s := r.stored
	s.Done, s.Begun, s.Next, s.From = s.Done.UTC(), s.Begun.UTC(), s.Next.UTC(), s.From.UTC()
	payload, _ := json.Marshal(s) // times of a store always encode
	return tenure.Object{Key: r.key, Payload: payload}
}
