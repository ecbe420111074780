package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure"
)

const (
	registerLife = 3 * time.Second // then all replicas switch to the next register, because only short histories can be checked
	callTimeout  = 700 * time.Millisecond
)

// operate does operations on the current register, which all replicas write, and reports
// their outcomes.
func (r *replica) operate(ctx context.Context) {
	var key string
	var version int64 // as far as this replica knows
	var h hurry
	for id := int64(1); pause(ctx, about(r.Pace)); id++ {
		if now := fmt.Sprint(int64(monotonic() / registerLife)); now != key {
			key, version = now, 0
		}
		o := op{ID: id, Key: key, Version: version, Value: fmt.Sprintf("%s.%d", r.birth, id)}
		switch n := rand.IntN(100); {
		case n < 25:
			o.Do, o.Version, o.Value = get, 0, ""
		case n < 35 || version == 0:
			o.Do, o.Version = create, 0
		case n < 40:
			o.Do, o.Version = put, 0
		case n < 50:
			o.Do, o.Value = remove, ""
		default:
			o.Do = replace
		}
		begun := o
		r.events.write(event{Kind: operation, Note: r.birth, Op: &begun})
		_ = r.objectCall(&h, func(ctx context.Context) error { return o.run(ctx, r.backend.store()) })
		r.events.write(event{Kind: answer, Note: r.birth, Op: &o})
		if o.Now != 0 {
			version = o.Now
		}
	}
}

// objectCall makes one call with enough time, or sometimes with hardly any if this replica
// hurries.
func (r *replica) objectCall(h *hurry, do func(context.Context) error) (err error) {
	if r.Hurry && rand.IntN(2) == 0 {
		err = h.once(do)
	} else {
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		err = do(ctx)
		cancel()
	}
	r.tellSetUp(err)
	return err
}

// createOnce creates objects that are never changed, and reports those whose creation was
// acknowledged.
func (r *replica) createOnce(ctx context.Context) {
	var h hurry
	for n := 0; pause(ctx, about(4*r.Pace)); n++ {
		id := fmt.Sprintf("%s.%d", r.birth, n)
		obj := tenure.Object{Key: tenure.Key{Type: onceType, ID: id}, Payload: []byte(id)}
		err := r.objectCall(&h, func(ctx context.Context) error {
			_, err := r.backend.store().PutIf(ctx, obj, tenure.IfAbsent())
			return err
		})
		if err == nil {
			r.events.write(event{Kind: acknowledge, Note: onceType + " " + id})
		}
	}
}
