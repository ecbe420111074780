package sim

import (
	"context"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// In some worlds an operator marks replicas as drained, and processes drain themselves by Drain.Start. The judge
// knows the marks, and what each process was told. It wants:
//
//   - a process that was told takes nothing: it does not compete, no job of it begins, and its job is told to return
//     at that moment;
//   - its record is gone soon after its job has returned, and when Start returns;
//   - a process that began after its replica was marked takes nothing, told or not;
//   - a process that was told of a mark takes nothing while that stands, even if it cannot read it;
//   - a process that reaches the store is told of a mark, and that it is gone, in time.
//
// That another replica holds instead, and this one later, is for the rules of liveness.

// draining is what the judge knows about the drains of one process. It is guarded by the world's lock.
type draining struct {
	drain   *tenure.Drain // nil in other worlds
	since   time.Time     // when it was told that it is drained; zero if it takes part
	last    time.Time     // the last such time
	takes   time.Time     // when it was told that it takes part; zero before it has read the mark
	itself  bool          // it has called Drain.Start
	byStart bool          // that is why it was told
}

// out reports whether the process was told at an earlier moment that it is drained.
func (d *draining) out() bool { return !d.since.IsZero() && time.Now().After(d.since) }

// marked is an operator's mark of a replica. It is guarded by the world's lock.
type marked struct {
	at, until time.Time // of the mark that was set last
	hinted    time.Time // when a hint told of a change
}

func (m *marked) stands() bool { return time.Now().Before(m.until) }

// changed returns when the mark was last set or ended.
func (m *marked) changed() time.Time {
	if m.stands() {
		return m.at
	}
	return m.until
}

// newDrain gives a process its Drain.
func (l *life) newDrain() *tenure.Drain {
	var store tenure.Store = storetest.Faulty(l.r.w.marks, l.call)
	if !l.r.w.wakes {
		store = struct{ tenure.Store }{store}
	}
	return testkit.Must(tenure.NewDrain(store, l.r.name, l.blocker().Logger(l.r.w.line.Logger(l.r.name))))
}

// follow runs the Drain of a process until done is called.
func (l *life) follow(ctx context.Context) (done func()) {
	if l.drain == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	leave := l.drain.Follow(l.setDrained)
	l.r.w.running.Go(func() { _ = l.drain.Run(ctx) })
	l.r.w.running.Go(func() {
		l.drain.AwaitMark(ctx)
		l.r.w.locked(func() {
			if l.since.IsZero() {
				l.takes = time.Now()
			}
		})
	})
	return func() { leave(); cancel() }
}

func (l *life) setDrained(drained bool) (givenBack func(context.Context) error) {
	l.r.w.locked(func() {
		if drained {
			l.r.w.line.Say(l.r.name, "is drained")
			testkit.Count(&l.r.w.judge.judged, "drains followed")
			l.since, l.last, l.takes, l.byStart = time.Now(), time.Now(), time.Time{}, l.itself
		} else if !l.since.IsZero() {
			l.r.w.line.Say(l.r.name, "takes part")
			if m := &l.r.marked; m.stands() && m.at.Before(l.since) && !l.itself && !l.byStart {
				l.r.w.judge.violated("drain", "%s takes part, and its mark stands for %v", l.r.name, time.Until(m.until))
			}
			l.since, l.takes = time.Time{}, time.Now()
		}
	})
	return nil
}

// mark marks a replica as drained, or removes its mark if d is 0.
func (r *replica) mark(d time.Duration) {
	hint, d := r.w.rng.IntN(3) > 0, d.Truncate(time.Millisecond)
	var store tenure.Store = r.w.marks
	if !hint {
		store = struct{ tenure.Store }{store}
	}
	r.w.locked(func() {
		m, err := &r.marked, error(nil)
		switch {
		case d > 0:
			r.w.line.Say(r.name, "is marked as drained for %v; hint: %v", d, hint)
			m.at, m.until = time.Now(), time.Now().Add(d)
			err = tenure.SetDrain(context.Background(), store, tenure.Drained{Replica: r.name, Left: d})
		case m.stands():
			r.w.line.Say(r.name, "is no longer marked as drained; hint: %v", hint)
			m.until = time.Now()
			err = tenure.ClearDrain(context.Background(), store, r.name)
		default:
			return
		}
		if hint {
			m.hinted = time.Now()
		}
		if err != nil {
			panic(err)
		}
	})
}

// drainsItself has the process drain itself for a while.
func (r *replica) drainsItself(d time.Duration) {
	var l *life
	r.w.locked(func() {
		if l = r.life; l == nil || l.stopping || l.itself || r.paused != nil {
			l = nil
			return
		}
		l.itself = true
	})
	if l == nil {
		return
	}
	r.w.line.Say(r.name, "drains itself for %v", d)
	r.w.running.Go(func() {
		ctx, cancel := timed(d)
		defer cancel()
		err := l.drain.Start(ctx)
		r.w.locked(func() { r.w.judge.gaveBack(l, err) })
		<-ctx.Done()
		l.drain.Stop()
		r.w.locked(func() { l.itself = false })
	})
}

// mayTake is called when a process competes or its job begins.
func (j *judge) mayTake(l *life, what string) {
	switch m := &l.r.marked; {
	case l.drain == nil:
	case l.out() && !l.byStart && time.Now().Equal(m.until): // its coordinator may be told of that before setDrained is called
	case l.out():
		j.violated("drain", "%s %s, and has been drained for %v", l.r.name, what, time.Since(l.since))
	case m.stands() && m.at.Before(l.started):
		j.violated("drain", "%s %s, and was marked as drained when its process started", l.r.name, what)
	}
}

// gaveBack is called when Start has returned.
func (j *judge) gaveBack(l *life, err error) {
	if err != nil || l.dead() || l.stopping || l.panicked || l.since.IsZero() { // a process that ends may have to leave its record
		return
	}
	testkit.Count(&j.judged, "returns of Start")
	for _, t := range j.running {
		if t.life == l {
			j.violated("drain", "%s's Start has returned, and its job runs", l.r.name)
		}
	}
	// A process forgets a record that has expired.
	if t := j.standing; t != nil && t.life == l && !t.told.IsZero() && !t.offer && !t.restored && !t.copied && time.Since(j.writtenAt) < l.ttl() {
		j.violated("drain", "%s's Start has returned, and its record of term %d stands", l.r.name, t.token)
	}
}

// followsDrains is called from time to time.
func (j *judge) followsDrains(l *life) {
	if l == nil || l.drain == nil || l.dead() || l.stopping {
		return
	}
	now := time.Now()
	for _, t := range j.running {
		if t.life == l && t.told.IsZero() && l.out() {
			j.violated("drain", "%s has been drained for %v, and its job is not told", l.r.name, now.Sub(l.since))
		}
	}
	if !l.r.good {
		return
	}
	m, good := &l.r.marked, l.goodSince()
	if is, wanted := !l.since.IsZero(), m.stands(); is != wanted && !l.itself {
		// A call may hang for 10 s and be repeated 5 s later.
		due := later(m.changed(), good).Add(46*time.Second + 4*j.w.latency)
		if j.w.wakes && m.hinted.Equal(m.changed()) && m.changed().Sub(good) > time.Minute {
			due = m.changed().Add(2*time.Second + 4*j.w.latency)
		}
		if now.After(due) {
			j.violated("drain", "%s was to be told that it is drained: %v, by %v ago", l.r.name, wanted, now.Sub(due))
			m.at, m.until = now, now.Add(m.until.Sub(now)) // report it once
		}
	}
	if t := j.standing; t != nil && t.life == l && l.out() && t.running == 0 && !t.offer && !t.restored && !t.copied {
		from := later(later(l.since, t.at), later(good, t.returned))
		if took := now.Sub(from); took > l.slack() {
			j.violated("drain", "%s is drained, and its record of term %d has stood for %v since its job returned", l.r.name, t.token, took)
			t.restored = true // report it once
		}
	}
}
