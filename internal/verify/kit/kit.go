// Package kit holds what tests of several packages share: databases, leases, faults of a
// store, and jobs that must not overlap.
package kit

import (
	"bytes"
	"context"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Patience is how long to wait for what takes milliseconds on an idle machine.
const Patience = time.Minute

// UntilEnough runs a stress test in rounds until enough has happened to prove anything. A
// busy machine may be too slow for the pace of a round. Then the next round is slower: it
// multiplies its TTLs and the like by slower. A round Must end with its context.
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
			t.Fatal("too little happened to prove anything")
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

// AwaitThat waits until ok, which it Calls on the test's own goroutine.
func AwaitThat(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); !ok(); time.Sleep(5 * time.Millisecond) {
		require.True(t, time.Now().Before(end), "waited until %s", what)
	}
}

// SleepFor sleeps, unless the context ends before.
func SleepFor(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// Percentile sorts d.
func Percentile(d []time.Duration, p int) time.Duration {
	slices.Sort(d)
	return d[len(d)*p/100]
}

// StacksOf counts the goroutines that run code of these.
func StacksOf(code ...string) (n int) {
	stacks := make([]byte, 1<<22)
	for g := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
		if slices.ContainsFunc(code, func(code string) bool { return strings.Contains(g, code) }) {
			n++
		}
	}
	return n
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
