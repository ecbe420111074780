package tenure

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure/internal/clock"
)

func TestTimeIsLeftByWhicheverClockSaysThatLessIs(t *testing.T) {
	attempt := clock.Process()
	now := attempt
	term := &Term{id: "a", trusted: time.Hour, clock: func() clock.Reading { return now }}
	term.trust.Store(newTrust(attempt, term.trusted))
	for name, c := range map[string]struct {
		mono, wall, left time.Duration
	}{
		"at once":                        {0, 0, time.Hour},
		"later":                          {time.Minute, time.Minute, 59 * time.Minute},
		"suspended for half an hour":     {time.Minute, 31 * time.Minute, 29 * time.Minute},
		"a wall clock that is ahead":     {0, time.Minute, 59 * time.Minute},
		"a wall clock that was set back": {time.Minute, -time.Hour, 59 * time.Minute},
	} {
		now = clock.Reading{Mono: attempt.Mono.Add(c.mono), Wall: attempt.Wall.Add(c.wall)}
		if got := term.Remaining(); got != c.left {
			t.Errorf("%s: %v remain, want %v", name, got, c.left)
		}
		if got := term.Deadline().Sub(now.Mono); got != c.left {
			t.Errorf("%s: the deadline is in %v, want %v", name, got, c.left)
		}
		if got := term.sinceRenewal(); got != time.Hour-c.left {
			t.Errorf("%s: renewed %v ago, want %v", name, got, time.Hour-c.left)
		}
	}
	now = clock.Reading{Mono: attempt.Mono, Wall: attempt.Wall.Add(time.Hour)}
	if term.Valid() || term.Remaining() != 0 {
		t.Error("the term outlasts a machine that was suspended")
	}
	now = attempt
	if term.Valid() {
		t.Error("a wall clock that is set back revives the term")
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
