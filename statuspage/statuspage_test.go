package statuspage_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/statuspage"
	"github.com/tenurelib/tenure/storetest"
)

var key = tenure.Key{Type: "reconciler_lease", ID: "singleton"} // of a lease whose config has none

func newCoordinator(t *testing.T, store tenure.Store, cfg tenure.LeaseConfig, job func(context.Context) error) *tenure.Coordinator {
	t.Helper()
	cfg.Key = cmp.Or(cfg.Key, key)
	lease, err := tenure.NewLease(store, cfg)
	require.NoError(t, err)
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: job})
	require.NoError(t, err)
	return c
}

// start runs a coordinator until the test ends or stop is called.
func start(t *testing.T, store tenure.Store, cfg tenure.LeaseConfig, job func(context.Context) error) (c *tenure.Coordinator, stop func()) {
	t.Helper()
	c = newCoordinator(t, store, cfg, job)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); c.Run(ctx) }()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return c, stop
}

func untilDone(ctx context.Context) error { <-ctx.Done(); return nil }

func get(t *testing.T, h http.Handler, target, accept string) (*http.Response, string) {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, target, nil)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	return serve(t, h, r)
}

func serve(t *testing.T, h http.Handler, r *http.Request) (*http.Response, string) {
	t.Helper()
	recorder := httptest.NewRecorder()
	h.ServeHTTP(recorder, r)
	response := recorder.Result()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response, string(body)
}

// browser is the Accept header that Chromium sends.
const browser = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"

func TestTheStatusPageIsHTMLForBrowsersAndJSONForOthers(t *testing.T) {
	h := statuspage.Handler(newCoordinator(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"}, untilDone))
	for _, tt := range []struct{ target, accept, want string }{
		{"/", browser, "text/html; charset=utf-8"},
		{"/", "TEXT/HTML", "text/html; charset=utf-8"},
		{"/?format=json", browser, "application/json"},
		{"/", "application/json", "application/json"},
		{"/", "application/json, text/html;q=0.5", "application/json"},
		{"/", "*/*", "application/json"},
		{"/", "", "application/json"},
		{"/", "; nonsense,,", "application/json"},
	} {
		response, body := get(t, h, tt.target, tt.accept)
		if got := response.Header.Get("Content-Type"); got != tt.want || response.StatusCode != http.StatusOK || body == "" {
			t.Errorf("%s with Accept %q: %d %s, %d bytes; want %s", tt.target, tt.accept, response.StatusCode, got, len(body), tt.want)
		}
	}
}

func TestTheStatusPageIsReadOnly(t *testing.T) {
	h := statuspage.Handler()
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions} {
		response, _ := serve(t, h, httptest.NewRequest(method, "/", nil))
		if response.StatusCode != http.StatusMethodNotAllowed || response.Header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: %d, Allow %q", method, response.StatusCode, response.Header.Get("Allow"))
		}
	}
	response, _ := serve(t, h, httptest.NewRequest(http.MethodHead, "/", nil))
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Length") != "3" { // []\n
		t.Errorf("HEAD: %d, Content-Length %q", response.StatusCode, response.Header.Get("Content-Length"))
	}
}

func TestTheStatusPageShowsTheHolderTheTrustLeftAndRecentTerms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a, stop := start(t, store, tenure.LeaseConfig{Holder: "a", Labels: map[string]string{"address": "10.0.0.1"}}, untilDone)
		synctest.Wait()
		b, _ := start(t, store, tenure.LeaseConfig{Holder: "b"}, untilDone)
		time.Sleep(10*time.Minute + 4*time.Second)

		h := statuspage.Handler(a, b)
		_, page := get(t, h, "/", browser)
		holders, standbys, ok := strings.Cut(page, "</article>")
		if !ok {
			t.Fatalf("the page doesn't have two leases:\n%s", page)
		}
		wantAll(t, "the holder's", holders, "reconciler_lease/singleton", `<span class="state good">held</span> a</p>`, "has held for 10 min 4 s", "10.0.0.1",
			"25 s", `value="0.86`, "4.0 s ago, took 0 s", "<dt>TTL</dt><dd>30 s</dd>", "This replica has not seen any term end")
		wantAll(t, "the standby's", standbys, `<span class="state good">held</span> a</p>`, "has held for 10 min 4 s", "10.0.0.1", "standby</b>", "<dt>TTL</dt><dd>30 s</dd>")
		if strings.Contains(standbys, "trust left") {
			t.Error("a standby shows trust")
		}

		stop()
		synctest.Wait()
		_, page = get(t, statuspage.Handler(b), "/", browser)
		wantAll(t, "the next holder's", page, `<span class="state good">held</span> b</p>`, `<td data-name="holder">a</td>`, `<td class="short" data-name="lasted">10 min 4 s</td>`,
			`<td data-name="why">released</td>`)

		_, data := get(t, h, "/?format=json", "")
		var statuses []tenure.Status
		require.NoError(t, json.Unmarshal([]byte(data), &statuses))
		require.Len(t, statuses, 2)
		require.Equal(t, tenure.RoleHolder, statuses[1].Role)
		require.Equal(t, "b", statuses[1].Holder)
		require.Equal(t, "a", statuses[1].Recent[0].Holder)
	})
}

func wantAll(t *testing.T, what, page string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(page, part) {
			t.Errorf("%s page lacks %q:\n%s", what, part, page)
		}
	}
}

// The names and labels of holders come from other replicas.
func TestTheStatusPageEscapesNamesAndLabels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const evil = `<script>alert("x")</script>`
		store := storetest.NewMem()
		vanished, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Holder: evil, Labels: map[string]string{evil: evil}})
		require.NoError(t, err)
		_, err = vanished.TryAcquire(t.Context())
		require.NoError(t, err)
		b, _ := start(t, store, tenure.LeaseConfig{Holder: "b"}, func(context.Context) error { return context.Canceled })
		time.Sleep(40 * time.Second)
		_, page := get(t, statuspage.Handler(b), "/", browser)
		if strings.Contains(page, "<script") || !strings.Contains(page, "&lt;script&gt;") {
			t.Errorf("a name or a label is not escaped:\n%s", page)
		}
	})
}

func TestTheStatusPageShowsAStuckJobAndTheLastError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), nil)
		a, _ := start(t, store, tenure.LeaseConfig{Holder: "a"}, func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(time.Hour)
			return nil
		})
		synctest.Wait()
		store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error {
			return errors.New("connection refused")
		})
		time.Sleep(31 * time.Second)
		_, page := get(t, statuspage.Handler(a), "/", browser)
		wantAll(t, "a stuck job's", page, `<span class="state bad">stuck</span> a</p>`, tenure.ErrDeadline.Error(), "connection refused", "0 s <meter",
			"The term of this replica is over, and its job still runs: it was told to return 11 s ago. Another replica may hold the lease.")
		require.NotContains(t, page, "has held")
	})
}

func TestTheStatusPageShowsAJobThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan struct{})
		a, _ := start(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"}, tenure.Every(time.Second, func(context.Context) error { <-hangs; return nil }))
		time.Sleep(50 * time.Second)
		_, page := get(t, statuspage.Handler(a), "/", browser)
		wantAll(t, "a busy job's", page, `<span class="state good">held</span> a</p>`, `data-name="running">1, for 50 s</td>`)
		time.Sleep(30 * time.Minute)
		_, page = get(t, statuspage.Handler(a), "/", browser)
		wantAll(t, "a hung job's", page, `<span class="state bad">job hangs</span> a</p>`, `data-name="running" class="bad">1, for 30 min 50 s</td>`)
		close(hangs)
		synctest.Wait()
		_, page = get(t, statuspage.Handler(a), "/", browser)
		wantAll(t, "a job's that goes on", page, `<span class="state good">held</span> a</p>`, `data-name="running">0</td>`)
	})
}

func TestAStandbyThatCannotReadTheRecordDoesNotSayWhoHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMem()
		start(t, mem, tenure.LeaseConfig{Holder: "a"}, untilDone)
		store := storetest.Faulty(mem, nil)
		synctest.Wait()
		b, _ := start(t, store, tenure.LeaseConfig{Holder: "b"}, untilDone)
		time.Sleep(35 * time.Second) // a renewed at 30 s, and b looked then
		store.SetHook(func(ctx context.Context, _ storetest.Call, _ func(context.Context) error) error {
			<-ctx.Done()
			return ctx.Err()
		})
		h := statuspage.Handler(b)
		time.Sleep(20 * time.Second)
		_, page := get(t, h, "/", browser)
		wantAll(t, "before the TTL has passed, the standby's", page, `<span class="state good">held</span> a</p>`, "has held for 55 s")
		time.Sleep(19 * time.Second)
		_, page = get(t, h, "/", browser)
		wantAll(t, "after the TTL, the standby's", page, `<span class="state bad">error</span> last known holder a, 44 s ago: not known now`, "<dt>TTL</dt><dd>30 s</dd>")
		require.NotContains(t, page, "has held")
		_, data := get(t, h, "/", "")
		require.Contains(t, data, `"holder":"a","stale":true,`)
		require.Contains(t, data, `"ttl_seconds":30,`)
	})
}

func TestTheStatusPageShowsAJobThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mended atomic.Bool
		a, stop := start(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"}, tenure.Every(9*time.Second, func(context.Context) error {
			time.Sleep(time.Second)
			if !mended.Load() {
				return errors.New("no such table")
			}
			return nil
		}))
		time.Sleep(25 * time.Second)
		_, page := get(t, statuspage.Handler(a), "/", browser)
		wantAll(t, "a failing job's", page, `<span class="state bad">job fails</span> a</p>`, `class="bad">no such table</td>`,
			`data-name="success">none</td>`, `data-name="failed">3</td>`)
		mended.Store(true)
		time.Sleep(10 * time.Second)
		_, page = get(t, statuspage.Handler(a), "/", browser)
		wantAll(t, "a job's that has recovered", page, `<span class="state good">held</span> a</p>`, `data-name="error">no such table</td>`,
			`data-name="success">4.0 s ago</td>`)
		mended.Store(false)
		time.Sleep(10 * time.Second)
		stop()
		_, page = get(t, statuspage.Handler(a), "/", browser)
		wantAll(t, "a former holder's", page, `<span class="state wait">free</span>`, `class="bad">no such table</td>`)
	})
}

// A program with many leases adds leases while it runs.
func TestTheStatusPageOfManyLeasesIsATableWithTheWorstFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var coordinators []*tenure.Coordinator
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { statuspage.Handler(coordinators...).ServeHTTP(w, r) })
		add := func(id string, job func(context.Context) error) {
			c, _ := start(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a", Key: tenure.Key{Type: "tenant", ID: id}}, job)
			coordinators = append(coordinators, c)
			synctest.Wait()
		}
		for i := range 10 {
			add(strconv.Itoa(i), untilDone)
		}
		_, page := get(t, h, "/", browser)
		require.Equal(t, 10, strings.Count(page, "<article>"))
		add("broken?&", tenure.Every(time.Hour, func(context.Context) error { return errors.New("no such table") }))
		_, page = get(t, h, "/", browser)
		require.NotContains(t, page, "<article>")
		rows := strings.Split(page, "<tr>")[2:] // after the heading
		require.Len(t, rows, 11)
		wantAll(t, "the first lease of the", rows[0], `<span class="state bad">job fails</span>`, `<a href="?lease=tenant%2fbroken%3f%26">tenant/broken?&amp;</a>`, "reconcile: no such table")
		wantAll(t, "the second lease of the", rows[1], `<span class="state good">held</span>`, "tenant/0", `data-name="held for">0 s</td>`)

		_, page = get(t, h, "/?lease=tenant%2fbroken%3f%26", browser)
		require.Equal(t, 1, strings.Count(page, "<article>"))
		wantAll(t, "that lease's", page, "tenant/broken?&amp;", "no such table")
		_, data := get(t, h, "/?lease=tenant/3", "")
		var statuses []tenure.Status
		require.NoError(t, json.Unmarshal([]byte(data), &statuses))
		require.Len(t, statuses, 1)
		require.Equal(t, tenure.Key{Type: "tenant", ID: "3"}, statuses[0].Lease)
		_, data = get(t, h, "/?lease=tenant/unknown", "")
		require.Equal(t, "[]\n", data)
	})
}

func TestARecordWithTimesInAnotherUnitDoesNotBreakTheStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		payload, err := json.Marshal(map[string]any{"holder": "h", "acquired_at_ms": time.Now().UnixNano(), "term": "x", "ttl_ms": 30000})
		require.NoError(t, err)
		_, err = store.PutIf(t.Context(), tenure.Object{Key: key, Name: "n", Payload: payload}, tenure.IfAbsent())
		require.NoError(t, err)
		c, _ := start(t, store, tenure.LeaseConfig{Key: key}, untilDone)
		for _, role := range []tenure.Role{tenure.RoleStandby, tenure.RoleHolder} {
			time.Sleep(time.Second)
			response, body := get(t, statuspage.Handler(c), "/", "")
			require.Equal(t, role, c.Status().Role)
			require.Equal(t, http.StatusOK, response.StatusCode, body)
			if role == tenure.RoleStandby {
				require.NotContains(t, body, "held_since")
			}
			time.Sleep(time.Minute)
		}
	})
}

func TestTheStatusPageLeavesOutWhatIsNil(t *testing.T) {
	for name, handler := range map[string]http.Handler{
		"Handler": statuspage.Handler(nil), "Handler of a variable": statuspage.Handler((*tenure.Coordinator)(nil)),
		"Sessions": statuspage.Sessions(nil, (*claims.Session)(nil)), "Shards": statuspage.Shards(nil, (*shards.Member)(nil)),
	} {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/", nil))
		require.Equal(t, "[]\n", answer.Body.String(), name)
	}
}

func TestTheStatusPageShowsThatAStandbyWaitsForAFailoverToSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMem()
		mem.Lineages = true
		c, _ := start(t, mem.Fork(), tenure.LeaseConfig{Holder: "a"}, untilDone)
		synctest.Wait()
		_, page := get(t, statuspage.Handler(c), "/", browser)
		settles := c.Status().SettlesAt.UTC().Format("2006-01-02 15:04:05")
		wantAll(t, "a standby's", page, `<span class="state wait">settling</span>`, "waits for a failover to settle", settles)
		time.Sleep(time.Minute)
		_, page = get(t, statuspage.Handler(c), "/", browser)
		require.NotContains(t, page, "settl")
	})
}
