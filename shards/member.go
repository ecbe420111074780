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
	"github.com/tenurelib/tenure/internal/health"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

// DefaultSettle is the default of [Config.Settle].
const DefaultSettle = time.Second

// Config configures a [Member]. Kind, Work, and either Count or IDs must be set, and all
// processes must agree on Kind, Count, IDs and Settle.
type Config struct {
	Kind  string   // of the claims: the name of the jobs
	Count int      // how many shards there are; their IDs are "0", "1", …
	IDs   []string // their IDs, instead of a Count

	// Work works for one shard until ctx is done, and must return then: no other process begins
	// before. [context.Cause] tells why: [tenure.ErrResigned] if the shard moves,
	// [tenure.ErrShutdown] if this process stops, [tenure.ErrUnhealthy] if its Check fails, and
	// [tenure.ErrLost] or [tenure.ErrDeadline] if its session was lost. [ClaimFromContext]
	// returns the claim, by which writes can be fenced.
	//
	// If Work returns earlier, with an error or without, it is called again, after a pause that
	// grows from 100 ms to 30 s. It may be called for many shards at the same time.
	Work func(ctx context.Context, id string) error

	// Settle is how long a process has to be there before shards move to it. Processes that
	// start within it divide the shards among them without moving any; a process that crashes
	// within it has moved none. Default [DefaultSettle].
	Settle time.Duration

	// Check, if set, returns nil if this process is fit to work. It is called before the
	// process takes part, and once per RenewInterval of its session; it must return when its
	// context ends, after half of that. While it fails, this process does not begin to take
	// part, and it gives up its shards as soon as another process that counts is there. The
	// last one works on: to work badly is better than not at all.
	Check func(ctx context.Context) error

	Logger *slog.Logger // default that of the session
}

// Member is this process's part in a set of shards. All methods are safe for concurrent use.
type Member struct {
	session *claims.Session
	cfg     Config
	ids     []string
	sorted  []string     // the same
	keys    *claims.Keys // one for each shard
	members *claims.Keys // one for each process that takes part
	paces   claims.SessionConfig

	started atomic.Bool
	kick    chan struct{} // receives when Run's goroutine has to look again
	funcs   sync.WaitGroup

	mu      sync.Mutex // guards the fields below; never held across I/O
	view    view       // of the last look; mine and running are not kept up to date
	me      claims.Claim
	shards  map[string]*shard // those for which a goroutine runs
	claimed int               // how many were claimed so far
	givenUp int               // how many of these were freed for others
	over    error             // why no func begins any more; nil: they may
	sick    error             // why this process is not fit to work
}

// memberSuffix is appended to the kind of the shards to get the kind of the members.
const memberSuffix = "/member"

// New returns this process's part in a set of shards. A session has at most one for each kind.
// It does no I/O. An [tenure.ErrInvalid] names what is wrong with the config.
func New(s *claims.Session, cfg Config) (*Member, error) {
	m, err := newMember(s, cfg)
	if err != nil {
		return nil, fmt.Errorf("shards: new: %w", err)
	}
	return m, nil
}

func newMember(s *claims.Session, cfg Config) (*Member, error) {
	var errs []error
	refuse := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf("%w: "+format, append([]any{tenure.ErrInvalid}, args...)...))
		}
	}
	refuse(s == nil, "session is nil")
	refuse(cfg.Kind == "", "Kind is empty")
	refuse(cfg.Work == nil, "Work is nil")
	refuse(cfg.Settle < 0, "Settle %v is negative", cfg.Settle)
	refuse(cfg.Count < 0, "Count %d is negative", cfg.Count)
	refuse(cfg.Count == 0 && len(cfg.IDs) == 0, "there are no shards: set Count or IDs")
	refuse(cfg.Count != 0 && len(cfg.IDs) != 0, "both Count and IDs are set")
	for _, id := range cfg.IDs {
		refuse(id == "", "an ID is empty")
		if err := objects.ValidText("ID", id); err != nil {
			errs = append(errs, err)
		}
	}
	ids := slices.Sorted(slices.Values(cfg.IDs))
	refuse(len(slices.Compact(slices.Clone(ids))) < len(ids), "an ID is given twice")
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	for i := range cfg.Count {
		ids = append(ids, strconv.Itoa(i))
	}
	if err := s.CheckKeys(cfg.Kind, ids...); err != nil {
		return nil, err
	}
	keys, err := claims.NewKeysOf(s, cfg.Kind, cfg.Kind+memberSuffix)
	if err != nil {
		return nil, err
	}
	paces := s.Config()
	cfg.Settle = cmp.Or(cfg.Settle, DefaultSettle)
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, paces.Logger))
	return &Member{
		session: s, cfg: cfg, ids: ids, sorted: slices.Sorted(slices.Values(ids)), keys: keys[0], members: keys[1], paces: paces,
		kick: make(chan struct{}, 1), shards: make(map[string]*shard), view: view{shards: len(ids), rank: -1},
	}, nil
}

// Run takes part until ctx is done: it claims this process's shards and runs the funcs for
// them. Then it stops them, and returns nil when the last has returned and its shard is free.
// Errors of the store do not end it, except [tenure.ErrSetup]; [claims.ErrClosed] says that the
// session ended before. It may be called once, and needs the session's Run beside it.
func (m *Member) Run(ctx context.Context) error {
	if !m.started.CompareAndSwap(false, true) {
		return fmt.Errorf("shards: run %s: %w: they have been run before", m.cfg.Kind, tenure.ErrInvalid)
	}
	defer report.Flush(m.cfg.Logger)
	defer m.funcs.Wait()
	defer m.stopAll(tenure.ErrShutdown)
	defer context.AfterFunc(ctx, func() { m.stopAll(tenure.ErrShutdown) })() // before the membership is given up
	if m.cfg.Check != nil {
		checking, cancel := context.WithCancel(ctx)
		defer cancel()
		m.mu.Lock()
		m.sick = errors.New("Check was not called yet")
		m.mu.Unlock()
		m.funcs.Go(func() { m.check(checking) })
	}
	var retries logtext.Retries
	for failures := 0; ctx.Err() == nil; failures++ {
		joined, err := m.join(ctx)
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, claims.ErrClosed), errors.Is(err, tenure.ErrSetup):
			return fmt.Errorf("shards: run %s: %w", m.cfg.Kind, err)
		case err != nil:
			retries.Log(m.cfg.Logger, slog.LevelWarn, "shards: cannot take part, trying again", err, "kind", m.cfg.Kind)
		case joined:
			failures = 0
			retries.Reset()
		}
		pace.Sleep(ctx, pace.Retry(m.paces.RenewInterval, longestRetryPause, failures))
	}
	return nil
}

// longestRetryPause limits the pause between two tries of anything that has failed.
const longestRetryPause = 5 * time.Second

// join takes part under the present session, until that is lost, ctx is done, or this process
// is not fit to work. A member has a key of its own each time, so its token tells when it has
// joined.
func (m *Member) join(ctx context.Context) (joined bool, err error) {
	for {
		stays, err := m.staysAway(ctx)
		if err != nil {
			return false, err
		}
		if !stays {
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
	for _, me := range got { // also beside an error
		err := m.members.Do(ctx, me, func(ctx context.Context) error {
			m.funcs.Go(m.members.Wake) // which may hang
			m.enter(me)
			defer m.enter(claims.Claim{})
			return m.live(ctx, me)
		})
		if errors.Is(err, tenure.ErrUnhealthy) { // now that the others no longer leave it any
			m.stopAll(err)
		}
		joined = true
	}
	return joined, err
}

// staysAway reports whether this process must not take part yet: it is not fit to work, or a func
// of a session that was lost has not returned, and another process is there. That one may work for
// the shard meanwhile, and would give it up for this process, which cannot.
func (m *Member) staysAway(ctx context.Context) (bool, error) {
	if m.unfit() != nil {
		return true, nil
	}
	former := m.former()
	if len(former) == 0 {
		return false, nil
	}
	listing, err := m.session.List(ctx, m.cfg.Kind+memberSuffix)
	return slices.ContainsFunc(listing.Claims, func(c claims.Claim) bool { return !former[c.Session] }), err
}

// enter notes as which member this process takes part.
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

// live looks who is there, stops and claims shards, and waits for a reason to look again, as
// long as this process is a member.
func (m *Member) live(ctx context.Context, me claims.Claim) error {
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
			retries.Log(m.cfg.Logger, slog.LevelWarn, "shards: trying again", err, "kind", m.cfg.Kind)
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
			flood /= 10 // while shards move, they have no owner
		} else {
			freed = nil // it does not matter what others free
		}
		ignored := min(spurious.IgnoreFor(woken && !did, flood), next)
		if !pace.Sleep(ctx, ignored) {
			return nil
		}
		timer := time.NewTimer(next - ignored)
		woken = false
		select {
		case <-ctx.Done(): // the others wait for the membership to end
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

// spreadMoves is the time in which members, one after another, stop what moves to one that
// counts by now.
const spreadMoves = 150 * time.Millisecond

// floodPace is how often hints are followed that lead to nothing, after the first few.
const floodPace = 100 * time.Millisecond

var errNoMember = errors.New("the row that makes this process a member is gone")

// sightings is what a member remembers from one look to the next.
type sightings struct {
	free    map[string]time.Time // since when shards have been free, as long as this member counts
	members []string             // the sessions of the last look
	tries   int                  // looks in a row after which a free shard could not be claimed
}

// look lists members and shards, and does what the rule says. It returns whether it had
// anything to do, and when to look again at the latest.
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
	var ages []time.Duration
	var has []int
	sessions := make([]string, 0, len(members))
	for _, c := range members {
		ages, has, sessions = append(ages, listing.Age(c)), append(has, owned.count[c.Session]), append(sessions, c.Session)
	}
	n, in := counted(ages, m.cfg.Settle)
	if n < len(members) {
		in += time.Millisecond
		if rank < n { // the others are ready by then, and have claimed what one has freed before the next frees more
			in += spreadMoves * time.Duration(rank+1) / time.Duration(n)
		}
		next = min(next, in)
	}
	v := m.update(newView(len(m.ids), has, n, rank))
	if sick := m.unfit(); sick != nil && (n > 1 || n == 1 && rank > 0) {
		return true, 0, fmt.Errorf("%w: %w", tenure.ErrUnhealthy, sick)
	}
	did = m.stopSurplus() > 0 || !slices.Equal(sessions, seen.members)
	if rank == 0 && slices.ContainsFunc(seen.members, func(s string) bool { return !slices.Contains(sessions, s) }) {
		defer func() { _ = m.members.Forget(ctx) }() // else their rows are deleted a day later; their shards come first
	}
	seen.members = sessions

	seen.note(m.ids, owned, me.Session, m.running(), v.counts(), now)
	// Each begins elsewhere in the list, so that those who look at the same moment do not claim
	// the same shards.
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
	} else { // others were faster, or have locked the rows
		next = min(next, 5*time.Millisecond<<min(seen.tries, 10))
	}
	return did || len(got) > 0, next, err
}

// owners are the sessions that own shards.
type owners struct {
	of    map[string]string
	count map[string]int
}

// sort returns the members of a listing by their age, and who owns what.
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
	return slices.DeleteFunc(members, func(c claims.Claim) bool { // it has two rows if an answer was lost
		defer func() { known[c.Session] = true }()
		return known[c.Session]
	}), owned
}

// note notes which shards are free: those that no other session owns, and for which no func runs
// in this process. A row may name this session all the same, if the answer to a claim was lost.
func (s *sightings) note(ids []string, owned owners, me string, runs map[string]bool, counts bool, now time.Time) {
	if s.free == nil || !counts {
		s.free = make(map[string]time.Time)
	}
	if !counts {
		return
	}
	for _, id := range ids {
		by, isOwned := owned.of[id]
		if isOwned && by != me || runs[id] {
			delete(s.free, id)
		} else if _, noted := s.free[id]; !noted {
			s.free[id] = now
		}
	}
}

// wanted returns which of the free shards a member claims, and when it may be more; 0: never.
func (s *sightings) wanted(ids []string, v view, begin int, now time.Time, settle time.Duration) (wanted []string, in time.Duration) {
	room, later := v.room()
	var free []string
	for _, id := range ids {
		if _, ok := s.free[id]; ok {
			free = append(free, id)
		}
	}
	free = slices.Concat(free[begin:], free[:begin])
	for _, id := range free {
		since := now.Sub(s.free[id])
		switch {
		case len(wanted) < room, len(wanted) < later && since >= settle:
			wanted = append(wanted, id)
		case len(wanted) < later && (in == 0 || settle-since < in):
			in = settle - since
		}
	}
	return wanted, in
}

// Owner returns who works for a shard: the holder of its session, with the labels, so that a
// request can be sent there. It returns [tenure.ErrNotFound] if nobody does at this moment. A
// process that has crashed is returned until its session has expired and was removed.
func (m *Member) Owner(ctx context.Context, id string) (tenure.Holding, error) {
	if _, found := slices.BinarySearch(m.sorted, id); !found {
		return tenure.Holding{}, fmt.Errorf("shards: owner of %q of %s: %w: there is no such shard", id, m.cfg.Kind, tenure.ErrInvalid)
	}
	return m.keys.Owner(ctx, id)
}

// unfit returns why this process is not fit to work.
func (m *Member) unfit() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sick
}

// check calls Check until ctx is done.
func (m *Member) check(ctx context.Context) {
	check := health.Check{Timeout: m.paces.RenewInterval / 2}
	for ctx.Err() == nil {
		answered, err := check.Ask(ctx, func(ctx context.Context) error { return logtext.Sound(m.cfg.Check(ctx)) })
		if !answered {
			err = errors.New("Check has not returned in time")
		}
		if ctx.Err() == nil {
			m.checked(err)
		}
		pace.Sleep(ctx, m.paces.RenewInterval)
	}
}

func (m *Member) checked(err error) {
	m.mu.Lock()
	was := m.sick
	m.sick = err
	m.mu.Unlock()
	switch {
	case err != nil && (was == nil || was.Error() != err.Error()):
		m.cfg.Logger.Warn("shards: Check fails", "kind", m.cfg.Kind, "error", err)
	case err == nil && was != nil:
		m.cfg.Logger.Info("shards: Check succeeds", "kind", m.cfg.Kind)
	}
	if (err == nil) != (was == nil) {
		m.wake()
	}
}

// wake makes Run's goroutine look again.
func (m *Member) wake() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}
