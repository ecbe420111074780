package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/witness"
)

// The processes of the measures "witness" and "requests" are this program again, with a part.
const (
	partEnv   = "TENURE_BENCH_PART"
	urlEnv    = "TENURE_BENCH_URL"
	amountEnv = "TENURE_BENCH_AMOUNT"

	longTTL = 5 * time.Minute // longer than any trial
)

// bePart is main for such a process, if this one is one.
func bePart() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	slog.SetDefault(slog.New(slog.DiscardHandler))
	part := os.Getenv(partEnv)
	if after, ok := strings.CutPrefix(part, "witness "); ok {
		os.Setenv(partEnv, after)
		status, err := witness.Run(witness.Config{Open: openPart, Young: -1}, "/proc/self/exe")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(status)
	}
	amount, _ := strconv.Atoi(os.Getenv(amountEnv))
	var err error
	switch part {
	case "":
		return
	case "leases":
		err = holdLeases(ctx, amount, 0)
	case "resident":
		err = holdLeases(ctx, 1, amount)
	case "keys":
		err = holdKeys(ctx, amount)
	case "advisory":
		err = holdAdvisory(ctx)
	case "requests":
		err = answerRequests(ctx, amount)
	case etcdPeer.name:
		err = holdPeer(ctx, etcdPeer)
	case clientGoPeer.name:
		err = holdPeer(ctx, clientGoPeer)
	}
	if err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func openPart(ctx context.Context) (tenure.Store, error) {
	return tenure.OpenPostgres(ctx, os.Getenv(urlEnv), tenure.PostgresConfig{})
}

// began tells that all has begun, and when.
func began() { fmt.Println("began", time.Now().UnixNano()) }

// holdLeases competes for leases with mib resident, and tells when all their jobs run.
func holdLeases(ctx context.Context, n, mib int) error {
	resident := bytes.Repeat([]byte{1}, mib<<20)
	defer runtime.KeepAlive(resident)
	store, err := openPart(ctx)
	if err != nil {
		return err
	}
	var running atomic.Int64
	var all sync.WaitGroup
	for i := range n {
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, TTL: longTTL})
		if err != nil {
			return err
		}
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			if running.Add(1) == int64(n) {
				began()
			}
			<-ctx.Done()
			return nil
		}})
		if err != nil {
			return err
		}
		all.Go(func() { _ = c.Run(ctx) })
	}
	fmt.Println("stands by")
	all.Wait()
	return nil
}

// holdKeys claims keys in a session, and tells when it has all.
func holdKeys(ctx context.Context, n int) error {
	store, err := openPart(ctx)
	if err != nil {
		return err
	}
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: longTTL, PollInterval: longTTL})
	if err != nil {
		return err
	}
	keys, err := claims.NewKeys(session, "tenant")
	if err != nil {
		return err
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		_ = session.Run(ctx)
	}()
	var ids []string
	for i := range n {
		ids = append(ids, fmt.Sprint(i))
	}
	fmt.Println("stands by")
	for claimed := 0; claimed < n; {
		got, err := keys.Claim(ctx, ids...)
		if err != nil {
			return err
		}
		claimed += len(got)
	}
	began()
	<-closed
	return nil
}

// holdPeer competes as another library does, and releases when it is told to stop.
func holdPeer(ctx context.Context, p peer) error {
	r, err := p.open(ctx, options{url: os.Getenv(urlEnv), name: fmt.Sprint(os.Getpid())})
	if err != nil {
		return err
	}
	defer r.close()
	c, err := r.contender("lease")
	if err != nil {
		return err
	}
	fmt.Println("stands by")
	holds := false
	err = c.campaign(ctx, func(ctx context.Context) {
		holds = true
		began()
		<-ctx.Done()
	})
	if holds {
		return c.resign(context.WithoutCancel(ctx))
	}
	return err
}

// holdAdvisory waits for an advisory lock of Postgres, and works until it is told to stop. Then its connection ends.
func holdAdvisory(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, os.Getenv(urlEnv))
	if err != nil {
		return err
	}
	fmt.Println("stands by")
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock(1)`); err != nil {
		return err
	}
	began()
	<-ctx.Done()
	return conn.Close(context.Background())
}
