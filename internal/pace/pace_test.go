package pace

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestAHintIsHeardAfterTheTimeInWhichHintsAreIgnored(t *testing.T) {
	for name, c := range map[string]struct {
		hintAfter, ignoreFor, longest time.Duration
		hinted                        bool
		took                          time.Duration
	}{
		"at once":             {time.Second, 0, time.Minute, true, time.Second},
		"while it is ignored": {time.Second, 10 * time.Second, time.Minute, true, 10 * time.Second},
		"never heard":         {time.Second, time.Minute, time.Minute, false, time.Minute},
		"too late":            {time.Hour, 0, time.Minute, false, time.Minute},
		"nothing to wait for": {time.Hour, time.Second, -time.Second, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				hints := make(chan struct{}, 1)
				time.AfterFunc(c.hintAfter, func() { hints <- struct{}{} })
				began := time.Now()
				hinted, ok := Await(t.Context(), hints, c.ignoreFor, c.longest)
				if took := time.Since(began); hinted != c.hinted || !ok || took != c.took {
					t.Errorf("hinted %v, ok %v, after %v; want %v after %v", hinted, ok, took, c.hinted, c.took)
				}
			})
		})
	}
}

func TestAContextEndsEveryWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if Sleep(ctx, time.Minute) || Sleep(ctx, 0) {
			t.Error("a sleep outlasts its context")
		}
		if _, ok := Await(ctx, nil, 0, time.Minute); ok {
			t.Error("a wait outlasts its context")
		}
	})
}

func TestAfterAFewSpuriousHintsOneInAnIntervalIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Limiter
		for i := range 5 {
			if d := l.IgnoreFor(true, time.Minute); d != 0 {
				t.Fatalf("after %d spurious hints they are ignored for %v", i+1, d)
			}
		}
		for i := range 3 {
			d := l.IgnoreFor(true, time.Minute)
			if d != time.Minute {
				t.Errorf("after %d spurious hints they are ignored for %v", i+6, d)
			}
			time.Sleep(d)
		}
		time.Sleep(time.Hour)
		if d := l.IgnoreFor(true, time.Minute); d != 0 {
			t.Errorf("after a quiet hour they are ignored for %v", d)
		}
	})
}

func TestPausesGrowUpToTheirLimit(t *testing.T) {
	for failures, most := range []time.Duration{1, 2, 4, 8, 8, 8} {
		most *= time.Second
		if got := Retry(16*time.Second, time.Hour, failures); got > most || got < most*3/4 {
			t.Errorf("after %d failures: %v", failures, got)
		}
	}
	if got := Retry(time.Hour, 5*time.Second, 9); got > 5*time.Second {
		t.Errorf("a long interval makes it %v", got)
	}
	var d Doubling
	for i, want := range []time.Duration{1, 2, 4, 5, 5} {
		if got := d.Next(0, 1, 5); got != want {
			t.Errorf("pause %d is %d, want %d", i, got, want)
		}
	}
	if got := d.Next(6, 1, 5); got != 1 {
		t.Errorf("after a long time without trouble it is %d", got)
	}
}
