//go:build unix

package main

import (
	"cmp"
	"flag"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/witnessed"
	"github.com/tenurelib/tenure/witness"
)

// The values of -on-loss.
const (
	onLossStop = "stop"
	onLossKill = "kill"
)

// defaultType is the type of a key given without one.
const defaultType = "reconciler_lease"

// longestTTL is far longer than anyone needs, and far too short to overflow.
const longestTTL = 10000 * time.Hour

// options holds the values of all flags. Each command takes the flags that it names.
type options struct {
	guardConfig

	line  []string        // the command line, without the command
	given map[string]bool // which flags were

	store    storeFlag
	keyName  string
	json     bool
	kind     string
	sessions bool
	session  string
	print    bool
	queue    string
	columns  string
	ready    string
	order    string
	to       string
	wait     time.Duration
	lasts    time.Duration
	force    bool
	drained  bool
	replicas int
	look     time.Duration

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
	stopEvery    time.Duration
	fenceEvery   time.Duration
	unfenceEvery time.Duration

	listen         string
	drain          bool
	settle         time.Duration
	young          time.Duration
	releaseTimeout time.Duration
	passStore      bool
}

// storeFlags are the flags of all commands on a store.
const storeFlags = "store table schema "

// flagSet returns the flags of a command.
func (o *options) flagSet(c command) *flag.FlagSet {
	all, flags := flag.NewFlagSet("", flag.ContinueOnError), flag.NewFlagSet(c.name, flag.ContinueOnError)
	o.define(all)
	for name := range strings.FieldsSeq(c.flags) {
		f := all.Lookup(name)
		flags.Var(f.Value, name, cmp.Or(c.usages[name], f.Usage))
	}
	flags.SetOutput(io.Discard)
	return flags
}

// define defines the flags of all commands.
func (o *options) define(flags *flag.FlagSet) {
	flags.StringVar(&o.store.flag, "store", "", "`PATH` of a SQLite file, for the processes of one host, or a postgres://, nats://,\netcd:// or kube:// URL; put a URL with a password into $"+storeEnv+" instead")
	flags.StringVar(&o.store.table, "table", "", "`NAME` of the table of objects, on Postgres and SQLite, the same for all replicas\n(default objects)")
	flags.StringVar(&o.store.schema, "schema", "", "`NAME` of the table's schema, on Postgres (default the first schema of the\nsearch_path that has the table)")
	flags.BoolVar(&o.store.lossless, "lossless", false, "a failover of this Postgres never loses an acknowledged write, so a free lease is taken\nat once after one; give it on all replicas or on none")
	flags.StringVar(&o.keyName, "key", "", "`NAME` of the lease, or TYPE/NAME, the type and ID of a program's Key; NAME alone means\n"+defaultType+"/NAME")
	flags.BoolVar(&o.json, "json", false, "print JSON")
	flags.StringVar(&o.kind, "type", "", "`TYPE` of the leases' keys (default: leases of all types)")
	flags.BoolVar(&o.sessions, "sessions", false, "list the sessions of package claims, and how many keys each owns")
	flags.StringVar(&o.session, "session", "", "`ID` of a session of package claims, to find the replica by it")
	flags.BoolVar(&o.print, "print", false, "print the SQL statements instead of running them")
	flags.StringVar(&o.queue, "queue", "", "`TABLE` to make a queue of package claims")
	flags.StringVar(&o.columns, "columns", "", "comma-separated `LIST` of optional columns: attempts, not_before, requested, expires,\nlimit, per_key. Give a column that has another name as in not_before=run_at, also for id,\nsession and token")
	flags.StringVar(&o.ready, "ready", "", "`SQL` condition under which a row may be taken, for the index; without the parts that\ndepend on the time")
	flags.StringVar(&o.order, "order", "", "`SQL` order in which rows are taken, for the index (default: by ID)")
	flags.StringVar(&o.to, "to", "", "name of the `REPLICA` that should hold the lease next, as given to tenure run -replica")
	durationVar(flags, &o.wait, "wait", 0, "`TIME` to wait until that replica holds the lease (default: no wait)")
	durationVar(flags, &o.lasts, "for", 24*time.Hour, "`TIME` after which the mark expires")
	flags.BoolVar(&o.force, "force", false, "drain even if no other replica has a session")
	flags.BoolVar(&o.drained, "drained", false, "list the replicas that are drained")
	flags.IntVar(&o.replicas, "replicas", 3, "`NUMBER` of replicas that will use the store")
	durationVar(flags, &o.look, "look", 5*time.Second, "`TIME` to measure for, at most 6s")
	flags.StringVar(&o.listen, "listen", "", "`PATH` of a socket, for programs that others start: see docs/witness.md")
	flags.BoolVar(&o.drain, "drain", true, "on Postgres, end the sessions of the dead program before the release")
	durationVar(flags, &o.settle, "settle", 0, "`TIME` to wait between the death and the release, for requests that the program had sent")
	durationVar(flags, &o.young, "young", witness.DefaultYoung, "`TIME` that a term must have lasted when its process dies; a younger one is left to expire,\nso that a job that crashes its process does not crash one replica after the other")
	durationVar(flags, &o.releaseTimeout, "release-timeout", witness.DefaultReleaseTimeout, "`TIME` after the program's end at which witness exits even if nothing could be\nreleased")
	flags.BoolVar(&o.passStore, "pass-store", false, "leave TENURE_STORE in the program's environment")
	durationVar(flags, &o.ask, "ask", 0, "`TIME` between two questions about how much trust is left")
	flags.StringVar(&o.replica, "replica", "", "`NAME` of this replica, as shown to people and used by tenure handover (default\n$TENURE_REPLICA_ID, or the host's name)")
	flags.BoolVar(&o.unique, "unique-replica", false, "if tenure was killed and is started again, continue as soon as the program of the earlier\nrun has ended; a second run of a replica on the same host waits for the first. Give each\nhost its own -replica")
	durationVar(flags, &o.ttl, "ttl", tenure.DefaultTTL, "`TIME` for which the lease counts as held after its last renewal. If a host\nvanishes, the program runs nowhere for that long")
	durationVar(flags, &o.renew, "renew", 0, "`TIME` from one renewal to the next (default a third of the TTL)")
	flags.IntVar(&o.missed, "missed", 0, "`NUMBER` of renewals that a holder must miss, 2 or more, before this replica takes over.\nThen no clock decides, only what this replica has observed itself; the TTL is\n-renew times NUMBER. Give all replicas the same NUMBER")
	durationVar(flags, &o.acquire, "acquire", 0, "`TIME` between attempts to acquire the lease while nothing would notify this replica\nof a release; run waits twice as long after the program has exited on its own\n(default a sixth of the TTL)")
	flags.StringVar(&o.check, "check", "", "`COMMAND` whose exit status says whether this host is healthy. It runs with the\nargument standby before tenure competes, and active before each renewal; a holder\nwhose check fails is replaced. The argument is appended to the command: end a\ncommand that takes none with \"&& :\", as in 'test -e /etc/fit && :'")
	durationVar(flags, &o.checkTimeout, "check-timeout", 0, "`TIME` within which -check must return (default a sixth of the TTL, or less if a\nlong -stop-timeout leaves less time between renewals). A -check that may last\nlonger than the default begins before a renewal is due; if it may last longer\nthan half of the TTL, the default -stop-timeout is shorter")
	flags.IntVar(&o.confirm, "confirm", 0, "`NUMBER` of renewals that must succeed before the program starts, after a host has\nvanished")
	flags.StringVar(&o.fence, "fence", "", "`COMMAND` that cuts off a host that has vanished, before the program starts here.\n$TENURE_PREDECESSOR names that host: NULs become U+FFFD, and a name over 4096\nbytes is cut and marked with \"…\". The command is retried until it succeeds. It\ndoes not run for an earlier run of this -replica, so each replica needs its own name")
	flags.StringVar(&o.peers, "peers", "", "comma-separated `NAMES` of replicas that -fence cuts off too, after the host that has\nvanished, each in $TENURE_PREDECESSOR. This -replica is left out, so that all hosts can\nhave the same list")
	durationVar(flags, &o.fenceEvery, "fence-every", 0, "`TIME` between two runs of -fence for each of the -peers while this replica runs the\nprogram; a failure is only logged (default: they are fenced only when a host has vanished)")
	flags.StringVar(&o.unfence, "unfence", "", "`COMMAND` that undoes what another replica's -fence has done to this host. It runs in each\nterm before anything is fenced and the program starts; if it fails, the lease is given up")
	durationVar(flags, &o.unfenceEvery, "unfence-every", 0, "`TIME` between two runs of -unfence while this replica runs the program; if one fails, the\nterm ends (default: once per term)")
	durationVar(flags, &o.stopTimeout, "stop-timeout", 0, "`TIME` from SIGTERM to SIGKILL (default a little over a quarter of the TTL, and less with a\nlong -check-timeout)")
	flags.StringVar(&o.onLoss, "on-loss", onLossStop, "stop or kill: `HOW` the program is ended if the lease was not renewed in time or\n-check failed; kill sends SIGKILL at once. With -start, SIGKILL\ngoes to all that -start has left running below tenure, and then -stop is run with\nTENURE_STOP=kill")
	flags.BoolVar(&o.once, "once", false, "when the program exits on its own, exit with its exit status")
	flags.StringVar(&o.start, "start", "", "`COMMAND` that starts a service and returns, used instead of a program")
	flags.StringVar(&o.stop, "stop", "", "`COMMAND` that stops what -start started, and returns when it has stopped")
	flags.Var(&o.log, "log", "json or text: `FORMAT` of the log (default text)")
	durationVar(flags, &o.startEvery, "start-every", 0, "`TIME` between two runs of -start while this replica holds the lease, in case the service\nhas ended; -start must leave a running service alone, and the term ends if -start fails\n(default: once per term)")
	durationVar(flags, &o.stopEvery, "stop-every", 0, "`TIME` between two runs of -stop while another replica holds the lease, in case the\nservice was started here (default: never)")
}

// validate checks the options, fills in defaults, and returns the timing they result in.
func (o *options) validate(args []string) (timing, error) {
	if !o.given["replica"] {
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
		return timing{}, usageError("give either a program, or -start and -stop")
	case service && (o.start == "" || o.stop == ""):
		return timing{}, usageError("-start needs -stop, and -stop needs -start")
	case service && os.Getenv(witnessed.Env) != "":
		return timing{}, usageError("-start and -stop do not work under a witness, which would end the guard before -stop has run: start tenure run by itself")
	case service && o.once:
		return timing{}, usageError("-once needs a program")
	case !service && (o.startEvery != 0 || o.stopEvery != 0):
		return timing{}, usageError("-start-every and -stop-every need -start and -stop")
	case !service && len(args) == 0:
		return timing{}, usageError(`no program: "tenure run -h" explains the usage`)
	case o.onLoss != onLossStop && o.onLoss != onLossKill:
		return timing{}, usageError("-on-loss %q is neither stop nor kill", o.onLoss)
	case o.replica == "":
		return timing{}, usageError("-replica is empty")
	case o.unique && !o.given["replica"] && os.Getenv("TENURE_REPLICA_ID") == "":
		return timing{}, usageError("-unique-replica needs -replica, or TENURE_REPLICA_ID: a name that only this host has, at each start; a host's default name may be neither")
	case o.unique && runtime.GOOS != "linux":
		return timing{}, usageError("-unique-replica needs Linux: elsewhere nothing tells whether the program of an earlier run has ended")
	}
	if err := o.observe(); err != nil {
		return timing{}, err
	}
	switch {
	case o.ttl < time.Second:
		return timing{}, usageError("-ttl %v is below 1s", o.ttl)
	case o.ttl > longestTTL:
		return timing{}, usageError("-ttl %v is above %v", o.ttl, longestTTL)
	case o.confirm < 0:
		return timing{}, usageError("-confirm %d is negative", o.confirm)
	case o.fence != "" && schemeOf(store) == nil && o.replica == tenure.ReplicaID() && os.Getenv("TENURE_REPLICA_ID") == "":
		// Otherwise each replica would take the others for earlier runs of itself and never fence them.
		return timing{}, usageError("-fence needs -replica: all replicas on a SQLite file are on this host and get its name by default")
	case o.fence == "" && o.peers != "":
		return timing{}, usageError("-peers needs -fence")
	case o.peers != "" && slices.Contains(o.peerNames(), ""):
		return timing{}, usageError("-peers %q has an empty name", o.peers)
	case o.peers == "" && o.fenceEvery != 0:
		return timing{}, usageError("-fence-every needs -peers, the replicas to fence again")
	case o.unfence == "" && o.unfenceEvery != 0:
		return timing{}, usageError("-unfence-every needs -unfence")
	case o.check == "" && o.checkTimeout != 0:
		return timing{}, usageError("-check-timeout needs -check")
	}
	for name, d := range map[string]time.Duration{
		"renew": o.renew, "acquire": o.acquire, "check-timeout": o.checkTimeout, "stop-timeout": o.stopTimeout, "start-every": o.startEvery, "stop-every": o.stopEvery,
		"fence-every": o.fenceEvery, "unfence-every": o.unfenceEvery,
	} {
		if d < 0 {
			return timing{}, usageError("-%s %v is negative", name, d)
		}
	}
	if !service {
		if _, err := exec.LookPath(args[0]); err != nil {
			return timing{}, usageError("%v", err)
		}
	}
	if o.renew == 0 {
		o.renew = o.ttl / 3
	}
	t, err := newTiming(o.ttl, o.renew, o.stopTimeout, o.checkTimeout)
	t.patient = service
	return t, err
}

// peerNames returns the names of -peers.
func (o *options) peerNames() []string {
	if o.peers == "" {
		return nil
	}
	names := strings.Split(o.peers, ",")
	for i, name := range names {
		names[i] = strings.TrimSpace(name)
	}
	return names
}

// observe checks -missed, and sets the TTL that it results in.
func (o *options) observe() error {
	switch {
	case o.missed == 0:
		return nil
	case o.missed < 0:
		return usageError("-missed %d is negative", o.missed)
	case o.renew <= 0:
		return usageError("-missed needs -renew, the time from one renewal to the next")
	case o.missed == 1:
		return usageError("-missed 1 cannot be safe: another replica would take over when the next renewal is due, before a program whose renewal fails could be ended; -renew %v -missed 2 takes over as soon", o.renew/2)
	case o.renew > longestTTL/time.Duration(o.missed):
		return usageError("-renew %v × -missed %d is above %v", o.renew, o.missed, longestTTL)
	}
	ttl := o.renew * time.Duration(o.missed)
	if o.given["ttl"] && o.ttl != ttl {
		return usageError("-ttl %v is not -renew × -missed, %v: leave it out", o.ttl, ttl)
	}
	o.ttl = ttl
	return nil
}

// key returns the key of the lease that -key names.
func (o *options) key() tenure.Key {
	if kind, id, ok := strings.Cut(o.keyName, "/"); ok {
		return tenure.Key{Type: kind, ID: id}
	}
	return tenure.Key{Type: defaultType, ID: o.keyName}
}

func (o *options) checkKey() error {
	if o.keyName == "" {
		return usageError("no lease: give -key")
	}
	if err := o.key().Validate(); err != nil {
		return usageError("-key: %v", err)
	}
	return nil
}
