package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// peer is one way to run a job on only one replica at a time: this library, another
// library, a feature of a database, or the bare statements that all of them need.
type peer struct {
	name  string
	about string
	on    place

	// polls is how long a standby sleeps between its reads at fast timing if it learns of
	// a release only by polling; 0 if it is notified.
	polls time.Duration

	// settles is the time from the start of a campaign until the standby is certain to be
	// notified of a release.
	settles time.Duration

	// expires means that the lease of a holder that vanishes is free after its TTL.
	expires bool

	// renews is the time between renewals at fast timing. versionSQL reads a value that
	// each renewal changes, by the lease's name. It is empty for a peer without such a value.
	renews     time.Duration
	versionSQL string

	// ownPool means that a replica can have a pool that it does not share with the
	// application.
	ownPool bool

	// prepare creates the peer's tables, once per database.
	prepare func(ctx context.Context, url string) error

	open func(ctx context.Context, o options) (*replica, error)
}

// options are the options of one replica.
type options struct {
	url    string
	name   string // of the replica
	timing timing
	conns  int // maximum; 0 means the peer's default

	// shared makes the replica use the application's pool, even if the peer would open
	// one of its own.
	shared bool

	ttl     time.Duration // of this library's leases; 0 means that of the timing
	renewed *atomic.Int64 // counts the renewals of this library's campaigns, if set
}

// timing determines how fast a peer renews and competes.
type timing int

const (
	standard timing = iota // the peer's own defaults
	fast                   // a TTL of 3 s, and half a second between attempts if that is configurable
	endless                // a TTL that outlasts the measure, and only manual renewals
	brief                  // briefTTL, and only manual renewals
)

const (
	fastTTL  = 3 * time.Second
	briefTTL = 300 * time.Millisecond
)

// replica stands for one process of a service, with its own connections. All replicas of
// a measure live in this process, so that they share a clock.
type replica struct {
	contender func(lease string) (contender, error)
	close     func()

	// exec executes a statement of the application on the connections that it shares with the
	// replica; nil if there are none.
	exec func(ctx context.Context, sql string) error
}

// poolReplica returns a replica on a pool of connections that it shares with the application.
func poolReplica(pool *pgxpool.Pool, contender func(lease string) (contender, error)) *replica {
	return &replica{
		contender: contender,
		close:     pool.Close,
		exec:      func(ctx context.Context, sql string) error { _, err := pool.Exec(ctx, sql); return err },
	}
}

// contender is a replica that competes for one lease.
type contender interface {
	// campaign competes for one term and runs job while it lasts. The job's context ends
	// as soon as the peer reports that the term is over. campaign returns when the job has
	// returned. When ctx ends, it stops like a process that is told to exit.
	campaign(ctx context.Context, job func(ctx context.Context)) error

	// resign gracefully gives up the current term of campaign. It is called only after the
	// job has begun. The job returns before the release is sent.
	resign(ctx context.Context) error

	// acquire and release control the contender step by step, without a campaign.
	acquire(ctx context.Context) error
	release(ctx context.Context) error
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

// renewer is a contender that can also renew on request.
type renewer interface {
	contender
	renew(ctx context.Context) error
}

// stealer is a contender that can take over a lease that it has seen and that has expired since.
type stealer interface {
	contender
	steal(ctx context.Context) error
}

// place is what a peer keeps its leases in.
type place int

const (
	onPostgres place = iota
	onSQLite
	onEtcd
	onNATS
	onMySQL
)

// peers are in the order of the tables' rows.
var peers = []peer{
	floorPeer,
	floorAsyncPeer,
	tenurePeer,
	tenurePollPeer,
	tenureSQLitePeer,
	pglockPeer,
	pglockPgxPeer,
	clientGoPeer,
	advisoryPeer,
	etcdPeer,
	etcdHandPeer,
	tenureEtcdPeer,
	natsHandPeer,
	tenureNATSPeer,
	mysqlFloorPeer,
	getLockPeer,
	tenureMySQLPeer,
}
