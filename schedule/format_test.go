package schedule_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure/proof/golden"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/schedule"
	"github.com/tenurelib/tenure/storetest"
)

func TestTheStoredStateStaysAsItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		hold(t, store, schedule.Config{Plan: schedule.Interval(time.Hour, 0), Do: func(ctx context.Context, slot schedule.Slot) error {
			if slot.Time.Hour() < 3 {
				return nil
			}
			return kit.UntilDone(ctx)
		}})
		var got string
		for _, pause := range []time.Duration{time.Minute, 2 * time.Hour, time.Hour} {
			time.Sleep(pause)
			got += string(kit.Get(t, store, key).Payload) + "\n"
		}
		golden.Compare(t, "state", got)
	})
}
