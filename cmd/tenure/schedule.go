//go:build unix

package main

import (
	"context"
	"io"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/schedule"
)

// stateSchedule is the state of a key that has the state of a schedule, which is no lease.
const stateSchedule = "schedule"

// scheduleView is what status shows of a schedule.
type scheduleView struct {
	Key  string `json:"key"`
	Kind string `json:"state"` // stateSchedule
	schedule.State
	Late bool `json:"late"` // the next slot was due and is not done
}

// readSchedule reads the state of a schedule; ok is false if the object under the key is something else.
func readSchedule(ctx context.Context, store tenure.Store, key tenure.Key) (v scheduleView, ok bool) {
	state, err := schedule.ReadState(ctx, store, key)
	late := !state.Next.IsZero() && time.Since(state.Next) > 0 // by this host's clock
	return scheduleView{key.String(), stateSchedule, state, late}, err == nil
}

func (v scheduleView) print(w io.Writer) error {
	table := newSheet(w)
	in, err := time.LoadLocation(v.Location)
	if err != nil { // this host does not know it
		in = time.Local
	}
	at := func(t time.Time) string { return t.In(in).Format(time.DateTime + " MST") }
	table.line("schedule", "%s", printable(v.Key))
	table.line("done", "%s", at(v.Done))
	if v.Begun.After(v.Done) {
		table.line("begun", "%s, and not done: it runs, or will be run again", at(v.Begun))
	}
	switch {
	case v.Late:
		table.line("next", "%s, which has passed", at(v.Next))
	case !v.Next.IsZero():
		table.line("next", "%s", at(v.Next))
	}
	return table.Flush()
}
