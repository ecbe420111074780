package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

const hurriedTries = 300

// hurry gives calls about as much time as they take, so that their contexts end at every
// possible moment of a call, even during its commit.
type hurry struct {
	takes time.Duration // approximate duration of a call
}

// untilDone repeats a call until it succeeds, up to several hundred times while the disk is
// full: perhaps one in ten thousand contexts ends at the critical moment.
func (h *hurry) untilDone(ctx context.Context, do func(context.Context) error, goOn func() bool) (err error) {
	for range hurriedTries {
		if err = h.once(do); err == nil || ctx.Err() != nil || !goOn() {
			break
		}
	}
	return err
}

func (h *hurry) once(do func(context.Context) error) error {
	h.takes = min(max(h.takes, 10*time.Microsecond), 100*time.Millisecond)
	ctx, cancel := context.WithTimeout(context.Background(), rand.N(2*h.takes))
	defer cancel()
	began := time.Now()
	err := do(ctx)
	if ctx.Err() != nil || time.Since(began) > h.takes {
		h.takes += h.takes / 16
	} else {
		h.takes -= h.takes / 16
	}
	return err
}

// writeHurried writes an object that no other replica writes, with hardly any time for
// each call, and reports the writes that were acknowledged.
func (r *replica) writeHurried(ctx context.Context) {
	var h hurry
	var version int64
	obj := tenure.Object{Key: tenure.Key{Type: hurriedType, ID: r.birth}}
	for n := 0; pause(ctx, about(r.Pace)); {
		err := h.untilDone(ctx, func(ctx context.Context) error {
			n++
			obj.Payload = fmt.Appendf(nil, "%s.%d", r.birth, n)
			cond := tenure.Unconditional()
			if version != 0 {
				cond = tenure.IfVersion(version)
			}
			written, err := r.backend.store().PutIf(ctx, obj, cond)
			var conflict *objects.Conflict
			switch {
			case err == nil:
				version = written.Version
			case errors.As(err, &conflict): // an earlier write happened although its call failed
				version = conflict.Current
			}
			return err
		}, func() bool { return true })
		if err == nil {
			r.events.write(event{Kind: acknowledge, Note: ledgerHurried + " " + string(obj.Payload)})
		}
	}
}
