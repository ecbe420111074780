package sqliteobjects

// Statements returns the statements on rows, by name, for tests of their plans.
func (r *Rows) Statements() map[string]string {
	return map[string]string{
		"ready": r.sql.ready, "take": r.sql.take, "free": r.sql.free, "owned": r.sql.owned, "owned after": r.sql.ownedAfter,
		"sessions": r.sql.sessions, "stand": r.sql.stand, "done": r.sql.done, "statement": r.sql.statement,
	}
}
