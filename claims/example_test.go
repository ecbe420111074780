package claims_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// Each tenant has one actor, on one of the replicas.
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
	tenants, err := claims.NewKeys(session, "tenant")
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

	got, err := tenants.Claim(ctx, "acme", "globex") // those that are free
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, claim := range got {
		running.Go(func() {
			err := tenants.Do(ctx, claim, func(ctx context.Context) error {
				<-ctx.Done() // serve the tenant until then
				return nil
			})
			if err != nil && ctx.Err() == nil {
				fmt.Println(err)
			}
		})
	}

	owner, err := tenants.Owner(ctx, "acme") // on any replica
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(len(got), "tenants; requests for acme go to", owner.Labels["address"])
	stop()
	running.Wait()
	// Output: 2 tenants; requests for acme go to 10.0.0.7:8080
}

// A session lives as long as its Run, and begins anew if it was lost.
func ExampleSession() {
	ctx, stop := context.WithCancel(context.Background()) // in a server: signal.NotifyContext
	defer stop()
	store, err := migrated(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	session, err := claims.NewSession(store, claims.SessionConfig{Holder: "a"})
	if err != nil {
		fmt.Println(err)
		return
	}
	tenants, err := claims.NewKeys(session, "tenant")
	if err != nil {
		fmt.Println(err)
		return
	}
	ended := make(chan error)
	go func() { ended <- session.Run(ctx) }()
	if _, err := tenants.Claim(ctx, "acme"); err != nil { // waits until the session has begun
		fmt.Println(err)
		return
	}
	fmt.Println("valid:", session.Valid())
	stop() // Run frees the keys, and deletes the session's record
	fmt.Println("ended:", <-ended)
	fmt.Println("valid:", session.Valid())
	// Output:
	// valid: true
	// ended: <nil>
	// valid: false
}

// Two processes claim the same keys.
func ExampleKeys() {
	store, err := migrated(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	a, err := start(ctx, store, &running)
	if err != nil {
		fmt.Println(err)
		return
	}
	b, err := start(ctx, store, &running)
	if err != nil {
		fmt.Println(err)
		return
	}
	first, err := a.TryClaim(ctx, "acme")
	if err != nil {
		fmt.Println(err)
		return
	}
	second, err := b.TryClaim(ctx, "acme", "globex") // those that are free
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("a has", first, "and b has", second)
	if err := a.Release(ctx, first...); err != nil {
		fmt.Println(err)
		return
	}
	second, err = b.Claim(ctx, "acme") // waits until it is free
	fmt.Println("b has", second, err)
	// Output:
	// a has [tenant/acme] and b has [tenant/globex]
	// b has [tenant/acme] <nil>
}

// A write under a claim is refused if another session has claimed the key since.
func ExampleClaim_Fence() {
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
	if _, err := store.DB().Exec(`CREATE TABLE balances (tenant text, cents integer)`); err != nil {
		fmt.Println(err)
		return
	}
	late := claims.Claim{Key: tenure.Key{Type: "tenant", ID: "acme"}, Session: "one that was removed", Token: 1}
	err = store.Fenced(ctx, late, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE balances SET cents = cents - 100 WHERE tenant = 'acme'`)
		return err
	})
	fmt.Println(err)
	// Output: tenure: fenced by tenant/acme: lease lost
}

// A process takes a key over from its owner.
func ExampleKeys_RequestRelease() {
	store, err := migrated(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	owner, err := start(ctx, store, &running)
	if err != nil {
		fmt.Println(err)
		return
	}
	owned, err := owner.Claim(ctx, "acme")
	if err != nil {
		fmt.Println(err)
		return
	}
	running.Go(func() {
		_ = owner.Do(ctx, owned[0], func(ctx context.Context) error {
			<-ctx.Done()
			fmt.Println("the owner stops:", context.Cause(ctx))
			return nil
		})
	})

	tenants, err := start(ctx, store, &running)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := tenants.RequestRelease(ctx, "acme"); err != nil {
		fmt.Println(err)
		return
	}
	got, err := tenants.Claim(ctx, "acme")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("and another process has", got[0])
	// Output:
	// the owner stops: lease resigned: on request
	// and another process has tenant/acme
}

// A key is moved from an owner that is alive, because what the key stands for has left that owner.
func ExampleKeys_Move() {
	store, err := migrated(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	owner, err := start(ctx, store, &running)
	if err != nil {
		fmt.Println(err)
		return
	}
	owned, err := owner.Claim(ctx, "acme")
	if err != nil {
		fmt.Println(err)
		return
	}
	told := make(chan struct{})
	running.Go(func() {
		err := owner.Do(ctx, owned[0], func(ctx context.Context) error {
			<-ctx.Done()
			return nil
		})
		fmt.Println("the former owner was told:", errors.Is(err, tenure.ErrLost))
		close(told)
	})

	tenants, err := start(ctx, store, &running) // in another process, to which acme has connected
	if err != nil {
		fmt.Println(err)
		return
	}
	seen, err := tenants.Standing(ctx, "acme") // or acme itself knows the claim of its last owner
	if err != nil {
		fmt.Println(err)
		return
	}
	got, err := tenants.Move(ctx, seen...)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(got[0], "has moved")
	<-told
	// Unordered output:
	// tenant/acme has moved
	// the former owner was told: true
}

// A claim is detached, and handed to a process that has no session.
func ExampleKeys_Detach() {
	store, err := migrated(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	tenants, err := start(ctx, store, &running)
	if err != nil {
		fmt.Println(err)
		return
	}
	got, err := tenants.Claim(ctx, "acme")
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := tenants.Detach(got...); err != nil {
		fmt.Println(err)
		return
	}
	message, err := json.Marshal(got[0])
	if err != nil {
		fmt.Println(err)
		return
	}

	var claim claims.Claim // in the other process
	if err := json.Unmarshal(message, &claim); err != nil {
		fmt.Println(err)
		return
	}
	if err := claims.ReleaseDetached(ctx, store, claim); err != nil {
		fmt.Println(err) // ErrLost: the claim has ended
	}
	fmt.Println(claim, "is free")
	// Output: tenant/acme is free
}

func migrated(ctx context.Context) (*tenure.SQLiteStore, error) {
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{})
	if err != nil {
		return nil, err
	}
	return store, errors.Join(store.Migrate(ctx), claims.Migrate(ctx, store))
}

// start runs a session until ctx is done.
func start(ctx context.Context, store tenure.Store, running *sync.WaitGroup) (*claims.Keys, error) {
	session, err := claims.NewSession(store, claims.SessionConfig{})
	if err != nil {
		return nil, err
	}
	running.Go(func() {
		if err := session.Run(ctx); err != nil {
			fmt.Println(err)
		}
	})
	return claims.NewKeys(session, "tenant")
}
