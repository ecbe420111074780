package sim

import (
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// In some worlds replicas outrank others, and some each other, by what changes every 20 TTLs. The judge wants a
// request of a standby for itself only after the holder's term has lasted for Settle, and each further one of a
// process after twice the time, unless it has held the lease for longer than that. Each vacancy is measured, from
// when a job is told to return until the next begins, and those that a request of a standby has caused apart.

// outranks reports whether a replica outranks a holder.
func (r *replica) outranks(h tenure.Holding) bool {
	phase := int(time.Since(r.w.began) / (20 * r.w.ttl))
	return (phase+len(r.name)+int(r.name[len(r.name)-1])*7+len(h.Holder)+int(h.Holder[len(h.Holder)-1])*5)%3 == 0
}

// wishing is what the judge knows about the requests of one process for itself. It is guarded by the world's lock.
type wishing struct {
	asked    time.Time     // the last time
	interval time.Duration // the least until the next; 0 if that is not known
	held     time.Duration // its longest term since then, and a bit more
}

// wishes is called when a request of a standby for itself has landed.
func (j *judge) wishes(l *life) {
	t, now, most := j.standing, time.Now(), max(time.Hour, l.ttl())
	again := t.wished == l
	t.wished = l
	testkit.Count(&j.judged, "requests of a standby")
	switch lasted := now.Sub(t.at); {
	case !j.w.outranks:
		j.violated("outranks", "%s asks for the lease, and outranks nobody", l.r.name)
	case lasted < l.ttl()*96/100 && !t.restored:
		j.violated("outranks", "%s asks for the lease of %s, who has held it for %v", l.r.name, t.who, lasted)
	case again: // another request came between
		return
	}
	l.forgetsInterval()
	if l.held > l.interval*96/100 {
		l.interval = 0
	}
	if took := now.Sub(l.asked); l.interval > 0 && took < l.interval*96/100 {
		j.violated("outranks", "%s asks for the lease again after %v, not after %v", l.r.name, took, l.interval)
	}
	l.interval = min(2*max(l.interval, l.ttl()), most)
	if now.Sub(l.goodSince()) < l.ttl() { // it may not know that its request has landed
		l.interval = 0
	}
	l.asked, l.held = now, 0
}

// forgetsInterval is called when another term of the process has begun, or before it matters: how long a term lasted
// whose job never began, only the process knows.
func (l *life) forgetsInterval() {
	if t := l.newest; t != nil && t.valid == nil && !t.at.Before(l.asked) {
		l.held = l.interval
	}
}

// vacated is called when a job was told to return or its process has crashed.
func (j *judge) vacated(t *term) {
	for _, other := range j.running {
		if other != t && other.told.IsZero() {
			return
		}
	}
	if j.vacant.IsZero() {
		j.vacant, j.vacator = time.Now(), t
	}
}

// occupied is called when a job begins.
func (j *judge) occupied() {
	t := j.vacator
	if j.vacant.IsZero() {
		return
	}
	took := time.Since(j.vacant)
	j.vacancy += took
	if t.wished != nil && t.asked {
		j.moves++
		j.moving += took
	}
	j.vacant = time.Time{}
}

// A replica with a preference costs a handover for each move, and nothing else. The hours are those of -sim.hours,
// as for TestSimulation; without it, this test lasts a quarter as long, which is too short to compare.
func TestAPreferenceCostsNoMoreThanItsMoves(t *testing.T) {
	testkit.Slow(t)
	var with, without tally
	began := time.Now()
	for seed := *flags.First; with.leaseHours() < *flags.Hours || *flags.Hours == 0 && time.Since(began) < *flags.For/4; seed++ {
		for _, outranks := range []bool{true, false} {
			sum := &without
			if outranks {
				sum = &with
			}
			testkit.Simulate(t, "", func(t *testing.T) {
				rng := testkit.RNG(seed, 0)
				traits := newTraits(seed, rng)
				traits.outranks, traits.drains = outranks, false
				runIn(t, newWorld(t, traits, rng), sum)
			})
		}
		if t.Failed() {
			return
		}
	}
	perHour := func(d time.Duration, sum *tally) float64 { return d.Seconds() / sum.leaseHours() }
	t.Logf("%.0f lease-hours each: without a holder for %.1f s in an hour without a preference, and for %.1f s with one, of which %.1f s in %d moves of %.1f s each",
		with.leaseHours(), perHour(without.vacancy, &without), perHour(with.vacancy, &with), perHour(with.moving, &with), with.moves,
		with.moving.Seconds()/float64(max(1, with.moves)))
	t.Logf("with a preference:\n%v", &with)
	if rest, before := perHour(with.vacancy-with.moving, &with), perHour(without.vacancy, &without); rest > before && with.leaseHours() > 5000 {
		t.Errorf("apart from moves, nobody held the lease for %.1f s in an hour, and for %.1f s without a preference", rest, before)
	}
}
