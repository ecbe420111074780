package testkit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// HistoryPairs is the number of leases of a [History]. Each guards an object.
const HistoryPairs = 4

const (
	longest = 700 * time.Millisecond // that a call may take
	ttl     = 500 * time.Millisecond // of the leases; none is ever renewed
)

// Operation is a call with its times since the history began. An unanswered write is answered at
// Never.
type Operation struct {
	Caller         int
	Call           HistoryCall
	Sent, Answered time.Duration
}

// Never is the time of an answer that never came.
const Never = time.Duration(math.MaxInt64)

// History is what some callers have sent to their stores, and the answers. [HistoryStep] tells a
// linearizability checker which histories are possible. The checker itself belongs to the tests, so
// that the library's module does not require one.
type History struct {
	began     time.Time
	mu        sync.Mutex
	histories [HistoryPairs][]Operation
	changes   int
}

// NewHistory returns an empty history, whose time begins now.
func NewHistory() *History { return &History{began: time.Now()} }

// Histories returns the history of each pair.
func (l *History) Histories() [HistoryPairs][]Operation {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.histories
}

// Tell logs how many calls each history has, and what became of the calls.
func (l *History) Tell(t testing.TB) {
	t.Helper()
	for pair, history := range l.Histories() {
		unknown, fenced, lost := 0, 0, 0
		for _, op := range history {
			switch {
			case op.Call.Unknown():
				unknown++
			case errors.Is(op.Call.Err, tenure.ErrLost):
				lost++
			case op.Call.Fence != 0 && op.Call.Err == nil:
				fenced++
			}
		}
		t.Logf("pair %d: %d calls, %d of them without an answer; %d fenced writes, and %d refused", pair, len(history), unknown, fenced, lost)
	}
}

// Changes returns how many writes have succeeded.
func (l *History) Changes() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changes
}

func (l *History) note(pair int, op Operation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if op.Call.Unknown() {
		if op.Call.Do == "get" {
			return
		}
		op.Answered = Never
	}
	if op.Call.Err == nil && op.Call.Do != "get" {
		l.changes++
	}
	l.histories[pair] = append(l.histories[pair], op)
}

// Use makes random calls of a store, as one of the callers, until the context is done.
func (l *History) Use(ctx context.Context, caller int, store FencingStore) {
	var all [HistoryPairs]*client
	for i := range all {
		all[i] = newClient(l, caller, i, store)
	}
	for ctx.Err() == nil {
		all[rand.N(HistoryPairs)].call()
		time.Sleep(rand.N(4 * time.Millisecond))
	}
}

// client is a caller of one pair. It writes the object both unfenced and, while it trusts its term,
// fenced.
type client struct {
	recorder
	store  FencingStore
	lease  *tenure.Lease
	term   *tenure.Term
	fenced tenure.Store
	known  tenure.Object
	writes int
}

func newClient(l *History, caller, pair int, store FencingStore) *client {
	c := &client{recorder: recorder{Store: store, log: l, caller: caller, pair: pair}, store: store}
	lease, err := tenure.NewLease(&c.recorder, tenure.LeaseConfig{
		Key: tenure.Key{Type: "lease", ID: fmt.Sprint(pair)}, Holder: fmt.Sprint("caller-", caller), TTL: ttl, Expiry: tenure.ExpiryObserved,
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		panic(err)
	}
	c.lease = lease
	return c
}

// call makes one call, or acquires or releases the lease.
func (c *client) call() {
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	key := tenure.Key{Type: "register", ID: fmt.Sprint(c.pair)}
	c.writes++
	obj := tenure.Object{Key: key, Payload: fmt.Append(nil, c.caller, ".", c.writes)}
	var store tenure.Store = &c.recorder
	if c.fenced != nil && rand.N(4) > 0 {
		store = c.fenced
	}
	var err error
	switch what := rand.N(20); {
	case what < 2 && c.term == nil:
		if c.term, err = c.lease.AcquireOrSteal(ctx); err == nil {
			fenced, err := c.store.Fence(c.term)
			if errors.Is(err, errors.ErrUnsupported) {
				return
			}
			if err != nil {
				panic(err)
			}
			on := c.recorder
			on.Store, on.fence = fenced, c.term.Token()
			c.fenced = &on
		}
	case what == 0:
		_ = c.lease.Release(ctx, c.term)
		c.term, c.fenced = nil, nil
	case what < 8 || c.known.Version == 0 && what < 12:
		c.known, _ = c.Get(ctx, key)
	case c.known.Version == 0:
		c.known, err = store.PutIf(ctx, obj, tenure.IfAbsent())
	case what < 18:
		c.known, err = store.PutIf(ctx, obj, tenure.IfVersion(c.known.Version))
	default:
		err = store.DeleteIf(ctx, key, tenure.IfVersion(c.known.Version))
		c.known = tenure.Object{}
	}
	if errors.Is(err, tenure.ErrLost) {
		c.term = nil
	}
}

// recorder records the calls of a store.
type recorder struct {
	tenure.Store
	log          *History
	caller, pair int
	fence        int64
}

func (r *recorder) Traits() tenure.Traits {
	traits := r.Store.Traits()
	traits.Clockless = true
	return traits
}

func (r *recorder) note(key tenure.Key, sent time.Duration, call HistoryCall) {
	answered := time.Since(r.log.began)
	call.Lease, call.Fence = key.Type == "lease", r.fence
	r.log.note(r.pair, Operation{Caller: r.caller, Call: call, Sent: sent, Answered: answered})
}

// VersionOf returns the version of a condition that is an [tenure.IfVersion], or 0.
func VersionOf(cond tenure.WriteCondition) int64 {
	var conflict *objects.Conflict
	if errors.As(cond.Check(tenure.Key{}, -1), &conflict) {
		return conflict.Wanted
	}
	return 0
}

func (r *recorder) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	sent := time.Since(r.log.began)
	obj, err := r.Store.Get(ctx, key)
	r.note(key, sent, HistoryCall{Do: "get", Err: err, Read: obj})
	return obj, err
}

func (r *recorder) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	call := HistoryCall{Do: "create", Value: string(obj.Payload)}
	if cond != tenure.IfAbsent() {
		call.Do, call.Version = "replace", VersionOf(cond)
	}
	sent := time.Since(r.log.began)
	call.Read, call.Err = r.Store.PutIf(ctx, obj, cond)
	r.note(obj.Key, sent, call)
	return call.Read, call.Err
}

func (r *recorder) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	sent := time.Since(r.log.began)
	err := r.Store.DeleteIf(ctx, key, cond)
	r.note(key, sent, HistoryCall{Do: "delete", Version: VersionOf(cond), Err: err})
	return err
}

// WithoutUnread returns a history without the puts that were not answered and whose value was never
// read. They may never have taken effect, and many of them make a checker slow.
func WithoutUnread(history []Operation) (traced []Operation) {
	read := make(map[string]bool)
	for _, op := range history {
		read[string(op.Call.Read.Payload)] = true
	}
	for _, op := range history {
		if !op.Call.Unknown() || op.Call.Do == "delete" || read[op.Call.Value] {
			traced = append(traced, op)
		}
	}
	return traced
}

// OnlyWrites returns a history without reads and refused calls. Only this part of it must be
// linearizable if the store's reads may be outdated.
func OnlyWrites(history []Operation) (written []Operation) {
	for _, op := range history {
		if op.Call.Do != "get" && (op.Call.Err == nil || op.Call.Unknown()) {
			written = append(written, op)
		}
	}
	return written
}
