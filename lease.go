package tenure

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/report"
)

// Defaults of [LeaseConfig].
const (
	DefaultTTL  = 30 * time.Second
	minimumTTL  = 10 * time.Millisecond
	maximumTTL  = record.LongestTTL
	defaultName = "reconciler-lease"
)

var defaultKey = Key{Type: "reconciler_lease", ID: "singleton"}

// LeaseConfig configures a [Lease]. The zero value is ready to use: one lease per table.
type LeaseConfig struct {
	Key    Key               // default {"reconciler_lease", "singleton"}
	Name   string            // of the object; default "reconciler-lease" for the default key, else the key's ID
	Holder string            // the replica's name, default ReplicaID(); for people to read: safety never depends on it
	TTL    time.Duration     // for how long after its last renewal the lease counts as held; default 30s; from 10ms to a year
	Margin time.Duration     // the holder's own trust ends this long before the TTL does; default TTL/30
	Labels map[string]string // shown to observers: an address, a build
	Expiry ExpiryPolicy      // default StoreClock, which a store without a clock makes Observed
	Logger *slog.Logger      // default slog.Default()

	// AssumeUniqueHolder lets this replica take over a lease that has not expired if the
	// record names its own Holder: a replica that crashed and restarted does not wait for
	// the TTL of its own last term. It is safe only if there is never more than one process
	// with this Holder, not even for a moment: for a pod of a StatefulSet, or for a systemd
	// unit that is named after its host. It is not safe if a name can be given out twice,
	// for example by an orchestrator that replaces what it cannot reach. Holder must be set.
	AssumeUniqueHolder bool
}

// withDefaults returns the config with its zero fields filled in, or an error that names
// everything that is wrong with it.
func (cfg LeaseConfig) withDefaults() (LeaseConfig, error) {
	cfg.Key = cmp.Or(cfg.Key, defaultKey)
	if cfg.Name == "" && cfg.Key == defaultKey {
		cfg.Name = defaultName
	}
	cfg.Name = cmp.Or(cfg.Name, cfg.Key.ID)
	unnamed := cfg.Holder == ""
	cfg.Holder = cmp.Or(cfg.Holder, ReplicaID())
	cfg.TTL = cmp.Or(cfg.TTL, DefaultTTL)
	cfg.Margin = cmp.Or(cfg.Margin, cfg.TTL/30)
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, slog.Default()))
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
			errs = append(errs, fmt.Errorf("%w: the label %q has the prefix %q, which is reserved", ErrInvalid, name, record.Reserved))
		}
	}
	if cfg.AssumeUniqueHolder && unnamed {
		errs = append(errs, fmt.Errorf("%w: AssumeUniqueHolder needs a Holder that only this process has, and Holder is empty", ErrInvalid))
	}
	if cfg.Expiry > Observed {
		errs = append(errs, fmt.Errorf("%w: Expiry %d is neither StoreClock nor Observed", ErrInvalid, cfg.Expiry))
	}
	return cfg, errors.Join(errs...)
}

// ExpiryPolicy says how a standby decides that a holder's TTL has passed.
type ExpiryPolicy uint8

const (
	// StoreClock lets a standby steal when the record's age, by the store's clock, has
	// reached its TTL, or when [Observed] would. On a [Clockless] store only the latter is
	// left, so it is Observed there. That is not an error, because StoreClock is the default,
	// and such a store leaves nothing to choose; nor is it less safe: Observed is the stricter.
	StoreClock ExpiryPolicy = iota

	// Observed lets a standby steal when it has itself seen the record unchanged for the
	// TTL, by its own monotonic clock. It is for databases whose clock may jump or that have
	// none, and makes a replica wait for a TTL after each start. On a store that delivers
	// changes, see [ChangeSubscription], a standby sees each renewal without a read; on any
	// other it polls.
	Observed
)

// Lease is the right to do one job, as one replica sees it. It acquires, steals, renews
// and releases. Most programs leave that to a [Coordinator].
//
// All methods are safe for concurrent use. Errors of the store are returned as they are.
// After one, the write may or may not have happened; the next call finds out.
type Lease struct {
	store  Store
	cfg    LeaseConfig
	memory memory
}

// NewLease returns a lease over a store. It does no I/O. An [ErrInvalid] names everything
// that is wrong with the config.
func NewLease(store Store, cfg LeaseConfig) (*Lease, error) {
	if objects.IsNil(store) {
		return nil, fmt.Errorf("tenure: new lease: %w: store is nil", ErrInvalid)
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("tenure: new lease: %w", err)
	}
	if isClockless(store) {
		cfg.Expiry = Observed
	}
	return &Lease{store: store, cfg: cfg}, nil
}

// Key returns the key of the lease.
func (l *Lease) Key() Key { return l.cfg.Key }

// TryAcquire begins a term if the lease is free, in one write. If another term's record
// stands, even an expired one, it returns [ErrHeld].
func (l *Lease) TryAcquire(ctx context.Context) (*Term, error) {
	return l.acquire(ctx, caller{}, true, false)
}

// StealExpired begins a term in place of a record that has expired. If it has not, it
// returns [ErrHeld]; if there is none, [ErrNotFound]; if another replica wrote first,
// [ErrConflict].
func (l *Lease) StealExpired(ctx context.Context) (*Term, error) {
	return l.takeOver(ctx, caller{}, true)
}

// AcquireOrSteal begins a term if the lease is free or expired; otherwise it returns
// [ErrHeld]. While the lease is held it costs one read.
func (l *Lease) AcquireOrSteal(ctx context.Context) (*Term, error) {
	return l.acquire(ctx, caller{}, false, true)
}

// acquire creates the record or takes it over, beginning with what is likelier to succeed.
func (l *Lease) acquire(ctx context.Context, by caller, likelyFree, steal bool) (*Term, error) {
	likelyFree = likelyFree || l.memory.lastSeen() == nil
	// Another replica's write may come between our read and our write. If it has done so
	// three times, the lease is held by a faster one.
	for range 3 {
		if likelyFree {
			term, err := l.begin(ctx, by, MustCreate(), nil)
			if !errors.Is(err, ErrExists) {
				return term, err
			}
		}
		term, err := l.takeOver(ctx, by, steal)
		if !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrConflict) {
			return term, err
		}
		likelyFree = errors.Is(err, ErrNotFound)
	}
	return nil, l.heldByUnknown()
}

// takeOver begins a term in place of the record that stands: one that this lease may take,
// or, to steal it, one that has expired.
func (l *Lease) takeOver(ctx context.Context, by caller, steal bool) (*Term, error) {
	read, err := l.look(ctx, by)
	if err != nil {
		return nil, err
	}
	held := l.held(read)
	from := held.Holding
	if !steal || held.canExpireIn > 0 { // the rule is sighting.CanExpireIn
		switch removed, err := l.removeOrphan(ctx, by, read); {
		case err != nil:
			return nil, err
		case removed:
			return nil, fmt.Errorf("tenure: steal %s: %w", l.cfg.Key, ErrNotFound)
		case !l.mayTake(from):
			return nil, held
		}
	}
	stolen := !from.isOffer() && !l.mayTake(from)
	term, err := l.begin(ctx, by, MatchVersion(from.Version), l.predecessors(from))
	if err == nil && stolen {
		term.stolenFrom = &from
	}
	if err == nil && held.canExpireIn > 0 && l.cfg.TTL < from.TTL {
		wakeAll(ctx, l.store, l.cfg.Key) // the standbys wait for the record that they saw, which would have expired later
	}
	return term, err
}

// held returns who holds the lease, and how long it will be until the record can expire: 0
// or less if it has expired, and a standby may steal the lease.
func (l *Lease) held(r reading) *HeldError {
	h := record.Holding{Term: r.holding.Term, TTL: r.holding.TTL, Age: r.holding.Age}
	in, byAge := l.memory.lastSeen().CanExpireIn(r.stored, h, l.cfg.Expiry == Observed)
	return &HeldError{Holding: r.holding, canExpireIn: in, byAge: byAge}
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
		inDoubt:    1, // the write that begins it
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
	defer l.memory.begins(id)()
	obj, err := l.store.PutIf(objects.WithLeaseCall(ctx), l.object(term), cond)
	if err != nil {
		if !objects.Answered(err) {
			l.memory.addOrphan(orphan{term: term}, l.cfg.TTL)
		}
		return nil, err
	}
	term.token, term.version, term.inDoubt = obj.Version, obj.Version, 0
	term.trust.Store(newTrust(attempt, term.trusted))
	l.memory.began(id)
	if newest := l.memory.sawVersion(obj.Version); obj.Version <= newest {
		l.abandon(ctx, term) // a replica that does not know the newer token can still hold
		return nil, fmt.Errorf("tenure: acquire %s: %w: fencing token %d would follow %d: the store was restored from an older state, or made anew, and its versions (resource_version in a table) are behind; raise them above %[4]d",
			l.cfg.Key, ErrSetup, obj.Version, newest)
	}
	if !term.Valid() {
		l.abandon(ctx, term)
		return nil, fmt.Errorf("tenure: acquire %s: the answer took %v: %w", l.cfg.Key, term.sinceRenewal(), ErrDeadline)
	}
	if !by.confirms {
		term.confirm()
	}
	return term, nil
}

// abandon releases a term that has just begun and that nobody can use. It does so at once,
// because all others would have to wait for a TTL.
func (l *Lease) abandon(ctx context.Context, term *Term) {
	term.end(ErrLost)
	if l.vacate(ctx, term, 0) != nil {
		l.memory.addOrphan(orphan{term: term}, l.cfg.TTL)
	}
}

// object is the record of a term.
func (l *Lease) object(term *Term) Object {
	obj := Object{Key: l.cfg.Key, Name: l.cfg.Name, Labels: l.cfg.Labels, Payload: term.payload}
	if term.resumed != nil {
		obj.Name, obj.Labels = term.resumed.Name, term.resumed.Labels
	}
	if term.sealed.Load() {
		obj.Labels = record.WithSeal(obj.Labels, term.id)
	}
	if predecessors := term.unconfirmed(); predecessors != nil {
		obj.Labels = record.WithUnconfirmed(obj.Labels, term.id, recorded(predecessors))
	}
	return obj
}

// Renew extends the trust in the term, counted from now, in one write. It returns [ErrLost]
// if another term stands or none does, and [ErrDeadline] if the trust had ended before the
// store answered; in both cases the term is over. After any other error the term is as it
// was, and Renew may be called again.
func (l *Lease) Renew(ctx context.Context, term *Term) error {
	if err := term.isFor("renew", l.cfg.Key); err != nil {
		return err
	}
	if term.local() {
		return nil
	}
	defer term.renewal()()
	// The second round is for an earlier renewal of ours that landed although its
	// answer was lost: the record is ours, at a version that we did not know. That we have
	// seen it extends no trust; only a write that is answered does.
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
			l.memory.sawVersion(obj.Version)
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

// reread looks at the record of a term after a write found another version than the term
// knows. If the record is still the term's, because of a write whose answer was lost,
// reread notes the version and returns nil. If it is not, reread ends the term.
func (l *Lease) reread(ctx context.Context, term *Term) error {
	known := term.currentVersion()
	r, err := l.look(ctx, caller{})
	switch {
	case errors.Is(err, ErrNotFound) && !term.deleteSent.Load():
		return term.lostTo(&LostError{Key: l.cfg.Key})
	case err != nil:
		return err
	case !bytes.Equal(r.Payload, term.payload):
		return term.lostTo(&LostError{Key: l.cfg.Key, To: &r.holding})
	case !l.recognises(term, known, r):
		why := "is renewed by a copy of this process"
		if r.stored.Resumed() {
			why = "was resumed elsewhere"
		}
		return term.lostTo(&LostError{Key: l.cfg.Key, To: &r.holding, why: why})
	}
	return nil
}

// recognises reports whether a record with the term's payload was written by the term
// itself and not by another process. If so, it notes the version and any request.
func (l *Lease) recognises(term *Term, known int64, r reading) bool {
	request := r.stored.Request()
	elsewhere := r.stored.Resumed() && term.resumed == nil // whatever the version says
	if elsewhere || !term.recognise(known, r.Version, request) {
		l.memory.foundCopy(term.id)
		return false
	}
	if request != nil {
		term.request.Store(request)
	}
	return true
}

// Read returns who holds the lease, or to which replica it is offered, see
// [Holding.OfferedTo]. It returns [ErrNotFound] if there is no record.
func (l *Lease) Read(ctx context.Context) (Holding, error) {
	read, err := l.look(ctx, caller{})
	return read.holding, err
}

// ReplicaID returns a name for this replica, for people to read: the first of
// the environment variables TENURE_REPLICA_ID, OPENSHELL_REPLICA_ID and HOSTNAME
// that is set, else the host's name, else a new UUID. Two replicas may share
// it: nothing that must be safe depends on it.
func ReplicaID() string {
	for _, name := range []string{"TENURE_REPLICA_ID", "OPENSHELL_REPLICA_ID", "HOSTNAME"} {
		if id := os.Getenv(name); id != "" {
			return id
		}
	}
	if host, err := os.Hostname(); err == nil && host != "" {
		return host
	}
	return uuid.NewString()
}
