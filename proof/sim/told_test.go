package sim

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A standby with hints looks once in its own TTL. If the record of one holder is deleted by
// hand, and the next holder has a shorter TTL and vanishes, a standby that was told of neither
// can't know that the lease has expired before it looks.
func TestTheJudgeExpectsNothingOfAStandbyThatWasNotToldBeforeItLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, traits{seed: 1, ttl: time.Hour, replicaCount: 3, wakes: true}, testkit.RNG(1, 0))
		holder, next := w.replicas[0], w.replicas[2]
		holder.ttl, next.ttl = 12*time.Hour, 30*time.Minute
		w.run(func() {
			for _, r := range w.replicas {
				r.start()
				time.Sleep(time.Minute)
			}
			time.Sleep(58*time.Minute + 30*time.Second) // the standby has just looked, and the next holder is about to
			holder.crash()
			_ = w.journal.handle("operator", nil, false).DeleteIf(t.Context(), leaseKey, tenure.IfVersion(w.journal.mustGet().Version))
			time.Sleep(2 * time.Minute)
			next.crash()
			time.Sleep(90 * time.Minute) // the standby looks an hour after its last look
		})
		if n := w.judge.tally.terms; n != 3 {
			t.Errorf("%d terms began, not one of each replica", n)
		}
	})
}
