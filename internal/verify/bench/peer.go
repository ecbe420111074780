package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// peer is one way to have a job run on one replica at a time: this library,
// another one, what a database offers by itself, or the bare statements that
// none can do without.
type peer struct {
	name  string
	about string
	etcd  bool // else Postgres

	// polls is how long a standby sleeps that learns of a release only when it
	// looks again, at fast timing. 0: it is told.
	polls time.Duration

	// settles is how long it takes from the begin of a campaign until the standby
	// is sure to be told of a release.
	settles time.Duration

	// expires says that the lease of a holder that vanishes is free after its TTL.
	expires bool

	// renews is the time between renewals at fast timing, and versionSQL reads
	// what each of them changes, by the lease's name. Empty: it can't be read.
	renews     time.Duration
	versionSQL string

	// ownPool says that a replica may have a pool that no application shares.
	ownPool bool

	// prepare makes the peer's tables, once per database.
	prepare func(ctx context.Context, url string) error

	open func(ctx context.Context, o options) (replica, error)
}

// options are those of one replica.
type options struct {
	url    string
	name   string // of the replica
	timing timing
	conns  int // at most; 0: as many as the peer takes by itself

	// shared has the replica use a pool that is the application's, even where the
	// peer would open one of its own.
	shared bool

	// interval is a standby's longest sleep, where the peer lets one choose;
	// 0: as the timing says.
	interval time.Duration
}

// timing says how fast a peer renews and competes.
type timing int

const (
	standard timing = iota // the peer's own defaults
	fast                   // a TTL of 3 s, and half a second between the attempts of peers that let one choose
	endless                // a TTL that outlives the measure, and no renewal but by hand
	brief                  // briefTTL, and no renewal but by hand
)

const (
	fastTTL  = 3 * time.Second
	briefTTL = 300 * time.Millisecond
)

// replica is one process of a service, with connections of its own. All
// replicas of a measure live in this process, so that one clock judges them.
type replica interface {
	contender(name string) (contender, error)
	close()
}

// contender is a replica's interest in one lease.
type contender interface {
	// campaign competes for one term and runs job while it lasts. The job's
	// context ends as soon as the peer says that the term is over. campaign
	// returns when the job has. When ctx ends, it stops as a process would that
	// is told to exit.
	campaign(ctx context.Context, job func(ctx context.Context)) error

	// resign gives up the term that campaign is in, in the peer's graceful way.
	// It is called only after the job has begun. The job has returned before the
	// release is sent.
	resign(ctx context.Context) error
}

// running is a job that can be told to return.
type running struct {
	cancel   context.CancelFunc
	returned chan struct{}
}

// run runs job, and returns when it has.
func (r *running) run(ctx context.Context, job func(context.Context)) {
	ctx, r.cancel = context.WithCancel(ctx)
	defer r.cancel()
	r.returned = make(chan struct{})
	defer close(r.returned)
	job(ctx)
}

// stop tells the job to return, and waits until it has.
func (r *running) stop() {
	r.cancel()
	<-r.returned
}

// stepper is a contender that can be led by hand.
type stepper interface {
	acquire(ctx context.Context) error
	release(ctx context.Context) error
}

// renewer is a stepper that can also renew by hand.
type renewer interface {
	stepper
	renew(ctx context.Context) error
}

// stealer is a stepper that can take over a lease which it has seen and which
// has expired since.
type stealer interface {
	stepper
	steal(ctx context.Context) error
}

// peers are in the order of the tables.
var peers = []peer{
	floorPeer,
	floorAsyncPeer,
	tenurePeer,
	tenurePollPeer,
	pglockPeer,
	pglockPgxPeer,
	clientGoPeer,
	etcdPeer,
	advisoryPeer,
}

// peersNamed returns the peers of a comma-separated list, in the order of the
// tables. An empty list is all.
func peersNamed(list string) ([]peer, error) {
	if list == "" {
		return peers, nil
	}
	names := strings.Split(list, ",")
	for _, name := range names {
		if !slices.ContainsFunc(peers, func(p peer) bool { return p.name == name }) {
			return nil, fmt.Errorf("no peer %q", name)
		}
	}
	return slices.DeleteFunc(slices.Clone(peers), func(p peer) bool { return !slices.Contains(names, p.name) }), nil
}
