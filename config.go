package tenure

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/report"
)

// DefaultTTL is the default of [LeaseConfig.TTL].
const (
	DefaultTTL = 30 * time.Second
	minimumTTL = 10 * time.Millisecond
	maximumTTL = record.LongestTTL
)

// LeaseConfig configures a [Lease]. Only the ID of Key must be set.
type LeaseConfig struct {
	Key    Key               // of the object; the same in all replicas of a service, and in no other service; the Type is by default "lease"
	Name   string            // of the object; default: the key's ID, or none in a Nameless store (see [Traits])
	Holder string            // the replica's name, at most 256 bytes, default ReplicaID(); for people to read: safety never depends on it
	TTL    time.Duration     // how long the lease counts as held after its last renewal; default 30s; from 10ms to a year
	Margin time.Duration     // the holder's own trust ends this long before the TTL; default TTL/30
	Labels map[string]string // shown to observers: an address, a build
	Expiry ExpiryPolicy      // default ExpiryStoreClock; in a Clockless store (see [Traits]) always ExpiryObserved
	Logger *slog.Logger      // default slog.Default()

	// AssumeUniqueHolder lets this replica take over a lease that has not expired if the
	// record names its own Holder. A replica that crashed and restarted then does not wait for
	// the TTL of its own last term. A term that this process has begun, through whichever lease,
	// is not such a leftover. This is safe only if there is never more than one process
	// with this Holder, not even for a moment: for a pod whose name is its Holder, or for a
	// systemd unit that is named after its host. It is unsafe if a name can be given out twice, for
	// example by an orchestrator that replaces what it cannot reach. Holder must be set.
	// The page docs/maintenance.md says where it is safe.
	//
	// If Labels has [UniqueWithin], the Holder need be unique only within what that label names,
	// and only a record with the same label is taken over.
	AssumeUniqueHolder bool
}

// UniqueWithin is the label that limits [LeaseConfig].AssumeUniqueHolder to what its value names,
// such as a machine. Only one process there may have this Holder.
const UniqueWithin = "unique-within"

// withDefaults returns the config with its zero fields filled in, and an error that names
// everything that is wrong with it.
func (cfg LeaseConfig) withDefaults() (LeaseConfig, error) {
	if cfg.Key.ID != "" {
		cfg.Key.Type = cmp.Or(cfg.Key.Type, "lease")
	}
	cfg.Name = cmp.Or(cfg.Name, cfg.Key.ID)
	unnamed, given := cfg.Holder == "", cfg
	cfg.Holder = cmp.Or(cfg.Holder, ReplicaID())
	cfg.TTL = cmp.Or(cfg.TTL, DefaultTTL)
	cfg.Margin = cmp.Or(cfg.Margin, cfg.TTL/30)
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, slog.Default()))
	cfg.Labels = maps.Clone(cfg.Labels)

	var problems objects.Problems
	if cfg.Key == (Key{}) {
		problems.Add(fmt.Errorf(`%w: Key is empty: name the lease, for example Key{ID: "sweeper"}`, ErrInvalid))
	} else {
		problems.Add(Object{Key: cfg.Key, Name: cfg.Name, Labels: cfg.Labels}.Validate())
	}
	problems.Add(objects.ValidName("holder", cfg.Holder))
	unit := objects.ValidDuration("TTL", max(cfg.TTL, 0), "time.Second")
	fits := cfg.TTL >= minimumTTL && cfg.TTL <= maximumTTL
	problems.If(!fits && unit == nil, "TTL %v is not between %v and %v", cfg.TTL, minimumTTL, maximumTTL)
	problems.Add(unit)
	problems.If(fits && (cfg.Margin < 0 || cfg.Margin >= cfg.TTL), "Margin %v is not between 0 and the TTL of %v", cfg.Margin, cfg.TTL)
	problems.Duration("Margin", max(given.Margin, 0))
	for name := range cfg.Labels {
		problems.If(strings.HasPrefix(name, record.Reserved), "the label %q has the prefix %q, which is reserved", name, record.Reserved)
	}
	problems.If(cfg.AssumeUniqueHolder && unnamed, "AssumeUniqueHolder needs a Holder that only this process has, and Holder is empty")
	problems.If(cfg.Expiry > ExpiryObserved, "Expiry %d is neither ExpiryStoreClock nor ExpiryObserved", cfg.Expiry)
	return cfg, problems.Err()
}

// ExpiryPolicy says how a standby decides that a holder's TTL has passed.
type ExpiryPolicy uint8

const (
	// ExpiryStoreClock lets a standby steal when the record's age, by the store's clock, has
	// reached its TTL, or when [ExpiryObserved] would, whichever comes first. On a Clockless store
	// it means ExpiryObserved. That is as safe, because ExpiryObserved is the stricter of the two. The clock
	// of a SQLite store is that of its processes' host.
	ExpiryStoreClock ExpiryPolicy = iota

	// ExpiryObserved lets a standby steal when the standby itself has seen the record unchanged for
	// the TTL, by its own monotonic clock. It is for databases whose clock may jump, or that
	// have no clock. It makes a replica wait for a TTL after each start. A standby on a store
	// that delivers changes sees each renewal without a read: see [ChangeSubscription]. On any
	// other store it polls.
	ExpiryObserved
)

// CoordinatorConfig configures a [Coordinator]. The zero value is ready to use.
type CoordinatorConfig struct {
	// Watch and Reconcile are the job. Both run, each in its own goroutine, from the start of a
	// term until their context ends; [context.Cause] says why it ended, and [TermFromContext]
	// returns the term. If one of them returns or panics earlier, the term is over: the other's
	// context ends, the lease is released, and after a pause this replica competes again.
	//
	// Either or both may be nil. If both are nil, the replica only holds the lease, for a
	// program that asks [Coordinator.IsHolder] before each of its steps.
	Watch     func(ctx context.Context) error
	Reconcile func(ctx context.Context) error

	// RenewInterval is the time between renewals. Default TTL/3.
	RenewInterval time.Duration

	// AcquireInterval is the longest time between a standby's attempts while it can't
	// expect a release to wake it: if the store is not a [Watcher], if its watch is not live,
	// after an error, and with [ExpiryObserved] unless the watch is a [ChangeSubscription]. After an
	// [ErrSetup] the time is longer. A replica whose term has ended stays away for one
	// AcquireInterval, or for two if it resigned or its job ended. Default TTL/6, and at most
	// 10s.
	AcquireInterval time.Duration

	// RenewDeadline is how long the job may run without a renewal. The job has the rest of
	// TTL − Margin to return. Default 2/3 of the TTL.
	RenewDeadline time.Duration

	// Check, if set, returns nil if this replica is healthy. It is called before the
	// replica competes, with [RoleStandby], and before each renewal, with [RoleHolder], or
	// with [RoleConfirming] if the job has not begun yet. An unhealthy standby does not
	// compete. An unhealthy holder does not renew. After CheckFailures failures in a row, or
	// at the RenewDeadline, its term ends with [ErrUnhealthy], and the lease is released once
	// the job has returned. The replica then stays away, longer each time, so that a healthy
	// one wins.
	//
	// Check must return when its context ends, at the latest after CheckTimeout; otherwise it
	// counts as failed. It should be quick, because a standby calls it between a release that
	// wakes it and its attempt. It must not panic.
	//
	// If CheckTimeout exceeds its default, Check is called earlier, by the difference, but
	// never before the previous renewal.
	Check         func(ctx context.Context, role Role) error
	CheckTimeout  time.Duration // default (RenewDeadline − RenewInterval)/2; below the RenewDeadline
	CheckFailures int           // default 1

	// Confirmations is how many renewals must succeed after a takeover before the job
	// begins. Default 0. A takeover is a steal from a holder that has not released the
	// lease; an acquire of a free lease has nothing to confirm, unless it is the first after a
	// failover that may have lost a holder's record. If a replica releases the
	// lease before it has confirmed the takeover, the next holder confirms it.
	Confirmations int

	// FencePredecessor, if set, is called after a takeover and its confirmations, before
	// the job begins: it cuts off the power, the disk or the address of a holder that
	// vanished. It is called again until it returns nil or the term is over. When it has
	// failed for a TTL, another replica gets the lease and has to fence the same holders;
	// this one stays away as if its Check had failed.
	//
	// It must be safe to call for a holder that is already cut off, because a replica that did
	// not finish leaves its predecessors to the next one. After a crash and restart it is also
	// called for a holder with this replica's own name, unless AssumeUniqueHolder is set and the
	// holder was an earlier process. After a failover of the database that may have lost a holder's record, the first replica that
	// gets the lease calls it for a holder with the name "unknown" and without a term: it then has
	// to cut off every other replica, or to return nil at the risk that one still works. Its
	// context ends with the term, or after ten TTLs if that is earlier; it must then return, as
	// a job must.
	FencePredecessor func(ctx context.Context, prev Holding) error

	// Outranks, if set, reports whether this replica should have the lease rather than holder, for
	// example because it is in the database's zone. Once it has returned true about the same term for
	// Settle, and Check has passed, this replica asks for a handover to itself. Each such request
	// doubles the time that must pass before the next one, up to an hour; after a term of this
	// replica that lasted longer than that time, it is Settle again. Outranks is called when this
	// replica has read who holds the lease. It must do no I/O, and must not panic.
	Outranks func(holder Holding) bool
	Settle   time.Duration // default 4 TTLs

	// Drain, if set, makes this replica resign, and not compete, while it is drained. Run does not compete
	// before the Drain has read the mark for the first time.
	Drain *Drain

	// Logger gets one line for each acquire, loss and release, and for each problem.
	// Nothing waits for it: see [Trace]. Default: the lease's.
	Logger *slog.Logger

	// Trace, if set, is called when something happens.
	Trace *Trace
}

// longestAcquireInterval is the default for long TTLs. A brief error of the store or a lost hint
// then costs no more than this.
const longestAcquireInterval = 10 * time.Second

func (cfg CoordinatorConfig) withDefaults(lease LeaseConfig) (CoordinatorConfig, error) {
	set := cfg
	cfg.RenewInterval = cmp.Or(cfg.RenewInterval, lease.TTL/3)
	cfg.AcquireInterval = cmp.Or(cfg.AcquireInterval, min(lease.TTL/6, longestAcquireInterval))
	cfg.RenewDeadline = cmp.Or(cfg.RenewDeadline, lease.TTL*2/3)
	cfg.Logger = cmp.Or(cfg.Logger, lease.Logger)
	given, renewing := cfg, cfg.RenewDeadline-cfg.RenewInterval
	if cfg.Check != nil {
		cfg.CheckTimeout = cmp.Or(cfg.CheckTimeout, renewing/2)
		cfg.CheckFailures = cmp.Or(cfg.CheckFailures, 1)
	}
	if cfg.Outranks != nil {
		cfg.Settle = cmp.Or(cfg.Settle, 4*lease.TTL)
	}

	var problems objects.Problems
	problems.Duration("RenewInterval", set.RenewInterval)
	problems.Duration("AcquireInterval", max(set.AcquireInterval, 0))
	problems.If(cfg.AcquireInterval < 0 || cfg.AcquireInterval > maximumTTL,
		"AcquireInterval %v is not between 0 and %v", cfg.AcquireInterval, maximumTTL)
	problems.Duration("RenewDeadline", max(set.RenewDeadline, 0))
	problems.Duration("CheckTimeout", max(set.CheckTimeout, 0))
	problems.If(given.CheckTimeout != 0 && cfg.Check == nil, "CheckTimeout is %v, and Check is nil", given.CheckTimeout)
	problems.If(given.CheckFailures != 0 && cfg.Check == nil, "CheckFailures is %d, and Check is nil", given.CheckFailures)
	problems.If(given.CheckTimeout < 0 || given.CheckTimeout > 0 && given.CheckTimeout >= cfg.RenewDeadline,
		"CheckTimeout %v is not between 0 and the RenewDeadline, %v: there would be no time for the renewal",
		cfg.CheckTimeout, cfg.RenewDeadline)
	problems.If(given.Settle != 0 && cfg.Outranks == nil, "Settle is %v, and Outranks is nil", given.Settle)
	problems.Duration("Settle", set.Settle)
	problems.If(cfg.CheckFailures < 0, "CheckFailures %d is negative", cfg.CheckFailures)
	problems.If(cfg.Confirmations < 0, "Confirmations %d is negative", cfg.Confirmations)
	least := lease.TTL / 30 // for a renewal and its repetition, and for a job to return
	problems.If(renewing < least && given.RenewDeadline == 0, "RenewInterval %v is above %v, the most that TTL %v leaves time for",
		cfg.RenewInterval, (cfg.RenewDeadline - least).Truncate(time.Millisecond), lease.TTL)
	problems.If(renewing < least && given.RenewDeadline != 0, "RenewDeadline %v is not at least %v above RenewInterval %v", cfg.RenewDeadline, least, cfg.RenewInterval)
	problems.If(lease.TTL-lease.Margin-cfg.RenewDeadline < least,
		"RenewDeadline %v is not at least %v below TTL %v less Margin %v: the job would have no time to return",
		cfg.RenewDeadline, least, lease.TTL, lease.Margin)
	return cfg, problems.Err()
}
