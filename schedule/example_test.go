package schedule_test

import (
	"context"
	"log"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/schedule"
)

// A report at 03:00 UTC, by whichever replica holds the lease.
func Example() {
	ctx := context.Background()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		log.Fatal(err)
	}

	nightly, err := schedule.New(schedule.Config{
		Store: store,
		Key:   tenure.Key{Type: "schedule", ID: "nightly-report"},
		Plan:  schedule.Interval(24*time.Hour, 3*time.Hour),
		Do:    report,
	})
	if err != nil {
		log.Fatal(err)
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	if err != nil {
		log.Fatal(err)
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: nightly.Run})
	if err != nil {
		log.Fatal(err)
	}

	ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond) // a service runs until it is told to stop
	defer cancel()
	if err := coordinator.Run(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
}

func report(ctx context.Context, slot schedule.Slot) error {
	log.Printf("the report of %v", slot.Time)
	return nil
}

// What a slot writes to the same database takes effect exactly once.
func ExampleSlot_Statement() {
	var store *tenure.SQLiteStore

	bill := func(ctx context.Context, slot schedule.Slot) error {
		done, args, err := slot.Statement()
		if err != nil {
			return err
		}
		tx, err := store.DB().BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, `INSERT INTO invoices SELECT id, ? FROM customers`, slot.Time.Unix()); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, done, args...); err != nil {
			return err // the slot was done meanwhile, or the statement failed
		}
		return tx.Commit()
	}
	_ = bill
}
