package sim

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// gateway is a replica of another program. Its record has no term and no TTL. It
// follows the rules by what it has observed itself, and its job returns immediately.
type gateway struct {
	w     *world
	store *handle
	rng   *rand.Rand

	seen  int64 // the version that it last saw
	since time.Time
}

func newGateway(w *world) *gateway {
	return &gateway{w: w, store: w.journal.handle("gateway", nil, true), rng: testkit.RNG(w.seed, 100)}
}

func (g *gateway) run() {
	for g.w.sleep(g.w.ttl/7 + rand.N(g.w.ttl/7)) {
		if g.rng.IntN(40) != 0 { // it is usually busy with something else
			g.look()
			continue
		}
		if obj, ok := g.acquire(); ok {
			g.hold(obj)
		}
	}
}

// look returns the current version, and whether the lease may be taken over.
func (g *gateway) look() (version int64, expired bool) {
	obj, err := g.store.Get(g.w.t.Context(), leaseKey)
	if err != nil {
		g.seen = 0
		return 0, true
	}
	if obj.Version != g.seen {
		g.seen, g.since = obj.Version, time.Now()
	}
	return obj.Version, time.Since(g.since) >= g.w.ttl*103/100
}

func (g *gateway) acquire() (obj tenure.Object, ok bool) {
	version, expired := g.look()
	if !expired {
		return obj, false
	}
	cond := tenure.IfAbsent()
	if version != 0 {
		cond = tenure.IfVersion(version)
	}
	return g.write(fmt.Appendf(nil, `{"holder":"gateway","acquired_at_ms":%d}`, time.Now().UnixMilli()), cond)
}

func (g *gateway) write(payload []byte, cond tenure.WriteCondition) (obj tenure.Object, ok bool) {
	obj, err := g.store.PutIf(g.w.t.Context(), tenure.Object{Key: leaseKey, Name: "reconciler-lease", Payload: payload}, cond)
	return obj, err == nil
}

// hold works and renews for a while, and then releases the lease or vanishes.
func (g *gateway) hold(obj tenure.Object) {
	var t *term
	valid := true
	g.w.locked(func() {
		t = g.w.judge.terms[foreignID(g.store.who, obj.Version)]
		g.w.judge.begins(t, func() bool { return valid })
	})
	for range 1 + g.rng.IntN(12) {
		if !g.w.sleep(g.w.ttl / 3) {
			break
		}
		renewed, ok := g.write(obj.Payload, tenure.IfVersion(obj.Version))
		if !ok {
			break
		}
		obj = renewed
	}
	g.w.locked(func() { valid = false; g.w.judge.ends(t) })
	if g.rng.IntN(2) == 0 {
		_ = g.store.DeleteIf(g.w.t.Context(), leaseKey, tenure.IfVersion(obj.Version))
	}
}

// mustGet returns the current record, or the zero value if there is none.
func (j *journal) mustGet() tenure.Object {
	obj, _ := j.mem.Load().Get(j.w.t.Context(), leaseKey)
	return obj
}

// meddle changes the record as an operator would by hand.
func (w *world) meddle() {
	by := w.journal.handle("operator", nil, false)
	obj := w.journal.mustGet()
	if obj.Version != 0 && w.rng.IntN(2) == 0 {
		_ = by.DeleteIf(w.t.Context(), leaseKey, tenure.IfVersion(obj.Version))
		return
	}
	payloads := []string{
		fmt.Sprintf(`{"holder":"operator","acquired_at_ms":%d}`, time.Now().UnixMilli()),
		`{"holder":"operator","ttl_ms":-1}`, `not JSON at all`, ``, `{"term":""}`,
	}
	_, _ = by.PutIf(w.t.Context(), tenure.Object{Key: leaseKey, Name: "reconciler-lease", Payload: []byte(payloads[w.rng.IntN(len(payloads))])}, tenure.Unconditional())
}
