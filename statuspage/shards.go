package statuspage

import (
	"html/template"
	"net/http"

	"github.com/tenurelib/tenure/shards"
)

// Shards serves the status of this process as a member of sets of shards, as [Handler] does for
// coordinators: a page, or a JSON array of [shards.Status]. A member is a [*shards.Member]; a nil
// member is left out.
func Shards(members ...interface{ Status() shards.Status }) http.Handler {
	return handler(statusesOf(members), shardsPage)
}

var shardsPage = newPage("shards.html", template.FuncMap{
	"state": shardsState, "shardState": shardState, "worstFirst": worstFirst(shardState),
})

func shardsState(s shards.Status) state {
	switch {
	case s.Stuck > 0:
		return state{"stuck", bad}
	case s.Unhealthy != "":
		return state{"unhealthy", bad}
	case s.Failing > 0:
		return state{"failing", bad}
	case s.Session == "":
		return state{"not taking part", wait}
	case !s.Settled:
		return state{"settling", wait}
	case len(s.Shards) != s.Share:
		return state{"moving", wait}
	}
	return state{"settled", good}
}

func shardState(s shards.ShardStatus) state {
	switch {
	case s.Stuck:
		return state{"does not stop for " + since(s.Stopping), bad}
	case s.Failing:
		return state{"fails", bad}
	case !s.Stopping.IsZero():
		return state{"stops", wait}
	}
	return state{"runs", good}
}
