package claims_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// At most four jobs use a GPU at a time, in all processes together.
func ExampleSlots() {
	ctx, cancel := context.WithCancel(context.Background())
	store := testkit.Must(tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{}))
	defer store.Close()
	check(store.Migrate(ctx))
	check(claims.Migrate(ctx, store))
	session := testkit.Must(claims.NewSession(store, claims.SessionConfig{}))
	ended := make(chan error)
	go func() { ended <- session.Run(ctx) }()
	train := func(ctx context.Context, gpu int) error {
		fmt.Println("trains on GPU", gpu)
		return nil
	}

	gpus, err := claims.NewSlots(session, "gpu", 4)
	check(err)
	slot, err := gpus.Take(ctx) // waits for one of the four
	check(err)
	err = gpus.Do(ctx, slot, func(ctx context.Context) error { // ctx ends when the claim does
		return train(ctx, gpus.Number(slot)) // 0 to 3
	})

	check(err)
	cancel()
	check(<-ended)
	// Output: trains on GPU 0
}

// Each ID has a number that no other process has, and a time later than that of the number's former owner.
func ExampleSlots_Number() {
	ctx := context.Background()
	var workers *claims.Slots // see NewSlots
	slot, err := workers.Take(ctx)
	check(err)
	taken := time.Now()
	next := func() (ms int64, worker int, ok bool) {
		ms = timeOf(slot.Token, time.Since(taken))
		return ms, workers.Number(slot), ms > slot.Token/1000 && workers.Holds(slot)
	}
	fmt.Println(next())
}

// timeOf never runs ahead of the database's clock, though this process's may run a thirtieth faster.
func timeOf(token int64, passed time.Duration) (ms int64) {
	return (token + (passed - passed/30).Microseconds()) / 1000
}

// A process is taken out while its operator says so.
func Example_drain() {
	var ctx context.Context
	var store tenure.Database
	var logger *slog.Logger
	var coordinatorConfig tenure.CoordinatorConfig
	var sessionConfig claims.SessionConfig
	drain, err := tenure.NewDrain(store, "", logger) // for the replica of this name: ReplicaID()
	check(err)
	go drain.Run(ctx) // follows the mark; nothing is taken before it has been read
	coordinatorConfig.Drain, sessionConfig.Drain = drain, drain
}

// The replica in the database's zone should hold the lease.
func Example_outranks() {
	var coordinatorConfig tenure.CoordinatorConfig
	var primaryZone func() string // of the database, as it was last seen
	zone := "a"
	coordinatorConfig.Outranks = func(h tenure.Holding) bool {
		return h.Labels["zone"] != zone && zone == primaryZone()
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
