package testkit

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure"
)

// LeaseKey is the key of the leases that NewLease makes, unless their config has another.
var LeaseKey = tenure.Key{Type: "reconciler_lease", ID: "singleton"}

// Quiet discards what is logged.
var Quiet = slog.New(slog.DiscardHandler)

// NewLease makes a lease, which is quiet unless cfg has a logger.
func NewLease(t testing.TB, store tenure.Store, cfg tenure.LeaseConfig) *tenure.Lease {
	t.Helper()
	cfg.Key, cfg.Logger = cmp.Or(cfg.Key, LeaseKey), cmp.Or(cfg.Logger, Quiet)
	lease, err := tenure.NewLease(store, cfg)
	require.NoError(t, err)
	return lease
}

// MustAcquire begins a term.
func MustAcquire(t testing.TB, lease *tenure.Lease) *tenure.Term {
	t.Helper()
	term, err := lease.AcquireOrSteal(context.Background())
	require.NoError(t, err)
	return term
}

// AcquireBriefly begins a term as soon as the lease is free or has expired. The term has the TTL
// of cfg, or a longer one if the machine is too slow for that.
func AcquireBriefly(t testing.TB, store tenure.Store, cfg tenure.LeaseConfig) (lease *tenure.Lease, term *tenure.Term, ttl time.Duration) {
	t.Helper()
	lease = NewLease(t, store, cfg)
	for end := time.Now().Add(Patience); ; {
		term, err := lease.AcquireOrSteal(t.Context())
		switch {
		case err == nil:
			return lease, term, cfg.TTL
		case errors.Is(err, tenure.ErrDeadline):
			cfg.TTL *= 2
			lease = NewLease(t, store, cfg)
		case !errors.Is(err, tenure.ErrHeld) || time.Now().After(end):
			t.Fatal(err)
		}
	}
}

// Put writes an object unconditionally.
func Put(t testing.TB, store tenure.Store, obj tenure.Object) tenure.Object {
	t.Helper()
	obj, err := store.PutIf(context.Background(), obj, tenure.Unconditional())
	require.NoError(t, err)
	return obj
}

// Get reads an object.
func Get(t testing.TB, store tenure.Store, key tenure.Key) tenure.Object {
	t.Helper()
	obj, err := store.Get(context.Background(), key)
	require.NoError(t, err)
	return obj
}

// RemoveRecord deletes the record of the lease, without a hint, as an operator might.
func RemoveRecord(t testing.TB, store tenure.Store) {
	t.Helper()
	require.NoError(t, store.DeleteIf(context.Background(), LeaseKey, tenure.IfVersion(Get(t, store, LeaseKey).Version)))
}

// WantLost fails unless the term is over because it was lost to the holder to, or to no holder if
// to is empty.
func WantLost(t testing.TB, err error, term *tenure.Term, to string) {
	t.Helper()
	require.ErrorIs(t, err, tenure.ErrLost)
	if to == "" {
		require.NotContains(t, err.Error(), "held by")
	} else {
		require.ErrorContains(t, err, "is held by "+to)
	}
	require.False(t, term.Valid(), "a lost term is valid")
}

// WantErr fails unless err is want. A nil want means no error.
func WantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

// Bare hides all optional capabilities of a store.
func Bare(store tenure.Store) tenure.Store { return struct{ tenure.Store }{store} }

// BlockedLog returns a log handler that blocks until release is closed, like a pipe without a
// reader.
func BlockedLog(release <-chan struct{}) slog.Handler { return blockedLog(release) }

type blockedLog <-chan struct{}

func (b blockedLog) Enabled(context.Context, slog.Level) bool  { <-b; return true }
func (b blockedLog) Handle(context.Context, slog.Record) error { <-b; return nil }
func (b blockedLog) WithAttrs([]slog.Attr) slog.Handler        { <-b; return b }
func (b blockedLog) WithGroup(string) slog.Handler             { <-b; return b }
