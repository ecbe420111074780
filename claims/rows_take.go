package claims

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// taking is a call of Take.
type taking struct {
	n   int
	got chan []Claim // receives once
}

// Take takes at most n rows that are free and ready, in order, and at most 1,000. It waits until
// there is one. Rows that somebody else has locked are passed over. Calls at the same time share
// a statement. Take waits while there is no session; [ErrClosed] says that there will be none.
// Errors of the store do not end it, except [tenure.ErrSetup].
//
// The caller works on each row, by [Rows.Do] or on its own, and ends its claim by a Finish
// method, Release or ReleaseAfter. An attempt is counted when a row is taken, even if the
// database's answer is lost. What was taken before ctx was done is returned without an error.
func (r *Rows) Take(ctx context.Context, n int) ([]Claim, error) {
	if n < 1 {
		return nil, r.failed("take", fmt.Errorf("%w: %d rows are asked for", tenure.ErrInvalid, n))
	}
	t := &taking{n: min(n, perStatement), got: make(chan []Claim, 1)}
	r.mu.Lock()
	r.takes = append(r.takes, t)
	r.mu.Unlock()
	var err error
	select {
	case got := <-t.got:
		return got, nil
	case r.leads <- struct{}{}:
		err = r.lead(ctx, t)
		<-r.leads
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	r.mu.Lock()
	if i := slices.Index(r.takes, t); i >= 0 {
		r.takes = slices.Delete(r.takes, i, i+1)
	}
	r.mu.Unlock()
	select {
	case got := <-t.got: // also if ctx ended at the same moment
		return got, nil
	default:
		return nil, r.failed("take", err)
	}
}

// lead takes rows for all calls of Take, until this one has got some.
func (r *Rows) lead(ctx context.Context, t *taking) error {
	k := r.keys
	var hints tenure.Subscription = noHints{}
	var done func()
	defer func() {
		if done != nil {
			hints.Stop()
			done()
		}
	}()
	var spurious pace.Limiter
	for woken, failures := false, 0; len(t.got) == 0; {
		err := r.takeForAll(ctx)
		switch {
		case len(t.got) > 0:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case isRefused(err): // by the user's SQL, for a row as it is now
		case errors.Is(err, ErrClosed), errors.Is(err, tenure.ErrSetup), errors.Is(err, tenure.ErrInvalid):
			return err
		}
		if done == nil { // subscribe, and look again before waiting, so that no hint is missed
			hints, done = k.s.hints(keyOf(k.kind)), k.s.sweeper.waits()
			continue
		}
		pause := pace.Jitter(r.cfg.PollInterval)
		if err != nil {
			pause = pace.Retry(k.s.cfg.RenewInterval, longestRetryPause, failures)
			k.s.retries.Log(k.s.cfg.Logger, slog.LevelWarn, "rows are not taken, trying again", err, "table", r.cfg.Table)
			failures++
		} else {
			failures = 0
		}
		waiting, cancel := k.s.untilEnd(ctx)
		woken, _ = pace.Await(waiting, hints.C(), spurious.IgnoreFor(woken, min(coalesce, pause)), pause)
		cancel()
	}
	return nil
}

// takeForAll takes as many rows as all calls of Take want, and gives them to those that have
// waited longest.
func (r *Rows) takeForAll(ctx context.Context) error {
	wants := func() (n int) {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, t := range r.takes {
			n = min(n+t.n, perStatement)
		}
		return n
	}
	got, err := r.take(ctx, wants)
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(got) > 0 && len(r.takes) > 0 {
		t := r.takes[0]
		n := min(t.n, len(got))
		t.got <- got[:n:n]
		got, r.takes = got[n:], r.takes[1:]
	}
	if len(got) > 0 { // the callers that wanted them have given up
		go func() { _ = r.keys.Release(context.Background(), got...) }()
	}
	return err
}

// take takes rows once.
func (r *Rows) take(ctx context.Context, wants func() int) ([]Claim, error) {
	k := r.keys
	if err := k.s.await(ctx); err != nil {
		return nil, err
	}
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	k.s.mu.Lock()
	h, over, strays := k.now, error(nil), make([]string, 0, len(k.strays))
	over = k.s.over(h.term)
	unsure := time.Now().Before(h.doubts.all.soon)
	for id := range k.strays {
		strays = append(strays, id)
	}
	k.s.mu.Unlock()
	n := wants()
	if over != nil || n == 0 {
		return nil, over
	}
	sent := time.Now()
	if unsure {
		switch rows, err := k.adoptable(ctx, h, n); {
		case err != nil:
			return nil, err
		case len(rows) > 0:
			return r.keep(h, rows, sent)
		}
	}
	rows, err := r.takeReady(ctx, h.term.id, n, strays, func(n int, skip, only []string) ([]objects.Claim, error) {
		if _, over := k.wanted(h, nil); over != nil { // it took long
			return nil, over
		}
		sending, cancel := k.s.uncut(ctx)
		defer cancel()
		return r.table.TakeReady(sending, h.term.id, n, skip, only, k.s.limit)
	})
	if err != nil && !errors.Is(err, tenure.ErrSetup) && !wroteNothing(err) {
		k.lostAnswer(h)
	}
	if len(rows) == 0 {
		return nil, err
	}
	return r.keep(h, rows, sent)
}

// keep makes claims of rows that were taken by a statement that was sent at a time. Those that have
// had all their attempts it gives to what the config says.
func (r *Rows) keep(h *holdings, rows []objects.Claim, sent time.Time) ([]Claim, error) {
	k := r.keys
	kept, err := k.keep(h, rows)
	if err != nil {
		return nil, err
	}
	for i := range kept {
		kept[i].Attempt = rows[i].Attempts
	}
	k.s.mu.Lock()
	var back []objects.Claim
	kept = slices.DeleteFunc(kept, func(c Claim) bool {
		busy := k.running[c.Key.ID] != nil // a func that has ended its claim, and has not returned
		if busy {
			back = append(back, c.row())
		}
		return busy
	})
	if h.term.over == nil {
		k.free(h, back...)
	}
	r.due.add(r, h, kept, sent)
	k.s.mu.Unlock()

	kept, exhausted := r.split(kept)
	r.giveUp(h, exhausted)
	return kept, nil
}

// TakeFor takes at most n rows that are free and ready for another session, by its ID, and does
// not wait: it may return none. It is for the server of workers that don't reach the database
// themselves, see [tenure.Lease.Resume]. The claims are the worker's, and this process does not
// hold them. The session must not be one that a process runs by [Session.Run], which frees rows of
// which it does not know. If the answer is lost, [Rows.OwnedBy] returns what was taken. It needs no session.
func (r *Rows) TakeFor(ctx context.Context, session string, n int) ([]Claim, error) {
	err := errors.Join(objects.ValidText("session", session), r.s.fits(objects.SessionType, session))
	switch {
	case session == "":
		err = fmt.Errorf("%w: session is empty", tenure.ErrInvalid)
	case n < 1:
		err = fmt.Errorf("%w: %d rows are asked for", tenure.ErrInvalid, n)
	}
	if err != nil {
		return nil, r.failed("take", err)
	}
	n = min(n, perStatement)
	rows, err := r.takeReady(ctx, session, n, nil, func(n int, skip, only []string) ([]objects.Claim, error) {
		return r.table.TakeReady(ctx, session, n, skip, only, r.s.limit)
	})
	if len(rows) == 0 && err != nil {
		return nil, r.failed("take", err)
	}
	kept, exhausted := r.split(r.claimsOf(rows))
	r.giveUpFor(ctx, exhausted)
	return kept, nil
}

// overdue is when claims reach [RowsConfig.Deadline], the earliest first. All last as long, so
// it is the order in which they were taken.
type overdue struct {
	claims []dueClaim
	runs   bool // a goroutine waits for the first
}

type dueClaim struct {
	of    *holdings
	id    string
	token int64
	at    time.Time
}

func (d dueClaim) held() bool { return d.of.term.over == nil && d.of.tokens[d.id] == d.token }

// add notes claims of a statement that was sent at a time. The caller holds the session's mutex.
func (o *overdue) add(r *Rows, h *holdings, claims []Claim, sent time.Time) {
	if r.cfg.Deadline == 0 || len(claims) == 0 || h.term.over != nil {
		return
	}
	if len(o.claims) > 1000+2*r.keys.len() { // most have ended
		o.claims = slices.DeleteFunc(o.claims, func(d dueClaim) bool { return !d.held() })
	}
	for _, c := range claims {
		o.claims = append(o.claims, dueClaim{h, c.Key.ID, c.Token, sent.Add(r.cfg.Deadline)})
	}
	if !o.runs {
		o.runs = true
		go o.run(r)
	}
}

// run ends claims at their deadlines, until there are none.
func (o *overdue) run(r *Rows) {
	s := r.s
	for {
		s.mu.Lock()
		var late []dueClaim
		for len(o.claims) > 0 && (!o.claims[0].held() || time.Until(o.claims[0].at) <= 0) {
			late = append(late, o.claims[0])
			o.claims = o.claims[1:]
		}
		r.endLate(late)
		if len(o.claims) == 0 {
			o.runs = false
			s.mu.Unlock()
			return
		}
		next, over := o.claims[0].at, o.claims[0].of.term.ended
		s.mu.Unlock()
		select {
		case <-time.After(time.Until(next)):
		case <-over:
		}
	}
}

// endLate tells the funcs of claims to return, and gives the rows away a while later. Rows without
// a func it gives away at once. The caller holds the session's mutex.
func (r *Rows) endLate(late []dueClaim) {
	for _, d := range late {
		call := r.keys.running[d.id]
		switch {
		case !d.held():
		case call == nil || call.token != d.token:
			r.keys.free(d.of, d.row())
		default:
			call.cancel(ErrOverdue)
			time.AfterFunc(r.cfg.Grace, func() {
				r.s.mu.Lock()
				defer r.s.mu.Unlock()
				if call := r.keys.running[d.id]; d.held() && call != nil && call.token == d.token {
					r.s.cfg.Logger.Warn("a func did not return at its deadline, its row is given away", "table", r.cfg.Table, "id", d.id)
					call.kept, r.keys.strays[d.id] = true, true
					r.keys.free(d.of, d.row())
				}
			})
		}
	}
}

func (d dueClaim) row() objects.Claim {
	return objects.Claim{ID: d.id, Session: d.of.term.id, Token: d.token}
}
