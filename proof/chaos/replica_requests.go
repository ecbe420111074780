package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/route"
)

const tenants = 12

func tenant(i int) string { return fmt.Sprint(actor, "t", i) }

// answerRequests serves the tenants' requests: it owns some tenants, and sends the requests for others to their owners.
func (r *replica) answerRequests(ctx context.Context) error {
	if r.Certificate != "" { // that all replicas and clients trust
		os.Setenv("SSL_CERT_FILE", r.Certificate)
	}
	session, err := claims.NewSession(r.backend.store(), claims.SessionConfig{TTL: r.TTL, Holder: r.birth, Expiry: r.Expiry, Drain: r.drain,
		Labels: map[string]string{"address": r.Address}})
	if err != nil {
		return err
	}
	keys, err := claims.NewKeys(session, "tenant")
	if err != nil {
		return err
	}
	requests, err := route.Keys(keys, func(req *http.Request) string { return strings.TrimPrefix(req.URL.Path, "/") }, route.Config{
		MaxWait: r.TTL + 2*time.Second, Idle: 4 * r.TTL, Run: r.runTenant,
	})
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: requests, Protocols: new(http.Protocols), ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetHTTP2(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() {
		var err error
		if strings.HasPrefix(r.Address, "https:") {
			err = server.ServeTLS(listener, r.Certificate, r.Key)
		} else {
			err = server.Serve(listener)
		}
		slog.Debug("serve", "error", err)
	})
	wg.Go(func() { r.moveTenants(ctx, keys) })
	r.events.write(event{Kind: serves, Note: listener.Addr().String()})
	err = session.Run(ctx)
	r.events.write(event{Kind: leaves})
	closing, cancel := context.WithTimeout(context.Background(), 2*r.TTL)
	defer cancel()
	if late := requests.Shutdown(closing, server); late != nil { // owners that are stopped don't answer
		err = errors.Join(err, late, server.Close(), requests.Shutdown(context.Background(), server))
	}
	wg.Wait()
	return err
}

// moveTenants asks for one tenant after another, so that they change hands.
func (r *replica) moveTenants(ctx context.Context, keys *claims.Keys) {
	for pause(ctx, about(20*r.Pace)) {
		limited, cancel := context.WithTimeout(ctx, r.TTL)
		if err := keys.RequestRelease(limited, tenant(rand.N(tenants))); err != nil {
			slog.Debug("request a tenant", "error", err)
		}
		cancel()
	}
}

// runTenant counts a tenant's requests from the last number that was committed.
func (r *replica) runTenant(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
	last, err := r.backend.lastNote(ctx, "%."+c.Key.ID)
	if err != nil {
		return err
	}
	n := 0
	if number, _, ok := strings.Cut(last, " "); ok {
		if n, err = strconv.Atoi(number); err != nil {
			return err
		}
	}
	var mu sync.Mutex
	return serve(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		id := req.Header.Get("Id")
		r.events.write(event{Kind: requestRan, Token: tokenOf(req), Note: id})
		mu.Lock()
		defer mu.Unlock()
		ctx, cancel := context.WithTimeout(req.Context(), r.TTL)
		defer cancel()
		n++ // a number that may have been committed is never given again
		if err := r.backend.fenced(ctx, c, claimEntry(ledgerClaimFenced, c, fmt.Sprintf("%09d %s", n, id)), 0); err != nil {
			http.Error(w, "it may not have been counted", http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, n)
	}))
}

// tokenOf returns the token under which a handler runs.
func tokenOf(req *http.Request) int64 { return claims.ClaimFromContext(req.Context()).Token }
