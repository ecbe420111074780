package statuspage

import (
	"html/template"
	"net/http"

	"github.com/tenurelib/tenure/claims"
)

// Sessions serves the status of this process's sessions of package claims, as [Handler] does for
// coordinators: a page, or a JSON array of [claims.Status]. A session is a [*claims.Session]; a nil
// session is left out.
func Sessions(sessions ...interface{ Status() claims.Status }) http.Handler {
	return handler(statusesOf(sessions), sessionsPage)
}

var sessionsPage = newPage("sessions.html", template.FuncMap{"state": sessionState, "running": running})

// running returns how many funcs run, for all kinds together.
func running(s claims.Status) (n int) {
	for _, k := range s.Kinds {
		n += k.Running
	}
	return n
}

func sessionState(s claims.Status) state {
	switch {
	case s.Stuck:
		return state{"stuck", bad}
	case s.LastError != "":
		return state{"error", bad}
	case s.Closing:
		return state{"closing", wait}
	case !s.Valid:
		return state{"no session", wait}
	}
	return state{"valid", good}
}
