//go:build unix

package main

import (
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/witnessed"
)

// The values of --on-loss.
const (
	onLossStop = "stop"
	onLossKill = "kill"
)

// longestTTL is far longer than anyone needs, and far too short to overflow.
const longestTTL = 10000 * time.Hour

// runOptions are the flags of run.
type runOptions struct {
	options
	guardConfig

	replica      string
	unique       bool
	ttl          time.Duration
	missed       int
	renew        time.Duration
	acquire      time.Duration
	check        string
	checkTimeout time.Duration
	confirm      int
	fence        string
	peers        string
	unfence      string
	once         bool
	every        time.Duration
	stopEvery    time.Duration
	fenceEvery   time.Duration
	unfenceEvery time.Duration
}

// validate checks the options, fills in defaults, and returns the timing they result in.
func (o *runOptions) validate(flags *pflag.FlagSet, args []string) (timing, error) {
	if !flags.Changed("replica") {
		o.replica = tenure.ReplicaID()
	}
	store, err := o.store.name()
	if err != nil {
		return timing{}, err
	}
	if err := o.checkKey(); err != nil {
		return timing{}, err
	}
	service := o.start != "" || o.stop != ""
	switch {
	case service && len(args) > 0:
		return timing{}, usageError("give either a program, or --start and --stop")
	case service && (o.start == "" || o.stop == ""):
		return timing{}, usageError("--start needs --stop, and --stop needs --start")
	case service && os.Getenv(witnessed.Env) != "":
		return timing{}, usageError("--start and --stop do not work under a witness, which would end the guard before --stop has run: start tenure run by itself")
	case !service && (o.startEvery != 0 || o.stopEvery != 0):
		return timing{}, usageError("--start-every and --stop-every need --start and --stop")
	case !service && len(args) == 0:
		return timing{}, usageError(`no program: "tenure run -h" explains the usage`)
	case o.onLoss != onLossStop && o.onLoss != onLossKill:
		return timing{}, usageError("--on-loss: want stop or kill")
	case o.log != "text" && o.log != "json":
		return timing{}, usageError("--log: want json or text")
	case o.replica == "":
		return timing{}, usageError("--replica is empty")
	case o.unique && !flags.Changed("replica") && os.Getenv("TENURE_REPLICA_ID") == "":
		return timing{}, usageError("--unique-replica needs --replica, or TENURE_REPLICA_ID: a name that only this host has, at each start; a host's default name may be neither")
	case o.unique && runtime.GOOS != "linux":
		return timing{}, usageError("--unique-replica needs Linux: elsewhere nothing tells whether the program of an earlier run has ended")
	}
	if err := o.observe(flags); err != nil {
		return timing{}, err
	}
	switch {
	case o.ttl < time.Second:
		return timing{}, usageError("--ttl %v is below 1s", o.ttl)
	case o.ttl > longestTTL:
		return timing{}, usageError("--ttl %v is above %v", o.ttl, longestTTL)
	case o.fence != "" && schemeOf(store) == nil && o.replica == tenure.ReplicaID() && os.Getenv("TENURE_REPLICA_ID") == "":
		// Otherwise each replica would take the others for earlier runs of itself and never fence them.
		return timing{}, usageError("--fence needs --replica: all replicas on a SQLite file are on this host and get its name by default")
	case o.fence == "" && o.peers != "":
		return timing{}, usageError("--peers needs --fence")
	case o.peers != "" && slices.Contains(o.peerNames(), ""):
		return timing{}, usageError("--peers has an empty name")
	case o.peers == "" && o.fenceEvery != 0:
		return timing{}, usageError("--fence-every needs --peers, the replicas to fence again")
	case o.unfence == "" && o.unfenceEvery != 0:
		return timing{}, usageError("--unfence-every needs --unfence")
	case o.every != 0 && !o.once:
		return timing{}, usageError("--every needs --once")
	case o.every != 0 && !isSQL(store):
		return timing{}, usageError("--every needs a store on Postgres or SQLite, whose clock tells when the last run began")
	case o.check == "" && o.checkTimeout != 0:
		return timing{}, usageError("--check-timeout needs --check")
	}
	if !service {
		if err := findProgram(args[0]); err != nil {
			return timing{}, err
		}
	}
	if o.renew == 0 {
		o.renew = o.ttl / 3
	}
	t, err := newTiming(o.ttl, o.renew, o.stopTimeout, o.checkTimeout)
	t.patient = service
	return t, err
}

// peerNames returns the names of --peers.
func (o *runOptions) peerNames() []string {
	if o.peers == "" {
		return nil
	}
	names := strings.Split(o.peers, ",")
	for i, name := range names {
		names[i] = strings.TrimSpace(name)
	}
	return names
}

// observe checks --missed, and sets the TTL that it results in.
func (o *runOptions) observe(flags *pflag.FlagSet) error {
	switch {
	case o.missed == 0:
		return nil
	case o.renew <= 0:
		return usageError("--missed needs --renew, the time from one renewal to the next")
	case o.missed == 1:
		return usageError("--missed 1 cannot be safe: another replica would take over when the next renewal is due, before a program whose renewal fails could be ended; --renew %v --missed 2 takes over as soon", o.renew/2)
	case o.renew > longestTTL/time.Duration(o.missed):
		return usageError("--renew %v × --missed %d is above %v", o.renew, o.missed, longestTTL)
	}
	ttl := o.renew * time.Duration(o.missed)
	if flags.Changed("ttl") && o.ttl != ttl {
		return usageError("--ttl %v is not --renew × --missed, %v: leave it out", o.ttl, ttl)
	}
	o.ttl = ttl
	return nil
}
