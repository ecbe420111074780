//go:build unix

package main

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// behind is a store without a clock, whose writers' clocks are an hour behind this host's.
type behind struct{ *storetest.Mem }

func (behind) Migrate(context.Context) error { return nil }
func (behind) Close() error                  { return nil }

func (b behind) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := b.Mem.Get(ctx, key)
	obj.UpdatedAt = obj.UpdatedAt.Add(-time.Hour)
	return obj, err
}

func TestAHandoverToAHostWhoseClockIsBehindIsNoticed(t *testing.T) {
	t.Parallel()
	store := behind{storetest.NewMem()}
	store.Events = true
	o := requestOptions{options: options{keyName: "svc"}, to: "b", wait: 2 * time.Second}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: o.key(), Holder: "b"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lease.TryAcquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	from := tenure.Holding{Key: o.key(), Holder: "a", Term: "of a"}
	if err := o.awaitHandover(t.Context(), &output{stdout: &said, stderr: &said}, store, from); err != nil {
		t.Errorf("%v, and %q", err, said.String())
	}
}
