package route_test

import (
	"context"
	"hash/fnv"
	"net/http"
	"strconv"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/route"
	"github.com/tenurelib/tenure/shards"
)

var (
	lease   *tenure.Lease
	session *claims.Session
	keys    *claims.Keys
	api     http.Handler
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func sweep(context.Context) error { return nil }

// A job of one replica that also answers requests.
func ExampleLease() {
	leader, err := route.Lease(lease, route.Config{})
	check(err)
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Watch:     func(ctx context.Context) error { return leader.Serve(ctx, api) },
		Reconcile: tenure.Every(time.Minute, sweep),
	})
	check(err)
	http.Handle("/api/", leader)
	check(coordinator.Run(context.Background()))
}

func load(context.Context, claims.Claim) (http.Handler, error) { return api, nil }

// An actor for each tenant, which begins with the tenant's first request and ends when it is idle.
func ExampleKeys() {
	tenantOf := func(r *http.Request) string { return r.PathValue("tenant") }
	tenants, err := route.Keys(keys, tenantOf, route.Config{
		Idle: 10 * time.Minute,
		Run: func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
			actor, err := load(ctx, c) // which fences its writes by c
			if err != nil {
				return err
			}
			return serve(actor)
		},
	})
	check(err)
	http.Handle("/{tenant}/", tenants)
}

func partition(string) http.Handler { return api }

// Each shard answers for its users.
func ExampleShards() {
	shardOf := func(r *http.Request) string {
		h := fnv.New32()
		h.Write([]byte(r.PathValue("user")))
		return strconv.Itoa(int(h.Sum32() % 64))
	}
	var users *route.Route
	member, err := shards.New(session, shards.Config{
		Kind: "users", Count: 64,
		Work: func(ctx context.Context, id string) error { return users.Serve(ctx, partition(id)) },
	})
	check(err)
	users, err = route.Shards(member, shardOf, route.Config{}) // before the member runs
	check(err)
	http.Handle("/users/{user}", users)
}
