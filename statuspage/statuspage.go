// Package statuspage serves the status of coordinators, sessions and shards, as a page for people
// and as JSON for programs. It is a separate package so that only programs that serve the page
// link html/template.
package statuspage

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
)

// Handler serves the status of coordinators. Browsers get a page, which reloads itself
// every five seconds and needs no script. All other clients, and those that add
// "?format=json", get a JSON array of [tenure.Status]. With "?lease=type/id" it is only
// about that lease. A coordinator that is nil is left out. It answers GET and HEAD, and never queries the store. It is safe for
// concurrent use.
//
// It has no access control, and shows the store's errors and the holders' labels, so make
// it reachable only by operators.
func Handler(coordinators ...*tenure.Coordinator) http.Handler {
	coordinators = slices.Clone(coordinators)
	return HandlerFor(func() []*tenure.Coordinator { return coordinators })
}

// HandlerFor is [Handler] for a program whose coordinators change while it runs. It calls the
// func for each request, possibly for several at once, and doesn't change the slice.
func HandlerFor(coordinators func() []*tenure.Coordinator) http.Handler {
	if coordinators == nil {
		return Handler()
	}
	return handler(func(r *http.Request) []tenure.Status {
		lease, statuses := r.URL.Query().Get("lease"), []tenure.Status{}
		for _, c := range coordinators() {
			if c == nil {
				continue
			}
			if s := c.Status(); lease == "" || lease == s.Lease.String() {
				statuses = append(statuses, s)
			}
		}
		return statuses
	}, writePage)
}

// handler serves what look returns, as a page or as JSON.
func handler[S any](look func(*http.Request) []S, writePage func(*bytes.Buffer, []S) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
			return
		}
		statuses := look(r)
		var body bytes.Buffer
		var err error
		header := w.Header()
		if r.URL.Query().Get("format") != "json" && wantsPage(r.Header.Values("Accept")) {
			header.Set("Content-Type", "text/html; charset=utf-8")
			header.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
			err = writePage(&body, statuses)
		} else {
			header.Set("Content-Type", "application/json")
			err = json.NewEncoder(&body).Encode(statuses)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		header.Set("Vary", "Accept")
		header.Set("Cache-Control", "no-store")
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Content-Length", strconv.Itoa(body.Len()))
		w.Write(body.Bytes())
	})
}

// wantsPage reports whether a client's Accept header names text/html, and does not prefer
// JSON.
func wantsPage(accept []string) bool {
	page, data := 0.0, 0.0
	for _, item := range strings.Split(strings.Join(accept, ","), ",") {
		kind, params, err := mime.ParseMediaType(item)
		if err != nil {
			continue
		}
		q := 1.0
		if given, err := strconv.ParseFloat(params["q"], 64); err == nil {
			q = given
		}
		switch kind {
		case "text/html":
			page = q
		case "application/json":
			data = q
		}
	}
	return page > data
}

//go:embed page.html
var page string

var pageTemplate = template.Must(template.New("status").Parse(page))

// mostSections is how many leases are shown in full. More of them are a table.
const mostSections = 10

// leaseView is a status as the page shows it.
type leaseView struct {
	tenure.Status
	Role, RoleFor, Held, Renewed, TTL string // all but Role are durations

	// State is a word for what the page shows. Severity is the class of its colour.
	State    string
	Severity severity

	Trust, Latency string // empty if unknown

	// As fractions of the trust after a renewal: what is left now, and what is left when the
	// job is told to return.
	TrustPart, StopPart float64
	Runs                []runsView
	Past                []pastView
}

type severity int

const (
	good severity = iota
	wait
	bad
)

func (s severity) String() string { return [...]string{"good", "wait", "bad"}[s] }

type runsView struct {
	tenure.Runs
	Success string // how long ago; empty: never
}

type pastView struct {
	tenure.PastTerm
	When, Lasted string
}

const timeFormat = "2006-01-02 15:04:05" // UTC

func writePage(w *bytes.Buffer, statuses []tenure.Status) error {
	now := time.Now()
	views := make([]leaseView, len(statuses))
	for i, s := range statuses {
		views[i] = newLeaseView(s, now)
	}
	asTable := len(views) > mostSections
	if asTable { // what needs attention first
		slices.SortStableFunc(views, func(a, b leaseView) int { return cmp.Compare(b.Severity, a.Severity) })
	}
	return pageTemplate.Execute(w, struct {
		Leases  []leaseView
		AsTable bool
		Now     string
	}{views, asTable, now.UTC().Format(timeFormat)})
}

func newLeaseView(s tenure.Status, now time.Time) leaseView {
	v := leaseView{
		Status: s, Role: s.Role.String(), RoleFor: span(now.Sub(s.Since)),
		Held: spanSince(now, s.HeldSince), Renewed: spanSince(now, s.RenewedAt),
	}
	v.State, v.Severity = state(s)
	if s.TTL != 0 {
		v.TTL = span(s.TTL)
	}
	if s.TrustGiven != 0 {
		trusted := float64(s.TrustGiven)
		v.Trust, v.Latency = span(s.TrustLeft), span(s.RenewalLatency)
		v.TrustPart = float64(s.TrustLeft) / trusted
		v.StopPart = 1 - float64(s.RenewDeadline)/trusted
	}
	for _, runs := range s.Runs {
		v.Runs = append(v.Runs, runsView{runs, spanSince(now, runs.LastSuccess)})
	}
	for _, past := range s.Recent {
		p := pastView{PastTerm: past, When: past.Ended.UTC().Format(timeFormat)}
		if !past.Began.IsZero() {
			p.Lasted = span(past.Ended.Sub(past.Began))
		}
		v.Past = append(v.Past, p)
	}
	return v
}

// state says in a word what a status amounts to. The worst comes first.
func state(s tenure.Status) (word string, how severity) {
	switch {
	case s.Stuck:
		return "stuck", bad
	case s.Role == tenure.RoleHolder && slices.ContainsFunc(s.Runs, tenure.Runs.Failing): // another holder's may succeed
		return "job fails", bad
	case s.LastError != "":
		return "error", bad
	case s.Stale:
		return "not known", wait
	case s.Holder == "":
		return "free", wait
	case s.Role == tenure.RoleConfirming || s.Role == tenure.RoleStopping:
		return s.Role.String(), wait
	}
	return "held", good
}

// spanSince returns how long ago t was, or "" if t is zero.
func spanSince(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return span(now.Sub(t))
}

// span formats a duration for people, always in the same way: 2.3 ms, 150 ms, 4.2 s, 44 s,
// 3 min 12 s, 5 h 3 min, 12 d 4 h.
func span(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d <= 0: // another replica's clock may be ahead
		return "0 s"
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", max(d, time.Millisecond/10).Truncate(time.Millisecond/10).Seconds()*1000)
	case d < time.Second:
		return fmt.Sprintf("%d ms", d/time.Millisecond)
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Truncate(time.Second/10).Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", d/time.Minute, d%time.Minute/time.Second)
	case d < day:
		return fmt.Sprintf("%d h %d min", d/time.Hour, d%time.Hour/time.Minute)
	default:
		return fmt.Sprintf("%d d %d h", d/day, d%day/time.Hour)
	}
}
