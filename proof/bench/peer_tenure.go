package main

import (
	"context"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

var (
	tenurePeer = peer{
		name:       "tenure",
		about:      "this library, on Postgres",
		renews:     time.Second,
		versionSQL: `SELECT resource_version FROM objects WHERE id = $1`,
		ownPool:    true,
		expires:    true,
		prepare:    prepareTenure,
		open: func(ctx context.Context, o options) (*replica, error) {
			return openTenure(ctx, o, tenureStore())
		},
	}
	tenurePollPeer = peer{
		name:    "tenure-poll",
		about:   "the same without LISTEN",
		polls:   time.Second / 2,
		expires: true,
		prepare: prepareTenure,
		open: func(ctx context.Context, o options) (*replica, error) {
			cfg := tenureStore()
			cfg.PollOnly = true
			return openTenure(ctx, o, cfg)
		},
	}
)

func tenureStore() tenure.PostgresConfig {
	return tenure.PostgresConfig{Logger: slog.New(slog.DiscardHandler)}
}

func prepareTenure(ctx context.Context, url string) error {
	store, err := tenure.OpenPostgres(ctx, url, tenureStore())
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	return claims.Migrate(ctx, store)
}

func openTenure(ctx context.Context, o options, cfg tenure.PostgresConfig) (*replica, error) {
	if o.shared {
		pool, err := openPool(ctx, o)
		if err != nil {
			return nil, err
		}
		store, err := tenure.NewPostgresStore(pool, cfg)
		if err != nil {
			return nil, err
		}
		r := tenureReplica(store, o)
		shared := poolReplica(pool, r.contender)
		shared.close = func() { r.close(); pool.Close() }
		return shared, nil
	}
	url := o.url
	if o.conns > 0 {
		url = withParameter(url, "pool_max_conns", strconv.Itoa(o.conns))
	}
	store, err := tenure.OpenPostgres(ctx, url, cfg)
	if err != nil {
		return nil, err
	}
	return tenureReplica(store, o), nil
}

func tenureReplica(store database, o options) *replica {
	cfg := tenure.LeaseConfig{Holder: o.name, Logger: slog.New(slog.DiscardHandler)}
	switch o.timing {
	case fast:
		cfg.TTL = fastTTL
	case brief:
		cfg.TTL = briefTTL
	case endless:
		cfg.TTL = time.Hour
	}
	if o.ttl > 0 {
		cfg.TTL = o.ttl
	}
	trace := &tenure.Trace{}
	if o.renewed != nil {
		trace.Renewed = func(*tenure.Term, time.Duration, time.Duration) { o.renewed.Add(1) }
	}
	return &replica{
		contender: func(name string) (contender, error) {
			cfg := cfg
			cfg.Key = tenure.Key{Type: "bench", ID: name}
			lease, err := tenure.NewLease(store, cfg)
			return &tenureContender{trace: trace, lease: lease}, err
		},
		close: func() { store.Close() },
	}
}

type tenureContender struct {
	trace       *tenure.Trace
	lease       *tenure.Lease
	coordinator *tenure.Coordinator // the last campaign's
	term        *tenure.Term        // the last term
}

// campaign runs a new coordinator for each term, because one that has resigned
// deliberately stays away for a while, and the measure would wait for it.
func (c *tenureContender) campaign(ctx context.Context, job func(context.Context)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var err error
	c.coordinator, err = tenure.NewCoordinator(c.lease, tenure.CoordinatorConfig{
		Trace: c.trace,
		Reconcile: func(ctx context.Context) error {
			c.term = tenure.TermFromContext(ctx)
			job(ctx)
			// The goroutine that owns the term sees that ctx is done, too. It releases the lease
			// before it ends.
			cancel()
			return nil
		},
	})
	if err != nil {
		return err
	}
	return c.coordinator.Run(ctx)
}

func (c *tenureContender) resign(ctx context.Context) error { return c.coordinator.Resign(ctx) }

func (c *tenureContender) acquire(ctx context.Context) (err error) {
	c.term, err = c.lease.AcquireOrSteal(ctx)
	return err
}

func (c *tenureContender) renew(ctx context.Context) error { return c.lease.Renew(ctx, c.term) }

func (c *tenureContender) release(ctx context.Context) error { return c.lease.Release(ctx, c.term) }

func (c *tenureContender) steal(ctx context.Context) error { return c.acquire(ctx) }

// renewed returns when the last successful renewal was sent; trust in the term counts from
// then.
func (c *tenureContender) renewed() time.Time {
	cfg := c.lease.Config()
	return c.term.Deadline().Add(-(cfg.TTL - cfg.Margin))
}

// withParameter adds a parameter to a database's URL.
func withParameter(url, name, value string) string {
	separator := "?"
	if strings.Contains(url, "?") {
		separator = "&"
	}
	return url + separator + name + "=" + value
}
