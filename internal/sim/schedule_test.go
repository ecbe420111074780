package sim

import (
	"time"
)

// schedule lets things happen until the world is over. The times of quiet between
// them are long enough for the replicas to settle, at times.
func (w *world) schedule() {
	end := w.began.Add(worldTTLs * w.ttl)
	for {
		quiet := w.upTo(4 * w.ttl)
		if time.Until(end) < quiet {
			time.Sleep(time.Until(end))
			return
		}
		time.Sleep(quiet)
		w.happens()
	}
}

func (w *world) upTo(most time.Duration) time.Duration {
	return scale(most, float64(1+w.rng.IntN(1000))/1000/float64(int(1)<<w.rng.IntN(5)))
}

func (w *world) happens() {
	r := w.replicas[w.rng.IntN(len(w.replicas))]
	w.locked(func() { // what befalls the holder matters most
		if t := w.judge.standing; t != nil && t.life != nil && w.rng.IntN(3) > 0 {
			r = t.life.r
		}
	})
	kind := ""
	switch n := w.rng.IntN(100); {
	case n < 35:
		weather := weathers[w.rng.IntN(len(weathers))]
		kind = string(weather)
		r.turn(weather, w.upTo(3*w.ttl))
	case n < 42:
		weather := weathers[w.rng.IntN(len(weathers))]
		kind = string(weather) + " for all"
		d := w.upTo(2 * w.ttl)
		for _, r := range w.replicas {
			r.turn(weather, d)
		}
	case n < 54:
		kind = "pause"
		r.pause(w.upTo(3 * w.ttl))
	case n < 62:
		kind = "crash"
		down := w.upTo(2 * w.ttl)
		r.crash()
		w.later(down, r.start)
	case n < 70:
		kind = "shutdown"
		r.stop(3*w.ttl, w.upTo(w.ttl))
	case n < 77:
		kind = "resignation"
		away := time.Duration(0)
		if w.rng.IntN(2) == 0 {
			away = w.upTo(2 * w.ttl)
		}
		r.resign(away)
	case n < 85 && w.checks:
		kind = "unfit"
		r.ail([]string{"fails", "hangs", "deaf"}[w.rng.IntN(3)], w.upTo(2*w.ttl))
	case n < 90 && w.clockJumps:
		d := w.upTo([]time.Duration{w.ttl, 3 * w.ttl, 100 * time.Hour}[w.rng.IntN(3)])
		if kind = "database's clock set ahead"; w.rng.IntN(2) == 0 {
			kind, d = "database's clock set back", -d
		}
		w.line.say("store", "its clock is set by %v", d)
		w.locked(func() { w.judge.clockSetAt = time.Now() })
		w.journal.clock.jump(d)
	case n < 94 && w.operator:
		kind = "record meddled with by hand"
		w.meddle()
	case n < 97 && w.wakes:
		kind = "hints lost"
		w.locked(func() { w.journal.hintsLost = true })
		w.later(w.upTo(2*w.ttl), func() { w.locked(func() { w.journal.hintsLost = false }) })
	case n < 99 && w.wakes:
		kind = "hints in vain"
		d := w.upTo(w.ttl)
		w.locked(func() { w.judge.vainUntil = time.Now().Add(d) })
		w.journal.flood(d)
	default:
		return
	}
	w.locked(func() { count(&w.judge.faults, kind) })
}

// turn gives a replica a weather for a while.
func (r *replica) turn(to weather, d time.Duration) {
	change := 0
	r.change(func() {
		r.link.weather = to
		r.link.change++
		change = r.link.change
	})
	r.w.line.say(r.name, "link: %s for %v", to, d)
	r.w.later(d, func() {
		r.change(func() {
			if r.link.change == change {
				r.link.weather = clear
				r.w.line.say(r.name, "link: clear")
			}
		})
	})
}

// ail lets a replica's checks fail for a while.
func (r *replica) ail(how string, d time.Duration) {
	change := 0
	r.change(func() {
		r.unfit = unfitness{true, how, r.unfit.change + 1}
		change = r.unfit.change
	})
	r.w.line.say(r.name, "is unfit for %v: its check %s", d, how)
	r.w.later(d, func() {
		r.change(func() {
			if r.unfit.change == change {
				r.unfit.is = false
				r.w.line.say(r.name, "is fit again")
			}
		})
	})
}
