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
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pace"
)

// replicaEnv holds the configuration of a replica; if it is set, this program is that
// replica.
const replicaEnv = "TENURE_CHAOS_REPLICA"

type replicaConfig struct {
	Name      string
	URL       string // of the server, through the replica's proxy
	SharePool bool   // the store uses the ledger's pool
	File      string // for SQLite instead of a URL
	TTL       time.Duration
	Expiry    tenure.ExpiryPolicy
	Pace      time.Duration // approximate time from one operation to the next
	Crowd     int           // number of workers that use other leases
	Hurry     bool          // some calls get about as much time as a write takes
	Task      task
	Keys      int    // how many keys there are to claim
	Lock      string // the file of the job's lock, under a witness

	Address          string // at which other replicas reach this one
	Certificate, Key string // the files for TLS
}

// task is what a replica does beside the job of the lease.
type task string

const (
	useObjects  task = "" // and other leases
	claimKeys   task = "claims"
	shareShards task = "shards" // the few keys that have a func, and claim no others
	workOnRows  task = "rows"
	getRequests task = "requests"
	createOnly  task = "create" // objects, once each
	useWitness  task = "witness"
)

// replica is a process that faults are injected into.
type replica struct {
	replicaConfig
	events    *eventWriter
	backend   backend
	birth     string // makes the names of this process's objects unique
	late      sync.WaitGroup
	lateTurns chan struct{} // held during a late write by a claim
	notes     atomic.Int64  // of writes by claims so far, so that no two are the same
	ending    context.Context
	drain     *tenure.Drain
	out       atomic.Int64 // since when this replica is drained, by the clock of monotonic; 0: it is not
}

// runReplica is main for a replica. It ends on SIGTERM, and when its parent is gone.
func runReplica(encoded string) error {
	var cfg replicaConfig
	if err := json.Unmarshal([]byte(encoded), &cfg); err != nil {
		return err
	}
	cfg = cfg.named()
	own := connections(cfg)
	signal.Ignore(os.Interrupt, unix.SIGXFSZ) // from the terminal; and from a full disk, which makes the write fail too
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	events := &eventWriter{replica: cfg.Name, to: os.Stdout}
	events.write(event{Kind: ready})
	orders := make(chan struct{})
	go take(orders)                  // ends with the process, because a read can't be interrupted
	before := goleak.IgnoreCurrent() // the one above, and those for signals
	if err := live(ctx, cfg, events, orders); err != nil {
		return err
	}
	// The check for goroutines comes first because it waits a little: a pool gives an
	// unresponsive server as many seconds as the goroutines that close its connections
	// have, so it may be closed a moment before they end.
	err := goleak.Find(before)
	for since := time.Now(); err != nil && time.Since(since) < closes; err = goleak.Find(before) {
	}
	if err != nil {
		events.write(event{Kind: leaked, Note: err.Error()})
	}
	if left := leftConnections(cfg, own); len(left) > 0 {
		events.write(event{Kind: leaked, Note: fmt.Sprint(left)})
	}
	events.write(event{Kind: ended})
	return nil
}

// closes is the longest that pgx takes to close a connection whose server is too busy to answer.
const closes = 15 * time.Second

// leftConnections returns what connections does when all but the process's own, to its witness, have been closed. The client of NATS
// leaves a connection to the garbage collector if the server breaks it before the handshake is over.
func leftConnections(cfg replicaConfig, own []string) (open []string) {
	for range 50 {
		open = slices.DeleteFunc(connections(cfg), func(c string) bool { return slices.Contains(own, c) })
		if len(open) == 0 || !strings.HasPrefix(cfg.URL, "nats:") {
			break
		}
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
	}
	return open
}

// connections returns this process's open sockets and SQLite files.
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

// live runs the replica from its start to its shutdown.
func live(ctx context.Context, cfg replicaConfig, events *eventWriter, orders <-chan struct{}) error {
	r := &replica{replicaConfig: cfg, events: events, ending: ctx, lateTurns: make(chan struct{}, lateOnes), birth: fmt.Sprintf("%s.%d", cfg.Name, os.Getpid())}
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
	if r.drain, err = tenure.NewDrain(r.backend.store(), cfg.Name, nil); err != nil {
		return err
	}
	r.drain.Follow(r.setOut)
	wg.Go(func() { _ = r.drain.Run(ctx) })
	lease, err := tenure.NewLease(r.backend.store(), tenure.LeaseConfig{Key: tenure.Key{Type: leaseType, ID: "singleton"}, Holder: cfg.Name, TTL: cfg.TTL, Expiry: cfg.Expiry})
	if err != nil {
		return err
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: r.job, Drain: r.drain, Trace: &tenure.Trace{
		Attempt: func(_ time.Duration, err error) { r.tellSetUp(err) },
		Renewed: func(term *tenure.Term, took, _ time.Duration) {
			now := monotonic() // the log was written since the call, which may take a while
			events.write(event{At: now, From: now - took - stallFrom, Kind: renewed, Term: term.ID(), Note: lease.Key().ID, Until: trustedUntil(term)})
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
	switch cfg.Task {
	case useObjects:
		r.do(ctx, &wg)
	case useWitness:
		wg.Go(func() { r.operate(ctx) })
		wg.Go(func() { r.createOnce(ctx) })
	case createOnly:
		wg.Go(func() { r.createOnce(ctx) })
	case claimKeys:
		wg.Go(func() { slog.Debug("claims have ended", "error", r.claim(ctx)) })
	case shareShards:
		wg.Go(func() { slog.Debug("shards have ended", "error", r.share(ctx)) })
	case getRequests:
		wg.Go(func() { slog.Debug("requests have ended", "error", r.answerRequests(ctx)) })
	case workOnRows:
		wg.Go(func() { slog.Debug("work on rows has ended", "error", r.workOnRows(ctx)) })
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

// do does what keeps the database busy beside the job.
func (r *replica) do(ctx context.Context, wg *sync.WaitGroup) {
	wg.Go(func() { r.operate(ctx) })
	wg.Go(func() { r.createOnce(ctx) })
	if r.Hurry {
		wg.Go(func() { r.writeHurried(ctx) })
	}
	for worker := range r.Crowd {
		wg.Go(func() { r.crowd(ctx, worker) })
	}
}

// take passes on orders, the lines of the input. At the end of the input the parent is
// gone, so the process ends.
func take(orders chan<- struct{}) {
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		orders <- struct{}{}
	}
	os.Exit(3)
}

// tellSetUp reports an error if it means that the database is not set up.
func (r *replica) tellSetUp(err error) {
	if errors.Is(err, tenure.ErrSetup) {
		r.events.write(event{Kind: setUpError, Note: err.Error()})
	}
}

// obey resigns when ordered to, or drains this replica for a while.
func (r *replica) obey(ctx context.Context, c *tenure.Coordinator, orders <-chan struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-orders:
		}
		resigning, cancel := context.WithTimeout(ctx, r.TTL)
		var err error
		switch rand.IntN(4) {
		case 0:
			err = tenure.SetDrain(resigning, r.backend.store(), tenure.Drained{Replica: r.Name, Left: r.TTL})
		case 1:
			err = r.drain.Start(resigning)
			pause(ctx, rand.N(r.TTL/2))
			r.drain.Stop()
		default:
			err = c.Resign(resigning)
		}
		if err != nil {
			slog.Warn("resign", "error", err)
		}
		cancel()
	}
}

// setOut notes whether this replica is drained.
func (r *replica) setOut(drained bool) (givenBack func(context.Context) error) {
	since := int64(0)
	if drained {
		since = int64(monotonic())
	}
	r.out.Store(since)
	return func(context.Context) error { return nil }
}

// tellIfOut reports a job or func that begins although this replica has been drained for some time.
func (r *replica) tellIfOut(ctx context.Context, what string) {
	now := monotonic()
	if ctx.Err() != nil { // it is told
		return
	}
	if since := time.Duration(r.out.Load()); since != 0 && now-since > r.TTL/10 {
		r.events.write(event{Kind: begunOut, From: since, Note: what})
	}
}

const (
	pulseEvery = 20 * time.Millisecond
	stallFrom  = 100 * time.Millisecond
)

// pulse reports when this process did not run, whether it was stopped or the machine was
// busy.
func (r *replica) pulse(ctx context.Context) {
	for last := monotonic(); pause(ctx, pulseEvery); {
		now := monotonic()
		if now-last > stallFrom {
			r.events.write(event{At: now, Kind: stalled, From: last})
		}
		last = now
	}
}

var pause = pace.Sleep

// about returns a random duration between d/2 and 3d/2.
func about(d time.Duration) time.Duration { return d/2 + rand.N(d+1) }
