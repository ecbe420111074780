// Package statuspage serves the status of coordinators, sessions and shards, as a page for people
// and as JSON for programs. It is a separate package so that only programs that serve the page
// link html/template.
package statuspage

import (
	"bytes"
	"encoding/json"
	"html/template"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Handler serves the status of coordinators. Browsers get a page, which reloads itself every five
// seconds and needs no script. All other clients, and all requests with "?format=json", get a JSON
// array of [tenure.Status]. "?lease=type/id" limits either to that lease. A nil coordinator is left
// out. The handler answers GET and HEAD, and never queries the store. It is safe for concurrent
// use.
//
// It has no access control, and shows the store's errors and the holders' labels, so make it
// reachable only for operators.
func Handler(coordinators ...*tenure.Coordinator) http.Handler {
	coordinators = slices.Clone(coordinators)
	return handler(func(r *http.Request) []tenure.Status {
		lease, statuses := r.URL.Query().Get("lease"), []tenure.Status{}
		for _, c := range coordinators {
			if c == nil {
				continue
			}
			if s := c.Status(); lease == "" || lease == s.Lease.String() {
				statuses = append(statuses, s)
			}
		}
		return statuses
	}, leasesPage)
}

// statusesOf returns a func that returns the statuses of all elements that are not nil.
func statusesOf[S any](all []interface{ Status() S }) func(*http.Request) []S {
	all = slices.DeleteFunc(slices.Clone(all), func(one interface{ Status() S }) bool { return objects.IsNil(one) })
	return func(*http.Request) []S {
		statuses := []S{} // never null in JSON
		for _, one := range all {
			statuses = append(statuses, one.Status())
		}
		return statuses
	}
}

// handler serves what look returns, as a page or as JSON.
func handler[S any](look func(*http.Request) []S, page *template.Template) http.Handler {
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
			err = page.Execute(&body, statuses)
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

// isFailing reports whether a run has failed and none has succeeded since.
func isFailing(r tenure.RunStats) bool { return r.LastFailure.After(r.LastSuccess) }

var leasesPage = newPage("leases.html", template.FuncMap{"state": leaseState, "failing": isFailing, "worstFirst": worstFirst(leaseState)})

func leaseState(s tenure.Status) state {
	switch {
	case s.Stuck:
		return state{"stuck", bad}
	case s.Role == tenure.RoleHolder && slices.ContainsFunc(s.Runs, isFailing): // another holder's may succeed
		return state{"job fails", bad}
	case s.Role == tenure.RoleHolder && slices.ContainsFunc(s.Runs, func(r tenure.RunStats) bool { return r.Overdue }):
		return state{"job hangs", bad}
	case s.LastError != "":
		return state{"error", bad}
	case s.Stale:
		return state{"not known", wait}
	case !s.SettlesAt.IsZero():
		return state{"settling", wait}
	case s.Holder == "":
		return state{"free", wait}
	case s.Role == tenure.RoleConfirming || s.Role == tenure.RoleStopping:
		return state{string(s.Role), wait}
	}
	return state{"held", good}
}
