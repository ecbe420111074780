package tenure

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/sighting"
)

// Defaults of [LeaseConfig].
const (
	DefaultTTL  = 30 * time.Second
	minimumTTL  = 10 * time.Millisecond
	maximumTTL  = record.LongestTTL
	defaultName = "reconciler-lease"
)

var defaultKey = Key{Type: "reconciler_lease", ID: "singleton"}

// LeaseConfig configures a [Lease]. The zero value serves: one lease per table.
type LeaseConfig struct {
	Key    Key               // default {"reconciler_lease", "singleton"}
	Name   string            // the object's name; default "reconciler-lease" for the default key, else the key's ID
	Holder string            // default ReplicaID(); shown to people, never trusted for safety
	TTL    time.Duration     // default 30s; from 10ms to a year
	Margin time.Duration     // default TTL/30; the holder's trust ends this long before the TTL does
	Labels map[string]string // told to observers: an address, a build
	Expiry ExpiryPolicy      // default StoreClock
	Logger *slog.Logger      // default slog.Default()

	// AssumeUniqueHolder lets this replica take a lease over at once, although it has not
	// expired, where the record names its own Holder: a replica that crashed and
	// was started anew does not wait for the TTL of its own last term. It is right
	// only where of one Holder there is never more than one process, not for a
	// moment: a pod of a StatefulSet, a unit of systemd on a host whose name it
	// bears. It is wrong where a name can be given twice, as by an orchestrator that
	// replaces what it cannot reach. Holder must be set.
	AssumeUniqueHolder bool
}

// withDefaults returns the config with its zero fields filled, or an error that
// names everything that is wrong with it.
func (cfg LeaseConfig) withDefaults() (LeaseConfig, error) {
	if cfg.Key == (Key{}) {
		cfg.Key = defaultKey
	}
	if cfg.Name == "" {
		cfg.Name = cfg.Key.ID
		if cfg.Key == defaultKey {
			cfg.Name = defaultName
		}
	}
	unnamed := cfg.Holder == ""
	if unnamed {
		cfg.Holder = ReplicaID()
	}
	if cfg.TTL == 0 {
		cfg.TTL = DefaultTTL
	}
	if cfg.Margin == 0 {
		cfg.Margin = cfg.TTL / 30
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	cfg.Labels = maps.Clone(cfg.Labels)

	errs := []error{
		Object{Key: cfg.Key, Name: cfg.Name, Labels: cfg.Labels}.Validate(),
		objects.ValidText("holder", cfg.Holder),
		validHolder(cfg.Holder),
	}
	if cfg.TTL < minimumTTL || cfg.TTL > maximumTTL {
		errs = append(errs, fmt.Errorf("%w: TTL %v is not between %v and %v", ErrInvalid, cfg.TTL, minimumTTL, maximumTTL))
	} else if cfg.Margin < 0 || cfg.Margin >= cfg.TTL {
		errs = append(errs, fmt.Errorf("%w: Margin %v is not between 0 and the TTL of %v", ErrInvalid, cfg.Margin, cfg.TTL))
	}
	for name := range cfg.Labels {
		if strings.HasPrefix(name, record.Reserved) {
			errs = append(errs, fmt.Errorf("%w: the label %q begins as those do that leases write themselves", ErrInvalid, name))
		}
	}
	if cfg.AssumeUniqueHolder && unnamed {
		errs = append(errs, fmt.Errorf("%w: AssumeUniqueHolder is set, and Holder is empty: it must be one that only this process has", ErrInvalid))
	}
	if cfg.Expiry > Observed {
		errs = append(errs, fmt.Errorf("%w: Expiry %d is neither StoreClock nor Observed", ErrInvalid, cfg.Expiry))
	}
	return cfg, errors.Join(errs...)
}

// validHolder refuses a name that a record has no room for: escaped in JSON it may
// become six times as long.
func validHolder(name string) error {
	if len(name) > record.LongestHolder {
		return fmt.Errorf("%w: Holder has %d bytes, more than %d", ErrInvalid, len(name), record.LongestHolder)
	}
	return nil
}

// ExpiryPolicy says by what a standby judges that a holder's TTL has passed.
type ExpiryPolicy uint8

const (
	// StoreClock steals when the record's age, by the store's clock, has
	// reached its TTL, or when [Observed] would.
	StoreClock ExpiryPolicy = iota

	// Observed steals when this replica has watched the record stand unchanged
	// for its TTL, on its own monotonic clock. It is for databases whose clock
	// may jump, and costs a TTL of waiting after each start.
	Observed
)

// Lease is the right to do one job, as seen by one replica: it acquires,
// steals, renews and releases. Most programs leave that to a [Coordinator].
//
// All methods are safe for concurrent use. Errors of the store come back as
// they are; after one, the write may or may not have happened, and the next
// call finds out.
type Lease struct {
	store Store
	cfg   LeaseConfig

	mu       sync.Mutex // guards the fields below; never held across I/O
	seen     *sighting.Sighting
	leftover []leftover
	newest   int64    // the greatest version that any term's record was seen to have
	begun    string   // the last term that this lease began
	copied   string   // the last term that a copy of this process goes on with
	sent     []string // terms whose first write is under way; nil: none
}

// NewLease returns a lease over a store. It does no I/O. An [ErrInvalid] names
// everything that is wrong with the config.
func NewLease(store Store, cfg LeaseConfig) (*Lease, error) {
	if store == nil {
		return nil, fmt.Errorf("tenure: new lease: %w: store is nil", ErrInvalid)
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("tenure: new lease: %w", err)
	}
	return &Lease{store: store, cfg: cfg}, nil
}

// Key returns the key of the lease.
func (l *Lease) Key() Key { return l.cfg.Key }

// TryAcquire begins a term if nobody holds the lease, in one write. It returns
// [ErrHeld] where a record stands, expired or not.
func (l *Lease) TryAcquire(ctx context.Context) (*Term, error) {
	for range 2 {
		term, err := l.begin(ctx, caller{}, MustCreate(), nil)
		if !errors.Is(err, ErrExists) {
			return term, err
		}
		obj, err := l.look(ctx, caller{})
		if errors.Is(err, ErrNotFound) { // released since
			return nil, l.heldByUnknown()
		}
		if err != nil {
			return nil, err
		}
		removed, err := l.removeLeftover(ctx, caller{}, obj)
		if err != nil {
			return nil, err
		}
		if removed {
			continue
		}
		held := l.held(obj)
		if l.mayTake(held.Holding) {
			if term, err := l.takeOver(ctx, caller{}, held.Holding); !errors.Is(err, ErrConflict) {
				return term, err
			}
		}
		return nil, held
	}
	return nil, l.heldByUnknown() // another was quicker
}

// StealExpired begins a term if the record that stands has expired. Otherwise
// it returns [ErrHeld]; [ErrNotFound] where there is no record; [ErrConflict]
// where another replica wrote first.
func (l *Lease) StealExpired(ctx context.Context) (*Term, error) {
	return l.stealExpired(ctx, caller{})
}

func (l *Lease) stealExpired(ctx context.Context, by caller) (*Term, error) {
	obj, err := l.look(ctx, by)
	if err != nil {
		return nil, err
	}
	held := l.held(obj)
	if held.canExpireIn > 0 {
		switch removed, err := l.removeLeftover(ctx, by, obj); {
		case err != nil:
			return nil, err
		case removed:
			return nil, fmt.Errorf("tenure: steal %s: %w", l.cfg.Key, ErrNotFound)
		case !l.mayTake(held.Holding):
			return nil, held
		}
	}
	return l.takeOver(ctx, by, held.Holding)
}

// AcquireOrSteal begins a term if the lease is free or expired; otherwise it
// returns [ErrHeld]. While the lease is held it costs one read.
func (l *Lease) AcquireOrSteal(ctx context.Context) (*Term, error) {
	return l.acquireOrSteal(ctx, caller{}, l.lastSeen() == nil)
}

// acquireOrSteal tries at first what is likely to succeed.
func (l *Lease) acquireOrSteal(ctx context.Context, by caller, likelyFree bool) (*Term, error) {
	// A look may be overtaken by another replica's write, and so again the next:
	// after three times the lease is held by somebody quicker.
	for range 3 {
		if likelyFree {
			term, err := l.begin(ctx, by, MustCreate(), nil)
			if !errors.Is(err, ErrExists) {
				return term, err
			}
		}
		term, err := l.stealExpired(ctx, by)
		if !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrConflict) {
			return term, err
		}
		likelyFree = errors.Is(err, ErrNotFound)
	}
	return nil, l.heldByUnknown()
}

// Renew makes the term count anew from now, in one write. It returns [ErrLost]
// where another term stands or none, [ErrDeadline] where trust in the term had
// ended before the store answered; in both cases the term is over. After any
// other error the term is as it was, and Renew may be called again.
func (l *Lease) Renew(ctx context.Context, term *Term) error {
	if err := l.owns("renew", term); err != nil {
		return err
	}
	if term.local() {
		return nil
	}
	defer term.renewal()()
	// The second round is for a renewal of our own that landed although its
	// answer was lost: the record is ours at a version that we did not know.
	for range 2 {
		if !term.Valid() {
			return l.tooLate(ctx, term)
		}
		attempt, version := term.clock(), term.writing()
		obj, err := l.store.PutIf(objects.WithLeaseCall(ctx), l.object(term), MatchVersion(version))
		if objects.Answered(err) {
			term.refused(version)
		}
		switch {
		case err == nil:
			l.sawVersion(obj.Version)
			if !term.extend(obj.Version, attempt) {
				return fmt.Errorf("tenure: renew %s: %w", l.cfg.Key, ErrDeadline)
			}
			return nil
		case !errors.Is(err, ErrConflict):
			return err
		}
		if err := l.reread(ctx, term); err != nil {
			return err
		}
	}
	return fmt.Errorf("tenure: renew %s: another write came first, twice: %w", l.cfg.Key, ErrConflict)
}

// tooLate says what became of a term that was over before its renewal was sent.
func (l *Lease) tooLate(ctx context.Context, term *Term) error {
	err := l.reread(ctx, term)
	if errors.Is(err, ErrLost) {
		return err
	}
	if err != nil {
		return fmt.Errorf("tenure: renew %s: %w (and %w)", l.cfg.Key, ErrDeadline, err)
	}
	return fmt.Errorf("tenure: renew %s: %w", l.cfg.Key, ErrDeadline)
}

// Read returns who holds the lease, or to which replica it was left, see [Holding.OfferedTo]. It
// returns [ErrNotFound] where there is no record.
func (l *Lease) Read(ctx context.Context) (Holding, error) {
	obj, err := l.look(ctx, caller{})
	if err != nil {
		return Holding{}, err
	}
	return l.decode(obj), nil
}

// takeOver begins a term in the place of another's record.
func (l *Lease) takeOver(ctx context.Context, by caller, from Holding) (*Term, error) {
	mayTake := l.mayTake(from)
	term, err := l.begin(ctx, by, MatchVersion(from.Version), l.predecessors(from))
	if err == nil && !mayTake && !from.isOffer() {
		term.stolenFrom = &from
	}
	return term, err
}

// begin writes the record of a new term.
func (l *Lease) begin(ctx context.Context, by caller, cond WriteCondition, predecessors []Holding) (*Term, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("tenure: acquire %s: %w", l.cfg.Key, err)
	}
	ctx, cancel := by.write(ctx)
	defer cancel()
	now := clock.From(ctx)
	attempt := now()
	id := uuid.NewString()
	term := &Term{
		key:        l.cfg.Key,
		id:         id,
		holder:     l.cfg.Holder,
		acquiredAt: attempt.Mono,
		trusted:    l.cfg.TTL - l.cfg.Margin,
		clock:      now,
		unsure:     1, // the write that begins it
		payload: record.Payload{
			Holder:       l.cfg.Holder,
			AcquiredAtMS: attempt.Wall.UnixMilli(),
			Term:         id,
			TTLMS:        (l.cfg.TTL + time.Millisecond - 1).Milliseconds(), // never less than we trust
		}.Encode(),
	}
	if len(predecessors) > 0 {
		term.predecessors.Store(&predecessors)
	}
	defer l.sends(id)()
	obj, err := l.store.PutIf(objects.WithLeaseCall(ctx), l.object(term), cond)
	if err != nil {
		if !objects.Answered(err) {
			l.leave(leftover{term: term})
		}
		return nil, err
	}
	term.token, term.version, term.unsure = obj.Version, obj.Version, 0
	term.trust.Store(newTrust(attempt, term.trusted))
	l.mu.Lock()
	l.begun = id
	l.mu.Unlock()
	if newest := l.sawVersion(obj.Version); obj.Version <= newest {
		// It is for a replica that has seen less, and may go on.
		l.giveUpUnused(ctx, term)
		return nil, fmt.Errorf("tenure: acquire %s: %w: fencing token %d would follow %d: the table was restored from an older state and the store's clock is behind; raise resource_version above %[4]d",
			l.cfg.Key, ErrSetup, obj.Version, newest)
	}
	if !term.Valid() {
		l.giveUpUnused(ctx, term)
		return nil, fmt.Errorf("tenure: acquire %s: the answer took %v: %w", l.cfg.Key, term.sinceRenewal(), ErrDeadline)
	}
	if !by.confirms {
		term.confirm()
	}
	return term, nil
}

// giveUpUnused gives up a term that has just begun and that nobody can use, at once:
// its record would keep all others waiting for a TTL, and the next attempt of this
// replica might make it young again.
func (l *Lease) giveUpUnused(ctx context.Context, term *Term) {
	term.end(ErrLost)
	if l.giveUp(ctx, term, 0) != nil {
		l.leave(leftover{term: term})
	}
}

// object is the record of a term.
func (l *Lease) object(term *Term) Object {
	obj := Object{Key: l.cfg.Key, Name: l.cfg.Name, Labels: l.cfg.Labels, Payload: term.payload}
	if predecessors := term.unconfirmed(); predecessors != nil {
		obj.Labels = record.WithUnconfirmed(obj.Labels, term.id, recorded(predecessors))
	}
	return obj
}

// owns refuses a term that this lease cannot act upon.
func (l *Lease) owns(op string, term *Term) error {
	if term == nil || term.id == "" {
		return fmt.Errorf("tenure: %s %s: %w: no term is given", op, l.cfg.Key, ErrInvalid)
	}
	if term.key != l.cfg.Key {
		return fmt.Errorf("tenure: %s %s: %w: the term is one of %s", op, l.cfg.Key, ErrInvalid, term.key)
	}
	return nil
}

// reread looks at a record that was not at the version at which this term left
// it. It returns nil where it is still the term's, by a write whose answer was
// lost, and notes its version. Otherwise the term is over.
func (l *Lease) reread(ctx context.Context, term *Term) error {
	known := term.currentVersion()
	obj, err := l.look(ctx, caller{})
	switch {
	case errors.Is(err, ErrNotFound) && !term.deleteSent.Load():
		return term.lostTo(&LostError{Key: l.cfg.Key})
	case err != nil:
		return err
	case !bytes.Equal(obj.Payload, term.payload):
		holding := l.decode(obj)
		return term.lostTo(&LostError{Key: l.cfg.Key, To: &holding})
	}
	if !l.recognises(term, known, obj) {
		holding := l.decode(obj)
		return term.lostTo(&LostError{Key: l.cfg.Key, To: &holding, toCopy: true})
	}
	return nil
}

// recognises reports whether a record with a term's payload is that term's, and not of a
// copy of this process, and notes its version and what it is asked.
func (l *Lease) recognises(term *Term, known int64, obj Object) bool {
	request := stored(obj).Request()
	if !term.recognise(known, obj.Version, request) {
		l.mu.Lock()
		l.copied = term.id
		l.mu.Unlock()
		return false
	}
	if request != nil {
		term.asked.Store(request)
	}
	return true
}

// caller is who makes an acquire. The zero value is a program that calls the methods of
// [Lease] itself.
type caller struct {
	timeout  time.Duration // of each call to the store; 0: the context alone bounds them
	confirms bool          // a takeover is confirmed before the job begins
}

func (by caller) read(ctx context.Context) (context.Context, context.CancelFunc) {
	if by.timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, by.timeout)
}

// write is not ended by a shutdown: an acquire that is cut off halfway may leave the
// record of a term that nobody holds, and all would have to wait for its TTL.
func (by caller) write(ctx context.Context) (context.Context, context.CancelFunc) {
	if by.timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(context.WithoutCancel(ctx), by.timeout)
}

// look reads the record and notes since when it has stood as it is.
func (l *Lease) look(ctx context.Context, by caller) (Object, error) {
	ctx, cancel := by.read(ctx)
	defer cancel()
	obj, err := l.store.Get(objects.WithLeaseCall(ctx), l.cfg.Key)
	answered := time.Now()
	l.mu.Lock()
	before := l.seen
	switch {
	case errors.Is(err, ErrNotFound):
		l.seen = nil
	case err == nil && !before.Of(stored(obj)):
		l.seen = &sighting.Sighting{Object: stored(obj), Since: answered}
	}
	if err == nil || errors.Is(err, ErrNotFound) {
		// A record that has been released can't come back. One that was acquired without
		// an answer may still come.
		l.leftover = slices.DeleteFunc(l.leftover, func(o leftover) bool { return o.release && !stored(obj).IsOf(o.term.id) })
	}
	l.mu.Unlock()

	if err == nil && (before == nil || !bytes.Equal(before.Object.Payload, obj.Payload)) {
		if _, err := decodeHolding(obj, l.cfg.TTL); err != nil {
			l.cfg.Logger.Warn("lease record cannot be decoded; it counts as held by unknown until it expires",
				"lease", l.cfg.Key.String(), "replica", l.cfg.Holder, "error", err)
		}
	}
	return obj, err
}

func (l *Lease) lastSeen() *sighting.Sighting {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen
}

// held says who holds the lease, by an object that was just read, and how soon
// it can expire: at once where it has.
func (l *Lease) held(obj Object) *HeldError {
	h, _ := record.Read(stored(obj), l.cfg.TTL) // look has logged the error
	left, byAge := l.lastSeen().CanExpireIn(stored(obj), h, l.cfg.Expiry == Observed)
	return &HeldError{Holding: l.decode(obj), canExpireIn: left, byAge: byAge}
}

// heldByUnknown is for a record that was gone again when it was looked at.
func (l *Lease) heldByUnknown() *HeldError {
	return &HeldError{Holding: Holding{Key: l.cfg.Key, Holder: record.Unknown}}
}

func (l *Lease) decode(obj Object) Holding {
	holding, _ := decodeHolding(obj, l.cfg.TTL) // look has logged the error
	l.mu.Lock()
	own := slices.Contains(l.sent, holding.Term)
	l.mu.Unlock()
	// Another program's versions say nothing of ours; and a term that we are about to
	// begin, whose answer is under way while somebody reads, does not follow itself.
	if holding.Term != "" && !own {
		l.sawVersion(obj.Version)
	}
	return holding
}

// sends notes that the first write of a term is under way, until done is called.
func (l *Lease) sends(term string) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent = append(l.sent, term)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.sent = slices.DeleteFunc(l.sent, func(id string) bool { return id == term }); len(l.sent) == 0 {
			l.sent = nil // a lease that is held has no use for it
		}
	}
}

// sawVersion notes a version that a term's record has, and returns the greatest
// seen before. It does not note one near the limit, because the store will not count
// on from there: the tokens that follow would be refused for ever.
func (l *Lease) sawVersion(v int64) (before int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before = l.newest
	if v < objects.VersionLimit/2 {
		l.newest = max(l.newest, v)
	}
	return before
}
