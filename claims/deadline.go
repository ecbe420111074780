package claims

import (
	"slices"
	"time"
)

// deadlines end the claims of a kind at [QueueConfig.Deadline]. All claims last equally long, so they end in
// the order in which they were taken.
type deadlines struct {
	k     *kind
	after time.Duration // 0: there are no deadlines
	grace time.Duration // how long a func may still run after the deadline

	// The session's mu guards the fields below.
	claims []dueClaim
	runs   bool // a goroutine waits for the first deadline
}

type dueClaim struct {
	Claim
	of *ledger
	at time.Time
}

func (d dueClaim) isHeld() bool { return d.of.term.over == nil && d.of.holds(d.Key.ID, d.Token) }

// add notes claims, and when the statement that took them was sent.
func (d *deadlines) add(l *ledger, claims []Claim, sent time.Time) {
	d.k.s.mu.Lock()
	defer d.k.s.mu.Unlock()
	if d.after == 0 || len(claims) == 0 || l.term.over != nil {
		return
	}
	if len(d.claims) > 1000+2*d.k.ledger.size() { // most have ended
		d.claims = slices.DeleteFunc(d.claims, func(c dueClaim) bool { return !c.isHeld() })
	}
	for _, c := range claims {
		d.claims = append(d.claims, dueClaim{c, l, sent.Add(d.after)})
	}
	if !d.runs {
		d.runs = true
		go d.run()
	}
}

// run ends claims at their deadlines until there are none left.
func (d *deadlines) run() {
	for {
		d.k.s.mu.Lock()
		for len(d.claims) > 0 && (!d.claims[0].isHeld() || time.Until(d.claims[0].at) <= 0) {
			d.end(d.claims[0])
			d.claims = d.claims[1:]
		}
		if len(d.claims) == 0 {
			d.runs = false
			d.k.s.mu.Unlock()
			return
		}
		next, over := d.claims[0].at, d.claims[0].of.term.ended
		d.k.s.mu.Unlock()
		select {
		case <-time.After(time.Until(next)):
		case <-over:
		}
	}
}

// end tells the func of a claim to return, and frees the row after the grace even if the func still runs.
// If no func runs for the claim, end frees the row at once. The caller holds the session's mu.
func (d *deadlines) end(c dueClaim) {
	k, call := d.k, d.k.running[c.Key.ID]
	switch {
	case !c.isHeld():
	case !call.isFor(c.Session, c.Token):
		k.free(c.of, false, c.row())
	default:
		call.cancel(ErrOverdue)
		time.AfterFunc(d.grace, func() {
			k.s.mu.Lock()
			defer k.s.mu.Unlock()
			if call := k.running[c.Key.ID]; c.isHeld() && call.isFor(c.Session, c.Token) {
				k.s.cfg.Logger.Warn("a func did not return at its deadline; its row is given away", "table", k.name, "id", c.Key.ID)
				call.kept, k.strays[c.Key.ID] = true, true
				k.free(c.of, false, c.row())
			}
		})
	}
}
