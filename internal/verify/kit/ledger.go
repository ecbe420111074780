package kit

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure"
)

// Ledger records when jobs begin and end, and fails the test if two overlap.
type Ledger struct {
	t     *testing.T
	began time.Time

	mu      sync.Mutex
	running string
	lines   []string
}

// Say adds a line.
func (l *Ledger) Say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%v ", time.Since(l.began).Round(time.Millisecond))+fmt.Sprintf(format, args...))
}

// Run is a job that ends when it is told to.
func (l *Ledger) Run(ctx context.Context, name string) {
	l.Begin(name)
	<-ctx.Done()
	l.End(name, context.Cause(ctx))
}

// Begin is called as the job of that replica begins.
func (l *Ledger) Begin(name string) {
	l.Say("%s begins", name)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running != "" {
		l.t.Errorf("%s's job began while %s's was running", name, l.running)
	}
	l.running = name
}

// End is called as it ends.
func (l *Ledger) End(name string, why error) {
	l.mu.Lock()
	l.running = ""
	l.mu.Unlock()
	l.Say("%s ends: %v", name, why)
}

// Holder returns whose job runs.
func (l *Ledger) Holder() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running
}

func (l *Ledger) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// NewLedger begins to count time.
func NewLedger(t *testing.T) *Ledger { return &Ledger{t: t, began: time.Now()} }

// UntilDone is a job that works until it is stopped.
func UntilDone(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// Succeeds is a job, or a check, with nothing to do.
func Succeeds(context.Context) error { return nil }

// Start runs a replica until the test ends, or until stop, which waits for it. Its job is in
// the ledger, unless cfg brings one of its own.
func Start(t *testing.T, l *Ledger, store tenure.Store, name string, cfg tenure.CoordinatorConfig) (c *tenure.Coordinator, stop func()) {
	t.Helper()
	if cfg.Watch == nil && cfg.Reconcile == nil {
		cfg.Reconcile = func(ctx context.Context) error { l.Run(ctx, name); return nil }
	}
	c, err := tenure.NewCoordinator(NewLease(t, store, tenure.LeaseConfig{Holder: name}), cfg)
	require.NoError(t, err)
	return c, Run(t, context.Background(), c)
}

// Run runs a coordinator until the test ends, or until stop, which waits for it.
func Run(t *testing.T, ctx context.Context, c *tenure.Coordinator) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		if err := c.Run(ctx); err != nil {
			t.Errorf("Run of %s: %v", c.Status().Replica, err)
		}
	}()
	stop = func() { cancel(); <-returned }
	t.Cleanup(stop)
	return stop
}
