package statuspage

import (
	"bytes"
	_ "embed"
	"html/template"
	"net/http"
	"slices"
	"time"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
)

// Sessions serves the status of this process's sessions of package claims, as [Handler] does for
// coordinators: a page, or a JSON array of [claims.Status]. A session is a [*claims.Session];
// one that is nil is left out.
func Sessions(sessions ...interface{ Status() claims.Status }) http.Handler {
	sessions = slices.DeleteFunc(slices.Clone(sessions), func(s interface{ Status() claims.Status }) bool { return objects.IsNil(s) })
	return handler(func(*http.Request) []claims.Status {
		statuses := []claims.Status{}
		for _, s := range sessions {
			statuses = append(statuses, s.Status())
		}
		return statuses
	}, writeSessions)
}

//go:embed sessions.html
var sessionsPage string

// The page of leases defines the style.
var sessionsTemplate = template.Must(template.Must(pageTemplate.Clone()).New("sessions").Parse(sessionsPage))

// sessionView is a status as the page shows it.
type sessionView struct {
	claims.Status
	State    string
	Severity severity

	For, Renewed, TTL, Trust string // durations
	TrustPart                float64
}

func writeSessions(w *bytes.Buffer, statuses []claims.Status) error {
	now := time.Now()
	views := make([]sessionView, len(statuses))
	for i, s := range statuses {
		v := sessionView{
			Status: s, For: spanSince(now, s.Since), Renewed: spanSince(now, s.RenewedAt), TTL: span(s.TTL),
			Trust: span(s.TrustLeft), TrustPart: float64(s.TrustLeft) / float64(max(1, s.TTL)),
		}
		v.State, v.Severity = sessionState(s)
		views[i] = v
	}
	return sessionsTemplate.Execute(w, struct {
		Sessions []sessionView
		Now      string
	}{views, now.UTC().Format(timeFormat)})
}

// sessionState says in a word what a status amounts to. The worst comes first.
func sessionState(s claims.Status) (word string, how severity) {
	switch {
	case s.Stuck:
		return "stuck", bad
	case s.LastError != "":
		return "error", bad
	case s.Closing:
		return "closing", wait
	case !s.Valid:
		return "no session", wait
	}
	return "valid", good
}
