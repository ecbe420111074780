package integrations

import (
	"context"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/schedule"
)

// A cron expression is the plan of a schedule, which runs each slot once, over handovers,
// crashes and restarts.
func Example_cronExpression() {
	store := newStore()
	defer store.Close()
	plan, err := cron.ParseStandard("CRON_TZ=Europe/Berlin 0 3 * * *") // at 03:00 each day
	if err != nil {
		log.Fatal(err)
	}
	nightly, err := schedule.New(schedule.Config{
		Store: store,
		Key:   tenure.Key{Type: "schedule", ID: "nightly"},
		Plan:  plan,
		Do:    func(ctx context.Context, slot schedule.Slot) error { return nil },
	})
	if err != nil {
		log.Fatal(err)
	}
	coordinator := newCoordinator(store, "nightly", nightly.Run)

	ctx, stop := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer stop()
	fmt.Println(coordinator.Run(ctx))
	// Output: <nil>
}

// A cron that runs only while this replica holds the lease. A time at which no replica holds it passes without
// a run; use a schedule where that must not happen.
func Example_cronWhileHolding() {
	store := newStore()
	defer store.Close()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	coordinator := newCoordinator(store, "cron", func(ctx context.Context) error {
		entries := cron.New(cron.WithLocation(time.UTC)) // and not the time zone of each host
		_, err := entries.AddFunc("@every 1s", func() {
			fmt.Println("an entry runs while its term is valid:", tenure.TermFromContext(ctx).Valid())
			stop() // for the example's sake
		})
		if err != nil {
			return err
		}
		entries.Start()
		<-ctx.Done()
		<-entries.Stop().Done() // the lease is released after the last entry has returned
		return nil
	})
	fmt.Println(coordinator.Run(ctx))
	// Output:
	// an entry runs while its term is valid: true
	// <nil>
}

// docs/schedules.md says what robfig/cron does where clocks change, beside [schedule.Daily].
func TestWhatCronDoesWhereClocksChange(t *testing.T) {
	for _, c := range []struct{ zone, cron, after, first, second string }{
		{"Europe/Berlin", "30 2 * * *", "2026-03-28T12:00:00+01:00", "2026-03-30T02:30:00+02:00", "2026-03-31T02:30:00+02:00"},
		{"Europe/Berlin", "30 2 * * *", "2026-10-24T12:00:00+02:00", "2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00"},
		{"America/Santiago", "0 0 * * *", "2026-09-05T12:00:00-04:00", "2026-09-07T00:00:00-03:00", "2026-09-08T00:00:00-03:00"},
	} {
		in, err := time.LoadLocation(c.zone)
		if err != nil {
			t.Fatal(err)
		}
		after, _ := time.Parse(time.RFC3339, c.after)
		plan, _ := cron.ParseStandard(c.cron)
		first := plan.Next(after.In(in))
		second := plan.Next(first)
		if first.Format(time.RFC3339) != c.first || second.Format(time.RFC3339) != c.second {
			t.Errorf("%s %s: %v, %v", c.zone, c.cron, first, second)
		}
	}
}
