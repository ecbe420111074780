package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure"
)

const (
	registerLife = 3 * time.Second // then all go on with the next: short histories can be checked
	callTimeout  = 700 * time.Millisecond
)

// operate does operations on the register of the moment, which all replicas
// write, and tells how each ended.
func (r *replica) operate(ctx context.Context) {
	var key string
	var version int64 // as far as this replica knows
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
		o.run(r.backend.store(), callTimeout)
		r.events.write(event{Kind: answer, Note: r.birth, Op: &o})
		if o.Outcome == refused {
			r.events.write(event{Kind: setUpError, Note: o.Error})
		}
		if o.Now != 0 {
			version = o.Now
		}
	}
}

// createOnce creates objects that nobody changes, and tells of those that it was
// told are there.
func (r *replica) createOnce(ctx context.Context) {
	for n := 0; pause(ctx, about(4*r.Pace)); n++ {
		id := fmt.Sprintf("%s.%d", r.birth, n)
		obj := tenure.Object{Key: tenure.Key{Type: onceType, ID: id}, Payload: []byte(id)}
		limited, cancel := context.WithTimeout(context.Background(), callTimeout)
		_, err := r.backend.store().PutIf(limited, obj, tenure.MustCreate())
		cancel()
		r.tellSetUp(err)
		if err == nil {
			r.events.write(event{Kind: acknowledge, Note: onceType + " " + id})
		}
	}
}
