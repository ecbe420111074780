package pgconns

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
)

// ClaimConns is the most connections that the claims of a process have.
const ClaimConns = 4

const (
	leaseConns       = 4           // at least this many may be open, or leases would wait for one that waits for a lock
	leaseLockTimeout = time.Second // of the leases' sessions, unless there is a pooler in between
	connectTimeout   = 5 * time.Second
)

var errClosed = fmt.Errorf("%w: Close was called", objects.ErrClosed)

// leases has the connections that only leases use, so that no renewal ever waits behind the
// application's queries. It opens them when needed.
//
// Their sessions begin with a lock_timeout and a preference for indexes, so that no statement needs to
// set these. A pooler, which shares its sessions among clients, refuses both; then each transaction
// sets its own lock_timeout.
//
// No connection is closed because it is old, or because it may be dead, until another
// one is open: the server may have no slot for a new one, and then the term would be
// lost. Instead, all connections are replaced at once.
type leases struct {
	config   *pgxpool.Config
	groups   bool          // writes may be grouped
	lifetime time.Duration // connections are replaced after it; 0 means never
	jitter   time.Duration // upper limit of a random addition to the lifetime

	closing context.Context // done when the pool is being closed
	cancel  context.CancelFunc
	open    sync.WaitGroup // sets of connections, and goroutines that open them

	mu        sync.Mutex
	current   *leaseSet // nil before the first use, and after close
	state     sessionState
	corrected map[string]string // settings of the role that new sessions change; replaced as a whole
	closed    bool
	replacing bool
	replaced  time.Time     // when the last replacement began
	suspected time.Time     // when the last replacement because of a missing answer began
	pause     time.Duration // least time from then to the next
}

// leaseSet is a set of connections that is replaced as a whole. Its fields are
// guarded by the mu of leases.
type leaseSet struct {
	*pgxpool.Pool
	due      time.Time // when the set should be replaced; zero means never
	answered time.Time // when a call was last answered
	users    int       // calls that use the set
	retired  bool      // the last call that uses it closes it
}

const (
	// replaceAtMost is the shortest time between two attempts to replace connections. Between attempts
	// because of a missing answer it doubles, up to replaceSlow, as long as they do not help: the server is
	// then slow, and each attempt makes it slower.
	replaceAtMost = time.Second
	replaceSlow   = 8 * time.Second

	// replaceAgain is the pause after an attempt to replace old connections failed.
	replaceAgain = 10 * time.Second

	// leastIdle is the shortest time for which an idle connection is kept. A lease that
	// is renewed less often has a TTL that leaves it time to wait for a new one.
	leastIdle = 30 * time.Minute

	idleSessionTimeout = "idle_session_timeout"
	synchronousCommit  = "synchronous_commit"
)

type sessionState uint8

const (
	sessionUnknown sessionState = iota
	sessionOurs
	sessionPooled
)

// newLeases adopts the settings of another pool, including its hooks except ShouldPing and
// BuildContextWatcherHandler.
func newLeases(config *pgxpool.Config, most int32) *leases {
	l := &leases{config: config, lifetime: config.MaxConnLifetime, jitter: config.MaxConnLifetimeJitter}
	l.closing, l.cancel = context.WithCancel(context.Background())
	// A hook may prepare a connection for the context of one call. Unless statements are
	// prepared, a group of them is too large to arrive in one piece.
	//lint:ignore SA1019 the caller may still use this one
	l.groups = config.BeforeAcquire == nil && config.PrepareConn == nil &&
		config.ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
	config.MaxConns = most
	config.MinConns, config.MinIdleConns = 0, 0
	config.MaxConnLifetime = 0 // a pool closes a connection before it opens the next
	config.MaxConnIdleTime = max(config.MaxConnIdleTime, leastIdle)
	// The pool's health check takes all idle connections for an instant, in which a call
	// would have to open a new one.
	config.HealthCheckPeriod = max(config.HealthCheckPeriod, leastIdle)
	// Unless the socket shows that the connection is dead, a ping is not worth a round trip: a failed
	// call is retried in any case.
	config.ShouldPing = func(_ context.Context, params pgxpool.ShouldPingParams) bool {
		return params.IdleDuration > time.Second && !IsQuiet(params.Conn.PgConn().Conn())
	}
	config.PingTimeout = cmp.Or(config.PingTimeout, time.Second)
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = connectTimeout
	}
	patiently(config, l.closing)
	const setting = "lock_timeout"
	if config.ConnConfig.RuntimeParams[setting] != "" { // the caller's own
		l.state = sessionPooled
		return l
	}
	before := config.BeforeConnect
	config.BeforeConnect = func(ctx context.Context, conn *pgx.ConnConfig) error {
		state, corrected := l.sessions()
		if state != sessionPooled {
			conn.RuntimeParams[setting] = fmt.Sprint(leaseLockTimeout.Milliseconds())
			// A plan made while the table had one page scans the whole table, and still
			// does when dead rows fill it. Not enable_seqscan=off: that would make a
			// trigger's necessary scan look so expensive that it is JIT-compiled, which
			// takes longer than a lease has.
			conn.RuntimeParams["random_page_cost"] = cmp.Or(conn.RuntimeParams["random_page_cost"], "0.1")
			maps.Copy(conn.RuntimeParams, corrected)
		}
		if before != nil {
			return before(ctx, conn)
		}
		return nil
	}
	return l
}

func (l *leases) sessions() (state sessionState, corrected map[string]string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state, l.corrected
}

// get returns the current set, and whether its sessions have a lock_timeout. The first call connects to find
// that out. The caller must return the set with put.
func (l *leases) get(ctx context.Context) (set *leaseSet, bounded bool, err error) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil, false, errClosed
	}
	if l.current == nil {
		l.current, err = l.openLocked(ctx)
		if err != nil {
			l.mu.Unlock()
			return nil, false, err
		}
	}
	set, state := l.current, l.state
	set.users++
	if !set.due.IsZero() && time.Now().After(set.due) {
		l.replaceLocked(ctx)
	}
	l.mu.Unlock()
	if state != sessionUnknown {
		return set, state == sessionOurs, nil
	}

	state, err = l.findOut(ctx, set)
	if err != nil {
		l.put(set)
		return nil, false, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = state
	return set, state == sessionOurs, nil
}

func (l *leases) put(set *leaseSet) {
	l.mu.Lock()
	set.users--
	over := set.retired && set.users == 0
	l.mu.Unlock()
	if over {
		l.end(set)
	}
}

func (l *leases) openLocked(ctx context.Context) (*leaseSet, error) {
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), l.config)
	if err != nil {
		return nil, err
	}
	l.open.Add(1)
	set := &leaseSet{Pool: pool}
	if l.lifetime > 0 {
		set.due = time.Now().Add(l.lifetime + rand.N(max(0, l.jitter)+1))
	}
	return set, nil
}

// retire closes a set as soon as no call uses it. Until then its idle connections stay open too, because a
// call may be about to take one, and the server may have no slot for another. A set is retired once.
func (l *leases) retire(set *leaseSet) {
	l.mu.Lock()
	set.retired = true
	over := set.users == 0
	l.mu.Unlock()
	if over {
		l.end(set)
	}
}

func (l *leases) end(set *leaseSet) {
	go func() {
		defer l.open.Done()
		set.Close()
	}()
}

// findOut determines what kind of sessions a set has. It connects if necessary.
func (l *leases) findOut(ctx context.Context, set *leaseSet) (state sessionState, err error) {
	conn, err := set.Acquire(ctx)
	if err == nil {
		defer conn.Release()
		state, err = l.ask(ctx, conn)
	}
	if RefusesSetting(err) {
		return sessionPooled, nil
	}
	return state, err
}

func (l *leases) ask(ctx context.Context, conn *pgxpool.Conn) (sessionState, error) {
	var lock, idle, commit string
	err := conn.QueryRow(ctx, "SELECT current_setting('lock_timeout'), coalesce(current_setting('"+idleSessionTimeout+"', true), '0'), current_setting('"+synchronousCommit+"')").
		Scan(&lock, &idle, &commit)
	if err != nil {
		return sessionUnknown, err
	}
	if lock != fmt.Sprintf("%ds", int(leaseLockTimeout.Seconds())) { // a pooler that does not pass the setting on
		return sessionPooled, nil
	}
	// Only later connections set these as they connect: servers before version 14 would refuse the first.
	correct := make(map[string]string)
	if idle != "0" { // the server would end the session between two renewals
		correct[idleSessionTimeout] = "0"
	}
	if commit == "off" || commit == "local" { // a crash or a failover could forget a lease that was granted
		correct[synchronousCommit] = "on"
	}
	for setting, value := range correct {
		if _, err := conn.Exec(ctx, "SET "+setting+" = "+value); err != nil {
			return sessionUnknown, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.Copy(correct, l.corrected) // with which this session may have begun
	l.corrected = correct
	return sessionOurs, nil
}

// replace opens a new set in the background because a call that began at began was not answered, unless
// another call of the set with this pool has been answered since. The old set stays in use until the new one
// is open, and for as long as the server has no slot for the new one.
func (l *leases) replace(ctx context.Context, pool *pgxpool.Pool, began time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	since := time.Since(l.suspected)
	if l.current == nil || l.current.Pool != pool || l.current.answered.After(began) || since < l.pause {
		return
	}
	if !l.replaceLocked(ctx) {
		return
	}
	l.suspected = time.Now()
	if since < 2*l.pause {
		l.pause = min(2*l.pause, replaceSlow)
	} else {
		l.pause = replaceAtMost
	}
}

// answered notes that a call of the set with this pool was answered.
func (l *leases) answered(pool *pgxpool.Pool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current != nil && l.current.Pool == pool {
		l.current.answered = time.Now()
	}
}

// replaceLocked reports whether it has begun to open a new set.
func (l *leases) replaceLocked(ctx context.Context) bool {
	if l.replacing || time.Since(l.replaced) < replaceAtMost {
		return false
	}
	next, err := l.openLocked(ctx)
	if err != nil {
		return false // can't happen: the same config worked before
	}
	l.replacing, l.replaced = true, time.Now()
	l.open.Go(func() {
		// The caller's hooks may need the values of a call's context.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.config.ConnConfig.ConnectTimeout)
		defer cancel()
		defer context.AfterFunc(l.closing, cancel)()
		l.retire(l.succeed(next, l.connect(ctx, next)))
	})
	return true
}

// connect opens the first connection of a new set. Its sessions may be of a different kind from the
// old ones, because a pooler may have been put in between.
func (l *leases) connect(ctx context.Context, set *leaseSet) error {
	if state, _ := l.sessions(); state != sessionPooled {
		state, err := l.findOut(ctx, set)
		if err != nil {
			return err
		}
		l.mu.Lock()
		l.state = state
		l.mu.Unlock()
	}
	return set.Ping(ctx) // connects without the setting if that was refused
}

// succeed makes a new set the current one, unless opening it failed with err, and
// returns the set to close: the previous one, or next if it can't be used.
func (l *leases) succeed(next *leaseSet, err error) (last *leaseSet) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.replacing = false
	last = l.current
	if last == nil || err != nil { // closed, or no slot
		if again := time.Now().Add(replaceAgain); last != nil && !last.due.IsZero() && last.due.Before(again) {
			last.due = again
		}
		return next
	}
	l.current = next
	return last
}

// forget makes the next call determine again what kind of sessions these are, unless they are known to be
// a pooler's.
func (l *leases) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == sessionOurs {
		l.state = sessionUnknown
	}
}

// close closes all connections and waits until they are closed.
func (l *leases) close() {
	l.mu.Lock()
	set := l.current
	l.current, l.closed = nil, true
	l.mu.Unlock()
	l.cancel()
	if set != nil {
		l.retire(set)
	}
	l.open.Wait()
}
