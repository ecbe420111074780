package tenure

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestTrustEndsByTheWallClockToo(t *testing.T) {
	now := time.Now()
	trusted := newTrust(now, time.Hour)
	if !trusted.covers(now) {
		t.Fatal("fresh trust does not cover its own instant")
	}
	// A machine that was suspended for two hours: the monotonic clock stood
	// still, the wall clock went on.
	suspended := &trust{deadline: trusted.deadline, wall: trusted.wall.Add(-2 * time.Hour)}
	if suspended.covers(now) {
		t.Error("the trust outlasts a suspended machine")
	}
	// A wall clock that is set back gives no more trust.
	setBack := &trust{deadline: now, wall: trusted.wall.Add(2 * time.Hour)}
	if setBack.covers(now) {
		t.Error("the trust grows with a wall clock that is set back")
	}
}

func TestAFencedWriteGivesWayToARenewalButNotForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var term Term
		waits := func(ctx context.Context) time.Duration {
			began := time.Now()
			term.giveWay(ctx)
			return time.Since(began)
		}
		if got := waits(t.Context()); got != 0 {
			t.Errorf("without a renewal it waits %v", got)
		}
		done := term.renewal()
		go func() { time.Sleep(10 * time.Millisecond); done() }()
		if got := waits(t.Context()); got != 10*time.Millisecond {
			t.Errorf("for a renewal of 10ms it waits %v", got)
		}
		if got := waits(t.Context()); got != 0 {
			t.Errorf("after a renewal it waits %v", got)
		}
		done = term.renewal()
		defer done()
		if got := waits(t.Context()); got != 100*time.Millisecond {
			t.Errorf("for a renewal that hangs it waits %v", got)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if got := waits(ctx); got != time.Millisecond {
			t.Errorf("with a context that ends it waits %v", got)
		}
	})
}
