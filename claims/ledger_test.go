package claims

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/objects"
)

// ledgerWorld is a ledger, the table that it is about, and what the ledger should say: a model that
// notes for each claim by itself what has happened to it.
type ledgerWorld struct {
	*testing.T
	rng  *rand.Rand
	l    *ledger
	now  time.Time
	rows map[string]objects.Claim // of the table; no session: free

	claims map[objects.Claim]claimState // without a state: unknown to the session
	frees  []*batch                     // under way
	late   []func()                     // statements whose answers were lost, and that have not landed yet
	token  int64
}

type claimState int

const (
	_ claimState = iota
	isHeld
	isFreeing
	isDetached
)

const (
	ledgerMayRun = 10 * time.Second
	ledgerTTL    = 30 * time.Second
	ledgerLate   = time.Hour
)

// TestALedgerIsAsItsModelSays runs random sequences of what can happen to claims: they are taken, with
// an answer or without, released, detached, requested, and ended by others, while looks at rows in doubt
// go on.
func TestALedgerIsAsItsModelSays(t *testing.T) {
	for seed := range uint64(100) {
		w := &ledgerWorld{T: t, rng: rand.New(rand.NewPCG(seed, 0)), now: time.Unix(1e9, 0), rows: make(map[string]objects.Claim), claims: make(map[objects.Claim]claimState)}
		w.l = newLedger(&term{id: "ours"}, ledgerTTL)
		steps := []func(){w.take, w.take, w.loseTake, w.land, w.release, w.landFree, w.landFree, w.detach, w.finish, w.request, w.undo, w.wait, w.look}
		for range 300 {
			steps[w.rng.IntN(len(steps))]()
			w.check(seed)
		}
		w.settle(seed)
	}
}

func (w *ledgerWorld) ids() []string {
	ids := []string{"a", "b", "c", "d", "e", "f"}
	w.rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids[:1+w.rng.IntN(3)]
}

// in returns the claims in a state.
func (w *ledgerWorld) in(state claimState) (claims []objects.Claim) {
	for c, s := range w.claims {
		if s == state {
			claims = append(claims, c)
		}
	}
	slices.SortFunc(claims, func(a, b objects.Claim) int { return int(a.Token - b.Token) })
	return claims
}

func (w *ledgerWorld) any(claims []objects.Claim) []objects.Claim {
	if len(claims) == 0 {
		return nil
	}
	i := w.rng.IntN(len(claims))
	return claims[i : i+1]
}

// write makes the session the owner of those of the rows that are free.
func (w *ledgerWorld) write(ids []string) (taken []objects.Claim) {
	for _, id := range ids {
		if w.rows[id].Session == "" {
			w.token++
			w.rows[id] = objects.Claim{ID: id, Session: "ours", Token: w.token}
			taken = append(taken, w.rows[id])
		}
	}
	return taken
}

func (w *ledgerWorld) take() {
	taken := w.write(w.l.claimable(w.ids()))
	for _, c := range taken {
		for old, state := range w.claims { // the row is another's by now
			if old.ID == c.ID && state == isDetached {
				delete(w.claims, old)
			}
		}
		w.claims[c] = isHeld
	}
	w.l.add(taken)
}

func (w *ledgerWorld) loseTake() {
	ids := w.l.claimable(w.ids())
	if len(ids) == 0 {
		return
	}
	w.l.doubts.add(w.now.Add(ledgerMayRun), w.now.Add(ledgerLate))
	end := w.now.Add(ledgerLate)
	w.late = append(w.late, func() {
		if w.now.Before(end) { // later ones are found by a look that has no doubt
			w.write(ids)
		}
	})
}

func (w *ledgerWorld) land() {
	if len(w.late) > 0 {
		w.late[0]()
		w.late = w.late[1:]
	}
}

func (w *ledgerWorld) free(rows []objects.Claim) {
	for _, c := range rows {
		w.claims[c] = isFreeing
	}
	w.l.startFreeing(false, false, rows)
	for b := w.l.nextBatch(); b != nil; b = w.l.nextBatch() {
		w.frees = append(w.frees, b)
	}
}

func (w *ledgerWorld) release() { w.free(w.any(w.in(isHeld))) }

func (w *ledgerWorld) landFree() {
	if len(w.frees) == 0 {
		return
	}
	b := w.frees[0]
	w.frees = w.frees[1:]
	for _, c := range b.rows {
		if w.rows[c.ID] == c {
			w.rows[c.ID] = objects.Claim{ID: c.ID}
		}
		delete(w.claims, c)
	}
	w.l.freed(b.rows)
}

func (w *ledgerWorld) detach() {
	for _, c := range w.any(w.in(isHeld)) {
		w.claims[c] = isDetached
		w.l.detach([]Claim{claimOf("kind", "ours", c, false)})
	}
}

// finish ends a claim by its value.
func (w *ledgerWorld) finish() {
	for _, c := range w.any(append(w.in(isHeld), w.in(isDetached)...)) {
		if w.rows[c.ID] == c {
			w.rows[c.ID] = objects.Claim{ID: c.ID}
		}
		delete(w.claims, c)
		w.l.end(c.ID, c.Token)
	}
}

func (w *ledgerWorld) request() {
	for _, id := range w.ids() {
		r := w.rows[id]
		if r.Session != "ours" {
			continue
		}
		asked := w.l.requested[id]
		r.Gone = w.rng.IntN(4) == 0
		first := w.l.request(r)
		r.Gone = false
		require.Equal(w, w.claims[r] == isHeld && !asked && w.l.requested[id], first)
	}
}

// undo is what a failover does: a row is free, or another's.
func (w *ledgerWorld) undo() {
	for _, id := range w.ids() {
		w.token++
		w.rows[id] = objects.Claim{ID: id, Session: []string{"", "another"}[w.rng.IntN(2)], Token: w.token}
	}
	w.l.doubts.add(w.now, w.now)
}

func (w *ledgerWorld) wait() { w.now = w.now.Add(time.Duration(w.rng.Int64N(int64(20 * time.Minute)))) }

// look does what reconcile does when something is due. Claims begin and end while it reads the rows.
func (w *ledgerWorld) look() {
	if at := w.l.doubts.at; at.IsZero() || w.now.Before(at) {
		return
	}
	began := w.now
	unseen := w.l.claims()
	var others []objects.Claim
	for _, id := range slices.Sorted(maps.Keys(w.rows)) { // in pages of one row
		if r := w.rows[id]; r.Session == "ours" {
			others = append(others, w.l.compare(unseen, []objects.Claim{r})...)
		}
		if w.rng.IntN(4) == 0 {
			[]func(){w.take, w.release, w.landFree, w.finish}[w.rng.IntN(4)]()
		}
	}
	for _, r := range others {
		w.freeUnknown(r.ID)
	}
	for _, c := range w.l.stillOwned(unseen) {
		if r := w.rows[c.ID]; r != c {
			w.l.end(c.ID, c.Token)
			delete(w.claims, c)
		}
	}
	w.l.doubts.ended(began, w.now, true)
}

func (w *ledgerWorld) freeUnknown(id string) {
	r := w.rows[id]
	if r.Session != "ours" || w.l.owns(r) {
		return
	}
	w.l.doubts.add(w.now.Add(ledgerTTL), w.now.Add(ledgerTTL))
	if !w.l.knows(r) {
		require.Zero(w, w.claims[r], "%v is not unknown", r)
		w.free([]objects.Claim{r})
	}
}

func (w *ledgerWorld) check(seed uint64) {
	held, freeing, detached := make(map[string]int64), make(map[string]int), make(map[string]int64)
	for c, state := range w.claims {
		switch state {
		case isHeld:
			held[c.ID] = c.Token
		case isFreeing:
			freeing[c.ID]++
		case isDetached:
			detached[c.ID] = max(detached[c.ID], c.Token)
		}
	}
	what := fmt.Sprint("seed ", seed)
	require.Equal(w, held, w.l.held, what)
	require.Equal(w, freeing, w.l.freeing, what)
	require.Equal(w, detached, w.l.detached, what)
	require.Equal(w, len(held), w.l.size(), what)
	for id := range w.l.requested {
		require.Contains(w, held, id, what)
	}
	for _, id := range w.l.claimable([]string{"a", "b", "c", "d", "e", "f"}) {
		require.NotContains(w, held, id, what)
		require.NotContains(w, freeing, id, what)
	}
	for id, r := range w.rows {
		if r.Session == "ours" && w.claims[r] == 0 {
			require.False(w, w.l.doubts.at.IsZero(), "%s: no look at %s, %v, is due", what, id, r)
		}
	}
}

// settle checks that after a while without events nothing is in doubt, and that each row that names the
// session is one of a claim.
func (w *ledgerWorld) settle(seed uint64) {
	for range 200 {
		w.land()
		w.landFree()
		w.look()
		w.check(seed)
		w.now = w.now.Add(5 * time.Minute)
	}
	require.Zero(w, w.l.doubts.at, "seed %d: something is still in doubt", seed)
	for _, r := range w.rows {
		require.True(w, r.Session != "ours" || w.l.owns(r), "seed %d: %v is unknown", seed, r)
	}
}

func TestWhatIsFreedAndWhatEndsWhenClaimsAreComparedWithTheirRows(t *testing.T) {
	row := func(id string, token int64) objects.Claim {
		return objects.Claim{ID: id, Session: "ours", Token: token}
	}
	tests := map[string]struct {
		held, detached, freeing, since []objects.Claim // since: claims that began after the first ones were noted
		ended                          []objects.Claim // and those that have ended since
		rows, free, end                []objects.Claim
	}{
		"a claim whose row stands goes on":                {held: []objects.Claim{row("a", 2)}, rows: []objects.Claim{row("a", 2)}},
		"and so does a detached one":                      {detached: []objects.Claim{row("a", 2)}, rows: []objects.Claim{row("a", 2)}},
		"a claim without a row ends":                      {held: []objects.Claim{row("a", 2)}, end: []objects.Claim{row("a", 2)}},
		"and so does a detached one without a row":        {detached: []objects.Claim{row("a", 2)}, end: []objects.Claim{row("a", 2)}},
		"a claim whose row has an earlier token ends":     {held: []objects.Claim{row("a", 2)}, rows: []objects.Claim{row("a", 1)}, end: []objects.Claim{row("a", 2)}},
		"a detached claim whose row has a later one ends": {detached: []objects.Claim{row("a", 2)}, rows: []objects.Claim{row("a", 3)}, free: []objects.Claim{row("a", 3)}, end: []objects.Claim{row("a", 2)}},
		"a row without a claim is freed":                  {held: []objects.Claim{row("a", 2)}, rows: []objects.Claim{row("a", 2), row("b", 1)}, free: []objects.Claim{row("b", 1)}},
		"a row that is being freed is not freed again":    {freeing: []objects.Claim{row("a", 2)}, rows: []objects.Claim{row("a", 2)}},
		"a claim that began meanwhile goes on":            {since: []objects.Claim{row("a", 2)}, rows: []objects.Claim{row("a", 2)}},
		"even if its row was read before":                 {since: []objects.Claim{row("a", 2)}},
		"a claim that ended meanwhile does not end again": {held: []objects.Claim{row("a", 2)}, ended: []objects.Claim{row("a", 2)}},
		"nor is its row freed that was read before":       {held: []objects.Claim{row("a", 2)}, ended: []objects.Claim{row("a", 2)}, rows: []objects.Claim{row("a", 2)}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			l := newLedger(&term{id: "ours"}, ledgerTTL)
			l.add(append(slices.Clone(test.held), append(test.detached, test.freeing...)...))
			for _, r := range test.detached {
				l.detach([]Claim{claimOf("kind", "ours", r, false)})
			}
			l.startFreeing(false, false, test.freeing)
			unseen := l.claims()
			l.add(test.since)
			for _, r := range test.ended {
				l.end(r.ID, r.Token)
			}
			others := l.compare(unseen, test.rows)
			require.ElementsMatch(t, test.free, slices.DeleteFunc(others, l.knows))
			require.ElementsMatch(t, test.end, l.stillOwned(unseen))
		})
	}
}
