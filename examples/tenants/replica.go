package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// replica is this process.
type replica struct {
	address string // where the other replicas reach it
	store   tenure.Database
	db      *sql.DB
	tenants *claims.Keys
	actors  sync.Map // by tenant
}

// serve answers a request for a tenant: from the actor if it runs here, or else from the replica
// where it runs. If it runs nowhere, serve starts it here. The request waits while the actor's
// replica is dead but may not be replaced yet.
func (r *replica) serve(w http.ResponseWriter, req *http.Request) {
	tenant := req.PathValue("tenant")
	ctx, cancel := context.WithTimeout(req.Context(), 3*ttl)
	defer cancel()
	for ctx.Err() == nil {
		if a, here := r.actors.Load(tenant); here {
			if answered := a.(*actor).answer(ctx, w); answered {
				return
			}
		}
		if req.Header.Get("Forwarded-By") != "" { // the owner has changed; the other replica looks again
			http.Error(w, "not here", http.StatusMisdirectedRequest)
			return
		}
		owner, err := r.tenants.Owner(ctx, tenant) // two reads; a busy service would cache the answer
		if address := owner.Labels["address"]; err == nil && address != r.address {
			if answered := r.forward(ctx, w, req, address); answered {
				return
			}
		}
		soon, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		got, err := r.tenants.Claim(soon, tenant) // until it is free, or the owner has changed
		cancel()
		if len(got) == 1 {
			go r.run(got[0])
		} else if errors.Is(err, claims.ErrClosed) {
			break
		}
	}
	http.Error(w, "try another replica", http.StatusServiceUnavailable)
}

// forward reports whether it has answered the request. If it has not, the owner has not seen
// the request.
func (r *replica) forward(ctx context.Context, w http.ResponseWriter, req *http.Request, address string) (answered bool) {
	out := req.Clone(ctx)
	out.URL.Scheme, out.URL.Host, out.RequestURI = "http", address, ""
	out.Header.Set("Forwarded-By", r.address)
	response, err := http.DefaultClient.Do(out)
	if err != nil {
		if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" {
			return false
		}
		http.Error(w, err.Error(), http.StatusBadGateway) // the owner may have counted, so the request is not sent again
		return true
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusMisdirectedRequest {
		return false
	}
	w.WriteHeader(response.StatusCode)
	io.Copy(w, response.Body)
	return true
}

// actor is where a tenant's requests arrive, one at a time.
type actor struct {
	inbox chan chan int64
	ended chan struct{}
}

// answer reports whether it has answered the request. If it has not, the actor has not seen
// the request.
func (a *actor) answer(ctx context.Context, w http.ResponseWriter) (answered bool) {
	reply := make(chan int64, 1)
	select {
	case a.inbox <- reply:
	case <-a.ended:
		return false
	case <-ctx.Done():
		return false
	}
	if n, ok := <-reply; ok {
		fmt.Fprintln(w, n)
	} else {
		http.Error(w, "the number may not have been saved", http.StatusBadGateway)
	}
	return true
}

// run is the life of a tenant's actor. What it keeps in memory is right as long as no other
// replica runs the tenant, and what it writes is refused once another does.
func (r *replica) run(c claims.Claim) {
	err := r.tenants.Do(context.Background(), c, func(ctx context.Context) error {
		var n int64
		err := r.db.QueryRowContext(ctx, `SELECT n FROM counters WHERE tenant = $1`, c.Key.ID).Scan(&n)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		a := &actor{inbox: make(chan chan int64), ended: make(chan struct{})}
		r.actors.Store(c.Key.ID, a)
		defer close(a.ended)
		defer r.actors.Delete(c.Key.ID)
		for {
			select {
			case <-ctx.Done(): // the replica stops, or has lost its session
				return nil
			case reply := <-a.inbox:
				if err := r.save(ctx, c, n+1); err != nil {
					close(reply)
					return err // the number may have been saved; the next actor reads it
				}
				n++
				reply <- n
			}
		}
	})
	if err != nil {
		log.Print(err)
	}
}

// save commits only if no other replica has claimed the tenant. A replica that is told to stop
// finishes it.
func (r *replica) save(ctx context.Context, c claims.Claim, n int64) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ttl)
	defer cancel()
	write := func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO counters VALUES ($1, $2) ON CONFLICT (tenant) DO UPDATE SET n = excluded.n`, c.Key.ID, n)
		return err
	}
	if s, ok := r.store.(*tenure.SQLiteStore); ok { // lets the actors write one after another
		return s.Fenced(ctx, c, write)
	}
	return tenure.FencedTx(ctx, r.store, c, r.db, nil, write)
}
