package shards_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
)

// BenchmarkShards lets ten processes share a thousand shards on Postgres. Ten times, one more joins and another
// leaves. Then one is killed, and finally the others rest. It reports how long it takes until the shards are
// balanced again: for a join, counted from Settle after its start, and for a kill, from a TTL after the killed
// process's last renewal. The best round is the one at the least busy moment.
func BenchmarkShards(b *testing.B) {
	const settle, ttl = 100 * time.Millisecond, 6 * time.Second
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	for range b.N {
		c := newCluster(b, 1000, settle, ttl)
		var members []*member
		for i := range 10 {
			members = append(members, c.prepare(fmt.Sprint("m", i)))
		}
		began := time.Now()
		for _, m := range members {
			m.run()
		}
		took, moves, _ := c.await(began, 10)
		b.ReportMetric(ms(took-settle), "cold-ms")
		b.ReportMetric(float64(moves), "cold-moves")

		type rounds struct {
			took, gaps []time.Duration
			moves      int
			best       []time.Duration // the gaps of the best round
		}
		report := func(what string, r *rounds) {
			b.ReportMetric(ms(testkit.Percentile(r.took, 50)), what+"-p50-ms")
			b.ReportMetric(ms(testkit.Percentile(r.took, 0)), what+"-best-ms")
			b.ReportMetric(float64(r.moves)/float64(len(r.took)), what+"-moves")
			b.ReportMetric(ms(testkit.Percentile(r.gaps, 50)), what+"-gap-p50-ms")
			b.ReportMetric(ms(testkit.Percentile(r.gaps, 99)), what+"-gap-p99-ms")
			b.ReportMetric(ms(testkit.Percentile(r.best, 50)), what+"-best-gap-p50-ms")
			b.ReportMetric(ms(testkit.Percentile(r.best, 99)), what+"-best-gap-p99-ms")
		}
		add := func(r *rounds, since time.Time, members int) {
			took, moves, gaps := c.await(since, members)
			r.took, r.gaps, r.moves = append(r.took, took), append(r.gaps, gaps...), r.moves+moves
			if r.best == nil || testkit.Percentile(gaps, 99) < testkit.Percentile(r.best, 99) {
				r.best = gaps
			}
		}
		var joins, leaves rounds
		for round := range 10 {
			time.Sleep(time.Second)
			c.statements()
			began = time.Now()
			members = append(members, c.start(fmt.Sprint("joined", round)))
			add(&joins, began.Add(settle), 11)
			b.Logf("join: %s", c.statements())

			time.Sleep(time.Second)
			c.statements()
			began = time.Now()
			members[0].stop()
			members = members[1:]
			add(&leaves, began, 10)
			b.Logf("leave: %s", c.statements())
		}
		report("join", &joins)
		report("leave", &leaves)

		time.Sleep(time.Second)
		killed := members[4]
		killed.kill()
		took, moves, _ = c.await(killed.wrote.Load().Add(ttl), 9)
		b.ReportMetric(ms(took), "kill-ms")
		b.ReportMetric(float64(moves), "kill-moves")

		time.Sleep(time.Second)
		c.calls.Take()
		time.Sleep(5 * ttl)
		total := 0
		for _, n := range c.calls.Take() {
			total += n
		}
		b.ReportMetric(float64(total)/9/5, "calls/process/TTL")
		for _, m := range members {
			m.stop()
		}
	}
}
