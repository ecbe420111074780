package tenure

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

// longestCall limits a call to the store, however long the TTL is, because a shutdown waits
// that long if the store hangs.
const longestCall = 10 * time.Second

const (
	// lookAtDrain is the longest time between two looks of [Drain.Run] at the mark.
	lookAtDrain = 30 * time.Second

	// defaultDrain is how long a mark that cannot be read stands.
	defaultDrain = 24 * time.Hour
)

// Drain takes a replica out of service without stopping its process. While the replica is drained, the
// coordinators and sessions whose configs name this Drain give back what they hold, each lease and key as
// soon as its job or func has returned, and take nothing new. A replica is drained while it is marked
// (see [SetDrain]), even across restarts, and from [Drain.Start] to [Drain.Stop].
//
// [Drain.Run] must run: coordinators and sessions don't begin before it has read the mark for the first
// time. All methods are safe for concurrent use.
type Drain struct {
	store   Store
	key     Key
	logger  *slog.Logger
	retries logtext.Retries

	// Only Run uses these.
	version int64     // of the mark that was seen last
	seen    time.Time // when it was first seen

	running   atomic.Bool
	known     chan struct{} // closed when the mark has been read
	mu        sync.Mutex    // guards the fields below; taken before the mutexes of followers
	marked    bool
	started   bool // by Start
	drained   bool // what the followers were told
	followers map[*follower]bool
}

// follower is told when the replica is drained and when it takes part again. The func that set returns
// waits until everything is given back.
type follower struct {
	set       func(drained bool) (givenBack func(context.Context) error)
	givenBack func(context.Context) error
}

// NewDrain returns the Drain of the replica with that name, or [ReplicaID] if it is empty. A nil logger is
// [slog.Default]. NewDrain does no I/O.
func NewDrain(store Store, replica string, logger *slog.Logger) (*Drain, error) {
	if replica == "" {
		replica = ReplicaID()
	}
	d := &Drain{store: store, key: drainKey(replica), known: make(chan struct{}), followers: make(map[*follower]bool)}
	d.logger, _ = report.Logger(cmp.Or(logger, slog.Default()))
	err := cmp.Or(objects.ValidName("replica", replica), d.key.Validate())
	if objects.IsNil(store) {
		err = fmt.Errorf("%w: store is nil", ErrInvalid)
	}
	if err != nil {
		return nil, fmt.Errorf("tenure: new drain: %w", err)
	}
	return d, nil
}

// Run follows the mark until ctx is done, and then returns nil. It reads the mark at once, when it is woken, and
// at random moments at most 30 seconds apart. An error of the store changes nothing: Run logs it, and reads again.
func (d *Drain) Run(ctx context.Context) error {
	if !d.running.CompareAndSwap(false, true) {
		return fmt.Errorf("tenure: run drain: %w: it is running", ErrInvalid)
	}
	defer d.running.Store(false)
	defer report.Flush(d.logger)
	hints := Watch(d.store, d.key)
	defer hints.Stop()
	var spurious pace.Limiter
	for hinted, failures := false, 0; ctx.Err() == nil; {
		next, err := d.look(ctx)
		if err == nil {
			failures = 0
		} else if ctx.Err() == nil {
			d.retries.Log(d.logger, slog.LevelWarn, "failed to read whether the replica is drained; retrying", err, "replica", d.key.ID)
			next = pace.Retry(lookAtDrain/3, lookAtDrain/6, failures)
			failures++
		}
		hinted, _ = pace.Await(ctx, hints.C(), spurious.IgnoreFor(hinted, time.Second), next)
	}
	return nil
}

// look reads the mark, and returns when to look again.
func (d *Drain) look(ctx context.Context) (next time.Duration, err error) {
	// On a connection of the leases: an application that uses its whole pool is one that should be drained.
	ctx, cancel := context.WithTimeout(objects.WithLeaseCall(ctx), longestCall)
	defer cancel()
	next = pace.Jitter(lookAtDrain)
	o, err := d.store.Get(ctx, d.key)
	if errors.Is(err, ErrNotFound) {
		d.mark(false)
		return next, nil
	}
	if err != nil {
		return 0, err
	}
	if o.Version != d.version {
		d.version, d.seen = o.Version, time.Now()
	}
	// The store's clock may have been ahead when the mark was written, or a store may have none.
	mark := readDrain(o)
	left := min(mark.Left, mark.Left+o.Age-time.Since(d.seen))
	d.mark(left > 0)
	if left > 0 {
		return min(next, left), nil
	}
	if err := d.store.DeleteIf(ctx, d.key, IfVersion(o.Version)); err != nil && !errors.Is(err, ErrNotFound) {
		d.retries.Log(d.logger, slog.LevelWarn, "failed to delete the mark of a drained replica, which has expired", err, "replica", d.key.ID)
	}
	return next, nil
}

// mark notes whether the replica is marked.
func (d *Drain) mark(marked bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.marked = marked
	d.tell()
	select {
	case <-d.known:
	default:
		close(d.known)
	}
}

// AwaitMark waits until the mark has been read for the first time, or ctx is done. It is for programs that
// use [Drain.Follow]: a replica that was drained must take nothing when it starts.
func (d *Drain) AwaitMark(ctx context.Context) {
	if d == nil {
		return
	}
	for {
		select {
		case <-d.known:
			return
		case <-ctx.Done():
			return
		case <-time.After(lookAtDrain):
			d.logger.Warn("nothing is taken before the replica's mark is read; is Drain.Run running?", "replica", d.key.ID)
		}
	}
}

// tell tells the followers whether the replica is drained, if they don't know. The caller holds mu.
func (d *Drain) tell() {
	drained := d.marked || d.started
	if d.drained == drained {
		return
	}
	d.drained = drained
	if drained {
		d.logger.Info("replica is drained", "replica", d.key.ID)
	} else {
		d.logger.Info("replica takes part", "replica", d.key.ID)
	}
	for f := range d.followers {
		f.givenBack = f.set(drained)
	}
}

// Follow calls set at once, with whether the replica is drained, and again whenever that changes, until leave is
// called. It is for programs that hold something without a [Coordinator]. set must not block, and must not call
// methods of the Drain. When it is called with true, it returns a func that waits until everything is given
// back, or the replica takes part again.
func (d *Drain) Follow(set func(drained bool) (givenBack func(context.Context) error)) (leave func()) {
	if d == nil {
		return func() {}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	f := &follower{set: set}
	d.followers[f] = true
	f.givenBack = f.set(d.drained)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.followers, f)
	}
}

// Start drains the replica now, without a mark, for example in a preStop hook, and returns when its
// coordinators and sessions have given everything back. If ctx is done first, Start returns its cause. The
// replica stays drained until [Drain.Stop] in any case. Start must not be called by a job or func of this
// replica: it would wait for its own return.
func (d *Drain) Start(ctx context.Context) error {
	d.mu.Lock()
	d.started = true
	d.tell()
	var waits []func(context.Context) error
	for f := range d.followers {
		waits = append(waits, f.givenBack)
	}
	d.mu.Unlock()
	var errs []error
	for _, givenBack := range waits { // they were all told above
		if givenBack != nil {
			errs = append(errs, givenBack(ctx))
		}
	}
	d.mu.Lock()
	if !d.drained { // which has ended the waits
		errs = append(errs, errors.New("the replica takes part again"))
	}
	d.mu.Unlock()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("tenure: drain %s: %w", d.key.ID, err)
	}
	return nil
}

// Stop ends what [Drain.Start] has begun. The replica takes part again, unless it is marked.
func (d *Drain) Stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.started = false
	d.tell()
}

// Drained is the mark of a replica that is drained.
type Drained struct {
	Replica string
	By      string        // who has marked it, for people to read
	Left    time.Duration // until the mark expires; on a Clockless store, the whole time that was set
}

// drainRecord is the payload of a mark.
type drainRecord struct {
	ForMS int64  `json:"for_ms"`
	By    string `json:"by,omitempty"`
}

func drainKey(replica string) Key { return Key{Type: objects.DrainType, ID: replica} }

// readDrain reads a mark. One whose payload can't be read stands for a day.
func readDrain(o Object) Drained {
	var r drainRecord
	_ = json.Unmarshal(o.Payload, &r)
	lasts := time.Duration(r.ForMS) * time.Millisecond
	if lasts <= 0 {
		lasts = defaultDrain
	}
	return Drained{Replica: o.Key.ID, By: r.By, Left: lasts - o.Age}
}

// SetDrain marks the replica d.Replica as drained for d.Left from now on. If the replica runs a [Drain], it follows
// at once, or within 30 seconds if the hint was lost. If d.Left is less than a millisecond, the error is
// [ErrInvalid].
func SetDrain(ctx context.Context, store Store, d Drained) error {
	o := Object{Key: drainKey(d.Replica)}
	o.Payload, _ = json.Marshal(drainRecord{ForMS: d.Left.Milliseconds(), By: d.By})
	err := cmp.Or(objects.ValidName("replica", d.Replica), o.Validate())
	switch {
	case objects.IsNil(store):
		err = fmt.Errorf("%w: store is nil", ErrInvalid)
	case err == nil && d.Left < time.Millisecond:
		err = fmt.Errorf("%w: a replica can't be drained for %v", ErrInvalid, d.Left)
	}
	if err == nil {
		_, err = store.PutIf(ctx, o, Unconditional())
	}
	if err != nil {
		return fmt.Errorf("tenure: drain %s: %w", d.Replica, err)
	}
	_ = Wake(ctx, store, o.Key) // a lost hint only delays it
	return nil
}

// ClearDrain removes a replica's mark, so that the replica takes part again. If it is not marked, the error is
// [ErrNotFound].
func ClearDrain(ctx context.Context, store Store, replica string) error {
	if objects.IsNil(store) {
		return fmt.Errorf("tenure: undrain %s: %w: store is nil", replica, ErrInvalid)
	}
	key := drainKey(replica)
	o, err := store.Get(ctx, key)
	if err == nil {
		err = store.DeleteIf(ctx, key, IfVersion(o.Version))
	}
	if errors.Is(err, ErrConflict) && ctx.Err() == nil { // the replica was marked again
		return ClearDrain(ctx, store, replica)
	}
	if err != nil {
		return fmt.Errorf("tenure: undrain %s: %w", replica, err)
	}
	_ = Wake(ctx, store, key)
	return nil
}

// Drains returns the replicas that are marked as drained. On a store that is not a [Lister], the error is
// [errors.ErrUnsupported].
func Drains(ctx context.Context, store Store) ([]Drained, error) {
	var all []Drained
	for o, err := range List(ctx, store, objects.DrainType) {
		if err != nil {
			return nil, err
		}
		if d := readDrain(o); d.Left > 0 {
			all = append(all, d)
		}
	}
	return all, nil
}

// StandDown is [Coordinator.Resign] for a replica that must not begin another term until it is
// asked to: until [Coordinator.Compete] is called, or the lease is handed over to it by name, see
// [Lease.RequestHandover]. It also applies if this replica does not hold the lease, and it may be
// called before [Coordinator.Run]. An attempt to acquire that is under way may still get the lease
// for a moment. No job begins after StandDown has been called.
func (c *Coordinator) StandDown(ctx context.Context) error {
	return c.awaitResignation(ctx, c.setDown(&c.down, true))
}

// Compete undoes [Coordinator.StandDown]: this replica competes again, at once.
func (c *Coordinator) Compete() { c.setDown(&c.down, false) }

// drain makes this replica stand down, or compete again. It is for [Drain.Follow].
func (c *Coordinator) drain(drained bool) (givenBack func(context.Context) error) {
	rests := make(chan struct{})
	c.rest() // wakes the waiting calls, which look again
	c.mu.Lock()
	c.rested = sync.OnceFunc(func() { close(rests) })
	c.mu.Unlock()
	c.setDown(&c.out, drained)
	return func(ctx context.Context) error {
		select {
		case <-rests:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		return nil
	}
}

// rest notes that nothing is left to be given back.
func (c *Coordinator) rest() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rested()
}

// setDown makes this replica stand down or compete, for one of the two reasons. It returns the
// resignation from the current term, if there is one.
func (c *Coordinator) setDown(why *bool, down bool) (resign *resignation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if down {
		resign = c.endByResigning()
	}
	if *why != down {
		*why = down
		c.changed()
	}
	return resign
}

// changed tells the monitor whether this replica stands down, and ends a wait for its turn. The caller holds mu.
func (c *Coordinator) changed() {
	c.monitor.standsDown(c.down || c.out)
	if c.turn != nil {
		c.turn()
	}
}
