package wake_test

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure/internal/wake"
)

// hinted takes the hint of a watch, if there is one.
func hinted(w *wake.Watch[string]) bool {
	select {
	case <-w.C():
		return true
	default:
		return false
	}
}

func wantHint(t *testing.T, what string, w *wake.Watch[string], want bool) {
	t.Helper()
	if got := hinted(w); got != want {
		t.Errorf("%s: got a hint %v, want %v", what, got, want)
	}
}

// In a bubble, a send that blocks forever is a deadlock, and the test fails at once.
func TestAWakeNeverWaitsForThoseWhoWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := wake.NewHub[string](true)
		var watches []*wake.Watch[string]
		for range 10 {
			watches = append(watches, hub.Watch("a"))
		}
		for range 10 {
			hub.Wake("a")
			hub.SetLive(true)
		}
		for _, w := range watches {
			wantHint(t, "woken while nobody received", w, true)
		}
	})
}

func TestHintsThatNobodyHasTakenAreOne(t *testing.T) {
	hub := wake.NewHub[string](true)
	w := hub.Watch("a")
	wantHint(t, "before any wake", w, false)
	hub.Wake("a")
	hub.Wake("a")
	wantHint(t, "after two wakes", w, true)
	wantHint(t, "a second time", w, false)
	hub.Wake("a")
	wantHint(t, "after the next wake", w, true)
}

func TestAWakeIsForAllWhoWatchThatKeyAndForNobodyElse(t *testing.T) {
	hub := wake.NewHub[string](true)
	one, two, other := hub.Watch("a"), hub.Watch("a"), hub.Watch("b")
	hub.Wake("a")
	hub.Wake("nobody's")
	wantHint(t, "one watch of the key", one, true)
	wantHint(t, "another watch of the key", two, true)
	wantHint(t, "a watch of another key", other, false)
	if got, want := slices.Sorted(slices.Values(hub.Keys())), []string{"a", "b"}; !slices.Equal(got, want) {
		t.Errorf("keys: got %q, want %q", got, want)
	}
}

func TestAStoppedWatchIsNotWokenAndOthersAre(t *testing.T) {
	hub := wake.NewHub[string](true)
	stopped, stays := hub.Watch("a"), hub.Watch("a")
	stopped.Stop()
	stopped.Stop()
	hub.Wake("a")
	hub.SetLive(true)
	wantHint(t, "the stopped watch", stopped, false)
	wantHint(t, "the other watch", stays, true)
	if !stopped.Live() {
		t.Error("a stopped watch does not tell whether hints arrive")
	}

	stays.Stop()
	again := hub.Watch("a")
	stays.Stop() // after another has begun in its place
	hub.Wake("a")
	wantHint(t, "a watch begun since", again, true)
	again.Stop()
	if keys := hub.Keys(); len(keys) != 0 {
		t.Errorf("keys that are kept after the last watch: %q", keys)
	}
}

func TestAllAreWokenWhenHintsBeginToArriveOrCease(t *testing.T) {
	hub := wake.NewHub[string](false)
	watches := []*wake.Watch[string]{hub.Watch("a"), hub.Watch("a"), hub.Watch("b")}
	for _, step := range []struct {
		what  string
		live  bool
		woken bool
	}{
		{"still none arrive", false, false},
		{"they arrive", true, true},
		{"they arrive again, as after a reconnect", true, true},
		{"they cease", false, true},
		{"still none arrive, again", false, false},
		{"they arrive again", true, true},
	} {
		hub.SetLive(step.live)
		for _, w := range watches {
			if got := w.Live(); got != step.live {
				t.Errorf("%s: got Live %v, want %v", step.what, got, step.live)
			}
			wantHint(t, step.what, w, step.woken)
		}
	}
	if !hub.Watch("c").Live() {
		t.Error("a watch that began afterwards is not live")
	}
}

// A subscriber that is woken because hints now arrive may call Live at once.
func TestAWatchTellsOfTheChangeThatItWasWokenFor(t *testing.T) {
	hub := wake.NewHub[string](false)
	w := hub.Watch("a")
	defer w.Stop()
	for n := range 1000 {
		live := n%2 == 0
		go hub.SetLive(live)
		<-w.C()
		if w.Live() != live {
			t.Fatalf("round %d: woken, and Live is still %v", n, !live)
		}
	}
}

func TestNoWakeIsMissedWhileOtherWatchesOfTheKeyComeAndGo(t *testing.T) {
	const watchers, rounds = 16, 500
	hub := wake.NewHub[string](true)
	key := func(i int) string { return string(rune('a' + i%watchers)) }
	var others, all sync.WaitGroup
	var over atomic.Bool
	for range 4 {
		others.Go(func() {
			for n := 0; !over.Load(); n++ {
				w := hub.Watch(key(n))
				hub.Wake("nobody's")
				w.Live()
				go w.Stop()
				w.Stop()
			}
		})
	}
	for i := range watchers {
		all.Go(func() {
			for range rounds {
				w := hub.Watch(key(i))
				go hub.Wake(key(i))
				select {
				case <-w.C():
				case <-time.After(time.Minute):
					t.Error("a wake was missed")
					return
				}
				w.Stop()
			}
		})
	}
	all.Wait()
	over.Store(true)
	others.Wait()
}

func TestNothingIsKeptOfWatchesThatWereStopped(t *testing.T) {
	hub := wake.NewHub[string](true)
	var all sync.WaitGroup
	for i := range 32 {
		all.Go(func() {
			for n := range 100 {
				w := hub.Watch(string(rune('a' + i%4)))
				hub.SetLive(n%2 == 0)
				hub.Wake("a")
				hub.Keys()
				w.Live()
				all.Go(w.Stop)
				w.Stop()
			}
		})
	}
	all.Wait()
	if keys := hub.Keys(); len(keys) != 0 {
		t.Errorf("keys that are kept: %q", keys)
	}
}
