package pgobjects

import (
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// The root package's tests use these to cause what otherwise takes an hour or a coincidence.

// SetPruned sets when tombstones were last pruned.
func (t *Table) SetPruned(at time.Time) { t.pruned.Store(at.Unix()) }

// ForceLook ages what was found in the database, if anything, so that the next call looks again.
func (t *Table) ForceLook() {
	if found := t.setups.found.Load(); found != nil {
		old := *found
		old.at = old.at.Add(-lookAgain)
		t.setups.found.Store(&old)
	}
}

// ForceGroups makes the next writes of leases wait until they are sent in a group, as if
// others were in flight.
func (t *Table) ForceGroups() {
	for _, g := range t.groups.all() {
		g.mu.Lock()
		g.busy, g.apart = true, time.Time{}
		g.mu.Unlock()
	}
}

// Statements returns the statements on rows, by name, with arguments for them. The table must have
// been checked.
func (r *Rows) Statements(session string, ids []string, tokens []int64) (sql map[string]string, args map[string][]any) {
	texts, claims := r.found.Load().texts, make([]objects.Claim, len(ids))
	for i, id := range ids {
		claims[i] = objects.Claim{ID: id, Session: session, Token: tokens[i]}
	}
	sql, args = make(map[string]string), make(map[string][]any)
	add := func(name, text string, with ...any) { sql[name], args[name] = texts.Where(text, ""), with }
	add("take", takeRows, session, 10, []string{}, nil)
	add("free", setting(freeRows, objects.Freeing{}.Set()), session, ids, tokens)
	add("owned", ownedRows, session, ids[0], 1000)
	add("sessions", sessionsOfRows)
	add("stand", lookAtRows, ids)
	if r.cfg.Expires != "" {
		add("expired", expiredRows, 1000)
		add("any expired", anyExpired)
		add("expire", setting(freeExpiredRows, objects.Freeing{Lost: true}.Set()), ids)
		add("extend", setting(endUnlockedRows, objects.Ending{Extend: true}.Set("clock_timestamp() + $4 * interval '1 microsecond'")), ids, slices.Repeat([]string{session}, len(ids)), tokens, 1)
	}
	if r.cfg.PerKey != "" {
		add("lock keys", lockKeys, session, 10, []string{}, nil)
		add("take per key", takeRowsPerKey, session, 10, []string{}, nil)
		add("ready per key", whichAreReadyPerKey, session, 10, []string{}, nil)
	}
	takes := []any{session, 10, []string{}, nil}
	if r.cfg.Expires != "" {
		takes = append(takes, 1)
	}
	add("take for", takeRowsFor, takes...)
	end := func(name string, how objects.Ending, claims []objects.Claim) {
		text, with := endingSQL(how, claims)
		add(name, text, with...)
	}
	end("done, one", objects.Ending{Done: true}, claims[:1])
	end("done", objects.Ending{Done: true}, claims)
	end("done, unlocked", objects.Ending{Done: true, Unlocked: true}, claims)
	end("after", objects.Ending{After: time.Microsecond}, claims)
	end("release", objects.Ending{}, claims)
	return sql, args
}
