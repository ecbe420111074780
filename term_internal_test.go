package tenure

import (
	"testing"
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
	suspended := &trust{attempt: now, deadline: trusted.deadline, wall: trusted.wall.Add(-2 * time.Hour)}
	if suspended.covers(now) {
		t.Error("the trust outlasts a suspended machine")
	}
	// A wall clock that is set back gives no more trust.
	setBack := &trust{attempt: now, deadline: now, wall: trusted.wall.Add(2 * time.Hour)}
	if setBack.covers(now) {
		t.Error("the trust grows with a wall clock that is set back")
	}
}
