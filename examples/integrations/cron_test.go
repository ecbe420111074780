package integrations

import (
	"context"
	"fmt"
	"log"
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
