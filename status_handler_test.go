package tenure_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

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
	wantErr(t, err, nil)
	return response, string(body)
}

// browser is what Chromium sends.
const browser = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"

func TestTheStatusPageIsHTMLForABrowserAndJSONForAllElse(t *testing.T) {
	c, err := tenure.NewCoordinator(newLease(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"}),
		tenure.CoordinatorConfig{Reconcile: returnsAfter(0)})
	wantErr(t, err, nil)
	h := tenure.StatusHandler(c)
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

func TestTheStatusPageIsOnlyRead(t *testing.T) {
	h := tenure.StatusHandler()
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

func TestTheStatusPageShowsWhoHoldsForHowLongTrustLeftAndRecentTerms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		job := tenure.CoordinatorConfig{Reconcile: returnsAfter(0)}
		a := startWith(t, store, tenure.LeaseConfig{Holder: "a", Labels: map[string]string{"address": "10.0.0.1"}}, job)
		synctest.Wait()
		b := start(t, nil, store, "b", tenure.CoordinatorConfig{Reconcile: returnsAfter(0)})
		time.Sleep(10*time.Minute + 4*time.Second)

		h := tenure.StatusHandler(a.Coordinator, b.Coordinator)
		_, page := get(t, h, "/", browser)
		holders, standbys, ok := strings.Cut(page, "</article>")
		if !ok {
			t.Fatalf("no two leases on the page:\n%s", page)
		}
		wantAll(t, "the holder's", holders, "reconciler_lease/singleton", `<p class="holder">a</p>`, "holds for 10 min 4 s", "10.0.0.1",
			"25.0 s", `value="0.86`, "4.0 s ago, took 0s", "None that this replica has seen end")
		wantAll(t, "the standby's", standbys, `<p class="holder">a</p>`, "holds for 10 min 4 s", "10.0.0.1", "standby</b>")
		if strings.Contains(standbys, "trust left") {
			t.Error("a standby shows trust")
		}

		a.stop()
		settle()
		_, page = get(t, tenure.StatusHandler(b.Coordinator), "/", browser)
		wantAll(t, "the next holder's", page, `<p class="holder">b</p>`, `<td data-name="holder">a</td>`, `<td data-name="lasted">10 min 4 s</td>`,
			`<td data-name="why">released</td>`)

		_, data := get(t, h, "/?format=json", "")
		var fields []struct {
			Lease, Holder, Role string
			Recent              []struct{ Holder, Reason string }
		}
		if err := json.Unmarshal([]byte(data), &fields); err != nil || len(fields) != 2 {
			t.Fatalf("%v: %s", err, data)
		}
		if got := fields[1]; got.Lease != "reconciler_lease/singleton" || got.Role != "holder" || got.Holder != "b" || len(got.Recent) != 1 || got.Recent[0].Holder != "a" {
			t.Errorf("as JSON: %+v", got)
		}
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

// What a holder calls itself, and its labels, are others' text.
func TestTheStatusPageEscapesOthersText(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const evil = `<script>alert("x")</script>`
		store := storetest.NewMem()
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: evil, Labels: map[string]string{evil: evil}}))
		b := start(t, nil, store, "b", tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { return context.Canceled },
		})
		time.Sleep(40 * time.Second)
		_, page := get(t, tenure.StatusHandler(b.Coordinator), "/", browser)
		if strings.Contains(page, "<script") || !strings.Contains(page, "&lt;script&gt;") {
			t.Errorf("others' text is not escaped:\n%s", page)
		}
	})
}

func TestTheStatusPageSaysThatAJobIsStuckAndWhatWentWrong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t, nil, storetest.NewMem(), "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(time.Hour)})
		synctest.Wait()
		a.store.SetHook(refuse)
		time.Sleep(31 * time.Second)
		_, page := get(t, tenure.StatusHandler(a.Coordinator), "/", browser)
		wantAll(t, "a stuck job's", page, "The job does not return", "connection refused", "0.0 s <meter", tenure.ErrDeadline.Error())
	})
}
