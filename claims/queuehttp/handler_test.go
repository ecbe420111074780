package queuehttp_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/claims/queuehttp"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestWhatAServerAnswers(t *testing.T) {
	eachServer(t, func(w *world) {
		w.add(1, 3)
		servers, turn := []*queuehttp.Handler{w.handler(queuehttp.Config{TTL: time.Minute}), w.handler(queuehttp.Config{TTL: time.Minute})}, 0
		does := func(want int, name string, body any) answer {
			w.Helper()
			turn++ // each request goes to another server
			status, out := ask(w.T, servers[turn%2], name, body)
			require.Equal(w, want, status, out.Error)
			require.Equal(w, want == 200, out.Error == "")
			return out
		}
		begin := func(holder string) in { w.Helper(); return does(200, "begin", in{"holder": holder}).Session }
		take := func(s in, n int, have ...claims.Claim) []queuehttp.Task {
			w.Helper()
			return does(200, "take", in{"session": s, "n": n, "have": have}).Tasks
		}
		first, second := begin("first"), begin("second")
		require.EqualValues(w, 60, first["ttl_seconds"])
		does(200, "heartbeat", in{"session": first})
		does(200, "heartbeat", in{"session": first})
		does(409, "heartbeat", in{"session": in{"id": first["id"], "term": second["term"], "token": first["token"]}})

		got := take(first, 2)
		require.Equal(w, []string{`"p1"`, `"p2"`}, []string{string(got[0].Payload), string(got[1].Payload)})
		require.Equal(w, got, take(first, 3), "its answer was lost")
		third := take(first, 3, got[0].Claim, got[1].Claim)
		require.Equal(w, `"p3"`, string(third[0].Payload))

		// All results are written, or none.
		does(200, "abandon", in{"claims": []claims.Claim{got[1].Claim}})
		again := take(second, 1)
		require.Equal(w, `"p2"`, string(again[0].Payload))
		ended := does(200, "heartbeat", in{"session": first, "have": []claims.Claim{got[0].Claim, got[1].Claim, third[0].Claim}}).Ended
		require.Equal(w, []claims.Claim{got[1].Claim}, ended)
		all := []in{{"claim": got[0].Claim, "result": 1}, {"claim": got[1].Claim, "result": "late"}}
		require.Equal(w, []claims.Claim{got[1].Claim}, does(409, "finish", in{"results": all}).Ended)
		require.Zero(w, w.count(`SELECT count(*) FROM results`))
		does(200, "finish", in{"results": []in{all[0], {"claim": third[0].Claim, "result": in{"x": 3}}}})
		does(409, "finish", in{"results": all[:1]})
		does(409, "abandon", in{"claims": []claims.Claim{got[1].Claim}})
		require.Equal(w, 2, w.count(`SELECT count(*) FROM results`))
		require.Contains(w, does(400, "finish", in{"results": []in{{"claim": again[0].Claim, "result": "bad"}}}).Error, "it is bad")

		does(200, "nack", in{"claims": []claims.Claim{again[0].Claim}, "after_seconds": 3600})
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE not_before IS NOT NULL AND session IS NULL`))
		w.exec(`UPDATE tasks SET not_before = NULL`)
		again = take(first, 1)
		require.Equal(w, 2, again[0].Claim.Attempt, "an abandoned attempt does not count")

		does(200, "goodbye", in{"session": first})
		does(409, "goodbye", in{"session": first})
		does(409, "heartbeat", in{"session": first})
		does(409, "finish", in{"results": []in{{"claim": again[0].Claim, "result": "late"}}})
		require.Equal(w, `"p2"`, string(take(second, 1)[0].Payload))
	})
}

// The hooks of a queue without payloads and results.
func TestAQueueWithoutHooksTakesNoResults(t *testing.T) {
	eachServer(t, func(w *world) {
		w.add(1, 1)
		h := testkit.Must(queuehttp.NewHandler(w.store, w.queue, queuehttp.Config{Logger: testkit.Quiet}))
		_, out := ask(w.T, h, "begin", in{"holder": "w"})
		_, out = ask(w.T, h, "take", in{"session": out.Session, "n": 1})
		require.Equal(w, "null", string(out.Tasks[0].Payload))
		status, bad := ask(w.T, h, "finish", in{"results": []in{{"claim": out.Tasks[0].Claim, "result": 7}}})
		require.Equal(w, 400, status)
		require.Contains(w, bad.Error, "set Config.Finish")
		status, _ = ask(w.T, h, "finish", in{"results": []in{{"claim": out.Tasks[0].Claim, "result": nil}}})
		require.Equal(w, 200, status)
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND session IS NULL`))
	})
}

func TestATaskIsGivenBackForTheBackoffOfItsQueue(t *testing.T) {
	inBubble(t, func(w *world) {
		w.add(1, 1)
		h := w.handler(queuehttp.Config{})
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		began := time.Now()
		for attempt, after := range []time.Duration{0, time.Second, 2 * time.Second} {
			var got []queuehttp.Task
			for len(got) == 0 {
				_, out := ask(w.T, h, "take", in{"session": s.Session, "n": 1})
				got = out.Tasks
			}
			require.Equal(w, attempt+1, got[0].Claim.Attempt)
			require.GreaterOrEqual(w, time.Since(began), after)
			require.Less(w, time.Since(began), after+200*time.Millisecond)
			began = time.Now()
			status, _ := ask(w.T, h, "nack", in{"claims": []claims.Claim{got[0].Claim}})
			require.Equal(w, 200, status)
		}
	})
}

func TestATakeWaitsForTasksAndEndsWithItsRequest(t *testing.T) {
	inBubble(t, func(w *world) {
		h := w.handler(queuehttp.Config{TTL: 30 * time.Second})
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		began := time.Now()
		_, out := ask(w.T, h, "take", in{"session": s.Session, "n": 1})
		require.Empty(w, out.Tasks)
		require.Equal(w, 5*time.Second, time.Since(began).Round(time.Second/2))

		began = time.Now()
		time.AfterFunc(time.Second, func() { w.add(1, 1) })
		_, out = ask(w.T, h, "take", in{"session": s.Session, "n": 1})
		require.Len(w, out.Tasks, 1)
		require.Equal(w, time.Second, time.Since(began).Round(time.Second/2))

		began = time.Now()
		ctx, cancel := context.WithTimeout(w.Context(), 2*time.Second)
		defer cancel()
		body, err := json.Marshal(in{"session": s.Session, "n": 1, "have": []claims.Claim{out.Tasks[0].Claim}})
		require.NoError(w, err)
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/take", strings.NewReader(string(body))).WithContext(ctx))
		require.Equal(w, 2*time.Second, time.Since(began).Round(time.Second/2))
	})
}

func TestWhatIsWrongWithARequestIsSaid(t *testing.T) {
	inBubble(t, func(w *world) {
		w.add(1, 1)
		served := w.handler(queuehttp.Config{})
		h := http.MaxBytesHandler(served, 2000)
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		claim := claims.Claim{Key: tenure.Key{Type: "tasks", ID: "1"}, Session: "s", Token: 1}
		newer := maps.Clone(s.Session)
		newer["of a newer server"] = true
		for _, test := range []struct {
			name   string
			body   any
			status int
			says   string
		}{
			{"begin", in{}, 400, "name the worker"},
			{"begin", in{"holder": strings.Repeat("x", 1990)}, 413, "2000 bytes"},
			{"begin", "x", 400, "JSON object"},
			{"heartbeat", in{}, 400, "send what begin has returned"},
			{"heartbeat", in{"session": nil}, 400, "send what begin has returned"},
			{"heartbeat", in{"session": in{"id": "x"}}, 400, "session is missing or incomplete"},
			{"heartbeat", in{"session": in{"id": "x", "term": "y"}}, 400, "session is missing or incomplete"},
			{"goodbye", in{}, 400, "send what begin has returned"},
			{"take", in{"session": s.Session}, 400, "0 rows are asked for"},
			{"take", in{"session": s.Session, "n": 1, "lease": 30}, 400, `unknown field "lease"`},
			{"take", in{"session": s.Session, "n": 1, "lease_seconds": 30}, 400, "the tasks of this queue have no leases"},
			{"take", in{"session": s.Session, "n": 1, "filter": in{"tenant": "acme"}}, 400, "this queue has no filters"},
			{"wait", in{"filter": in{"tenant": "acme"}}, 400, "this queue has no filters"},
			{"wait", in{"filter": "acme"}, 400, "JSON object"},
			{"extend", in{"claims": []claims.Claim{claim}}, 400, "the tasks of this queue have no leases"},
			{"finish", in{"results": []in{{"claim": in{}, "error": "x"}}}, 400, `unknown field "error"`},
			{"heartbeat", in{"session": newer}, 200, ""},
			{"take", in{"n": 1}, 400, "session is missing"},
			{"finish", in{}, 400, "no claims are given"},
			{"finish", in{"results": []in{{"claim": in{}}}}, 400, "no session or no token"},
			{"finish", in{"results": []in{{"claim": claim}, {"claim": claim}}}, 400, "given twice"},
			{"abandon", in{"claims": []claims.Claim{claim, claim}}, 400, "given twice"},
			{"abandon", in{"claims": []claims.Claim{{Key: tenure.Key{Type: "other", ID: "1"}, Session: "s", Token: 1}}}, 400, "not a claim of this queue"},
			{"nack", in{}, 400, "no claims are given"},
			{"nack", in{"claims": []claims.Claim{claim}, "after_seconds": -1}, 400, "negative"},
			{"nack", in{"claims": []claims.Claim{claim}, "after_seconds": 1}, 409, "lease lost"},
			{"claim", in{}, 404, `no request "claim"`},
		} {
			status, out := ask(w.T, h, test.name, test.body)
			require.Equal(w, test.status, status, "%s %v: %s", test.name, test.body, out.Error)
			require.Contains(w, out.Error, test.says)
		}
		answered := httptest.NewRecorder()
		h.ServeHTTP(answered, httptest.NewRequest("GET", "/begin", nil))
		require.Equal(w, http.StatusMethodNotAllowed, answered.Code)
		require.JSONEq(w, `{"error":"use POST"}`, answered.Body.String())
	})
}

func TestAStoreThatIsDownIsA503ThatHidesWhy(t *testing.T) {
	inBubble(t, func(w *world) {
		var log testkit.SyncBuffer
		h := w.handler(queuehttp.Config{Logger: logTo(&log), Payloads: func(context.Context, []string) (map[string]any, error) { return nil, errors.New("the password is x") }})
		w.add(1, 1)
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		for range 3 {
			status, out := send(w.T, h, "take", in{"session": s.Session, "n": 1})
			require.Equal(w, 503, status)
			require.NotContains(w, out.Error, "password")
		}
		require.Equal(w, 3, w.count(`SELECT attempts FROM tasks WHERE session IS NULL AND not_before IS NOT NULL`), "others come first")
		time.Sleep(time.Second) // for the log
		require.Equal(w, 1, strings.Count(log.String(), "the password is x"), log.String())
	})
}

// A 409 would end the worker's session, or have it drop a task that its next take brings again at once.
func TestTheLossOfAnotherLeaseIsNotThatOfAWorker(t *testing.T) {
	inBubble(t, func(w *world) {
		other := fmt.Errorf("the cache: %w", &claims.EndedError{Claims: []claims.Claim{{Key: tenure.Key{Type: "cache", ID: "1"}, Token: 1}}})
		fails := false
		h := w.handler(queuehttp.Config{
			Payloads: func(ctx context.Context, ids []string) (map[string]any, error) {
				if fails {
					return nil, other
				}
				return w.payloads(ctx, ids)
			},
			Finish: func(ctx context.Context, results []queuehttp.Result) error {
				if fails {
					return other
				}
				return w.finish(ctx, results)
			},
		})
		w.add(1, 2)
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		_, got := ask(w.T, h, "take", in{"session": s.Session, "n": 1})
		require.Len(w, got.Tasks, 1)
		fails = true
		status, _ := send(w.T, h, "take", in{"session": s.Session, "n": 1, "have": []claims.Claim{got.Tasks[0].Claim}})
		require.Equal(w, 503, status)
		results := in{"results": []queuehttp.Result{{Claim: got.Tasks[0].Claim}}}
		status, _ = send(w.T, h, "finish", results)
		require.Equal(w, 503, status)
		fails = false
		status, _ = send(w.T, h, "finish", results)
		require.Equal(w, 200, status)
		status, out := send(w.T, h, "finish", results)
		require.Equal(w, 409, status, "its own claim has ended")
		require.Len(w, out.Ended, 1)
	})
}

func TestATaskThatCannotBeToldIsGivenBack(t *testing.T) {
	eachServer(t, func(w *world) {
		w.add(1, 2)
		var log testkit.SyncBuffer
		h := w.handler(queuehttp.Config{TTL: time.Minute, Logger: logTo(&log), Payloads: func(context.Context, []string) (map[string]any, error) {
			return map[string]any{"1": make(chan int), "2": "p2"}, nil
		}})
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		status, out := ask(w.T, h, "take", in{"session": s.Session, "n": 2})
		require.Equal(w, 200, status)
		require.Len(w, out.Tasks, 1)
		require.Equal(w, `"p2"`, string(out.Tasks[0].Payload))
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE id = 1 AND session IS NULL AND not_before IS NOT NULL AND attempts = 1`))
		require.Equal(w, 1, strings.Count(log.String(), "does not become JSON"), log.String())
	})
}

func TestBadInputToHandlersAndClients(t *testing.T) {
	inBubble(t, func(w *world) {
		plain := tasks
		plain.NotBefore = ""
		unfit := testkit.Must(claims.NewQueue(w.store, plain))
		plain = tasks
		plain.Expires, plain.Deadline = "expires", time.Minute
		expiring := testkit.Must(claims.NewQueue(w.store, plain))
		elsewhere := testkit.Must(claims.NewQueue(testkit.OpenSQLite(w.T, ":memory:"), tasks))
		for _, bad := range []struct {
			queue *claims.Queue
			cfg   queuehttp.Config
		}{{nil, queuehttp.Config{}}, {unfit, queuehttp.Config{}}, {elsewhere, queuehttp.Config{}}, {w.queue, queuehttp.Config{TTL: -1}}, {w.queue, queuehttp.Config{MaxLease: time.Minute}}, {expiring, queuehttp.Config{MaxLease: time.Second / 2}}} {
			_, err := queuehttp.NewHandler(w.store, bad.queue, bad.cfg)
			require.ErrorIs(w, err, tenure.ErrInvalid)
		}
		_, err := queuehttp.NewHandler(tenure.Static(), w.queue, queuehttp.Config{})
		require.ErrorIs(w, err, errors.ErrUnsupported)
		for _, servers := range [][]string{nil, {"127.0.0.1:8080"}, {"http://a", ":"}} {
			_, err := queuehttp.NewClient(queuehttp.ClientConfig{Servers: servers})
			require.ErrorIs(w, err, tenure.ErrInvalid, servers)
		}
		client := testkit.Must(queuehttp.NewClient(queuehttp.ClientConfig{Servers: []string{"http://a"}}))
		require.ErrorIs(w, client.Serve(w.Context(), 0, nil), tenure.ErrInvalid)
		require.ErrorIs(w, client.Serve(w.Context(), 1, nil), tenure.ErrInvalid)
	})
}
