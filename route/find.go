package route

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/pace"
)

var (
	errNoOwner = errors.New("the request was not run: no process answered for its key in time")
	errRun     = errors.New("the request was not run: its key could not be loaded")
	errTwin    = errors.New("two processes have one address")
	errBusy    = errors.New("the request was not run: too many wait")
)

// mostEntries limits how many keys are remembered that are not in use.
const mostEntries = 100_000

// The pause between two looks for owners doubles from shortestPause to longestPause.
const (
	shortestPause = 5 * time.Millisecond
	longestPause  = 250 * time.Millisecond
)

// entry has what this process knows about a key.
type entry struct {
	call     *call  // the call of Serve that answers here; nil: there is none
	loading  bool   // this process claims the key, or has called Run, which has not called serve
	owner    *owner // another process; nil: unknown
	twin     twin
	failed   string        // the session or term that was asked last and did not answer
	askPause pace.Doubling // before it is asked again
	askAfter time.Time     // when it may be asked again
	token    int64         // the greatest token of all answers and calls of Serve
	usage
	changed  chan struct{} // closed and replaced when there is news for them
	failures int           // number of failures of Run
	pause    pace.Doubling // before Run is called again
	runAfter time.Time     // when Run may be called again
}

// usage is how many requests of a key, or of all keys, take room in this process.
type usage struct {
	waiting int // for an owner
	sent    int // and have no answer yet
	bodies  int // are being read, and are kept or forwarded
}

// take counts a request under a limit. It reports whether there is room. A key must leave as much as it takes, so that
// however many keys take what they can get, there is room for one more. The caller holds mu.
func (rt *Route) take(ofKey, ofAll *int) bool {
	left := rt.cfg.MaxWaiting - *ofAll
	if left <= 0 || rt.keys != nil && *ofKey >= left { // a lease has no other key
		return false
	}
	*ofKey++
	*ofAll++
	return true
}

// twin is an owner with the address of this process, as it was first seen.
type twin struct {
	to      string
	version int64 // of its record
}

// owner is another process that owns a key.
type owner struct {
	to    string // its session or term
	url   *url.URL
	ttl   time.Duration
	heard time.Time // when it was last known to live; a TTL later, another process may have its address
}

// entry returns the entry of a key, which it makes if there is none. The caller holds mu.
func (rt *Route) entry(id string) *entry {
	if rt.entries[id] == nil {
		tries := 0
		for other, e := range rt.entries { // delete any entry that is not in use
			if tries++; len(rt.entries) < mostEntries || tries > 10 {
				break
			}
			if e.call == nil && !e.loading && e.usage == (usage{}) {
				delete(rt.entries, other)
				break
			}
		}
		rt.entries[id] = &entry{changed: make(chan struct{})}
	}
	return rt.entries[id]
}

// news wakes the requests that wait for the key. The caller holds mu.
func (e *entry) news() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// learn records the token of an answer or of a call of Serve. The caller holds mu.
func (e *entry) learn(to string, token int64) {
	if token > e.token {
		if e.token = token; e.owner != nil && e.owner.to != to {
			e.owner = nil
		}
	}
}

// locate returns the call of Serve or the other process that answers a request. It waits until there is one. A forwarded
// request is answered here or refused; it waits only while this process is about to serve its key.
func (rt *Route) locate(ctx context.Context, id string, isHop bool) (*call, *owner, error) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if isHop && rt.entries[id] == nil { // no entry for each key that a stranger makes up
		return nil, nil, errNoOwner
	}
	e := rt.entry(id)
	for failures := e.failures; ; {
		switch {
		case e.call != nil && e.call.admits() && e.call.token >= e.token: // if e.token is greater, the key has moved
			return e.call, nil, nil
		case isHop && !e.loading, ctx.Err() != nil:
			return nil, nil, errNoOwner
		case !isHop && e.owner != nil && time.Since(e.owner.heard) < e.owner.ttl:
			return nil, e.owner, nil
		case e.failures != failures:
			return nil, nil, errRun
		case !rt.take(&e.waiting, &rt.waiting):
			return nil, nil, errBusy
		}
		if !isHop {
			if len(rt.wanted) == 0 {
				rt.busy.Go(rt.search)
			} else if rt.wanted[id] != e {
				rt.wake()
			}
			rt.wanted[id] = e
		}
		changed := e.changed
		rt.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		rt.mu.Lock()
		e.waiting--
		rt.waiting--
	}
}

// wake makes the search look at once.
func (rt *Route) wake() {
	select {
	case rt.kick <- struct{}{}:
	default:
	}
}

// search looks for the owners of all keys for which requests wait, until none waits.
func (rt *Route) search() {
	var freed <-chan struct{}
	if rt.keys != nil {
		hints := rt.keys.Watch() // meanwhile the session also removes expired sessions
		defer hints.Stop()
		freed = hints.C()
	}
	var spurious pace.Limiter
	for pause := shortestPause; ; {
		rt.mu.Lock()
		maps.DeleteFunc(rt.wanted, func(_ string, e *entry) bool { return e.waiting == 0 })
		ids := slices.Collect(maps.Keys(rt.wanted))
		rt.mu.Unlock()
		if len(ids) == 0 {
			return
		}
		found := rt.look(ids)
		pace.Sleep(context.Background(), spurious.IgnoreFor(!found, 10*time.Millisecond))
		timer := time.NewTimer(pace.Jitter(pause))
		select {
		case <-freed:
			pause = shortestPause
		case <-rt.kick: // the new key costs one look, and not one per short pause
		case <-timer.C:
			pause = min(2*pause, longestPause)
		}
		timer.Stop()
	}
}

// look looks for the owners of keys, and claims free keys. It reports whether it found an owner.
func (rt *Route) look(ids []string) (found bool) {
	free, found := rt.findOwners(ids)
	if len(free) == 0 {
		return found
	}
	rt.mu.Lock()
	for _, id := range free {
		rt.entry(id).loading = true // so that a request from a process that already knows of the claim waits
	}
	rt.mu.Unlock()
	claimed := make(chan []string, 1)
	rt.busy.Go(func() { claimed <- rt.claim(free) })
	select {
	case left := <-claimed: // other processes were faster, and can be found now
		if len(left) > 0 {
			_, more := rt.findOwners(left)
			found = found || more
		}
		return found || len(left) < len(free)
	case <-time.After(longestPause): // claiming may wait for a session, and finding owners must not
		return found
	}
}

// findOwners looks for the owners of keys, and returns the keys to claim. An owner that was asked last and did not answer is
// asked again only after a pause: it may be about to free the key.
func (rt *Route) findOwners(ids []string) (free []string, found bool) {
	ctx, cancel := context.WithTimeout(context.Background(), rt.cfg.MaxWait)
	defer cancel()
	owners, err := rt.find(ctx, ids...)
	if err != nil {
		rt.log.Log(rt.cfg.Logger, slog.LevelWarn, "route: failed to find the owners of keys; retrying", err)
	}
	if err != nil && owners == nil {
		return nil, false
	}
	mayClaim := rt.cfg.Run != nil && rt.keys.Session().Valid()
	rt.mu.Lock()
	defer rt.mu.Unlock()
	for _, id := range ids {
		e := rt.entry(id)
		holding, owned := owners[id]
		to := rt.owner(holding)
		at, noAddress := address(holding.Labels[addressLabel])
		if owned || err == nil { // otherwise the owner's record may be unreadable
			e.owner = nil
		}
		switch {
		case !owned:
			if mayClaim && e.call == nil && !e.loading && !time.Now().Before(e.runAfter) {
				free = append(free, id)
			}
		case e.call != nil && e.call.to == to: // even if a stranger has sent us a greater token
			e.token, found = e.call.token, true
			e.news()
		case noAddress != nil:
			rt.log.Log(rt.cfg.Logger, slog.LevelWarn, "route: the owner of a key has no label with its address", noAddress, "holder", holding.Holder, "label", addressLabel)
		case at.Host == rt.own.Host: // this process never dials itself: Serve wakes the waiting requests
			if rt.isTwin(e, holding) {
				rt.log.Log(rt.cfg.Logger, slog.LevelWarn, "route: the owner of a key has the same address as this process, so no request reaches it: give each process a label of its own", errTwin, "holder", holding.Holder, "label", addressLabel)
			}
		case e.failed != to || !time.Now().Before(e.askAfter):
			found = found || e.failed != to
			e.owner = &owner{to, at, holding.TTL, time.Now()}
			e.news()
		}
	}
	return free, found
}

// isTwin reports whether the owner of a key is another process, and lives. The record of a process that has crashed and was
// started again with the same address is not renewed. The caller holds mu.
func (rt *Route) isTwin(e *entry, h tenure.Holding) bool {
	to := rt.owner(h)
	if rt.isMine(h) {
		return false
	}
	before := e.twin
	if before.to != to {
		before = twin{to, h.Version}
		e.twin = before
	}
	return before.version != h.Version
}

// claim claims keys, and calls Run for each one that it gets. It returns the others.
func (rt *Route) claim(ids []string) (left []string) {
	ctx, cancel := context.WithTimeout(context.Background(), rt.cfg.MaxWait)
	defer cancel()
	got, err := rt.keys.TryClaim(ctx, ids...)
	if err != nil {
		rt.log.Log(rt.cfg.Logger, slog.LevelWarn, "route: failed to claim keys; retrying", err)
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	ours := make(map[string]bool)
	for _, c := range got {
		ours[c.Key.ID] = true
		rt.load(c)
	}
	for _, id := range ids {
		if e := rt.entry(id); !ours[id] {
			e.loading = false
			e.news()
			left = append(left, id)
		}
	}
	return left
}

// load calls Run for a key that this process has claimed. The caller holds mu.
func (rt *Route) load(c claims.Claim) {
	e := rt.entry(c.Key.ID)
	e.loading = true
	rt.busy.Go(func() {
		failed := false
		defer func() { // also if Run ends by runtime.Goexit
			rt.mu.Lock()
			defer rt.mu.Unlock()
			e.loading = false
			if failed {
				e.failures++
				e.runAfter = time.Now().Add(e.pause.Next(time.Since(e.runAfter), 100*time.Millisecond, 30*time.Second))
			}
			e.news()
			rt.wake() // because the key is free
		}()
		err := rt.keys.Do(context.Background(), c, func(ctx context.Context) error {
			var served atomic.Bool
			failed = true
			err := rt.cfg.Run(ctx, c, func(h http.Handler) error {
				err := rt.Serve(ctx, h)
				served.Store(err == nil)
				return err
			})
			failed = !served.Load() && ctx.Err() == nil // if the right has ended, it was told to return
			return err
		})
		if err != nil {
			rt.cfg.Logger.Warn("route: the func of a key has failed", "key", c.String(), "error", err)
		}
	})
}
