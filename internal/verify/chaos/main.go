// Command chaos does to replicas of this library what happens to processes,
// networks and databases, for as long as it is told, and then looks whether each
// promise was kept. The replicas are processes of their own; Postgres is a
// server of its own, which each replica reaches through a proxy of its own.
// It runs on Linux.
//
// Afterwards it goes through what the replicas have told and what the databases
// have: that fencing tokens rise from term to term, and nothing fenced was
// committed but in its own term, in the order of the commits; that what each
// replica saw of registers written by compare-and-swap can have happened in some
// order; that nothing is lost that a replica was told is written, and every renewal that
// it was told of was committed; that somebody held the lease again within TTL + 1 s of
// each fault's end (a TTL more where the database's clock was moved), and somebody else
// where a copy of the holder had renewed the lease; that a full server costs no term of
// a replica whose connections are good; that no two jobs ran at once; that replicas
// which ended in order left no goroutine and no connection.
//
// Each replica has workers, too, that hold other leases by hand, all at the same times,
// so that on Postgres their writes go in groups: no two may see a term of one lease
// valid at one moment, and what they were told must be what was committed.
//
// On SQLite many calls get about as much time as a write takes, so that their contexts
// end at any moment of a write that a full disk undoes.
//
// In one of the phases on Postgres the table of tombstones is dropped, unlogged while the
// server crashes, revoked, and put under row-level security. Without it only the
// database's clock keeps versions from going back, so there the clock is never moved, and
// tokens must rise without exception. A replica may hear that the database is not set up
// for no longer than a second, and the lease is held as if nothing had happened.
//
// Jobs may overlap where the README says so: while a process is paused, until it
// has gone on and its job has returned; where the database's clock is moved, but
// not with the expiry policy Observed; and where SQLite's file is removed. These
// overlaps are counted. Each replica tells, too, when it did not run for 100 ms
// though nobody paused it, for a machine may be as busy as that.
//
// It exits with 1 where a promise was broken, and tells which, with the seed and
// what happened at the time. The seed draws the same faults again; what they
// meet is never the same twice. -run chooses faults, for example 'sqlite: disk'.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"
)

func main() {
	if replica := os.Getenv(replicaEnv); replica != "" {
		beReplica(replica)
	}
	duration := flag.Duration("duration", 10*time.Minute, "how long")
	seed := flag.Uint64("seed", rand.Uint64(), "draws the faults")
	only := flag.String("run", "", "does only the faults for which this regular expression matches `phase: fault`, and leaves out phases that have none")
	flag.Parse()
	match, err := regexp.Compile(*only)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, *duration, *seed, match); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// beReplica is the whole main of a replica.
func beReplica(encoded string) {
	if err := runReplica(encoded); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
