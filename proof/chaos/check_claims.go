package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
)

func ofClaims(kind string) bool {
	return slices.Contains([]string{ledgerClaimBegin, ledgerClaimEnd, ledgerClaimFenced, ledgerWrong}, kind)
}

// checkClaims checks the keys. Like a lease each of them has tokens that rise, and fenced writes
// that are committed within their own claims.
func (r *result) checkClaims(p *phase, a *audit) {
	for _, ledger := range [][]entry{a.ledger, a.replaced} {
		r.checkClaimLedger(ledger)
	}
	if p.left != "" {
		r.violate("%s", p.left)
	}
	for _, e := range p.record.sorted() {
		switch e.Kind {
		case claimTwice:
			r.violate("%s ran %s twice at %v, with token %d", e.Replica, e.Note, e.At, e.Token)
		case begunOut:
			r.violate("%s began %s at %v, and had been drained for %v", e.Replica, e.Note, e.At, e.At-e.From)
		}
	}
	for key, runs := range p.record.claimFuncs() {
		r.funcs += len(runs)
		known := slices.DeleteFunc(slices.Clone(runs), func(j job) bool { return j.death }) // of a killed one it is not known how long it was valid
		r.checkValid(p, key+" was claimed", known, p.ttl)
		if p.task == shareShards {
			r.checkFuncs(p, key, runs)
		}
		for f := range p.lastFaults() {
			if f.episode >= 0 {
				r.checkRecovery(p, f, runs, "nobody owned "+key)
			}
		}
	}
}

// checkFuncs looks for times at which two funcs of a shard ran, whether their claims were valid or
// not. It is excused as an overlap of two jobs is.
func (r *result) checkFuncs(p *phase, shard string, runs []job) {
	for two, to := range overlapping(runs, job.end) {
		if two[1].from < to {
			r.excuse(p, "two funcs ran for "+shard, two, to)
		}
	}
}

func (r *result) checkClaimLedger(ledger []entry) {
	as := map[string]string{ledgerClaimBegin: ledgerBegin, ledgerClaimEnd: ledgerEnd, ledgerClaimFenced: ledgerFenced}
	keys := map[string]string{} // by claim
	for _, e := range ledger {
		if e.kind == ledgerClaimBegin {
			keys[e.term] = e.lease
		}
	}
	each := map[string][]entry{}
	for _, e := range ledger {
		if e.kind == ledgerClaimBegin {
			r.claims++
		}
		switch {
		case e.kind == ledgerWrong:
			r.violate("%s was claimed by %s with token %d: %s", e.lease, e.term, e.token, e.note)
		case ofClaims(e.kind):
			key := keys[e.term]
			e.kind = as[e.kind]
			each[key] = append(each[key], e)
		}
	}
	for _, entries := range each {
		r.checkLease(entries, nil)
	}
}

// claimFuncs returns the runs of each key's funcs, in the order in which they began. One whose
// process was killed ended then.
func (r *record) claimFuncs() map[string][]job {
	runs := map[string][]job{}
	for _, e := range r.sorted() {
		switch e.Kind {
		case claimBegun:
			runs[e.Note] = append(runs[e.Note], job{span: span{e.Replica, e.At, forever}, term: e.Term, token: e.Token, until: forever})
		case claimEnded:
			for i, j := range runs[e.Note] {
				if j.term == e.Term && j.to == forever { // a shard's func may run again under the same claim
					runs[e.Note][i].from, runs[e.Note][i].to, runs[e.Note][i].until = e.From, e.At, e.Until
				}
			}
		case killed:
			for _, jobs := range runs {
				for i, j := range jobs {
					if j.replica == e.Replica && j.to == forever {
						jobs[i].to, jobs[i].until, jobs[i].death = e.At, e.At, true
					}
				}
			}
		}
	}
	for _, jobs := range runs {
		slices.SortFunc(jobs, func(a, b job) int { return cmp.Compare(a.from, b.from) })
	}
	return runs
}

// unclaimedSQL counts the free keys, and the keys whose session is gone.
const unclaimedSQL = `
	SELECT count(*) FILTER (WHERE session IS NULL) || ' ' || count(*) FILTER (WHERE session IS NOT NULL AND o.id IS NULL)
	FROM objects_claims c LEFT JOIN objects o ON o.object_type = 'tenure.session' AND o.id = c.session`

// awaitClaimed waits until nearly all keys have an owner: the replicas release some again and again.
func (p *phase) awaitClaimed(ctx context.Context, db database) error {
	began := time.Now()
	for p.task == claimKeys {
		counts, err := db.texts(ctx, unclaimedSQL)
		var free, gone int
		if err == nil {
			_, err = fmt.Sscan(counts[0], &free, &gone)
		}
		if err != nil {
			return err
		}
		if gone == 0 && free < p.keys/10 {
			return nil
		}
		if time.Since(began) > p.patient(time.Minute) {
			p.left = fmt.Sprintf("%v after the last fault %d of %d keys were free, and of %d the session was gone", p.patient(time.Minute), free, p.keys, gone)
			return nil
		}
		if !pause(ctx, p.ttl/5) {
			break
		}
	}
	return ctx.Err()
}

// awaitFuncs waits until the func of each key that has one runs, but not for longer than that.
func (p *phase) awaitFuncs(ctx context.Context, longest time.Duration) {
	await(ctx, longest, func() (bool, <-chan struct{}) {
		running, changed := p.record.funcs()
		return running == actors, changed
	})
}

// awaitEven waits until the shards are spread evenly over all replicas.
func (p *phase) awaitEven(ctx context.Context) error {
	var spread []int
	even := await(ctx, 20*p.ttl, func() (bool, <-chan struct{}) {
		var changed <-chan struct{}
		spread, changed = p.record.spread()
		return p.task != shareShards || len(spread) == replicas && spread[0] == actors/replicas && spread[replicas-1] == actors/replicas, changed
	})
	if !even && ctx.Err() == nil {
		p.left = fmt.Sprintf("long after the last fault the %d shards were spread over %d replicas as %v", actors, replicas, spread)
	}
	return ctx.Err()
}
