package integrations

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/tenurelib/tenure"
)

// elector is a gocron.Elector: it lets jobs begin only on the replica that holds the lease.
type elector struct{ *tenure.Coordinator }

func (e elector) IsLeader(context.Context) error {
	if !e.IsHolder() {
		return errors.New("another replica holds the lease")
	}
	return nil
}

// Each replica has a scheduler, and only the holder's begins jobs. The elector asks before a
// job begins; a job that already runs is not told when the term ends, so this is for short,
// idempotent jobs. Others run in the coordinator's job, as in the example for cron.
func Example_gocron() {
	store := newStore()
	defer store.Close()
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	holder := newCoordinator(store, "gocron", nil) // without a job: it only holds
	go func() { ended <- holder.Run(ctx) }()
	awaitHolding(holder)
	standby := newCoordinator(store, "gocron", nil)
	go func() { ended <- standby.Run(ctx) }()

	ran := make(chan string, 10)
	for name, coordinator := range map[string]*tenure.Coordinator{"holder": holder, "standby": standby} {
		scheduler, err := gocron.NewScheduler(gocron.WithDistributedElector(elector{coordinator}))
		if err != nil {
			log.Fatal(err)
		}
		defer scheduler.Shutdown()
		_, err = scheduler.NewJob(gocron.DurationJob(10*time.Millisecond), gocron.NewTask(func() { ran <- name }))
		if err != nil {
			log.Fatal(err)
		}
		scheduler.Start()
	}
	for range 3 {
		fmt.Println("ran on the", <-ran)
	}
	stop()
	fmt.Println(<-ended, <-ended)
	// Output:
	// ran on the holder
	// ran on the holder
	// ran on the holder
	// <nil> <nil>
}
