package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/route"
	"github.com/tenurelib/tenure/storetest"
)

const (
	ledgerEnv = "TENURE_BENCH_LEDGER"
	ttlEnv    = "TENURE_BENCH_TTL"
	schemeEnv = "TENURE_BENCH_SCHEME"
)

// answerRequests is a process of the measure "requests": it answers for the keys that it owns, and sends the requests
// for others to their owners.
func answerRequests(ctx context.Context, port int) error {
	addr := fmt.Sprint("127.0.0.1:", port)
	ttl, err := time.ParseDuration(os.Getenv(ttlEnv))
	if err != nil {
		return err
	}
	database, err := tenure.Open(ctx, os.Getenv(urlEnv))
	if err != nil {
		return err
	}
	defer database.Close()
	var calls atomic.Int64
	store := storetest.Faulty(database, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		calls.Add(1)
		return do(ctx)
	})
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: ttl, Labels: map[string]string{"address": os.Getenv(schemeEnv) + "://" + addr}})
	if err != nil {
		return err
	}
	keys, err := claims.NewKeys(session, "tenant")
	if err != nil {
		return err
	}
	ledger, err := os.OpenFile(os.Getenv(ledgerEnv), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer ledger.Close()
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if id := r.Header.Get("Id"); id != "" {
			fmt.Fprintln(ledger, id, claims.ClaimFromContext(r.Context()).Token)
		}
		w.Header().Set("By", addr)
	})
	requests, err := route.Keys(keys, func(r *http.Request) string { return strings.TrimPrefix(r.URL.Path, "/") }, route.Config{
		MaxWait: ttl + 2*time.Second,
		Run:     func(_ context.Context, _ claims.Claim, serve func(http.Handler) error) error { return serve(handler) },
	})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("/", requests)
	mux.Handle("/bare", handler)
	mux.HandleFunc("/calls", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Calls", fmt.Sprint(calls.Load())) })
	mux.HandleFunc("/release", func(w http.ResponseWriter, r *http.Request) {
		if err := keys.RequestRelease(r.Context(), "x"); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: mux, Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	go server.Serve(listener)
	go func() {
		for !session.Valid() {
			time.Sleep(time.Millisecond)
		}
		fmt.Println("serves")
	}()
	err = session.Run(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return errors.Join(err, requests.Shutdown(ctx, server))
}
