package main

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

var clientGoPeer = peer{
	name:       "client-go",
	about:      "leader election of k8s.io/client-go, over one row of Postgres",
	polls:      time.Second / 2,
	expires:    true,
	renews:     time.Second / 2,
	versionSQL: `SELECT resource_version FROM records WHERE name = $1`,
	prepare: func(ctx context.Context, url string) error {
		return execute(ctx, url, `
			CREATE TABLE records (
				name             text   PRIMARY KEY,
				record           bytea  NOT NULL,
				resource_version bigint NOT NULL
			) WITH (fillfactor = 50)`)
	},
	open: func(ctx context.Context, o options) (*replica, error) {
		silenceKlog()
		pool, err := openPool(ctx, o)
		if err != nil {
			return nil, err
		}
		return poolReplica(pool, func(lease string) (contender, error) {
			return &clientGoContender{record: &recordLock{pool: pool, name: lease, holder: o.name}, timing: o.timing}, nil
		}), nil
	},
}

// silenceKlog drops the log messages of electors, which all go to one global logger.
var silenceKlog = sync.OnceFunc(func() { klog.SetLogger(logr.Discard()) })

type clientGoContender struct {
	record *recordLock
	timing timing

	job  running
	stop context.CancelFunc // stops the elector, which then releases
	over chan struct{}      // closed when the elector has returned
	end  chan error         // when controlled step by step: what the campaign returns
}

func (c *clientGoContender) campaign(ctx context.Context, job func(context.Context)) error {
	var jobs sync.WaitGroup
	defer jobs.Wait()
	c.over = make(chan struct{})
	defer close(c.over)
	ctx, c.stop = context.WithCancel(ctx)
	defer c.stop()

	// The elector starts its callback in a goroutine that may begin after Run has returned. The
	// event is recorded before.
	c.record.event = func(event string) {
		if event == "became leader" {
			jobs.Add(1)
		}
	}
	cfg := leaderelection.LeaderElectionConfig{
		Lock:            c.record,
		LeaseDuration:   15 * time.Second,
		RenewDeadline:   10 * time.Second,
		RetryPeriod:     2 * time.Second,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				defer jobs.Done()
				c.job.run(ctx, job)
			},
			OnStoppedLeading: func() {},
		},
	}
	switch c.timing {
	case fast:
		cfg.LeaseDuration, cfg.RenewDeadline, cfg.RetryPeriod = 3*time.Second, 2*time.Second, time.Second/2
	case endless:
		cfg.LeaseDuration, cfg.RenewDeadline, cfg.RetryPeriod = time.Hour, 40*time.Minute, 20*time.Minute
	}
	elector, err := leaderelection.NewLeaderElector(cfg)
	if err != nil {
		return err
	}
	elector.Run(ctx)
	return ctx.Err()
}

func (c *clientGoContender) resign(ctx context.Context) error {
	c.job.stop()
	c.stop()
	return await(ctx, c.over)
}

// renewed returns when the last renewal that succeeded was sent.
func (c *clientGoContender) renewed() time.Time { return *c.record.sent.Load() }

// acquire runs an elector until it leads, because there is no other way to acquire.
func (c *clientGoContender) acquire(ctx context.Context) error {
	led := make(chan struct{})
	c.end = make(chan error, 1)
	go func() {
		c.end <- c.campaign(ctx, func(ctx context.Context) {
			close(led)
			<-ctx.Done()
		})
	}()
	select {
	case <-led:
		return nil
	case err := <-c.end:
		return err
	}
}

func (c *clientGoContender) release(ctx context.Context) error {
	err := c.resign(ctx)
	<-c.end
	return err
}

// recordLock keeps the record of one election in one row, which is replaced by
// compare-and-swap. Each elector has its own recordLock.
type recordLock struct {
	pool    *pgxpool.Pool
	name    string
	holder  string
	version int64                     // of the row, when it was last read or written
	sent    atomic.Pointer[time.Time] // when the last write that succeeded was sent
	event   func(string)
}

var _ resourcelock.Interface = (*recordLock)(nil)

var records = schema.GroupResource{Resource: "records"}

// bounded returns a context that ends at the deadline of ctx, but not when ctx is
// cancelled: pgx would close the connection in the middle of a statement, whereas an HTTP
// client only gives up the request.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(10 * time.Second)
	}
	return context.WithDeadline(context.WithoutCancel(ctx), deadline)
}

func (l *recordLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	var raw []byte
	err := l.pool.QueryRow(ctx, `SELECT record, resource_version FROM records WHERE name = $1`, l.name).Scan(&raw, &l.version)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil, apierrors.NewNotFound(records, l.name)
	}
	if err != nil {
		return nil, nil, err
	}
	record := &resourcelock.LeaderElectionRecord{}
	return record, raw, json.Unmarshal(raw, record)
}

func (l *recordLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, `
		INSERT INTO records (name, record, resource_version) VALUES ($1, $2, $3 + 1)
		ON CONFLICT (name) DO NOTHING RETURNING resource_version`, 0)
}

func (l *recordLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, `
		UPDATE records SET record = $2, resource_version = resource_version + 1
		WHERE name = $1 AND resource_version = $3 RETURNING resource_version`, l.version)
}

func (l *recordLock) write(ctx context.Context, record resourcelock.LeaderElectionRecord, sql string, version int64) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	raw, err := json.Marshal(record)
	if err != nil {
		return err
	}
	sent := time.Now()
	err = l.pool.QueryRow(ctx, sql, l.name, raw, version).Scan(&l.version)
	if err == nil {
		l.sent.Store(&sent)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return apierrors.NewConflict(records, l.name, errors.New("another write came first"))
	}
	return err
}

func (l *recordLock) RecordEvent(event string) { l.event(event) }
func (l *recordLock) Identity() string         { return l.holder }
func (l *recordLock) Describe() string         { return l.name }
