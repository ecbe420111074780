package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/tenurelib/tenure"
)

// replicaEnv tells this program that it is a replica, and which.
const replicaEnv = "TENURE_CHAOS_REPLICA"

type replicaConfig struct {
	Name      string
	URL       string // of Postgres, by way of the replica's proxy
	SharePool bool   // the store uses the ledger's pool
	File      string // of SQLite, instead
	TTL       time.Duration
	Expiry    tenure.ExpiryPolicy
	Pace      time.Duration // from one operation to the next, about
	Crowd     int           // workers on other leases
	Hurry     bool          // some calls get about as much time as a write takes
}

// replica is the process that faults are done to.
type replica struct {
	replicaConfig
	events  *eventWriter
	backend backend
	birth   string // with the number of an object makes names that nobody else makes
	late    sync.WaitGroup
	ending  context.Context
}

// runReplica is the main of a replica. It ends at a SIGTERM, and when the one who
// started it is gone.
func runReplica(encoded string) error {
	var cfg replicaConfig
	if err := json.Unmarshal([]byte(encoded), &cfg); err != nil {
		return err
	}
	signal.Ignore(os.Interrupt, unix.SIGXFSZ) // of the terminal; and of a full disk, which is an error of the write too
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	events := &eventWriter{replica: cfg.Name, to: os.Stdout}
	orders := make(chan struct{})
	go take(orders)                  // ends with the process: nothing ends a read
	before := goleak.IgnoreCurrent() // that one, and those of signals
	if err := live(ctx, cfg, events, orders); err != nil {
		return err
	}
	// First the goroutines, for which it waits a little: a pool that closes gives a
	// server that does not answer as many seconds as the goroutines that close its
	// connections have, and may be done a moment before them.
	if err := goleak.Find(before); err != nil {
		events.write(event{Kind: leaked, Note: err.Error()})
	}
	if left := connections(cfg); len(left) > 0 {
		events.write(event{Kind: leaked, Note: fmt.Sprint(left)})
	}
	events.write(event{Kind: ended})
	return nil
}

// connections returns the sockets of this process, and what it has open of
// SQLite's files.
func connections(cfg replicaConfig) (open []string) {
	const mine = "/proc/self/fd"
	descriptors, err := os.ReadDir(mine)
	if err != nil {
		return []string{err.Error()}
	}
	for _, d := range descriptors {
		to, err := os.Readlink(filepath.Join(mine, d.Name()))
		if err == nil && (strings.HasPrefix(to, "socket:") || cfg.File != "" && strings.HasPrefix(to, cfg.File)) {
			open = append(open, to)
		}
	}
	return open
}

// live is a replica's life, from its start to its orderly end.
func live(ctx context.Context, cfg replicaConfig, events *eventWriter, orders <-chan struct{}) error {
	r := &replica{replicaConfig: cfg, events: events, ending: ctx, birth: fmt.Sprintf("%s.%d", cfg.Name, os.Getpid())}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { r.pulse(ctx) })
	var err error
	for {
		if r.backend, err = openBackend(ctx, cfg); err == nil {
			break
		}
		slog.Warn("not open yet", "error", err)
		if !pause(ctx, 100*time.Millisecond) {
			return nil
		}
	}
	lease, err := tenure.NewLease(r.backend.store(), tenure.LeaseConfig{Holder: cfg.Name, TTL: cfg.TTL, Expiry: cfg.Expiry})
	if err != nil {
		return err
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: r.job, Trace: &tenure.Trace{
		Attempt: func(_ time.Duration, err error) { r.tellSetUp(err) },
		Renewed: func(term *tenure.Term, took, _ time.Duration) {
			now := monotonic()
			events.write(event{At: now, From: now - took, Kind: renewed, Term: term.ID(), Note: lease.Key().ID})
		},
		RenewalFailed: func(term *tenure.Term, err error, _ time.Duration) {
			events.write(event{Kind: notRenewed, Term: term.ID(), Note: err.Error()})
		},
		JobStuck: func(term *tenure.Term, since time.Duration) {
			now := monotonic()
			events.write(event{At: now, From: now - since, Kind: jobStuck, Term: term.ID(), Token: term.Token()})
		},
	}})
	if err != nil {
		return err
	}
	wg.Go(func() { r.obey(ctx, coordinator, orders) })
	wg.Go(func() { r.operate(ctx) })
	wg.Go(func() { r.createOnce(ctx) })
	if cfg.Hurry {
		wg.Go(func() { r.writeHurried(ctx) })
	}
	for worker := range cfg.Crowd {
		wg.Go(func() { r.crowd(ctx, worker) })
	}
	err = coordinator.Run(ctx)
	cancel()
	wg.Wait()
	r.late.Wait()
	if err == nil {
		err = r.backend.close()
	}
	return err
}

// take passes on the orders that are lines of the input. At the end of the input
// there is nobody to run for.
func take(orders chan<- struct{}) {
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		orders <- struct{}{}
	}
	os.Exit(3)
}

// tellSetUp reports an error that says that the database is not set up.
func (r *replica) tellSetUp(err error) {
	if errors.Is(err, tenure.ErrSetup) {
		r.events.write(event{Kind: setUpError, Note: err.Error()})
	}
}

// obey resigns when it is ordered to.
func (r *replica) obey(ctx context.Context, c *tenure.Coordinator, orders <-chan struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-orders:
		}
		resigning, cancel := context.WithTimeout(ctx, r.TTL)
		if err := c.Resign(resigning); err != nil {
			slog.Warn("resign", "error", err)
		}
		cancel()
	}
}

const (
	pulseEvery = 20 * time.Millisecond
	stallFrom  = 100 * time.Millisecond
)

// pulse tells when this process did not run, although nobody stopped it.
func (r *replica) pulse(ctx context.Context) {
	for last := monotonic(); pause(ctx, pulseEvery); {
		now := monotonic()
		if now-last > stallFrom {
			r.events.write(event{At: now, Kind: stalled, From: last})
		}
		last = now
	}
}

// pause waits, or returns false when ctx is done.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// about returns d, half as much, or half as much again.
func about(d time.Duration) time.Duration { return d/2 + rand.N(d+1) }
