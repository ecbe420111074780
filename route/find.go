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

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/pace"
)

var (
	errNoOwner = errors.New("the request was not run: no process answered for its key in time")
	errRun     = errors.New("the request was not run: its key could not be loaded")
	errBusy    = errors.New("the request was not run: too many wait")
)

// mostEntries is how many keys are remembered, unless more are in use.
const mostEntries = 100_000

// longestPause is the longest time before a request is sent again, and between two looks for owners.
const longestPause = 250 * time.Millisecond

// entry is what this process knows about a key.
type entry struct {
	call     *call         // of Serve that answers here; nil: none
	loading  bool          // Run was called, and has not called serve
	owner    *owner        // another process; nil: unknown
	token    int64         // the greatest of all answers and calls of Serve
	waiting  int           // requests
	changed  chan struct{} // closed and replaced when there is news for them
	failures int           // of Run
	pause    pace.Doubling // before Run is called again
	runAfter time.Time     // it may be called again
}

// owner is another process that has the right to a key.
type owner struct {
	to    string // its session or term
	url   *url.URL
	ttl   time.Duration
	heard time.Time // when it last lived; after a TTL its address may be another's
}

// entry returns what is known about a key. The caller holds mu.
func (rt *Route) entry(id string) *entry {
	if rt.entries[id] == nil {
		tries := 0
		for other, e := range rt.entries { // forget any one that is not in use
			if tries++; len(rt.entries) < mostEntries || tries > 10 {
				break
			}
			if e.call == nil && !e.loading && e.waiting == 0 {
				delete(rt.entries, other)
				break
			}
		}
		rt.entries[id] = &entry{changed: make(chan struct{})}
	}
	return rt.entries[id]
}

// news wakes the requests that wait. The caller holds mu.
func (e *entry) news() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// learn notes the token of an answer or of a call of Serve. The caller holds mu.
func (e *entry) learn(to string, token int64) {
	if token > e.token {
		if e.token = token; e.owner != nil && e.owner.to != to {
			e.owner = nil
		}
	}
}

// locate returns where a request is answered: by a call of Serve or by another process. It waits until there is such a
// place. A request that was forwarded is answered here or nowhere, and waits only while Run loads its key.
func (rt *Route) locate(ctx context.Context, id string, isHop bool) (*call, *owner, error) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if isHop && rt.entries[id] == nil { // strangers may ask for endless keys
		return nil, nil, errNoOwner
	}
	e := rt.entry(id)
	for failures := e.failures; ; {
		switch {
		case e.call != nil && e.call.token >= e.token: // below it, the key was moved
			return e.call, nil, nil
		case isHop && !e.loading, ctx.Err() != nil:
			return nil, nil, errNoOwner
		case !isHop && e.owner != nil && time.Since(e.owner.heard) < e.owner.ttl:
			return nil, e.owner, nil
		case e.failures != failures:
			return nil, nil, errRun
		case rt.waiting >= rt.cfg.MaxWaiting:
			return nil, nil, errBusy
		}
		e.waiting++
		rt.waiting++
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

// search looks for the owners of all keys for which requests wait, again and again until none waits.
func (rt *Route) search() {
	var freed <-chan struct{}
	if rt.keys != nil {
		hints := rt.keys.Watch() // which also has expired sessions removed
		defer hints.Stop()
		freed = hints.C()
	}
	var spurious pace.Limiter
	for pause := 5 * time.Millisecond; ; {
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
		case <-rt.kick:
			pause = 5 * time.Millisecond
		case <-timer.C:
			pause = min(2*pause, longestPause)
		}
		timer.Stop()
	}
}

// look looks for the owners of keys, and claims those that are free. It reports whether it has found any place.
func (rt *Route) look(ids []string) (found bool) {
	ctx, cancel := context.WithTimeout(context.Background(), rt.cfg.MaxWait)
	defer cancel()
	owners, err := rt.find(ctx, ids...)
	if err != nil {
		rt.log.Log(rt.cfg.Logger, slog.LevelWarn, "route: failed to find the owners of keys; retrying", err)
	}
	if err != nil && owners == nil {
		return false
	}
	mayClaim := rt.cfg.Run != nil && rt.keys.Session().Valid()
	var free []string
	rt.mu.Lock()
	for _, id := range ids {
		e := rt.entry(id)
		holding, owned := owners[id]
		at, noAddress := address(holding.Labels[rt.cfg.Label])
		if owned || err == nil { // otherwise its owner's record may be one that can't be read
			e.owner = nil
		}
		switch {
		case !owned:
			if mayClaim && e.call == nil && !e.loading && !time.Now().Before(e.runAfter) {
				free = append(free, id)
			}
		case e.call != nil && e.call.to == rt.owner(holding): // whatever token a stranger has made up
			e.token, found = e.call.token, true
			e.news()
		case noAddress != nil:
			rt.log.Log(rt.cfg.Logger, slog.LevelWarn, "route: the owner of a key has no label with its address", noAddress, "holder", holding.Holder, "label", rt.cfg.Label)
		case at.Host != rt.own.Host: // this process is never dialled: Serve tells the requests that wait
			e.owner, found = &owner{rt.owner(holding), at, holding.TTL, time.Now()}, true
			e.news()
		}
	}
	rt.mu.Unlock()
	if len(free) > 0 {
		claimed := make(chan bool, 1)
		rt.busy.Go(func() { claimed <- rt.claim(free) })
		select {
		case got := <-claimed:
			found = found || got
		case <-time.After(longestPause): // it may wait for a session, and owners can be found without one
		}
	}
	return found
}

// claim claims keys and calls Run for each that it gets. It reports whether it has got any.
func (rt *Route) claim(ids []string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), rt.cfg.MaxWait)
	defer cancel()
	got, err := rt.keys.TryClaim(ctx, ids...)
	if err != nil {
		rt.log.Log(rt.cfg.Logger, slog.LevelWarn, "route: failed to claim keys; retrying", err)
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	for _, c := range got {
		rt.load(c)
	}
	return len(got) > 0
}

// load calls Run for a key that this process has claimed. The caller holds mu.
func (rt *Route) load(c claims.Claim) {
	e := rt.entry(c.Key.ID)
	e.loading = true
	rt.busy.Go(func() {
		failed := false
		err := rt.keys.Do(context.Background(), c, func(ctx context.Context) error {
			var served atomic.Bool
			err := rt.cfg.Run(ctx, c, func(h http.Handler) error {
				err := rt.Serve(ctx, h)
				served.Store(err == nil)
				return err
			})
			failed = !served.Load() && ctx.Err() == nil // when its right ends, it may return
			return err
		})
		if err != nil {
			rt.cfg.Logger.Warn("route: the func of a key has failed", "key", c.String(), "error", err)
		}
		rt.mu.Lock()
		defer rt.mu.Unlock()
		e.loading = false
		if failed {
			e.failures++
			e.runAfter = time.Now().Add(e.pause.Next(time.Since(e.runAfter), 100*time.Millisecond, 30*time.Second))
		}
		e.news()
		rt.wake() // the key is free
	})
}
