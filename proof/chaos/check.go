package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
)

// result is what was found in one phase.
type result struct {
	phase      string
	faults     map[string]int
	terms      int
	writes     int // fenced writes that were committed
	late       int // unfenced writes that were committed after their term was over
	operations int
	doubtful   int             // operations with an unknown outcome
	registers  int             // registers whose history was checked
	undecided  int             // registers whose history took too long to check
	allowed    int             // events of leases that are a behaviour of the rules
	renewals   int             // renewals that were reported to a replica as successful
	crowd      int             // terms of other leases
	together   int             // beginnings and ends of these terms that shared a commit
	claims     int             // on the keys that have a func
	funcs      int             // of these
	takes      int             // of rows
	effects    int             // of rows
	requests   map[string]int  // by outcome
	waits      []time.Duration // for their answers
	moved      int             // tenants that clients saw change hands
	overlaps   map[string]int
	longest    map[string]time.Duration // longest overlap, by excuse
	handovers  []time.Duration          // from the end of a job to the start of the next, after a release
	failovers  []time.Duration          // from the kill of the holder to the start of the next job
	releases   []time.Duration          // the same after a kill that a witness saw, and nothing else
	wentOn     int                      // jobs that ran before a failover and after it
	recoveries []time.Duration          // from the end of a fault until a job runs
	violations []string
}

func (r *result) violate(format string, args ...any) {
	r.violations = append(r.violations, r.phase+": "+fmt.Sprintf(format, args...))
}

// check checks a phase by its histories and the database's content.
func check(p *phase, a *audit) *result {
	r := &result{phase: p.name, faults: map[string]int{}, overlaps: map[string]int{}, longest: map[string]time.Duration{}}
	for _, f := range p.record.faults {
		r.faults[f.kind]++
	}
	r.checkLedger(a.ledger, p.tokens(a))
	r.checkLedger(a.replaced, nil)
	r.checkBehaviour(p, a)
	r.checkRenewed(p, a)
	r.checkSetUp(p, a)
	r.checkCrowd(p, a)
	r.checkClaims(p, a)
	r.checkRows(p, a)
	r.checkRequests(p, a)
	if before, after := greatestToken(a.ledger), greatestToken(a.replaced); after < before && len(a.replaced) > 0 {
		r.violate("the file was removed and all replicas were restarted; the last token is %d, after %d", after, before)
	}
	r.checkAcknowledged(p, a)
	r.checkRegisters(p, a)
	jobs := p.record.jobs()
	r.terms = len(jobs)
	r.checkOverlaps(p, jobs)
	r.checkWitnessed(p, jobs)
	r.checkTokens(p, a, jobs)
	r.checkRecoveries(p, jobs)
	r.checkKept(p, jobs)
	r.checkEnds(p, a)
	r.measure(p, jobs, a)
	return r
}

// checkLedger goes through all commits in order: tokens must rise from term to term, and
// fenced writes must be committed within their own terms. A term whose record was written again has a lower token, as tokens
// says, than the version that it has there.
func (r *result) checkLedger(ledger []entry, tokens map[string]int64) {
	leases := map[string]string{} // lease by term
	for _, e := range ledger {
		if e.kind == ledgerBegin {
			leases[e.term] = e.lease
		}
	}
	each := map[string][]entry{}
	for _, e := range ledger {
		if ofClaims(e.kind) || ofRows(e.kind) {
			continue
		}
		lease := leases[e.term]
		if e.kind == ledgerRestored {
			lease = e.lease
		}
		each[lease] = append(each[lease], e)
	}
	for _, entries := range each {
		r.checkLease(entries, tokens)
	}
}

func (r *result) checkLease(ledger []entry, tokens map[string]int64) {
	var current, revived entry
	var greatest int64
	for i, e := range ledger {
		wrong := ""
		switch e.kind {
		case ledgerBegin:
			version := e.token
			if own, ok := tokens[e.term]; ok && own < version {
				e.token = own
			}
			if e.token <= greatest {
				wrong = fmt.Sprintf("a term begins, or is written again, with token %d after one with %d", e.token, greatest)
			}
			greatest, current, revived = max(greatest, version), e, entry{}
		case ledgerEnd:
			if e.term != current.term && e.term != revived.term {
				wrong = "a record is deleted that is not the current one"
			}
			current, revived = entry{}, entry{}
		case ledgerRestored:
			current, revived = entry{}, e
		case ledgerFenced:
			r.writes++
			if e.term != current.term || e.token != current.token {
				wrong = "a fenced write is committed outside its term"
			}
		case ledgerUnfenced:
			if e.term != current.term {
				r.late++
			}
		}
		if wrong != "" {
			r.violate("%s:\n%s", wrong, lines(ledger[max(0, i-5):min(i+2, len(ledger))]))
		}
	}
}

func greatestToken(ledger []entry) (greatest int64) {
	for _, e := range ledger {
		greatest = max(greatest, e.token)
	}
	return greatest
}

func lines(entries []entry) string {
	var b strings.Builder
	for _, e := range entries {
		fmt.Fprintf(&b, "\t%s %-8s term=%s token=%d %s\n", e.at, e.kind, e.term, e.token, e.note)
	}
	return b.String()
}

// checkAcknowledged looks for writes that were acknowledged to a replica but are missing.
func (r *result) checkAcknowledged(p *phase, a *audit) {
	written := map[string]int{}
	for _, e := range a.ledger {
		written[e.kind+" "+e.note]++
	}
	for id, payload := range a.once {
		written[onceType+" "+id]++
		if id != payload {
			r.violate("object %s has the payload %q", id, payload)
		}
	}
	for _, e := range p.record.sorted() {
		if e.Kind == acknowledge && written[e.Note] != 1 && a.promised(e.At) && !(written[e.Note] == 0 && p.mayBeLost(a, e)) {
			r.violate("%s was told at %v that %q was written; it occurs %d times", e.Replica, e.At, e.Note, written[e.Note])
		}
	}
}

// checkRenewed looks for renewals that were reported to a replica as successful, although
// nothing was committed during the call.
func (r *result) checkRenewed(p *phase, a *audit) {
	const slack = 10 * time.Millisecond // the ledger's times are in milliseconds
	since := time.Duration(time.Now().UnixNano()) - monotonic()
	committed := map[string][]time.Duration{} // times of renewals, by term
	for _, e := range a.ledger {
		if e.kind != ledgerRenewed && (e.kind != ledgerBegin || len(a.lost) == 0) {
			continue
		}
		ms, err := strconv.ParseInt(e.note, 10, 64)
		if err != nil {
			r.violate("the ledger has a renewal of term %s at an invalid time %q", e.term, e.note)
		}
		committed[e.term] = append(committed[e.term], time.Duration(ms)*time.Millisecond-since)
	}
	for _, e := range p.record.sorted() {
		if e.Kind != renewed || !a.promised(e.At) || p.mayBeLost(a, e) {
			continue
		}
		r.renewals++
		if !slices.ContainsFunc(committed[e.Term], func(at time.Duration) bool { return e.From-slack <= at && at <= e.At+slack }) {
			r.violate("%s was told at %v that term %s of %s was renewed by a call that began at %v, but no renewal was committed during the call\n%s",
				e.Replica, e.At, e.Term, e.Note, e.From, p.around(e.From, e.At))
		}
	}
}

// checkSetUp looks for replicas that were told that the store is not set up. On NATS they are told
// so while the stream or the disk is full. In a database only the loss of the tombstones may cause
// this error, and only for a moment: a replica must notice the loss and go on without tombstones.
// It may take longer only if the network fails at the same time.
func (r *result) checkSetUp(p *phase, a *audit) {
	if !a.fit {
		return
	}
	type of struct {
		replica string
		fault   *fault
	}
	first := map[of]time.Duration{}
	for _, e := range p.record.sorted() {
		if e.Kind != setUpError || p.streamWasFull(e.At) {
			continue
		}
		var latest *fault
		for _, f := range p.record.faults {
			if strings.HasPrefix(f.kind, tombstonesSpoilt) && f.from <= e.At {
				latest = f
			}
		}
		since, again := first[of{e.Replica, latest}]
		if !again {
			since = e.At
			first[of{e.Replica, latest}] = since
		}
		switch {
		case latest == nil:
			r.violate("%s was told at %v: %s", e.Replica, e.At, e.Note)
		case e.At-since > p.patient(time.Second) && !p.networkFailed(latest.episode):
			r.violate("%s was told at %v, and already %v earlier, after %s at %v: %s", e.Replica, e.At, e.At-since, latest.kind, latest.from, e.Note)
			first[of{e.Replica, latest}] = forever // one violation is enough
		}
	}
}

// streamWasFull reports whether a stream was full at that time, or its answers may still have been
// on their way.
func (p *phase) streamWasFull(at time.Duration) bool {
	return slices.ContainsFunc(p.record.faults, func(f *fault) bool {
		return (f.kind == streamFull || f.kind == streamDiskFull) && f.from <= at && at <= f.to+p.ttl
	})
}

func (a *audit) promised(at time.Duration) bool { return a.until == 0 || int64(at) < a.until }

func (p *phase) networkFailed(episode int) bool {
	return slices.ContainsFunc(p.record.faults, func(f *fault) bool {
		return f.episode == episode && strings.HasPrefix(f.kind, networkFault)
	})
}

// ran reports whether a replica was running all of that time.
func (p *phase) ran(replica string, from, to time.Duration) bool {
	return !slices.ContainsFunc(p.record.pauses, func(pause span) bool {
		return pause.replica == replica && pause.from < to && from < pause.to
	})
}

// around describes what happened at about that time.
func (p *phase) around(from, to time.Duration) string {
	from, to = from-p.ttl, to+p.ttl
	var b strings.Builder
	for _, f := range p.record.faults {
		if f.from <= to && from <= f.to {
			fmt.Fprintf(&b, "\t%v to %v: %s of %s\n", f.from, f.to, f.kind, f.target)
		}
	}
	for _, pause := range p.record.pauses {
		if pause.from <= to && from <= pause.to {
			fmt.Fprintf(&b, "\t%v to %v: %s did not run\n", pause.from, pause.to, pause.replica)
		}
	}
	for _, e := range p.record.sorted() {
		switch e.Kind {
		case jobStarted, jobStopped, jobStuck, killed, ended:
			if from <= e.At && e.At <= to {
				fmt.Fprintf(&b, "\t%v: %s: %s, token %d\n", e.At, e.Replica, e.Kind, e.Token)
			}
		}
	}
	return b.String()
}

// checkKept looks for replicas that lost their lease while the server was full, although
// their connections had not been broken.
func (r *result) checkKept(p *phase, jobs []job) {
	for _, f := range p.record.faults {
		if f.kind != serverFull || !p.alone(f) {
			continue
		}
		for _, j := range jobs {
			lost := strings.Contains(j.cause, tenure.ErrDeadline.Error()) || strings.Contains(j.cause, tenure.ErrLost.Error())
			if lost && j.from < f.from && f.from < j.to && j.to <= f.to && !strings.Contains(f.target, j.replica) && p.ran(j.replica, f.from, j.to) {
				r.violate("%s lost its term with token %d at %v: %s; the server was full, but its connections were good\n%s",
					j.replica, j.token, j.to, j.cause, p.around(f.from, f.to))
			}
		}
	}
}

// checkEnds looks for what replicas left behind although they shut down properly.
func (r *result) checkEnds(p *phase, a *audit) {
	for _, e := range p.record.sorted() {
		switch e.Kind {
		case leaked:
			r.violate("%s left behind: %s", e.Replica, e.Note)
		case jobStuck:
			if !p.ran(e.Replica, e.From, e.At) {
				continue
			}
			r.violate("%s: the job with token %d did not return within %v\n%s", e.Replica, e.Token, e.At-e.From, p.around(e.From, e.At))
		}
	}
	for _, c := range a.connections {
		r.violate("a connection was left behind: %s", c)
	}
}

// measure records the durations of handovers and failovers. It leaves out those during
// which there was another fault, because that affects them.
func (r *result) measure(p *phase, jobs []job, a *audit) {
	released := map[string]bool{}
	for _, e := range a.ledger {
		if e.kind == ledgerEnd {
			released[e.term] = true
		}
	}
	for i, j := range jobs[:max(0, len(jobs)-1)] {
		next := jobs[i+1]
		if next.from < j.to || slices.ContainsFunc(p.record.faults, func(f *fault) bool {
			return !f.passes && f.from < next.from && j.to < f.to
		}) {
			continue
		}
		switch {
		case j.death:
			r.failovers = append(r.failovers, next.from-j.to)
		case released[j.term]:
			r.handovers = append(r.handovers, next.from-j.to)
		}
	}
}
