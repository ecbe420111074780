package shards_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/storetest"
)

var (
	simEvents = flag.Int("shards.events", 300, "how many joins, leaves, crashes and faults of a link the simulation has")
	simSeed   = flag.Uint64("shards.seed", 0, "of these; 0: any")
)

// Whatever becomes of up to six processes and of what they send, no shard has two funcs that
// run, no token repeats, and every shard runs a TTL and a second after the last fault.
func TestShardsUnderFaults(t *testing.T) {
	seed := *simSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	defer testkit.NoteFailure(t, fmt.Sprintf("go test ./shards -run TestShardsUnderFaults -shards.events=%d -shards.seed=%d -count=50", *simEvents, seed))
	var total, funcs int
	var slowest time.Duration
	for part := uint64(0); total < *simEvents && !t.Failed(); part++ { // crashed processes cost time until their bubble ends
		inBubble(t, 16, func(w *world) {
			s := &sim{world: w, random: rand.New(rand.NewPCG(seed, part))}
			for total < *simEvents && s.events < 200 && !w.Failed() {
				for range 5 + s.random.IntN(20) {
					s.event()
					total++
				}
				slowest = max(slowest, s.calm())
			}
			funcs += w.funcs()
		})
	}
	t.Logf("seed %d: %d events, %d funcs, all shards run at the latest %v after the last fault", seed, total, funcs, slowest)
}

type sim struct {
	*world
	random    *rand.Rand
	processes []*process // the oldest first
	leaving   []*process
	events    int
	checks    bool         // some process has a Check that fails now and then
	late      atomic.Int32 // calls that have not landed yet
}

func (s *sim) in(d time.Duration) time.Duration { return time.Duration(s.random.Int64N(int64(d))) }

// event lets something happen, and some time pass.
func (s *sim) event() {
	s.events++
	pick := func() *process { return s.processes[s.random.IntN(len(s.processes))] }
	remove := func() *process {
		p := pick()
		s.processes = slices.DeleteFunc(s.processes, func(q *process) bool { return q == p })
		return p
	}
	switch n := s.random.IntN(10); {
	case len(s.processes) < 2 || n < 3 && len(s.processes) < 6:
		p := s.start(fmt.Sprint("p", s.events), func(p *process, cfg *shards.Config) {
			p.link.Hinted = s.random.IntN(2) == 0
			if s.random.IntN(8) == 0 {
				s.checks = true
				cfg.Check = func(context.Context) error {
					if rand.IntN(20) == 0 {
						return testkit.ErrReset
					}
					return nil
				}
			}
		})
		p.stops.Store(int64(s.in(2 * time.Second)))
		s.processes = append(s.processes, p)
	case n < 4:
		p := remove()
		p.cancel()
		s.leaving = append(s.leaving, p)
	case n < 5:
		remove().crash()
	default:
		pick().fault(s.anyFault())
	}
	if s.random.IntN(3) > 0 { // else more happens at the same moment
		time.Sleep(s.in(15 * time.Second))
	}
}

// anyFault returns what becomes of calls.
func (s *sim) anyFault() storetest.Hook {
	d := s.in(20 * time.Second)
	late := func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		s.late.Add(1)
		go func() {
			defer s.late.Add(-1)
			time.Sleep(d)
			_ = do(context.WithoutCancel(ctx))
		}()
		return testkit.ErrReset
	}
	hooks := []storetest.Hook{
		nil, nil, nil, testkit.Hang, testkit.Hang, testkit.Refuse, testkit.LoseAnswer, late, testkit.Slowly(d / 10), testkit.AnswerAfter(d / 10),
		testkit.Only("claims.take", testkit.LoseAnswer), testkit.Only("claims.take", late), testkit.Only("claims.free", testkit.LoseAnswer), testkit.Only("claims.free", late),
		testkit.Only("put", testkit.Hang), testkit.Only("claims.list", testkit.Hang), testkit.Only("claims.list", testkit.AnswerAfter(d/10)), testkit.Only("wake", testkit.Refuse),
	}
	return hooks[s.random.IntN(len(hooks))]
}

// calm ends the faults, and returns how long it took until every shard has run at the same
// time, from when what was late has landed.
func (s *sim) calm() time.Duration {
	for _, p := range append(s.processes, s.leaving...) {
		p.heal()
	}
	for s.late.Load() > 0 {
		time.Sleep(10 * time.Millisecond)
	}
	stops := time.Duration(0)
	for _, p := range append(s.processes, s.leaving...) {
		stops = max(stops, time.Duration(p.stops.Load()))
	}
	began := time.Now()
	for !s.allRun() {
		if since := time.Since(began); since > ttl+time.Second+stops {
			for _, p := range s.processes {
				status := p.shards.Status()
				s.Logf("%s (%s) runs %v, %d of %d", p.name, status.Session, p.runs(), len(status.Shards), status.Share)
			}
			rows, err := s.store.DB().Query(`SELECT id, coalesce(session, '-'), token, coalesce((SELECT payload FROM objects o WHERE o.id = session), 'gone') FROM objects_claims WHERE kind = 'job'`)
			require.NoError(s, err)
			for rows.Next() {
				var id, session, payload string
				var token int64
				require.NoError(s, rows.Scan(&id, &session, &token, &payload))
				s.Logf("%s is owned by %s with token %d: %s", id, session, token, payload)
			}
			require.FailNow(s, "shards do not run", "after %v", since)
		}
		time.Sleep(10 * time.Millisecond)
	}
	took := time.Since(began)
	if s.random.IntN(4) == 0 && !s.checks { // and evenly, if nothing happens for long enough
		time.Sleep(2 * ttl)
		for _, p := range s.processes {
			status := p.shards.Status()
			if n := len(p.runs()); n != status.Share || n < s.count/len(s.processes) || n > s.count/len(s.processes)+1 {
				s.Errorf("%s runs %d shards of %d, and there are %d processes: %+v", p.name, n, status.Share, len(s.processes), status)
			}
		}
	}
	return took
}
