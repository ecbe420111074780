package statuspage

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"net/http"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/shards"
)

// Shards serves the status of this process's part in sets of shards, as [Handler] does for
// coordinators: a page, or a JSON array of [shards.Status]. A part is a [*shards.Shards]; one
// that is nil is left out.
func Shards(parts ...interface{ Status() shards.Status }) http.Handler {
	parts = slices.DeleteFunc(slices.Clone(parts), func(p interface{ Status() shards.Status }) bool { return objects.IsNil(p) })
	return handler(func(*http.Request) []shards.Status {
		statuses := []shards.Status{}
		for _, p := range parts {
			statuses = append(statuses, p.Status())
		}
		return statuses
	}, writeShards)
}

//go:embed shards.html
var shardsPage string

// The page of leases defines the style.
var shardsTemplate = template.Must(template.Must(pageTemplate.Clone()).New("shards").Parse(shardsPage))

// shardsView is a status as the page shows it.
type shardsView struct {
	shards.Status
	State    string
	Severity severity
	Rows     []shardView
}

type shardView struct {
	shards.ShardStatus
	State    string
	Severity severity
	For      string // a duration
}

func writeShards(w *bytes.Buffer, statuses []shards.Status) error {
	now := time.Now()
	views := make([]shardsView, len(statuses))
	for i, s := range statuses {
		v := shardsView{Status: s}
		v.State, v.Severity = shardsState(s)
		for _, one := range s.Shards {
			row := shardView{ShardStatus: one, For: spanSince(now, one.Since)}
			row.State, row.Severity = shardState(now, one)
			v.Rows = append(v.Rows, row)
		}
		slices.SortStableFunc(v.Rows, func(a, b shardView) int { return cmp.Compare(b.Severity, a.Severity) })
		views[i] = v
	}
	return shardsTemplate.Execute(w, struct {
		Parts []shardsView
		Now   string
	}{views, now.UTC().Format(timeFormat)})
}

// shardsState says in a word what a status amounts to. The worst comes first.
func shardsState(s shards.Status) (word string, how severity) {
	switch {
	case s.Stuck > 0:
		return "stuck", bad
	case s.Unhealthy != "":
		return "unhealthy", bad
	case s.Failing > 0:
		return "failing", bad
	case s.Session == "":
		return "not taking part", wait
	case !s.Settled:
		return "settling", wait
	case len(s.Shards) != s.Share:
		return "moving", wait
	}
	return "settled", good
}

func shardState(now time.Time, s shards.ShardStatus) (word string, how severity) {
	switch {
	case s.Stuck:
		return fmt.Sprintf("does not stop for %s", spanSince(now, s.Stopping)), bad
	case s.Failing:
		return "fails", bad
	case !s.Stopping.IsZero():
		return "stops", wait
	}
	return "runs", good
}
