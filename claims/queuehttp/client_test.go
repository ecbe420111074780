package queuehttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"path"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims/queuehttp"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The tests in this file run in virtual time.

const ttl = 30 * time.Second

func logTo(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }

var errCut = errors.New("connection reset")

// wire connects clients with servers of their own.
func (w *world) wire(servers int) *wire {
	l := &wire{servers: make(map[string]http.Handler)}
	for i := range servers {
		l.servers[fmt.Sprint("server", i)] = w.run(w.handler(queuehttp.Config{TTL: ttl}))
	}
	w.Cleanup(l.carries.Wait)
	return l
}

// awaitCount waits until a query returns a number.
func (w *world) awaitCount(want int, query string) {
	w.Helper()
	for range 10_000 {
		if w.count(query) == want {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	w.Fatalf("%s is %d, and not %d", query, w.count(query), want)
}

const (
	countDone  = `SELECT count(*) FROM tasks WHERE status = 'done'`
	countOwned = `SELECT count(*) FROM tasks WHERE session IS NOT NULL`
)

// receive receives from a channel, or stops the process: its funcs would never return.
func receive[T any](w *world, from chan T) (v T) {
	select {
	case v = <-from:
	case <-time.After(10 * ttl):
		panic("nothing is received in " + w.Name())
	}
	return v
}

func echo(_ context.Context, t queuehttp.Task) (any, error) { return t.Payload, nil }

func TestAClientGoesOnWhileOneOfItsServersIsDown(t *testing.T) {
	testkit.Slow(t)
	inBubble(t, func(w *world) {
		l := w.wire(3)
		var sessions atomic.Int64
		down := ""
		l.fail(func(r *http.Request, send func() *http.Response) (*http.Response, error) {
			switch {
			case r.URL.Host != down:
			case rand.N(2) == 0:
				return nil, errCut
			default: // it hangs
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			if path.Base(r.URL.Path) == "begin" {
				sessions.Add(1)
			}
			return send(), nil
		})
		w.serve(l, 4, echo)
		for i := range 6 {
			synctest.Wait()
			down = fmt.Sprint("server", i%3)
			began := time.Now()
			w.add(100*i+1, 100*i+20)
			w.awaitCount(20*(i+1), countDone)
			require.Less(w, time.Since(began), ttl)
			time.Sleep(2 * ttl)
		}
		require.EqualValues(w, 6, sessions.Load(), "it has lost none: there is one for each time with tasks")
		require.Equal(w, 120, w.count(`SELECT count(DISTINCT task) FROM results`))
		require.Equal(w, 120, w.count(`SELECT count(*) FROM results`))
	})
}

func TestATaskWhoseFuncEndsByGoexitIsHeldBack(t *testing.T) {
	inBubble(t, func(w *world) {
		w.add(1, 1)
		var calls atomic.Int64
		w.serve(w.wire(1), 1, func(context.Context, queuehttp.Task) (any, error) {
			if calls.Add(1) < 1000 {
				runtime.Goexit() // as t.FailNow does
			}
			return nil, nil
		})
		w.awaitCount(1, `SELECT count(*) FROM tasks WHERE status = 'failed'`)
		require.EqualValues(w, tasks.MaxAttempts, calls.Load(), "each call is an attempt")
	})
}

func TestAClientStopsItsFuncsBeforeOthersGetTheirTasks(t *testing.T) {
	inBubble(t, func(w *world) {
		w.add(1, 3)
		l, other := w.wire(2), w.wire(1)
		var mu sync.Mutex
		works := map[string]bool{}
		causes := make(chan error, 3)
		w.serve(l, 3, func(ctx context.Context, t queuehttp.Task) (any, error) {
			mu.Lock()
			works[t.Claim.Key.ID] = true
			mu.Unlock()
			<-ctx.Done()
			mu.Lock()
			works[t.Claim.Key.ID] = false
			mu.Unlock()
			causes <- context.Cause(ctx)
			return nil, ctx.Err()
		})
		time.Sleep(4 * ttl)
		w.serve(other, 3, func(_ context.Context, t queuehttp.Task) (any, error) {
			mu.Lock()
			defer mu.Unlock()
			if works[t.Claim.Key.ID] {
				w.Errorf("two work on task %s", t.Claim.Key.ID)
			}
			return 1, nil
		})
		require.Equal(w, 3, w.count(countOwned), "its session is renewed")
		began := time.Now()
		l.fail(func(*http.Request, func() *http.Response) (*http.Response, error) { return nil, errCut })
		for range 3 {
			require.ErrorIs(w, receive(w, causes), tenure.ErrDeadline)
		}
		require.Less(w, time.Since(began), ttl)
		w.awaitCount(3, countDone)
		l.fail(func(_ *http.Request, send func() *http.Response) (*http.Response, error) { return send(), nil })
	})
}

func TestAFuncIsToldThatItsClaimHasEnded(t *testing.T) {
	inBubble(t, func(w *world) {
		w.add(1, 2)
		causes := make(chan string, 2)
		w.serve(w.wire(1), 2, func(ctx context.Context, t queuehttp.Task) (any, error) {
			if t.Claim.Attempt > 1 {
				return nil, nil
			}
			<-ctx.Done()
			causes <- fmt.Sprint(t.Claim.Key.ID, " ", context.Cause(ctx))
			return "late", nil
		})
		time.Sleep(ttl)
		w.exec(`UPDATE tasks SET session = NULL, status = 'cancelled' WHERE id = 2`)
		require.Equal(w, "2 lease lost", receive(w, causes))
		time.Sleep(ttl)
		require.Empty(w, causes, "the other one goes on")
		w.exec(`DELETE FROM objects WHERE object_type = 'tenure.session'`) // its session, and the server's
		require.Equal(w, "1 lease lost", receive(w, causes))
		w.awaitCount(1, countDone)
		require.Zero(w, w.count(`SELECT count(*) FROM results WHERE task = 2`))
		require.Equal(w, 1, w.count(`SELECT count(*) FROM results`), "of the other task, which no other worker had yet or has done again")
	})
}

func TestAClientGivesItsTasksBackWhenItStops(t *testing.T) {
	inBubble(t, func(w *world) {
		w.add(1, 4)
		stop := w.serve(w.wire(2), 4, func(ctx context.Context, t queuehttp.Task) (any, error) {
			switch t.Claim.Key.ID {
			case "1":
				return nil, fmt.Errorf("it fails: %w", tenure.ErrLost) // of something else
			case "2":
				<-ctx.Done()
				time.Sleep(5 * ttl) // meanwhile its session is renewed
				return context.Cause(ctx).Error(), nil
			case "3":
				return "bad", nil
			}
			<-ctx.Done()
			return nil, context.Cause(ctx)
		})
		time.Sleep(500 * time.Millisecond)
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE not_before IS NOT NULL AND session IS NULL`), "they are tried again after a while")
		stop()
		require.Zero(w, w.count(countOwned))
		require.Equal(w, 1, w.count(`SELECT count(*) FROM results WHERE task = 2 AND result = '"replica is shutting down"'`))
		require.Equal(w, 2, w.count(`SELECT count(*) FROM objects WHERE object_type = 'tenure.session'`), "only the servers have sessions")
	})
}

// The request may be obeyed late, and a func of the same claim must not run then.
func TestATaskIsItsWorkersUntilItIsGivenBack(t *testing.T) {
	inBubble(t, func(w *world) {
		l := w.wire(2)
		var cut atomic.Bool
		l.fail(func(r *http.Request, send func() *http.Response) (*http.Response, error) {
			if path.Base(r.URL.Path) == "nack" && cut.Load() {
				return nil, errCut
			}
			return send(), nil
		})
		var begun sync.Map
		failed := make(chan string, 10)
		stop := w.serve(l, 2, func(_ context.Context, t queuehttp.Task) (any, error) { // its second place asks for more
			if _, twice := begun.LoadOrStore(t.Claim, true); twice {
				w.Errorf("the claim %s was begun twice", t.Claim)
			}
			if t.Claim.Attempt == 1 {
				failed <- t.Claim.Key.ID
				return nil, errors.New("it fails")
			}
			return 1, nil
		})
		cut.Store(true)
		w.add(1, 1)
		require.Equal(w, "1", receive(w, failed))
		time.Sleep(2 * ttl)
		require.Equal(w, 1, w.count(countOwned))
		cut.Store(false)
		w.awaitCount(1, countDone)

		cut.Store(true)
		w.add(2, 2)
		require.Equal(w, "2", receive(w, failed))
		began := time.Now()
		stop()
		require.Less(w, time.Since(began), 2*ttl, "it stops all the same")
		require.Zero(w, w.count(countOwned))
	})
}

// Its func might run beside that of another worker.
func TestATaskWhoseAnswerComesTooLateIsNotBegun(t *testing.T) {
	inBubble(t, func(w *world) {
		l, other := w.wire(1), w.wire(1)
		var begun sync.Map
		var begins atomic.Int64
		cut, late := make(chan struct{}), make(chan struct{}, 100)
		l.fail(func(r *http.Request, send func() *http.Response) (*http.Response, error) {
			name := path.Base(r.URL.Path)
			isTake := name == "take"
			select {
			case <-cut:
				if name == "heartbeat" || name == "begin" && begins.Add(1) > 1 {
					return nil, errCut // nothing renews the session
				}
			default:
			}
			response := send()
			if isTake && w.count(countOwned) > 0 {
				late <- struct{}{}
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			return response, nil
		})
		w.serve(l, 1, func(_ context.Context, t queuehttp.Task) (any, error) {
			if _, twice := begun.LoadOrStore(t.Claim.Key.ID, true); twice {
				w.Errorf("task %s was begun twice", t.Claim.Key.ID)
			}
			return 1, nil
		})
		time.Sleep(ttl)
		close(cut)
		w.add(1, 1)
		<-late
		w.serve(other, 1, func(_ context.Context, t queuehttp.Task) (any, error) {
			begun.Store(t.Claim.Key.ID, true)
			return 2, nil
		})
		w.awaitCount(1, countDone)
		l.fail(func(_ *http.Request, send func() *http.Response) (*http.Response, error) { return send(), nil })
		time.Sleep(2 * ttl)
		require.Equal(w, 1, w.count(`SELECT count(*) FROM results WHERE result = '2'`))
		require.Equal(w, 1, w.count(`SELECT count(*) FROM results`))
	})
}

// A machine that was suspended stops its timers, and the first thing that it sees may be the answer to a take.
func TestATaskIsNotBegunAfterTheMachineWasSuspended(t *testing.T) {
	inBubble(t, func(w *world) {
		l := w.wire(1)
		var asleep atomic.Int64
		ctx, cancel := context.WithCancel(clock.With(context.Background(), func() clock.Reading {
			now := clock.Process()
			now.Wall = now.Wall.Add(time.Duration(asleep.Load()))
			return now
		}))
		client := testkit.Must(queuehttp.NewClient(queuehttp.ClientConfig{Servers: []string{"http://server0"}, HTTP: &http.Client{Transport: l}, Logger: testkit.Quiet}))
		var begun []int
		var suspended atomic.Bool
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = client.Serve(ctx, 1, func(_ context.Context, t queuehttp.Task) (any, error) {
				begun = append(begun, t.Claim.Attempt)
				return 1, nil
			})
		}()
		l.fail(func(r *http.Request, send func() *http.Response) (*http.Response, error) {
			response := send()
			if path.Base(r.URL.Path) == "take" && w.count(countOwned) > 0 && !suspended.Swap(true) {
				asleep.Store(int64(2 * ttl))
				w.exec(`UPDATE tasks SET session = NULL`) // meanwhile others have found its session expired
			}
			return response, nil
		})
		time.Sleep(time.Second)
		w.add(1, 1)
		w.awaitCount(1, countDone)
		cancel()
		<-done
		require.Equal(w, []int{2}, begun)
	})
}

func TestEachResultIsWrittenOnceWhateverIsLost(t *testing.T) {
	testkit.Slow(t)
	inBubble(t, func(w *world) {
		const total = 400
		var stops []func()
		for range 3 {
			l := w.wire(2)
			l.fail(func(r *http.Request, send func() *http.Response) (*http.Response, error) {
				testkit.Sleep(r.Context(), rand.N(200*time.Millisecond))
				switch rand.N(8) {
				case 0:
					return nil, errCut
				case 1, 2:
					_ = send()
					return nil, errCut
				case 3:
					_ = send()
					<-r.Context().Done()
					return nil, r.Context().Err()
				case 4:
					testkit.Sleep(r.Context(), rand.N(ttl/2))
				}
				return send(), nil
			})
			var running sync.Map
			stops = append(stops, w.serve(l, 8, func(ctx context.Context, t queuehttp.Task) (any, error) {
				if _, twice := running.LoadOrStore(t.Claim.Key.ID, true); twice {
					w.Errorf("two funcs of one client run for task %s", t.Claim.Key.ID)
				}
				defer running.Delete(t.Claim.Key.ID)
				time.Sleep(rand.N(2 * time.Second))
				if rand.N(20) == 0 {
					return nil, errors.New("it fails")
				}
				return t.Payload, ctx.Err()
			}))
		}
		w.add(1, total)
		w.awaitCount(total, `SELECT count(*) FROM tasks WHERE status <> 'queued'`)
		for _, stop := range stops {
			stop()
		}
		done := w.count(countDone)
		w.Logf("%d of %d tasks done, %d attempts", done, total, w.count(`SELECT sum(attempts) FROM tasks`))
		require.Greater(w, done, total*9/10, "the others have failed five times")
		require.Equal(w, done, w.count(`SELECT count(*) FROM results`))
		require.Equal(w, done, w.count(`SELECT count(DISTINCT task) FROM results`))
	})
}
