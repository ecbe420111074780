package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

func ofRows(kind string) bool {
	return slices.Contains([]string{ledgerRowBegin, ledgerRowFree, ledgerRowDone, ledgerRowEffect}, kind)
}

// checkRows checks the rows that the replicas worked on.
func (r *result) checkRows(p *phase, a *audit) {
	attempts := map[string]string{} // by claim, as the ledger has them
	for _, ledger := range [][]entry{a.ledger, a.replaced} {
		r.checkRowLedger(ledger)
		for _, e := range ledger {
			if e.kind == ledgerRowBegin {
				attempts[e.term] = e.note
			}
		}
	}
	r.violations = append(r.violations, p.stuck...)
	for _, e := range p.record.sorted() {
		if e.Kind == rowBegun && attempts[e.Term] != e.Note {
			r.violate("%s was told at %v that it has the claim %s, attempt %s; it is attempt %q", e.Replica, e.At, e.Term, e.Note, attempts[e.Term])
		}
	}
}

// row is what the ledger says of a row.
type row struct {
	owner   string // its current claim
	token   int64  // of its last claim
	counted int    // attempts
	done    entry  // its end
	effects int
	entries []entry
}

// checkRowLedger goes through all commits in order. A row must be taken only while it is free and
// not done, with tokens that rise and attempts that are counted, and taken back at most once. It must be done under its last
// claim, and then have one effect, which was written with it.
func (r *result) checkRowLedger(ledger []entry) {
	rows, ends := map[string]*row{}, map[string]entry{} // ends by claim
	for _, e := range ledger {
		if e.kind == ledgerRowDone {
			ends[e.term] = e
		}
	}
	for _, e := range ledger {
		if !ofRows(e.kind) {
			continue
		}
		id := e.term[strings.LastIndex(e.term, ".")+1:]
		if rows[id] == nil {
			rows[id] = &row{}
		}
		now, wrong := rows[id], ""
		now.entries = append(now.entries, e)
		switch e.kind {
		case ledgerRowBegin:
			r.takes++
			now.counted++
			switch {
			case now.owner != "":
				wrong = "it was taken from its owner"
			case now.done.kind != "":
				wrong = "it was taken after it was done"
			case e.token <= now.token:
				wrong = "its token did not rise"
			case e.note != fmt.Sprint(now.counted):
				wrong = fmt.Sprintf("%s attempts were counted, which should be %d", e.note, now.counted)
			}
			now.owner, now.token = e.term, e.token
		case ledgerRowFree, ledgerRowDone:
			if e.term != now.owner {
				wrong = "a claim ended that was not the current one"
			}
			now.owner = ""
			if e.kind == ledgerRowFree && e.note == fmt.Sprint(now.counted-1) {
				now.counted--
			}
			if e.kind == ledgerRowDone {
				now.done = e
			}
		case ledgerRowEffect:
			r.effects++
			now.effects++
			switch {
			case now.effects > 1:
				wrong = "it has two effects"
			case ends[e.term].kind == "" || ends[e.term].tx != e.tx: // of one transaction the order is not known
				wrong = "its effect was not written with its end"
			}
		}
		if wrong != "" {
			r.violate("row %s: %s:\n%s", id, wrong, lines(now.entries))
		}
	}
	for id, now := range rows {
		if now.done.kind != "" && now.effects == 0 {
			r.violate("row %s: it was done without an effect:\n%s", id, lines(now.entries))
		}
	}
}

// awaitEnded waits until all claims on rows that there were when faults ended have ended too. They must
// after the time that their sessions may stand, and after which a pool has connections again.
func (p *phase) awaitEnded(ctx context.Context, db database, faults []*fault) error {
	var last *fault
	for _, f := range faults {
		if last == nil || f.to > last.to {
			last = f
		}
	}
	const held = `SELECT id || '.' || token FROM work WHERE session IS NOT NULL`
	looked := max(last.to, monotonic()) // there may be new claims since the last fault
	before, err := db.texts(ctx, held)
	allowed := p.allowedAfter(faults...) + closes // a func that finishes a row waits for the pool's connections
	for left := before; err == nil && len(left) > 0; {
		now := monotonic()
		if limit := allowed + p.stalledFor(looked, now); now-looked > limit {
			p.stuck = append(p.stuck, fmt.Sprintf("%s: after %s of %s these claims had not ended for more than %v: %v\n%s",
				p.name, last.kind, last.target, limit, left[:min(len(left), 5)], p.around(last.from, now)))
			break
		}
		pause(ctx, p.ttl/50)
		var all []string
		if all, err = db.texts(ctx, held); err == nil {
			left = slices.DeleteFunc(left, func(c string) bool { return !slices.Contains(all, c) })
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return err
}

// awaitDone waits until all rows that there are are done.
func (p *phase) awaitDone(ctx context.Context, db database) error {
	if p.task != workOnRows {
		return nil
	}
	newest, err := db.texts(ctx, `SELECT CAST(max(id) AS text) FROM work HAVING max(id) IS NOT NULL`)
	if err != nil || len(newest) == 0 {
		return err
	}
	for began := time.Now(); ; pause(ctx, p.ttl/5) {
		left, err := db.texts(ctx, `SELECT CAST(id AS text) FROM work WHERE status <> 'done' AND id <= `+newest[0])
		if err != nil || len(left) == 0 || ctx.Err() != nil {
			return err
		}
		if time.Since(began) > p.patient(time.Minute) {
			p.left = fmt.Sprintf("%v after the last fault %d rows were not done: %v", p.patient(time.Minute), len(left), left[:min(len(left), 5)])
			return nil
		}
	}
}
