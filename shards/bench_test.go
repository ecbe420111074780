package shards_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/verify/kit"
)

// BenchmarkShards has ten processes share a thousand shards on Postgres. One more joins, then
// one leaves, one is killed, and at last all that are left rest. Times are those until the
// shards are balanced again: of a join from when the new member counts, of a kill from the TTL
// after the last renewal that the killed process may have sent.
func BenchmarkShards(b *testing.B) {
	const settle, ttl = 100 * time.Millisecond, 6 * time.Second
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	for range b.N {
		c := newCluster(b, 1000, settle, ttl)
		began := time.Now()
		var members []*member
		for i := range 10 {
			members = append(members, c.start(fmt.Sprint("m", i)))
		}
		took, moves, _ := c.await(began, 10)
		b.ReportMetric(ms(took-settle), "cold-ms")
		b.ReportMetric(float64(moves), "cold-moves")

		var gaps []time.Duration
		report := func(what string, members int, since time.Time) {
			took, moves, of := c.await(since, members)
			b.ReportMetric(ms(took), what+"-ms")
			b.ReportMetric(float64(moves), what+"-moves")
			if len(of) > 0 {
				gaps = append(gaps, of...)
				b.Logf("%s: %d moves in %v, gap p50 %v p99 %v", what, moves, took, kit.Percentile(of, 50), kit.Percentile(of, 99))
			}
		}
		time.Sleep(time.Second)
		began = time.Now()
		members = append(members, c.start("joined"))
		report("join", 11, began.Add(settle))

		time.Sleep(time.Second)
		began = time.Now()
		members[4].stop()
		report("leave", 10, began)
		b.ReportMetric(ms(kit.Percentile(gaps, 50)), "gap-p50-ms")
		b.ReportMetric(ms(kit.Percentile(gaps, 99)), "gap-p99-ms")

		time.Sleep(time.Second)
		began = time.Now()
		members[0].kill()
		report("kill", 9, began.Add(ttl))

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
