package sqliteobjects

import "strings"

// Statements returns the statements on rows, by name, for tests of their plans.
func (r *Rows) Statements() map[string]string {
	statements := make(map[string]string)
	for name, text := range map[string]string{
		"ready": readyRows, "take": takeRows, "free": setting(freeRows, "{session} = NULL"), "owned": ownedRows, "owned after": ownedRowsAfter,
		"sessions": sessionsOfRows, "stand": lookAtRows, "done": setting(endRows, "{session} = NULL{done}"), "statement": endRowOrFail,
		"ready for": forRemote(readyRows), "expired": expiredRows, "expire": setting(freeExpiredRows, "{session} = NULL"),
		"due": anyDue, "open": openRows, "open of all": openRowsOfAll,
	} {
		if r.cfg.PerKey == "" && strings.HasPrefix(name, "open") {
			continue
		}
		if r.cfg.NotBefore == "" && name == "due" {
			continue
		}
		if r.cfg.Expires == "" && strings.HasPrefix(name, "expire") {
			continue
		}
		statements[name] = r.texts.Where(text, "")
	}
	return statements
}
