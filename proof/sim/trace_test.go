package sim

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// trace is a recorded run: what the processes send, what takes effect in the database, and what they hear, in the
// order in which it happens. Its methods do nothing for a nil trace. All but sends must be called under the world's lock.
type trace struct {
	w     *world
	steps []step
}

type step struct {
	what  what
	at    time.Time // by the bubble's clock
	store time.Time // by the database's
	life  *life     // nil for runs
	sent  *sent     // that is sent, runs, is heard or given up
	term  string    // that is trusted, of a job, or of a fenced write
	token int64     // of a job that begins
	done  bool      // by a fenced write
}

type what string

const (
	sends   what = "sends"
	runs    what = "runs"
	hears   what = "hears"
	givesUp what = "gives up"
	trusts  what = "trusts its term"
	begins  what = "begins its job"
	returns what = "returns from its job"
	writes  what = "makes a fenced write"
	crashed what = "crashes"
)

// sent is a call about the lease's record, and the database's answer once it has run.
type sent struct {
	storetest.Call
	expects int64 // the version; 0: that there is no record
	obj     tenure.Object
	err     error
}

// sentKey is the key of a *sent in the context of a call.
type sentKey struct{}

func (t *trace) add(s step) {
	if t != nil {
		s.at, s.store = time.Now(), t.w.journal.clock.Now()
		t.steps = append(t.steps, s)
	}
}

// sends notes a call on which a process has decided. The func that it returns notes what the process is told.
func (t *trace) sends(ctx context.Context, l *life, call storetest.Call) (context.Context, func(error)) {
	if t == nil || call.Key != leaseKey || call.Op == "wake" {
		return ctx, func(error) {}
	}
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	if l.dead() {
		return ctx, func(error) {}
	}
	c := &sent{Call: call, expects: testkit.VersionOf(call.Condition)}
	t.add(step{what: sends, life: l, sent: c})
	return context.WithValue(ctx, sentKey{}, c), func(err error) {
		t.w.mu.Lock()
		defer t.w.mu.Unlock()
		is := givesUp
		if err == nil || objects.Refusal(err) {
			is = hears
		}
		if !l.dead() {
			t.add(step{what: is, life: l, sent: c})
		}
	}
}

// runs notes that a call has an effect, or none, and which holders trust their terms at that moment.
func (t *trace) runs(ctx context.Context, obj tenure.Object, err error) {
	c, ok := ctx.Value(sentKey{}).(*sent)
	if t == nil || !ok {
		return
	}
	c.obj, c.err = obj, err
	t.add(step{what: runs, sent: c})
	for _, running := range t.w.judge.running {
		if running.alive() && running.valid() {
			t.add(step{what: trusts, life: running.life, term: running.id})
		}
	}
}

// tell returns the steps before one that is refused.
func (t *trace) tell(until int) string {
	var b strings.Builder
	for _, s := range t.steps[max(0, until-30) : until+1] {
		who := "the database"
		if s.life != nil {
			who = s.life.r.name
		}
		fmt.Fprintf(&b, "%12v %s %s", s.at.Sub(t.w.began), who, s.what)
		if s.sent != nil {
			fmt.Fprintf(&b, " %s %d %s", s.sent.Op, s.sent.expects, s.sent.Object.Payload)
		}
		if s.what == runs {
			fmt.Fprintf(&b, ": %d, %v", s.sent.obj.Version, s.sent.err)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
