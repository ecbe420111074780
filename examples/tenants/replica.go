package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"sync"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// replica is this process.
type replica struct{ store tenure.Database }

// run is the life of a tenant's actor, which begins with a request for the tenant. Its memory is right as long as no
// other replica runs the tenant, and its writes are refused once another does.
func (r *replica) run(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
	a := &actor{r: r, claim: c}
	err := r.store.DB().QueryRowContext(ctx, `SELECT n FROM counters WHERE tenant = $1`, c.Key.ID).Scan(&a.n)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	return serve(a) // returns when the replica stops or has lost its session, and each request is answered
}

// actor counts the requests for a tenant, one at a time.
type actor struct {
	r     *replica
	claim claims.Claim

	mu sync.Mutex
	n  int64
}

func (a *actor) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	// A number that may or may not have been saved is never given again.
	a.n++
	if err := a.r.save(req.Context(), a.claim, a.n); err != nil {
		http.Error(w, "the number may not have been saved", http.StatusBadGateway)
		return
	}
	fmt.Fprintln(w, a.n)
}

// save commits only if no other replica has claimed the tenant.
func (r *replica) save(ctx context.Context, c claims.Claim, n int64) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ttl)
	defer cancel()
	return tenure.FencedTx(ctx, r.store, c, r.store.DB(), nil, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO counters VALUES ($1, $2) ON CONFLICT (tenant) DO UPDATE SET n = excluded.n`, c.Key.ID, n)
		return err
	})
}
