package shards_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/statuspage"
)

// Each of 4 partitions is consumed by one of the replicas.
func Example() {
	ctx, stop := context.WithCancel(context.Background()) // in a server: signal.NotifyContext
	defer stop()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	if err := claims.Migrate(ctx, store); err != nil {
		fmt.Println(err)
		return
	}
	session, err := claims.NewSession(store, claims.SessionConfig{
		Labels: map[string]string{"address": "10.0.0.7:8080"},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	cfg := shards.Config{
		Kind:  "partition",
		Count: 4,
		Work: func(ctx context.Context, id string) error {
			<-ctx.Done() // consume the partition until then
			return nil
		},
	}
	cfg.Settle = 10 * time.Millisecond // so that the example begins at once
	partitions, err := shards.New(session, cfg)
	if err != nil {
		fmt.Println(err)
		return
	}
	var running sync.WaitGroup
	running.Go(func() {
		if err := session.Run(ctx); err != nil {
			fmt.Println(err)
		}
	})
	running.Go(func() {
		if err := partitions.Run(ctx); err != nil {
			fmt.Println(err)
		}
	})

	for len(partitions.Status().Shards) < cfg.Count {
		time.Sleep(time.Millisecond)
	}
	owner, err := partitions.Owner(ctx, "3") // on any replica
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(len(partitions.Status().Shards), "partitions; requests for 3 go to", owner.Labels["address"])
	stop()
	running.Wait()
	// Output: 4 partitions; requests for 3 go to 10.0.0.7:8080
}

// consume is a func of a shard whose writes are not written if another process has the shard
// by now.
func consume(store *tenure.SQLiteStore, next func(ctx context.Context) (offset int, err error)) func(context.Context, string) error {
	return func(ctx context.Context, id string) error {
		for {
			offset, err := next(ctx)
			if err != nil {
				return err
			}
			err = store.Fenced(ctx, nil, func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, `UPDATE progress SET done = ?1 WHERE partition = ?2`, offset, id)
				return err
			})
			if err != nil {
				return err
			}
		}
	}
}

func ExampleClaimFromContext() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		fmt.Println(err)
		return
	}
	if err := claims.Migrate(ctx, store); err != nil {
		fmt.Println(err)
		return
	}
	if _, err := store.DB().Exec(`CREATE TABLE progress (partition text, done integer); INSERT INTO progress VALUES ('0', 0)`); err != nil {
		fmt.Println(err)
		return
	}
	session, err := claims.NewSession(store, claims.SessionConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	offset := 0
	next := func(ctx context.Context) (int, error) {
		if offset++; offset > 3 { // there is nothing more
			stop()
			<-ctx.Done()
			return 0, context.Cause(ctx)
		}
		return offset, nil
	}
	partitions, err := shards.New(session, shards.Config{Kind: "partition", Count: 1, Work: consume(store, next), Settle: 10 * time.Millisecond})
	if err != nil {
		fmt.Println(err)
		return
	}
	var running sync.WaitGroup
	running.Go(func() { _ = session.Run(ctx) })
	running.Go(func() { _ = partitions.Run(ctx) })
	running.Wait()
	var done int
	if err := store.DB().QueryRow(`SELECT done FROM progress`).Scan(&done); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(done, "are done")
	// Output: 3 are done
}

// Operators see what this replica works for, and how it does.
func ExampleMember_Status() {
	var partitions *shards.Member // made by shards.New
	mux := http.NewServeMux()
	mux.Handle("GET /shards", statuspage.Shards(partitions)) // what this replica works for, for operators
}
