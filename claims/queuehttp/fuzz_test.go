package queuehttp_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/claims/queuehttp"
	"github.com/tenurelib/tenure/internal/testkit"
)

// bodies are what a worker that obeys the protocol sends. SESSION and CLAIM stand for those that it has.
var bodies = map[string]string{
	"begin":     `{"holder": "w"}`,
	"heartbeat": `{"session": SESSION, "have": [CLAIM]}`,
	"take":      `{"session": SESSION, "n": 2, "have": [CLAIM]}`,
	"finish":    `{"results": [{"claim": CLAIM, "result": {"x": 1}}]}`,
	"nack":      `{"claims": [CLAIM], "after_seconds": 5}`,
	"abandon":   `{"claims": [CLAIM]}`,
	"goodbye":   `{"session": SESSION}`,
}

const (
	aSession = `{"id": "ID", "term": "TERM", "token": 9999, "ttl_seconds": 30}`
	aClaim   = `{"key": {"type": "tasks", "id": "1"}, "session": "ID", "token": 8888, "attempt": 1, "row": true}`
)

// mutilated returns a value of JSON with each part in turn left out, given twice, or replaced by another.
func mutilated(v any) (all []any) {
	all = append(all, nil, true, -1, 0, 1.5, 1e300, "", "x", "\x00", []any{}, []any{nil}, map[string]any{})
	switch v := v.(type) {
	case map[string]any:
		for name := range v {
			with := func(part any) { c := maps.Clone(v); c[name] = part; all = append(all, c) }
			less := maps.Clone(v)
			delete(less, name)
			all = append(all, less)
			for _, part := range mutilated(v[name]) {
				with(part)
			}
		}
	case []any:
		all = append(all, append(slices.Clone(v), v...))
		for i := range v {
			for _, part := range mutilated(v[i]) {
				c := slices.Clone(v)
				c[i] = part
				all = append(all, c, append(slices.Clone(v), part))
			}
		}
	case float64:
		all = append(all, -v, v+1)
	}
	return all
}

// request is one whose body has the words ID, TERM, 9999 and 8888 for the session's and the claim's own.
type request struct{ name, body string }

// mutilatedRequests returns a request of each kind, whole and mutilated.
func mutilatedRequests(t *testing.T) (all []request) {
	for name, body := range bodies {
		body = strings.NewReplacer("SESSION", aSession, "CLAIM", aClaim).Replace(body)
		var whole any
		require.NoError(t, json.Unmarshal([]byte(body), &whole), body)
		for _, part := range mutilated(whole) {
			all = append(all, request{name, string(testkit.Must(json.Marshal(part)))})
		}
		for _, text := range []string{"", body[:len(body)/2], body + body, body + "}", body + " \n"} {
			all = append(all, request{name, text})
		}
	}
	return all
}

// Whatever a worker sends is answered, and no func of the config gets what the protocol does not allow.
func TestAMutilatedRequestIsRefusedAndReachesNoFuncOfTheConfig(t *testing.T) {
	statuses := make(map[int]int)
	for left := mutilatedRequests(t); len(left) > 0; {
		inBubble(t, func(w *world) {
			sends := w.sender()
			for status := 400; len(left) > 0 && status == 400; left = left[1:] {
				status = sends(left[0])
				statuses[status]++
			}
		})
	}
	t.Log(statuses)
	require.Greater(t, statuses[400], 500)
	require.Greater(t, statuses[200], 10)
}

func FuzzARequestOfAnyBodyIsAnsweredAndOnlyAValidOneReachesTheConfig(f *testing.F) {
	for name, body := range bodies {
		f.Add(name, strings.NewReplacer("SESSION", aSession, "CLAIM", aClaim).Replace(body))
	}
	f.Fuzz(func(t *testing.T, name, body string) {
		inBubble(t, func(w *world) { w.sender()(request{name, body}) })
	})
}

// sender returns a func that sends requests to a server whose hooks allow only what the protocol does. It returns the
// status. After a 400, nothing has happened.
func (w *world) sender() func(request) (status int) {
	w.add(1, 2)
	valid := func(c claims.Claim) {
		_, err := c.Fence()
		require.NoError(w, err)
		require.Equal(w, "tasks", c.Key.Type)
		require.True(w, c.Row)
		require.GreaterOrEqual(w, c.Attempt, 0)
	}
	cfg := tasks
	cfg.Backoff = func(c claims.Claim) time.Duration { valid(c); return time.Second }
	queue := testkit.Must(claims.NewQueue(w.store, cfg))
	h := testkit.Must(queuehttp.NewHandler(w.store, queue, queuehttp.Config{
		Logger: testkit.Quiet, Payloads: w.payloads,
		Finish: func(ctx context.Context, results []queuehttp.Result) error {
			require.NotEmpty(w, results)
			var done []claims.Claim
			for i, r := range results {
				valid(r.Claim)
				require.True(w, json.Valid(r.Result), "%q", r.Result)
				for _, other := range results[:i] {
					require.NotEqual(w, other.Claim.Key, r.Claim.Key)
				}
				done = append(done, r.Claim)
			}
			return queue.Finish(ctx, done...)
		},
	}))
	_, begun := ask(w.T, h, "begin", in{"holder": "w"})
	_, took := ask(w.T, h, "take", in{"session": begun.Session, "n": 1})
	require.Len(w, took.Tasks, 1)
	own := strings.NewReplacer(`"ID"`, fmt.Sprintf("%q", begun.Session["id"]), `"TERM"`, fmt.Sprintf("%q", begun.Session["term"]),
		"9999", fmt.Sprintf("%.0f", begun.Session["token"]), "8888", fmt.Sprint(took.Tasks[0].Claim.Token))
	return func(send request) int {
		body := own.Replace(send.body)
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
		r.URL.Path = "/" + send.name
		answered := httptest.NewRecorder()
		h.ServeHTTP(answered, r)
		var out answer
		require.NoError(w, json.Unmarshal(answered.Body.Bytes(), &out))
		require.Contains(w, []int{200, 400, 404, 409}, answered.Code, "%s %s: %s", send.name, body, out.Error)
		require.Equal(w, answered.Code == 200, out.Error == "")
		require.True(w, answered.Code == 400 || answered.Code == 404 || json.Valid([]byte(body)), body)
		if answered.Code == 400 {
			require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE id = 1 AND session IS NOT NULL AND status = 'queued'`), body)
			require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE id = 2 AND attempts > 0`), body)
		}
		return answered.Code
	}
}

// The worker could not tell which of its results were written, and a queue in Postgres has no JSON without a value.
func TestAResultThatIsMissingIsNull(t *testing.T) {
	inBubble(t, func(w *world) {
		w.add(1, 1)
		var got []queuehttp.Result
		h := w.handler(queuehttp.Config{Finish: func(ctx context.Context, results []queuehttp.Result) error {
			got = results
			return w.finish(ctx, results)
		}})
		_, s := ask(w.T, h, "begin", in{"holder": "w"})
		_, out := ask(w.T, h, "take", in{"session": s.Session, "n": 1})
		claim := out.Tasks[0].Claim
		claim.Row = false // from a worker that sends back only what names the row
		status, _ := ask(w.T, h, "finish", in{"results": []in{{"claim": claim}}})
		require.Equal(w, 200, status)
		require.Equal(w, "null", string(got[0].Result))
		require.Equal(w, out.Tasks[0].Claim, got[0].Claim)
	})
}
