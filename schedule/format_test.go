package schedule_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/golden"
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
			return testkit.UntilDone(ctx)
		}})
		var got string
		for _, pause := range []time.Duration{time.Minute, 2 * time.Hour, time.Hour} {
			time.Sleep(pause)
			got += string(testkit.Get(t, store, key).Payload) + "\n"
		}
		golden.Compare(t, "state", got)
	})
}
