//go:build unix

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"
)

// noted is a charge that notes what it is told, and when.
type noted struct {
	began time.Time
	notes []string
	exit  chan struct{}
	left  chan ending
}

func (r *noted) note(what string) {
	note := fmt.Sprintf("%s %v", what, time.Since(r.began))
	if len(r.notes) == 0 || !strings.HasPrefix(r.notes[len(r.notes)-1], what) {
		r.notes = append(r.notes, note)
	}
}

func (r *noted) begin() (int, error)     { r.note("begin"); return 42, nil }
func (r *noted) pass(sig syscall.Signal) { r.note(sig.String()) }
func (r *noted) stop(sig syscall.Signal) { r.note("stop") }
func (r *noted) stopOthers()             { r.note("others") }
func (r *noted) kill()                   { r.note("kill") }
func (r *noted) ended() <-chan struct{}  { return r.exit }
func (r *noted) gone() <-chan ending     { return r.left }

// scene is a guard in virtual time, with the test playing tenure.
type scene struct {
	*noted
	orders chan order
	asked  chan time.Time
	final  chan ending
}

// newScene starts a guard that asks every 100 ms, and has a stop timeout of one second.
func newScene(t *testing.T, onLoss string) *scene {
	s := &scene{
		noted:  &noted{began: time.Now(), exit: make(chan struct{}), left: make(chan ending, 1)},
		orders: make(chan order), asked: make(chan time.Time, 1000), final: make(chan ending, 1),
	}
	out, in := io.Pipe()
	g := &guard{
		cfg:     guardConfig{ask: 100 * time.Millisecond, stopTimeout: time.Second, onLoss: onLoss},
		charge:  s.noted,
		reports: json.NewEncoder(in),
		log:     slog.New(slog.DiscardHandler),
	}
	go func() {
		for decoder := json.NewDecoder(out); ; {
			var r report
			if decoder.Decode(&r) != nil {
				return
			}
			if r.Ask {
				s.asked <- time.Now()
			}
			if r.End != nil {
				s.final <- *r.End
			}
		}
	}()
	go func() {
		defer in.Close()
		if err := g.run(s.orders); err != nil {
			t.Errorf("the guard: %v", err)
		}
	}()
	return s
}

// answer answers the guard's questions as tenure does. All durations count from when the
// scene began: how long to answer, and when the guard's two deadlines are.
func (s *scene) answer(until, hard, soft time.Duration) {
	for time.Since(s.began) < until {
		select {
		case <-s.asked:
			now := time.Since(s.began)
			s.orders <- order{Trust: &trust{Hard: hard - now, Soft: soft - now}}
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// over waits until everything that can happen has happened, and ends the charge.
func (s *scene) over(t *testing.T, told bool, want ...string) {
	t.Helper()
	time.Sleep(time.Minute)
	s.left <- ending{Text: "over"}
	if end := <-s.final; end.Told != told {
		t.Errorf("the ending has Told %v, want %v", end.Told, told)
	}
	if !slices.Equal(s.notes, want) {
		t.Errorf("the charge was told %q, want %q", s.notes, want)
	}
}

func TestAGuardEndsTheProgramByItself(t *testing.T) {
	const hard, soft = 10 * time.Second, 9500 * time.Millisecond
	bubble := func(name string, test func(t *testing.T)) {
		t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
	}
	bubble("if tenure hangs, it is told to end, and killed before trust ends", func(t *testing.T) {
		s := newScene(t, onLossStop)
		s.answer(3*time.Second, hard, soft)
		s.over(t, true, "begin 0s", "stop 9.5s", "kill 10s")
	})
	bubble("if tenure hangs with --on-loss kill, it is killed at once", func(t *testing.T) {
		s := newScene(t, onLossKill)
		s.answer(3*time.Second, hard, soft)
		s.over(t, true, "begin 0s", "stop 9.5s", "kill 9.5s")
	})
	bubble("if tenure is gone, it has the stop timeout to end", func(t *testing.T) {
		s := newScene(t, onLossStop)
		s.answer(3*time.Second, hard, soft)
		close(s.orders)
		s.over(t, true, "begin 0s", "stop 3s", "kill 4s")
	})
	bubble("if tenure is gone and less trust is left, it is killed before trust ends", func(t *testing.T) {
		s := newScene(t, onLossStop)
		s.answer(9400*time.Millisecond, hard, soft)
		close(s.orders)
		s.over(t, true, "begin 0s", "stop 9.4s", "kill 10s")
	})
	bubble("an answer counts from the question", func(t *testing.T) {
		s := newScene(t, onLossStop)
		<-s.asked
		time.Sleep(4 * time.Second)
		s.orders <- order{Trust: &trust{Hard: 5 * time.Second, Soft: 4500 * time.Millisecond}}
		s.over(t, true, "begin 4s", "stop 4.5s", "kill 5s")
	})
	bubble("if trust is extended while it ends, it still has only the stop timeout", func(t *testing.T) {
		s := newScene(t, onLossStop)
		s.answer(3*time.Second, hard, soft)
		s.orders <- order{Stop: syscall.SIGINT}
		s.orders <- order{Signal: syscall.SIGINT}
		s.answer(8*time.Second, 20*time.Second, 19*time.Second)
		s.over(t, true, "begin 0s", "stop 3s", "interrupt 3s", "kill 4s")
	})
	bubble("if the lease is lost, it is killed at once", func(t *testing.T) {
		s := newScene(t, onLossStop)
		s.answer(3*time.Second, hard, soft)
		s.orders <- order{Stop: syscall.SIGTERM}
		s.orders <- order{Kill: true}
		s.over(t, true, "begin 0s", "stop 3s", "kill 3s")
	})
	bubble("processes that it leaves behind are ended", func(t *testing.T) {
		s := newScene(t, onLossStop)
		s.answer(3*time.Second, hard, soft)
		close(s.exit)
		s.over(t, false, "begin 0s", "stop 3s", "others 3s", "kill 4s")
	})
}

func TestAProgramStartsOnlyWhileThereIsTrust(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, onLossStop)
		<-s.asked
		time.Sleep(4 * time.Second)
		s.orders <- order{Trust: &trust{Hard: 4 * time.Second, Soft: 3 * time.Second}}
		if end := <-s.final; end.Status == 0 || !end.Told || len(s.notes) != 0 {
			t.Errorf("it began: %+v, %q", end, s.notes)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, onLossStop)
		<-s.asked
		s.orders <- order{Stop: syscall.SIGTERM}
		if end := <-s.final; end.Status == 0 || !end.Told || len(s.notes) != 0 {
			t.Errorf("it began: %+v, %q", end, s.notes)
		}
	})
}

// beforeSuspend returns the time d ago, as if the machine had been suspended since then:
// the monotonic clock stood still.
func beforeSuspend(d time.Duration) time.Time {
	then := time.Now().Add(-d)
	inside := (*struct {
		wall      uint64
		monotonic int64
	})(unsafe.Pointer(&then))
	inside.monotonic += int64(d)
	return then
}

func TestTimeWhileSuspendedUsesUpTrust(t *testing.T) {
	t.Parallel()
	for suspended, want := range map[time.Duration][]string{
		5 * time.Second:  nil,
		15 * time.Second: {"stop"},
		25 * time.Second: {"stop", "kill"},
	} {
		asked := beforeSuspend(suspended)
		if monotonic, wall := time.Since(asked), time.Since(asked.Round(0)); monotonic > suspended/2 || wall < suspended {
			t.Fatalf("%v ago by the monotonic clock and %v by the wall clock; the test would prove nothing", monotonic, wall)
		}
		charge := &noted{began: time.Now()}
		g := &guard{
			cfg:     guardConfig{ask: time.Minute, stopTimeout: 5 * time.Second, onLoss: onLossStop},
			charge:  charge,
			reports: json.NewEncoder(io.Discard),
			log:     slog.New(slog.DiscardHandler),
			begun:   true,
			asked:   asked,
		}
		g.trust(trust{Hard: 20 * time.Second, Soft: 12 * time.Second}) // as tenure answered before the suspend
		g.watch()
		var told []string
		for _, note := range charge.notes {
			what, _, _ := strings.Cut(note, " ")
			told = append(told, what)
		}
		if !slices.Equal(told, want) {
			t.Errorf("after a suspend of %v the charge was told %q, want %q", suspended, told, want)
		}
	}
}

func TestAGuardIsToldHowMuchTrustIsLeft(t *testing.T) {
	t.Parallel()
	timing, err := newTiming(30*time.Second, 10*time.Second, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := timing.left(12*time.Second), (trust{Hard: 11 * time.Second, Soft: 4 * time.Second}); got != want {
		t.Errorf("with 12 s left: %v, want %v", got, want)
	}
	if got := timing.left(0); got != (trust{}) {
		t.Errorf("after the term has ended: %v", got)
	}
}
