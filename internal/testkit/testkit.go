// Package testkit is what the tests of this repository share, with its benchmarks and chaos runs:
// databases and other servers, virtual clocks, faults, histories, and scenarios that every store
// must pass. It carries no compatibility promise. Only tests and packages below proof import it.
package testkit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Patience is how long to wait for something that takes milliseconds on an idle machine.
const Patience = time.Minute

// UntilEnough runs a stress test in rounds until enough has happened to prove something. A busy
// machine may be too slow for the pace of a round, so each round is slower than the one before: a
// round multiplies its TTLs and other durations by slower. A round must end with its context.
func UntilEnough(t *testing.T, length time.Duration, round func(ctx context.Context, slower time.Duration), enough func() bool) {
	t.Helper()
	const longest = 5 * time.Minute
	began := time.Now()
	for slower := time.Duration(1); ; slower = min(2*slower, 32) {
		ctx, cancel := context.WithTimeout(t.Context(), length)
		round(ctx, slower)
		cancel()
		if t.Failed() || enough() {
			return
		}
		if time.Since(began) > longest {
			t.Fatal("too little has happened to prove anything")
		}
		t.Logf("too little has happened so far, at a pace of 1/%d", slower)
	}
}

// Must returns what a constructor has made, or panics.
func Must[T any](made T, err error) T {
	if err != nil {
		panic(err)
	}
	return made
}

// ErrOf returns the error of a call that also returns something else.
func ErrOf[T any](_ T, err error) error { return err }

// ErrPanicked stands for a panic that the documentation announces.
var ErrPanicked = errors.New("panic")

// PanicOf returns what fn panics with, as an [ErrPanicked], or nil if it returns.
func PanicOf(fn func()) (err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("%w: %v", ErrPanicked, panicked)
		}
	}()
	fn()
	return nil
}

// Await waits until ok returns true, for [Patience] at most. It calls ok on the test's own
// goroutine.
func Await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); !ok(); time.Sleep(5 * time.Millisecond) {
		require.True(t, time.Now().Before(end), "waited until %s", what)
	}
}

// Sleep sleeps for d, or until the context ends.
func Sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// Percentile sorts d and returns its p-th percentile.
func Percentile(d []time.Duration, p int) time.Duration {
	slices.Sort(d)
	return d[len(d)*p/100]
}

// SyncBuffer is a log that a store writes while the test reads it.
type SyncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *SyncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *SyncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
