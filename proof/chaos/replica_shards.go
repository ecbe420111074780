package main

import (
	"context"
	"log/slog"
	"math"
	"sync"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/shards"
)

// share has the replicas share the keys that have a func, as shards.
func (r *replica) share(ctx context.Context) error {
	session, err := claims.NewSession(r.backend.store(), claims.SessionConfig{TTL: r.TTL, Holder: r.birth, Expiry: r.Expiry, Drain: r.drain})
	if err != nil {
		return err
	}
	holds := func(c claims.Claim) bool { return session.ID() == c.Session && session.Valid() }
	var running sync.Map
	parts, err := shards.New(session, shards.Config{
		Kind: "key", IDs: actorIDs(), Settle: r.TTL / 10,
		Work: func(ctx context.Context, _ string) error {
			return r.serve(ctx, holds, claims.ClaimFromContext(ctx), math.MaxInt, &running)
		},
	})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		err := parts.Run(ctx)
		r.tellSetUp(err)
		slog.Debug("the shards' Run has returned", "error", err)
	})
	return session.Run(ctx)
}
