package tenure_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

var pollOnly bool

func settle() {
	if pollOnly {
		time.Sleep(5 * time.Second)
	}
	synctest.Wait()
}

func startWith(t *testing.T, store tenure.Store, leaseConfig tenure.LeaseConfig, cfg tenure.CoordinatorConfig) *replica {
	if pollOnly {
		store = bare(store)
	}
	return newScene(t, store).begin(leaseConfig, cfg)
}

func three(t *testing.T, l *ledger, store tenure.Store) (a, b, c *replica) {
	s := newScene(t, store)
	s.jobs = l
	return s.three()
}

func takeover(t *testing.T, l *ledger, cfg tenure.CoordinatorConfig) (a, b *replica) {
	s := newScene(t, storetest.NewMem())
	s.jobs = l
	return s.takeover(cfg)
}

func fencing(s *script, fence func(ctx context.Context) error) tenure.CoordinatorConfig {
	return s.fencing(fence)
}

func (s *script) want(t *testing.T, want ...string) {
	t.Helper()
	if got := s.said(); !slices.Equal(got, want) {
		t.Errorf("happened: %q, want %q", got, want)
	}
}

func copyRenews(t *testing.T, store tenure.Store) { renewAsCopy(t, store) }
