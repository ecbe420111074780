package pgobjects

import "time"

// The root package's tests use these to bring about what otherwise takes an hour or a
// coincidence.

// SetPruned sets when tombstones were last pruned.
func (t *Table) SetPruned(at time.Time) { t.pruned.Store(at.Unix()) }

// ForceLook makes what was found in the database, if anything, so old that the next call
// looks again.
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
	s := r.found.Load()
	sessions := make([]string, len(ids))
	for i := range sessions {
		sessions[i] = session
	}
	return map[string]string{
			"take": s.take, "free": s.free, "owned": s.owned, "sessions": s.sessions, "stand": s.stand,
			"done, one": s.done.one, "done": s.done.any, "done, unlocked": s.done.unlocked, "after": s.after.any, "release": s.release.any,
		}, map[string][]any{
			"take": {session, 10, []string{}, nil}, "free": {session, ids, tokens}, "owned": {session, ids[0], 1000}, "sessions": nil, "stand": {ids},
			"done, one": {ids[0], session, tokens[0]}, "done": {ids, sessions, tokens}, "done, unlocked": {ids, sessions, tokens}, "after": {ids, sessions, tokens, 1}, "release": {ids, sessions, tokens},
		}
}
