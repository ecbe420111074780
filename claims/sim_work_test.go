package claims_test

import (
	"context"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure/claims"
)

// This part of a process is the application: it claims keys, works for them, and frees them.

// work is one of the goroutines of an application. It ends with ctx, or when the process is
// gone, or when nothing happens any more.
func (l *life) work(ctx context.Context) {
	d, ttl := l.h.dice, l.h.ttl
	var working sync.WaitGroup
	defer working.Wait()
	for ctx.Err() == nil && !l.h.a.isCalm() {
		if l.h.a.hurries && !d.One(20) {
			l.useSlot(ctx)
			continue
		}
		var got []claims.Claim
		if l.slots != nil && d.One(3) {
			got = l.getSlot(ctx)
		} else {
			got, _ = l.get(ctx, l.someKeys()) // beside an error, too
		}
		l.h.a.locked(func() { l.h.a.judge.given(l, got) })
		if !l.halt() {
			return
		}
		switch n := d.N(10); {
		case len(got) == 0:
		case n < 2:
			working.Go(func() { l.hold(ctx, got) })
		default:
			for _, c := range got {
				working.Go(func() { l.do(ctx, c) })
				if d.One(10) { // by mistake
					working.Go(func() { l.do(ctx, c) })
				}
			}
			if n < 4 {
				working.Go(func() { l.release(ctx, d.UpTo(2*ttl), got) })
			}
		}
		if !l.wait(ctx, d.UpTo(ttl)) {
			return
		}
	}
}

// someKeys returns one of the keys, or some, or all.
func (l *life) someKeys() []string {
	d, all := l.h.dice, l.h.a.keys
	n := 1
	switch d.N(8) {
	case 0:
		n = len(all)
	case 1, 2:
		n = 1 + d.N(min(4, len(all)))
	}
	from := d.N(len(all) - n + 1)
	return all[from : from+n]
}

// get claims some of the keys.
func (l *life) get(ctx context.Context, ids []string) ([]claims.Claim, error) {
	d, a := l.h.dice, l.h.a
	if d.One(10) {
		_, _ = l.keys.Owner(ctx, ids[0])
	}
	if d.One(5) {
		return l.keys.TryClaim(ctx, ids...)
	}
	if a.moves && d.One(6) {
		return l.move(ctx, ids)
	}
	if a.attaches && d.One(4) {
		return l.attach(ctx, ids[0]), nil
	}
	ctx, done := l.waits(ctx, ids)
	defer done()
	return l.keys.Claim(ctx, ids...)
}

// waits tells the judge of a call that waits, and returns the context of a caller that gives up.
func (l *life) waits(ctx context.Context, ids []string) (_ context.Context, done func()) {
	a := l.h.a
	ctx, cancel := context.WithTimeout(ctx, l.h.ttl*time.Duration(1+l.h.dice.N(8)))
	stop := make(chan struct{})
	a.running.Go(func() {
		select {
		case <-a.calm:
			cancel()
		case <-stop:
		}
	})
	w := &waiting{life: l, ids: ids, since: time.Now()}
	a.locked(func() { a.judge.waits[w] = true })
	return ctx, func() {
		a.locked(func() { delete(a.judge.waits, w) })
		close(stop)
		cancel()
	}
}

// getSlot takes a slot.
func (l *life) getSlot(ctx context.Context) []claims.Claim {
	d := l.h.dice
	take := l.slots.TryTake
	if !d.One(5) {
		var done func()
		ctx, done = l.waits(ctx, nil)
		defer done()
		take = l.slots.Take
	}
	c, err := take(ctx)
	if err != nil {
		return nil
	}
	return []claims.Claim{c}
}

// useSlot takes a slot, if it gets one, and gives it back soon.
func (l *life) useSlot(ctx context.Context) {
	got := l.getSlot(ctx)
	l.h.a.locked(func() { l.h.a.judge.given(l, got) })
	if len(got) == 0 {
		l.wait(ctx, l.h.dice.UpTo(l.h.ttl/50))
		return
	}
	if l.halt() && l.wait(ctx, l.h.dice.UpTo(l.h.ttl/50)) {
		l.write(got[0])
	}
	l.release(context.WithoutCancel(ctx), 0, got)
}

// holds reports whether the process holds a claim of a key or a slot.
func (l *life) holds(c claims.Claim) bool {
	if c.Key.Type == slotKind {
		return l.slots.Holds(c)
	}
	return l.keys.Holds(c)
}

// kindOf returns the kind of a key or a slot.
func kindOf(id string) string {
	if strings.HasPrefix(id, "t") {
		return kind
	}
	return slotKind
}

func (a *arena) slotIDs(n int) (ids []string) {
	for i := range n {
		ids = append(ids, strconv.Itoa(i))
	}
	return ids
}

// move moves keys to this process, often because of claims that it saw a while ago.
func (l *life) move(ctx context.Context, ids []string) ([]claims.Claim, error) {
	seen, err := l.keys.Standing(ctx, ids...)
	if err != nil || len(seen) == 0 || l.h.dice.One(2) && !l.wait(ctx, l.h.dice.UpTo(2*l.h.ttl)) {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, l.h.ttl)
	defer cancel()
	return l.keys.Move(ctx, seen...)
}

// hold keeps claims for a while without a func, and frees them all at once.
func (l *life) hold(ctx context.Context, got []claims.Claim) {
	for range 3 {
		if !l.wait(ctx, l.h.dice.UpTo(l.h.ttl)) {
			return
		}
		l.write(got[l.h.dice.N(len(got))])
	}
	l.release(ctx, 0, got)
}

func (l *life) release(ctx context.Context, after time.Duration, got []claims.Claim) {
	if after > 0 && !l.wait(ctx, after) || !l.halt() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, l.h.ttl)
	defer cancel()
	l.h.a.locked(func() { l.h.a.judge.releasing(l, got) })
	release := l.keys.Release
	if got[0].Key.Type == slotKind {
		release = l.slots.Release
	}
	_ = release(ctx, got...)
	for _, c := range got { // if one of them was released before, none was now
		_ = release(ctx, c)
	}
}

// do runs a func for a claim.
func (l *life) do(ctx context.Context, c claims.Claim) {
	if !l.halt() {
		return
	}
	do := l.keys.Do
	if c.Key.Type == slotKind {
		do = l.slots.Do
	}
	_ = do(context.WithoutCancel(ctx), c, func(ctx context.Context) error {
		l.act(ctx, c)
		return nil
	})
}

// act is such a func: it makes fenced writes now and then until it is told to return. Then it
// delays and still writes.
func (l *life) act(ctx context.Context, c claims.Claim) {
	j := l.h.a.judge
	var r *run
	l.h.a.locked(func() { r = j.begins(l, ctx, c) })
	defer l.h.a.locked(func() { j.returns(r) })
	p := l.plan()
	early := time.NewTimer(p.early)
	defer early.Stop()
	for ctx.Err() == nil {
		select {
		case <-early.C:
			l.halt()
			return
		case <-l.gone:
			return
		case <-ctx.Done():
		case <-time.After(l.h.ttl/10 + l.h.dice.UpTo(2*l.h.ttl)):
			if !l.write(c) {
				return
			}
		}
	}
	if !l.halt() { // a func can't return while its process is paused
		return
	}
	for end := time.Now().Add(p.delay); time.Now().Before(end); {
		if !l.wait(context.WithoutCancel(ctx), min(time.Until(end), l.h.ttl/5)) || !l.write(c) {
			return
		}
	}
}

// write makes a write that is fenced by a claim. It returns false if the process is gone.
func (l *life) write(c claims.Claim) bool {
	if !l.halt() {
		return false
	}
	d, a := l.h.dice, l.h.a
	var late, open time.Duration
	if d.One(5) { // the network delays it
		late = d.UpTo(3 * l.h.ttl)
	}
	if d.One(5) { // others find the row locked
		open = d.UpTo(l.h.ttl / 20)
	}
	a.running.Go(func() {
		if late > 0 {
			time.Sleep(late)
		}
		_ = a.db.fenced(context.Background(), rowOf(c), open)
	})
	return true
}

// plan decides what one run of a func does.
type plan struct {
	early time.Duration // when it returns without being told to
	delay time.Duration // after it was told to return
}

func (l *life) plan() plan {
	d, ttl := l.h.dice, l.h.ttl
	p := plan{early: time.Duration(math.MaxInt64)}
	if !d.One(4) {
		p.early = d.UpTo(6 * ttl)
	}
	switch n := d.N(40); {
	case n < 14:
		p.delay = d.UpTo(l.allowed() * 9 / 10)
	case n < 17:
		p.delay = l.allowed() + d.UpTo(2*ttl)
	case n < 18: // never, unless the process crashes
		p.delay = 1000 * ttl
	}
	return p
}
