package shards

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

const defaultSettle = time.Second

// Config configures a [Member]. Kind, Work, and either Count or IDs must be set. All processes must agree
// on Kind, Count, IDs and Settle.
type Config struct {
	Kind  string   // of the claims: the name of the jobs
	Count int      // the number of shards; their IDs are "0", "1", …
	IDs   []string // the IDs of the shards, instead of a Count

	// Work does the work of one shard until ctx is done, and must then return: no other process begins before
	// it has. [context.Cause] says why: [tenure.ErrResigned] if the shard moves, [tenure.ErrShutdown] if this
	// process stops, [tenure.ErrUnhealthy] if its Check fails, and [tenure.ErrLost] or [tenure.ErrDeadline] if
	// its session was lost. [claims.ClaimFromContext] returns the claim, which can fence writes.
	//
	// If Work returns before ctx is done, with or without an error, or ends by [runtime.Goexit], it is called
	// again, after a pause that grows from 100 ms to 30 s. If it panics, the process panics, as by
	// [tenure.Coordinator.Run], once the shard is free. Work may run for many shards at the same time.
	Work func(ctx context.Context, id string) error

	// Settle is how long a process has to be present before shards move to it. Processes that start
	// within this time of each other divide the shards without moving any. A process that crashes
	// within this time has moved no shards. Default: 1 second.
	Settle time.Duration

	// Check, if set, returns nil if this process can work. It is called before the process takes part,
	// and then once per RenewInterval of its session. Its context ends after half of that interval, and
	// Check must return then. While Check fails, this process does not begin to take part, and gives up
	// its shards once another process that counts is present. The last process keeps working, because a
	// degraded member is better than none.
	Check func(ctx context.Context) error

	Logger *slog.Logger // default: that of the session
}

// Member is this process's part in a set of shards.
//
// All methods are safe for concurrent use.
type Member struct {
	session *claims.Session
	cfg     Config
	ids     []string
	sorted  []string     // the same, sorted
	keys    *claims.Keys // a key for each shard
	members *claims.Keys // a key for each process that takes part
	paces   claims.SessionConfig

	started atomic.Bool
	kick    chan struct{} // receives when Run's goroutine has to look again
	funcs   sync.WaitGroup

	mu       sync.Mutex // guards the fields below; never held across I/O
	view     view       // of the last look; current adds what has changed since
	me       claims.Claim
	shards   map[string]*shard // those for which a goroutine runs
	claimed  int               // how many shards were claimed so far
	givenUp  int               // how many of them were freed for other processes
	over     error             // why no func may begin any more, or nil
	checkErr error             // of the last call of Check: why this process must not work; nil: it may
}

// memberSuffix is appended to the kind of the shards to get the kind of the members.
const memberSuffix = "/member"

// New returns this process's part in a set of shards. A session has at most one Member for each kind. New
// does no I/O. A [tenure.ErrInvalid] names everything that is wrong with the config.
func New(s *claims.Session, cfg Config) (*Member, error) {
	m, err := newMember(s, cfg)
	if err != nil {
		return nil, fmt.Errorf("shards: new: %w", err)
	}
	return m, nil
}

func newMember(s *claims.Session, cfg Config) (*Member, error) {
	var problems objects.Problems
	problems.If(s == nil, "session is nil")
	problems.If(cfg.Kind == "", "Kind is empty")
	problems.If(cfg.Work == nil, "Work is nil")
	problems.Duration("Settle", cfg.Settle)
	problems.If(cfg.Count < 0, "Count %d is negative", cfg.Count)
	problems.If(cfg.Count == 0 && len(cfg.IDs) == 0, "there are no shards: set Count or IDs")
	problems.If(cfg.Count != 0 && len(cfg.IDs) != 0, "both Count and IDs are set")
	for _, id := range cfg.IDs {
		problems.If(id == "", "an ID is empty")
		problems.Add(objects.ValidText("ID", id))
	}
	ids := slices.Sorted(slices.Values(cfg.IDs))
	problems.If(len(slices.Compact(slices.Clone(ids))) < len(ids), "an ID is given twice")
	if err := problems.Err(); err != nil {
		return nil, err
	}
	for i := range cfg.Count {
		ids = append(ids, strconv.Itoa(i))
	}
	if err := s.CheckKeys(cfg.Kind, ids...); err != nil {
		return nil, err
	}
	// The members first: a set that is refused because of them must not keep its kind.
	members, err := claims.NewKeys(s, cfg.Kind+memberSuffix)
	if err != nil {
		return nil, err
	}
	keys, err := claims.NewKeys(s, cfg.Kind)
	if err != nil {
		return nil, err
	}
	paces := s.Config()
	cfg.Settle = cmp.Or(cfg.Settle, defaultSettle)
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, paces.Logger))
	return &Member{
		session: s, cfg: cfg, ids: ids, sorted: slices.Sorted(slices.Values(ids)), keys: keys, members: members, paces: paces,
		kick: make(chan struct{}, 1), shards: make(map[string]*shard), view: view{shards: len(ids), rank: -1},
	}, nil
}

// Run takes part until ctx is done: it claims this process's shards and calls Work for them. Then it tells
// these calls to return, and returns nil when the last of them has returned and its shard is free. Errors
// of the store do not end Run, except [tenure.ErrSetup]. If the session is closed before ctx is done, Run
// returns [claims.ErrClosed]. Run may be called once, and the session's Run must run beside it.
func (m *Member) Run(ctx context.Context) error {
	if !m.started.CompareAndSwap(false, true) {
		return fmt.Errorf("shards: run %s: %w: they have been run before", m.cfg.Kind, tenure.ErrInvalid)
	}
	defer report.Flush(m.cfg.Logger)
	defer m.funcs.Wait()
	defer m.stopAll(tenure.ErrShutdown)
	defer context.AfterFunc(ctx, func() { m.stopAll(tenure.ErrShutdown) })() // before the membership ends
	if m.cfg.Check != nil {
		checking, cancel := context.WithCancel(ctx)
		defer cancel()
		m.mu.Lock()
		m.checkErr = errors.New("Check was not called yet")
		m.mu.Unlock()
		m.funcs.Go(func() { m.check(checking) })
	}
	var retries logtext.Retries
	for failures := 0; ctx.Err() == nil; failures++ {
		joined, err := m.join(ctx)
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, objects.ErrDrained):
			failures = 0
		case errors.Is(err, claims.ErrClosed), errors.Is(err, tenure.ErrSetup):
			return fmt.Errorf("shards: run %s: %w", m.cfg.Kind, err)
		case err != nil:
			retries.Log(m.cfg.Logger, slog.LevelWarn, "shards: failed to take part; retrying", err, "kind", m.cfg.Kind)
		case joined:
			failures = 0
			retries.Reset()
		}
		pace.Sleep(ctx, pace.Retry(m.paces.RenewInterval, longestRetryPause, failures))
	}
	return nil
}

// longestRetryPause is the longest pause before a retry.
const longestRetryPause = 5 * time.Second

// join takes part under the present session until the session is lost, ctx is done, or this process gives up
// its shards because it is unhealthy. A member has a new key each time, so the key's token tells when the
// member joined.
func (m *Member) join(ctx context.Context) (joined bool, err error) {
	for {
		waits, err := m.mustWait(ctx)
		if err != nil {
			return false, err
		}
		if !waits {
			break
		}
		select {
		case <-m.kick:
		case <-time.After(m.paces.RenewInterval):
			if m.session.Status().Closing {
				return false, claims.ErrClosed
			}
		case <-ctx.Done():
			return false, nil
		}
	}
	got, err := m.members.TryClaim(ctx, uuid.NewString())
	for _, me := range got { // even together with an error
		err := m.members.Do(ctx, me, func(ctx context.Context) error {
			m.funcs.Go(m.members.Wake) // in a goroutine, because it may hang
			m.enter(me)
			defer m.enter(claims.Claim{})
			return m.takePart(ctx, me)
		})
		if errors.Is(err, tenure.ErrUnhealthy) { // now that the other members leave this one no shards
			m.stopAll(err)
		}
		joined = true
	}
	return joined, err
}

// mustWait reports whether this process must not take part yet. It must wait while it is unhealthy. It must
// also wait while a func of a lost session has not returned and another process is present: the other
// process may work for that func's shard, and would give it up for this process, which could not run it.
func (m *Member) mustWait(ctx context.Context) (bool, error) {
	if m.unhealthy() != nil {
		return true, nil
	}
	former := m.former()
	if len(former) == 0 {
		return false, nil
	}
	listing, err := m.session.List(ctx, m.cfg.Kind+memberSuffix)
	return slices.ContainsFunc(listing.Claims, func(c claims.Claim) bool { return !former[c.Session] }), err
}

// enter notes the claim under which this process is a member; a zero claim: it no longer is.
func (m *Member) enter(me claims.Claim) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.me = me
	if me.Session == "" {
		m.view = view{shards: len(m.ids), rank: -1}
	} else if errors.Is(m.over, tenure.ErrUnhealthy) {
		m.over = nil
	}
}

// takePart looks at members and shards, stops and claims shards, and waits for a reason to look again,
// while this process is a member.
func (m *Member) takePart(ctx context.Context, me claims.Claim) error {
	members, keys := m.members.Watch(), m.keys.Watch() // before the first look, so that no hint is missed
	defer members.Stop()
	defer keys.Stop()
	var seen sightings
	var spurious pace.Limiter
	var retries logtext.Retries
	for failures, woken := 0, false; ; {
		did, next, err := m.look(ctx, me, &seen)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, tenure.ErrUnhealthy), errors.Is(err, errNoMember):
			return err
		case err != nil:
			retries.Log(m.cfg.Logger, slog.LevelWarn, "shards: failed to look at members and shards; retrying", err, "kind", m.cfg.Kind)
			next = pace.Retry(m.paces.RenewInterval, longestRetryPause, failures)
			failures++
		default:
			failures = 0
			retries.Reset()
			if !members.Live() || !keys.Live() {
				next = min(next, pace.Jitter(m.paces.PollInterval))
			}
		}
		flood, freed := floodPace, keys.C()
		if m.wants() {
			flood /= 10 // shards that are moving have no owner, so this is urgent
		} else {
			freed = nil // what other members free does not matter
		}
		ignored := min(spurious.IgnoreFor(woken && !did, flood), next)
		if !pace.Sleep(ctx, ignored) {
			return nil
		}
		timer := time.NewTimer(next - ignored)
		woken = false
		select {
		case <-ctx.Done(): // without another look, because the others wait for the membership to end
			timer.Stop()
			return nil
		case <-timer.C:
		case <-m.kick:
		case <-members.C():
			woken = true
		case <-freed:
			woken = true
		}
		timer.Stop()
	}
}

// spreadMoves is the time over which members, one after another, stop the shards that move to a member that
// has begun to count.
const spreadMoves = 150 * time.Millisecond

// floodPace is the time between two looks when hints keep leading to nothing.
const floodPace = 100 * time.Millisecond

var errNoMember = errors.New("the row that makes this process a member is gone")

// look lists members and shards, and follows the rule. It returns whether there was anything to do, and the
// longest time until the next look.
func (m *Member) look(ctx context.Context, me claims.Claim, seen *sightings) (did bool, next time.Duration, err error) {
	listing, err := m.session.List(ctx, m.cfg.Kind, m.cfg.Kind+memberSuffix)
	if err != nil {
		return false, 0, err
	}
	now := time.Now()
	next = pace.Jitter(m.paces.TTL)
	members, owned := m.sort(listing)
	rank := slices.IndexFunc(members, func(c claims.Claim) bool { return c.Session == me.Session })
	if rank < 0 {
		return false, 0, errNoMember
	}
	if other := m.notConfigured(owned); other != "" && !seen.other {
		seen.other = true
		m.cfg.Logger.Warn("another member runs a shard that this one is not configured with: they may do the same work twice; give all members the same Count and IDs",
			"kind", m.cfg.Kind, "shard", other)
	}
	var ages []time.Duration
	var has []int
	sessions := make([]string, 0, len(members))
	for _, c := range members {
		ages, has, sessions = append(ages, listing.Age(c)), append(has, owned.count[c.Session]), append(sessions, c.Session)
	}
	n, in := counted(ages, m.cfg.Settle)
	if n < len(members) {
		in += time.Millisecond
		if rank < n { // one member after another, so that what one frees is claimed before the next frees more
			in += spreadMoves * time.Duration(rank+1) / time.Duration(n)
		}
		next = min(next, in)
	}
	v := m.update(newView(len(m.ids), has, n, rank))
	if err := m.unhealthy(); err != nil && (n > 1 || n == 1 && rank > 0) {
		return true, 0, fmt.Errorf("%w: %w", tenure.ErrUnhealthy, err)
	}
	did = m.stopSurplus() > 0 || !slices.Equal(sessions, seen.members)
	if rank == 0 && slices.ContainsFunc(seen.members, func(s string) bool { return !slices.Contains(sessions, s) }) {
		defer func() { _ = m.members.Forget(ctx) }() // otherwise their rows are deleted a day later; their shards come first
	}
	seen.members = sessions

	seen.note(m.ids, owned, me.Session, m.running(), v.counts(), now)
	// Each member begins at another place in the list, so that members that look at the same moment do
	// not claim the same shards.
	begin := 0
	if free := len(seen.free); free > 0 {
		for i, least := range shares(v.shards, has)[:rank] {
			begin += max(0, least-has[i])
		}
		begin %= free
	}
	wanted, in := seen.wanted(m.ids, v, begin, now, m.cfg.Settle)
	if in > 0 {
		next = min(next, in+time.Millisecond)
	}
	if _, later := v.room(); later > 0 {
		next = min(next, pace.Jitter(m.paces.PollInterval)) // a hint may have been lost
	}
	if len(wanted) == 0 {
		seen.tries = 0
		return did, next, nil
	}
	got, err := m.keys.TryClaim(ctx, wanted...)
	m.start(ctx, got)
	if seen.tries++; len(got) == len(wanted) {
		seen.tries = 0
	} else { // other members were faster, or have locked the rows
		next = min(next, 5*time.Millisecond<<min(seen.tries, 10))
	}
	return did || len(got) > 0, next, err
}

// sort returns the members of a listing, the oldest first, and which sessions own which shards.
func (m *Member) sort(listing claims.Listing) (members []claims.Claim, owned owners) {
	owned = owners{of: make(map[string]string, len(listing.Claims)), count: make(map[string]int)}
	for _, c := range listing.Claims {
		if c.Key.Type == m.cfg.Kind {
			owned.of[c.Key.ID] = c.Session
			owned.count[c.Session]++
		} else {
			members = append(members, c)
		}
	}
	slices.SortFunc(members, func(a, b claims.Claim) int {
		return cmp.Or(cmp.Compare(a.Token, b.Token), cmp.Compare(a.Key.ID, b.Key.ID))
	})
	known := make(map[string]bool, len(members))
	return slices.DeleteFunc(members, func(c claims.Claim) bool { // a process has two rows if an answer was lost
		defer func() { known[c.Session] = true }()
		return known[c.Session]
	}), owned
}

// notConfigured returns a shard that a session owns and that this member does not know; "" if there is none.
func (m *Member) notConfigured(owned owners) string {
	for id := range owned.of {
		if _, known := slices.BinarySearch(m.sorted, id); !known {
			return id
		}
	}
	return ""
}

// Owner returns the holder of the session that owns a shard, with its labels, so that a request can be sent
// there. If no session owns the shard at this moment, the error is [tenure.ErrNotFound]. A crashed process
// counts as the owner until its session has expired and been removed.
func (m *Member) Owner(ctx context.Context, id string) (tenure.Holding, error) {
	if _, found := slices.BinarySearch(m.sorted, id); !found {
		return tenure.Holding{}, fmt.Errorf("shards: owner of %q of %s: %w: there is no such shard", id, m.cfg.Kind, tenure.ErrInvalid)
	}
	return m.keys.Owner(ctx, id)
}

// Keys returns the claims of the shards, for package route and other readers. Only the Member may claim,
// release or detach them.
func (m *Member) Keys() *claims.Keys { return m.keys }

// wake makes Run's goroutine look again.
func (m *Member) wake() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}
