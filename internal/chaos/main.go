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
// order; that nothing is lost that a replica was told is written; that somebody
// held the lease again within TTL + 1 s of each fault's end (a TTL more where the
// database's clock was moved); that no two jobs ran at once; that replicas which
// ended in order left no goroutine and no connection.
//
// On Postgres each replica has workers, too, that hold other leases by hand, all at the
// same times, so that their writes go in groups: no two may see a term of one lease
// valid at one moment, and what they were told must be what was committed.
//
// Jobs may overlap where the README says so: while a process is paused, until it
// has gone on and its job has returned; where the database's clock is moved, but
// not with the expiry policy Observed; and where SQLite's file is removed. These
// overlaps are counted. Each replica tells, too, when it did not run for 100 ms
// though nobody paused it, for a machine may be as busy as that.
//
// It exits with 1 where a promise was broken, and tells which, with the seed and
// what happened at the time. The seed draws the same faults again; what they
// meet is never the same twice.
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
