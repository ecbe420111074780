// Command chaos runs replicas of this library while it injects faults into processes,
// networks and databases, and then checks that every promise was kept. Each replica is a
// separate process. Postgres, NATS, etcd and MariaDB are separate servers, which each replica reaches
// through its own proxy. The command runs on Linux.
//
// Afterwards it checks the events that the replicas reported and the content of the
// databases:
//
//   - In the order of the commits, fencing tokens rise from term to term, and every fenced
//     write was committed within its own term.
//   - On Postgres and SQLite, what happened to each lease is a behaviour of the rules that package proof/model/lease
//     states: each write of its record, each fenced write, and what the replicas said of their jobs and of their
//     trust. Those rules have neither failovers nor witnesses.
//   - The histories of registers written by compare-and-swap are linearizable.
//   - No write that was acknowledged to a replica is missing, and every renewal that
//     was reported as successful was committed.
//   - Within TTL + 1 s of each fault's end a replica held the lease again (a TTL more if
//     the database's clock was moved). If a copy of the holder had renewed the lease,
//     another term held it.
//   - A full server ends no term of a replica whose connections are good.
//   - No two jobs ran at the same time.
//   - Replicas that shut down properly left no goroutine and no connection behind.
//
// Each replica also has workers that use other leases directly, all at the same times, so
// that their writes are grouped on Postgres: no two workers may see valid terms of one
// lease at the same time, and what they were told must match what was committed.
//
// In two more phases the replicas claim keys instead, a hundred thousand on Postgres. A few of
// the keys have a func, which writes fenced by its claim. Tokens of each key must rise, no
// fenced write may be committed outside its claim, no claim may be taken over while its session
// has a record, no two claims of a key may be seen valid at the same time, no process may run
// a key twice, each of the few must have an owner within TTL + 1 s of each fault's end, and
// nearly all the others within a minute of the last.
//
// Some of these calls attach to a key: it may be taken from a session that lives only if that has offered it.
//
// In another phase the replicas share the few keys as shards. All of the above must hold, no
// two funcs of a shard may run at the same time, valid or not, and after the last fault the
// shards must be spread evenly.
//
// In two more the replicas work on the rows of a table, some of them also by value, in sessions that servers keep
// for remote workers: there answers are lost and heartbeats late. Each row must be finished exactly once, in
// the transaction of its effect and under its last claim; late results must be refused; attempts
// must be as many as the times that it was taken. Whatever is claimed at a fault's end must have
// been finished or freed within TTL + 1 s, and all rows must be finished within a minute of the last.
//
// In two more the replicas answer requests for tenants, over HTTP/1, h2c and TLS, and send them to each other through
// proxies, which refuse, hang, delay and cut connections, also after a request has passed. A handler notes past all faults that
// it runs, and counts in a fenced write. Clients send to any replica. An answered request must have run, once unless it is
// idempotent, and under the token that was told; a refused one must not have run; one may be unknown only at a fault that
// kills, cuts or pauses something. Tokens and numbers of a tenant must not fall from an answer to one that was asked for later.
//
// In one more each replica runs under a witness, and its jobs start processes that have their lock. Replicas are killed,
// also after their witness, or while that is stopped. No job may begin before all processes of the one before are dead, and
// where nothing else failed, the next job must begin within half a TTL of the kill.
//
// Two more phases are on a NATS server, with sync_interval: always, and on an etcd server. Each is
// killed, shut down and paused. The disk of the NATS server, or its stream, is filled. At the end
// of its phase the etcd server is restored from a snapshot after the lease has changed hands: no
// token may go back, and no fenced write of a term from before may succeed. The ledger of these
// two is what the servers keep of all writes, in the order of the commits. The stream differs from the one
// that Migrate creates in that it keeps all messages of a subject. Leases there expire as if
// ExpiryObserved was set.
//
// Two more are on a MariaDB server and on a Galera cluster of three nodes. The server's records are also locked by somebody;
// nodes are killed, shut down and paused, and cut off from the others, which leaves them without a majority. Jobs also write in
// transactions of their own, which linger between the fence and the commit. The ledger is the binary log, in a cluster that of
// the node that is never killed. Without MariaDB and Galera these two are left out.
//
// In the last phase a primary of Postgres and two standbys fail over, again and again. The standbys are cut off, the primary
// crashes or hangs, and a standby is promoted that lacks what was acknowledged meanwhile; the
// others are rewound and follow it. Some replicas reach the primary through PgBouncer, if there is one,
// some on connections that were opened before its promotion, and one comes later than the others. What was acknowledged
// between the cut and the end of a primary may be gone. All else must hold: no jobs
// overlap, tokens rise also above those that were lost, a term whose record was lost may be written again
// only if no later one has begun, and fenced writes stand within their terms in what survives.
//
// On SQLite many calls get about as much time as a write takes, so that their contexts
// end at every possible moment of a write that a full disk makes fail.
//
// In one of the phases on Postgres the table of tombstones is dropped, made unlogged while
// the server crashes, revoked, and put under row-level security. Without the table only the
// database's clock keeps versions from going back, so the clock is never moved in that
// phase, and tokens must rise without exception. A replica may get errors that the database
// is not set up for at most a second, and the lease must be held as if nothing had happened.
//
// Jobs may overlap in the cases that the README names: while a process is paused, until it
// has been resumed and its job has returned; if the database's clock is moved, except with
// the expiry policy ExpiryObserved; and if SQLite's file is removed. The command counts these
// overlaps. Replicas also report when they did not run for 100 ms although they were not
// paused, because the machine may be that busy.
//
// The command exits with 1 if a promise was broken, and prints which one, the seed and what
// happened at the time. The same seed injects the same faults, but their timing relative to
// the replicas differs in each run. -run selects faults, for example 'sqlite: disk'.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"syscall"
	"time"
)

func main() {
	beChild()
	duration := flag.Duration("duration", 10*time.Minute, "how long to run")
	seed := flag.Uint64("seed", rand.Uint64(), "seed for the choice of faults")
	only := flag.String("run", "", "inject only faults whose `phase: fault` matches this regular expression, and skip phases without any")
	other := flag.String("other", "", "the `program` of every second replica: this command, built from another version of the library")
	patience := flag.Int("patience", patienceHere(), "how many times longer than on a quiet machine with four cores recoveries may take")
	flag.Parse()
	match, err := regexp.Compile(*only)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, options{*duration, *seed, match, *other, *patience}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// patienceHere is 1 on four cores. On fewer the processes of the replicas and the server compete for them: when all
// connect at once after a fault, for example, that alone takes a second on two.
func patienceHere() int { return max(1, 4/runtime.NumCPU()) }

// beChild is main for a replica, if this process is one.
func beChild() {
	replica := os.Getenv(replicaEnv)
	if replica == "" {
		return
	}
	run := runReplica
	if os.Getenv(witnessEnv) != "" {
		run = beWitness
	}
	if err := run(replica); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
