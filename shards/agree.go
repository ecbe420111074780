package shards

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tenurelib/tenure/claims"
)

// If the members of one kind don't agree on Count, item i of the application is in other shards for some of them than for the
// others, so that shards with different IDs do the same work. Therefore only members that agree work at the same time: those
// that follow, in the order in which they joined, upon one with another Count wait until that one has ended.
//
// A member's place in that order is a claim whose ID ends with its Count. The claim lasts until all funcs of the member's session
// have returned, longer than the membership itself: others get its shards as soon as each is free, but a member with another
// Count must wait for all of them. Two members that do not agree never work at the same time, because the younger one sees the place
// of the older one, and no place that is before a member's own can be taken later.

// placeID returns the ID of a member's place.
func placeID(member string, count int) string { return member + "." + strconv.Itoa(count) }

// countOf returns the Count of a place; "" for another claim.
func countOf(place claims.Claim) string {
	_, count, _ := strings.Cut(place.Key.ID, ".")
	return count
}

// sort returns the members of a listing and their places, the oldest first, and which sessions own which shards.
func (m *Member) sort(listing claims.Listing) (members, places []claims.Claim, owned owners) {
	owned = owners{of: make(map[string]string, len(listing.Claims)), count: make(map[string]int)}
	for _, c := range listing.Claims {
		if c.Key.Type == m.cfg.Kind {
			owned.of[c.Key.ID] = c.Session
			owned.count[c.Session]++
		} else if countOf(c) != "" {
			places = append(places, c)
		} else {
			members = append(members, c)
		}
	}
	for _, rows := range [][]claims.Claim{members, places} {
		slices.SortFunc(rows, func(a, b claims.Claim) int {
			return cmp.Or(cmp.Compare(a.Token, b.Token), cmp.Compare(a.Key.ID, b.Key.ID))
		})
	}
	known := make(map[string]bool, len(members))
	return slices.DeleteFunc(members, func(c claims.Claim) bool { // a process has two rows if an answer was lost
		defer func() { known[c.Session] = true }()
		return known[c.Session]
	}), places, owned
}

// agree looks at the places, the oldest first. It removes the members that wait, and reports whether this one does.
func (m *Member) agree(places []claims.Claim, seen *sightings, members *[]claims.Claim) (waits bool, err error) {
	disagrees := func(c claims.Claim) bool { return countOf(c) != countOf(places[0]) }
	works := slices.IndexFunc(places, disagrees)
	if works < 0 {
		works = len(places)
	}
	if seen.place != "" {
		mine := slices.IndexFunc(places, func(c claims.Claim) bool { return c.Key.ID == seen.place })
		// If the claim took long, younger members may have begun before this place was there to see.
		late := seen.late && mine < works && works < len(places)
		seen.late = false
		if mine < 0 || late {
			return false, errNoMember
		}
		waits = mine >= works
	}
	if disagree := works < len(places); disagree != seen.disagree {
		if seen.disagree = disagree; disagree {
			m.cfg.Logger.Warn("members disagree on the number of shards; those with another number than the oldest wait until it has ended",
				"kind", m.cfg.Kind, "number", len(m.ids), "oldest", countOf(places[0]), "waiting", len(places)-works, "waits", waits)
		}
	}
	working := make(map[string]bool)
	for _, c := range places[:works] {
		working[c.Session] = true
	}
	waiting := places[works:]
	*members = slices.DeleteFunc(*members, func(c claims.Claim) bool {
		return !working[c.Session] && slices.ContainsFunc(waiting, func(w claims.Claim) bool { return w.Session == c.Session })
	})
	return waits, nil
}

// awaitIdle returns when no func runs for a shard of a session.
func (m *Member) awaitIdle(session string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for slices.ContainsFunc(slices.Collect(maps.Values(m.shards)), func(s *shard) bool { return s.claim.Session == session }) {
		m.returned.Wait()
	}
}
