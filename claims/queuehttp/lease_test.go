package queuehttp_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/claims/queuehttp"
)

var leased = func() claims.QueueConfig {
	cfg := tasks
	cfg.Expires, cfg.Deadline = "expires", time.Minute
	return cfg
}()

func TestEachTaskHasALeaseOfItsOwn(t *testing.T) {
	eachServerOf(t, leased, func(w *world) {
		w.add(1, 3)
		h := w.run(w.handler(queuehttp.Config{TTL: 5 * time.Minute, MaxLease: 2 * time.Minute}))
		does := func(want int, name string, body any) answer {
			w.Helper()
			status, out := ask(w.T, h, name, body)
			require.Equal(w, want, status, out.Error)
			return out
		}
		s := does(200, "begin", in{"holder": "w"}).Session
		out := does(200, "take", in{"session": s, "n": 1, "lease_seconds": 1})
		require.EqualValues(w, 1, out.Lease)
		short := out.Tasks[0].Claim
		out = does(200, "take", in{"session": s, "n": 2, "have": []claims.Claim{short}})
		require.EqualValues(w, 60, out.Lease, "the queue's Deadline")
		rest := []claims.Claim{out.Tasks[0].Claim, out.Tasks[1].Claim}
		does(200, "extend", in{"claims": rest[:1], "lease_seconds": 120})
		for _, seconds := range []any{121, 0.5, 0, -1} {
			for name, body := range map[string]in{"take": {"session": s, "n": 1}, "extend": {"claims": rest}} {
				body["lease_seconds"] = seconds
				require.Contains(w, does(400, name, body).Error, "this server allows 1s to 2m0s")
			}
		}

		have := append([]claims.Claim{short}, rest...)
		for began := time.Now(); time.Since(began) < time.Minute; {
			if ended := does(200, "heartbeat", in{"session": s, "have": have}).Ended; len(ended) > 0 {
				require.Equal(w, have[:1], ended, "its session is renewed, but not its lease")
				break
			}
		}
		require.Equal(w, []claims.Claim{short}, does(409, "extend", in{"claims": have}).Ended)
		require.Equal(w, []claims.Claim{short}, does(409, "finish", in{"results": []in{{"claim": short}}}).Ended)
		other := does(200, "begin", in{"holder": "other"}).Session
		require.Equal(w, "1", does(200, "take", in{"session": other, "n": 3}).Tasks[0].Claim.Key.ID)
	})
}

func TestATaskThatHangsIsAnotherWorkersOnceItsLeaseHasRunOut(t *testing.T) {
	const lease = 10 * time.Second
	inBubbleOf(t, leased, func(w *world) {
		w.add(1, 2)
		cause, hang := make(chan error, 1), make(chan struct{})
		var redone atomic.Pointer[time.Time]
		began := time.Now()
		w.serveAs(queuehttp.ClientConfig{Lease: lease}, w.wire(2), 2, func(ctx context.Context, t queuehttp.Task) (any, error) {
			if t.Claim.Key.ID == "1" && t.Claim.Attempt == 1 { // it hangs
				<-ctx.Done()
				cause <- context.Cause(ctx)
				<-hang
				return "late", nil
			}
			for range 10 { // it lasts longer than its lease, and says that it goes on
				time.Sleep(lease / 2)
				if err := t.Extend(ctx, lease); err != nil {
					return nil, err
				}
			}
			return "done", ctx.Err()
		})
		w.awaitCount(2, countOwned)
		w.serveAs(queuehttp.ClientConfig{}, w.wire(1), 1, func(_ context.Context, t queuehttp.Task) (any, error) {
			now := time.Now()
			redone.Store(&now)
			return "again", nil
		})
		require.ErrorIs(w, receive(w, cause), claims.ErrOverdue)
		require.Less(w, time.Since(began), lease)
		w.awaitCount(2, countDone)
		require.Less(w, redone.Load().Sub(began), lease+2*time.Second)
		close(hang)
		time.Sleep(time.Minute)
		require.Equal(w, 1, w.count(`SELECT count(*) FROM results WHERE task = 1 AND result = '"again"'`))
		require.Equal(w, 1, w.count(`SELECT count(*) FROM results WHERE task = 2 AND result = '"done"'`))
		require.Equal(w, 2, w.count(`SELECT count(*) FROM results`))
		require.Equal(w, 1, w.count(`SELECT attempts FROM tasks WHERE id = 2`))
		require.Equal(w, 2, w.count(`SELECT attempts FROM tasks WHERE id = 1`))
	})
}

func TestExtendIsForTasksOfAClient(t *testing.T) {
	require.ErrorIs(t, queuehttp.Task{}.Extend(t.Context(), time.Minute), tenure.ErrInvalid)
	inBubbleOf(t, leased, func(w *world) {
		w.add(1, 1)
		errs := make(chan error, 2)
		w.serve(w.wire(1), 1, func(ctx context.Context, t queuehttp.Task) (any, error) {
			errs <- t.Extend(ctx, time.Hour)
			w.exec(`UPDATE tasks SET session = NULL, status = 'canceled'`)
			errs <- t.Extend(ctx, time.Second)
			return nil, context.Cause(ctx)
		})
		require.ErrorIs(w, receive(w, errs), tenure.ErrInvalid, "longer than the server allows")
		require.ErrorIs(w, receive(w, errs), tenure.ErrLost)
	})
}

func TestAFinishOfEachResultFinishesThoseThatItCan(t *testing.T) {
	eachServer(t, func(w *world) {
		w.add(1, 5)
		h := w.handler(queuehttp.Config{TTL: time.Minute})
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		_, got := ask(w.T, h, "take", in{"session": s.Session, "n": 5})
		require.Len(w, got.Tasks, 5)
		results := func(ids ...int) (all []in) {
			for _, id := range ids {
				result := fmt.Sprint("r", id)
				if id == 2 {
					result = "bad"
				}
				all = append(all, in{"claim": got.Tasks[id-1].Claim, "result": result})
			}
			return all
		}
		_, _ = ask(w.T, h, "abandon", in{"claims": []claims.Claim{got.Tasks[3].Claim}})
		status, out := ask(w.T, h, "finish", in{"results": results(1, 2, 3, 4), "each": true})
		require.Equal(w, 200, status)
		require.Equal(w, []claims.Claim{got.Tasks[3].Claim}, out.Ended)
		require.Len(w, out.Refused, 1)
		require.Contains(w, out.Refused[0]["error"], "it is bad")
		require.Contains(w, fmt.Sprint(out.Refused[0]["claim"]), "tasks/2")
		require.Equal(w, 2, w.count(`SELECT count(*) FROM results WHERE task IN (1, 3)`))
		require.Equal(w, 2, w.count(`SELECT count(*) FROM results`))
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE id = 2 AND session IS NOT NULL`), "it is still the worker's")

		status, out = ask(w.T, h, "finish", in{"results": results(1, 3), "each": true})
		require.Equal(w, 200, status)
		require.Len(w, out.Ended, 2)
		status, out = ask(w.T, h, "finish", in{"results": results(5), "each": true})
		require.Equal(w, answer{}, out)
		require.Equal(w, 200, status)
	})
}

func TestAServerDecidesWhatWorkersMayAskFor(t *testing.T) {
	cfg := queuehttp.Config{Filter: func(_ context.Context, filter map[string]string) (string, []any, error) {
		where, args := "payload <> 'secret'", []any(nil)
		for name, value := range filter {
			switch name {
			case "payload":
				where, args = "payload = $1", []any{value}
			case "fails":
				return "", nil, fmt.Errorf("%w: another one", tenure.ErrLost)
			default:
				return "", nil, fmt.Errorf("%w: there is no filter %q", tenure.ErrInvalid, name)
			}
		}
		return where, args, nil
	}}
	eachServer(t, func(w *world) {
		w.add(1, 9)
		w.exec(`UPDATE tasks SET payload = 'secret' WHERE id = 1`)
		h := w.handler(cfg)
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		ids := func(filter in) (ids []string) {
			w.Helper()
			status, out := ask(w.T, h, "take", in{"session": s.Session, "n": 2, "filter": filter, "again": true})
			require.Equal(w, 200, status, out.Error)
			for _, t := range out.Tasks {
				ids = append(ids, t.Claim.Key.ID)
			}
			return ids
		}
		require.Equal(w, []string{"5"}, ids(in{"payload": "p5"}))
		require.Equal(w, []string{"2", "3"}, ids(nil))
		status, out := ask(w.T, h, "wait", in{"filter": in{"payload": "p7"}})
		require.Equal(w, 200, status)
		require.True(w, out.Ready)
		for _, name := range []string{"take", "wait"} {
			body := in{"filter": in{"customer": "acme"}}
			if name == "take" {
				body["session"], body["n"] = s.Session, 1
			}
			status, out = ask(w.T, h, name, body)
			require.Equal(w, 400, status)
			require.Contains(w, out.Error, `there is no filter "customer"`)
			body["filter"] = in{"fails": ""}
			status, _ = send(w.T, h, name, body)
			require.Equal(w, 503, status)
		}
	})
	inBubble(t, func(w *world) {
		w.add(1, 9)
		l := w.wire(0)
		l.servers = map[string]http.Handler{"server": w.run(w.handler(cfg))}
		var done []string
		w.serveAs(queuehttp.ClientConfig{Filter: map[string]string{"payload": "p4"}}, l, 1, func(_ context.Context, t queuehttp.Task) (any, error) {
			done = append(done, t.Claim.Key.ID)
			return nil, nil
		})
		time.Sleep(time.Minute)
		require.Equal(w, []string{"4"}, slices.Compact(done))
	})
}

// The worker's session goes on, so nothing else would find the task.
func TestATaskWhoseAnswerWasLostComesWithTheNextTry(t *testing.T) {
	inBubble(t, func(w *world) {
		l, lost := w.wire(2), false
		l.fail(func(r *http.Request, send func() *http.Response) (*http.Response, error) {
			response := send()
			if path.Base(r.URL.Path) == "take" && !lost && w.count(countOwned) == 2 {
				lost = true
				return nil, errCut
			}
			return response, nil
		})
		begun, hang := make(chan string), make(chan struct{})
		w.serve(l, 2, func(_ context.Context, t queuehttp.Task) (any, error) {
			begun <- t.Claim.Key.ID
			<-hang
			return 1, nil
		})
		for id := 1; id <= 2; id++ {
			time.Sleep(2 * ttl)
			w.add(id, id)
			began := time.Now()
			require.Equal(w, fmt.Sprint(id), receive(w, begun))
			require.Less(w, time.Since(began), 5*time.Second)
		}
		require.True(w, lost)
		close(hang)
		w.awaitCount(2, countDone)
	})
}

func TestATaskThatHangsUsesItsAttempt(t *testing.T) {
	inBubbleOf(t, leased, func(w *world) {
		w.add(1, 1)
		var calls atomic.Int64
		w.serve(w.wire(1), 1, func(ctx context.Context, t queuehttp.Task) (any, error) {
			calls.Add(1)
			<-ctx.Done()
			return nil, context.Cause(ctx)
		})
		w.awaitCount(1, `SELECT count(*) FROM tasks WHERE status = 'failed'`)
		require.EqualValues(w, leased.MaxAttempts, calls.Load())
	})
}

func TestAWaitGoesByTheFilter(t *testing.T) {
	inBubble(t, func(w *world) {
		w.add(1, 2)
		h := w.handler(queuehttp.Config{TTL: ttl, Filter: func(_ context.Context, filter map[string]string) (string, []any, error) {
			return "payload = $1", []any{filter["payload"]}, nil
		}})
		for payload, ready := range map[string]bool{"p2": true, "p3": false} {
			began := time.Now()
			status, out := ask(w.T, h, "wait", in{"filter": in{"payload": payload}})
			require.Equal(w, 200, status)
			require.Equal(w, ready, out.Ready)
			require.Equal(w, !ready, time.Since(began) >= ttl/6)
		}
	})
}

// The others that wait were there first, but they don't know of the row.
func TestAWorkerThatIsToldOfATaskGetsIt(t *testing.T) {
	inBubble(t, func(w *world) {
		l, begins := w.wire(1), atomic.Int64{}
		l.fail(func(r *http.Request, send func() *http.Response) (*http.Response, error) {
			if path.Base(r.URL.Path) == "begin" {
				begins.Add(1)
			}
			return send(), nil
		})
		begun := make(chan string)
		for range 50 {
			w.serve(l, 1, func(_ context.Context, t queuehttp.Task) (any, error) {
				begun <- t.Claim.Key.ID
				return 1, nil
			})
		}
		time.Sleep(time.Minute)
		w.add(1, 1)
		added := time.Now()
		require.Equal(w, "1", receive(w, begun))
		require.Less(w, time.Since(added), time.Second)
		w.awaitCount(1, countDone)
		require.LessOrEqual(w, begins.Load(), int64(3))
	})
}

func TestALeaseBeginsWhenItsTaskIsTaken(t *testing.T) {
	inBubbleOf(t, leased, func(w *world) {
		w.add(1, 1)
		causes, began := make(chan error, 1), time.Now()
		begun := make(chan time.Duration, 2)
		w.serveAs(queuehttp.ClientConfig{Lease: 4 * time.Second}, w.wire(1), 2, func(ctx context.Context, t queuehttp.Task) (any, error) {
			begun <- time.Since(began)
			if t.Claim.Key.ID == "1" { // the session goes on, and a take waits
				for range 8 {
					time.Sleep(time.Second)
					if err := t.Extend(ctx, 10*time.Second); err != nil {
						return nil, err
					}
				}
				return 1, nil
			}
			time.Sleep(3500 * time.Millisecond)
			causes <- context.Cause(ctx)
			return 1, nil
		})
		require.Zero(w, receive(w, begun).Round(time.Second))
		time.Sleep(4500 * time.Millisecond)
		w.add(2, 2)
		require.Less(w, receive(w, begun), 4900*time.Millisecond)
		require.NoError(w, receive(w, causes))
		w.awaitCount(2, countDone)
		require.Equal(w, 1, w.count(`SELECT attempts FROM tasks WHERE id = 2`))
	})
}

// A take arrives almost a TTL late, when the takes that search for its tasks have ended.
func TestATakeThatArrivesLateLosesNoTask(t *testing.T) {
	inBubble(t, func(w *world) {
		l, armed := w.wire(1), atomic.Bool{}
		l.fail(func(r *http.Request, send func() *http.Response) (*http.Response, error) {
			if path.Base(r.URL.Path) == "take" && armed.CompareAndSwap(true, false) {
				l.carries.Go(func() {
					time.Sleep(24 * time.Second)
					time.AfterFunc(3*time.Second, func() { w.add(2, 2) }) // by then it has waited longest
					l.servers[r.URL.Host].ServeHTTP(httptest.NewRecorder(), r.WithContext(context.WithoutCancel(r.Context())))
				})
				return nil, errCut
			}
			return send(), nil
		})
		w.add(1, 1)
		hang := make(chan struct{})
		w.serve(l, 2, func(_ context.Context, t queuehttp.Task) (any, error) {
			if t.Claim.Key.ID == "1" { // the session goes on
				<-hang
			}
			return 1, nil
		})
		time.Sleep(3 * ttl)
		armed.Store(true)
		time.Sleep(2 * ttl)
		require.False(w, armed.Load())
		require.Equal(w, 1, w.count(countDone))
		close(hang)
		w.awaitCount(2, countDone)
	})
}

func TestATaskThatCouldNotBeGivenBackIsNotLost(t *testing.T) {
	inBubble(t, func(w *world) {
		l, hang := w.wire(0), make(chan struct{})
		l.servers = map[string]http.Handler{"server": w.run(w.handler(queuehttp.Config{TTL: ttl, Payloads: func(_ context.Context, ids []string) (map[string]any, error) {
			return map[string]any{"2": make(chan int)}, nil // which does not become JSON
		}}))}
		w.serve(l, 3, func(_ context.Context, t queuehttp.Task) (any, error) { <-hang; return nil, nil })
		w.add(1, 1)
		time.Sleep(3 * ttl)
		w.exec(`CREATE TRIGGER refuse BEFORE UPDATE ON tasks WHEN NEW.session IS NULL AND OLD.id = 2 BEGIN SELECT RAISE(ABORT, 'no'); END`)
		w.add(2, 2)
		time.Sleep(time.Second)
		w.exec(`DROP TRIGGER refuse`)
		w.awaitCount(1, `SELECT count(*) FROM tasks WHERE id = 2 AND status = 'failed'`)
		close(hang)
	})
}

func TestATaskWhoseLeaseIsOverWhenItArrivesIsNotBegun(t *testing.T) {
	inBubbleOf(t, leased, func(w *world) {
		l, slow := w.wire(1), true
		l.fail(func(r *http.Request, send func() *http.Response) (*http.Response, error) {
			response := send()
			if path.Base(r.URL.Path) == "take" && slow && w.count(countOwned) > 0 {
				slow = false
				time.Sleep(3 * time.Second)
			}
			return response, nil
		})
		w.add(1, 1)
		w.serveAs(queuehttp.ClientConfig{Lease: 2 * time.Second}, l, 1, func(ctx context.Context, t queuehttp.Task) (any, error) {
			if time.Sleep(time.Millisecond); ctx.Err() != nil {
				w.Errorf("task %s is begun: %v", t.Claim.Key.ID, context.Cause(ctx))
			}
			return 1, nil
		})
		w.awaitCount(1, countDone)
		require.LessOrEqual(w, w.count(`SELECT attempts FROM tasks`), 2)
		require.False(w, slow)
	})
}

func TestATakeWhoseFilterIsInvalidIsRefusedAlsoWhenItWaits(t *testing.T) {
	inBubble(t, func(w *world) {
		h := w.handler(queuehttp.Config{TTL: ttl, Filter: func(context.Context, map[string]string) (string, []any, error) {
			return "payload = $1", nil, nil
		}})
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		for _, again := range []bool{false, true} {
			status, _ := ask(w.T, h, "take", in{"session": s.Session, "n": 1, "again": again})
			require.Equal(w, 400, status)
		}
	})
}
