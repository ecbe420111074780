// Command chaos does to replicas of this library what happens to processes,
// networks and databases, for as long as it is told, and then looks whether each
// promise was kept. The replicas are processes of their own; Postgres is a
// server of its own, which each replica reaches through a proxy of its own.
// It runs on Linux.
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
	"syscall"
	"time"
)

func main() {
	if replica := os.Getenv(replicaEnv); replica != "" {
		beReplica(replica)
	}
	duration := flag.Duration("duration", 10*time.Minute, "how long")
	seed := flag.Uint64("seed", rand.Uint64(), "draws the faults")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, *duration, *seed); err != nil {
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
