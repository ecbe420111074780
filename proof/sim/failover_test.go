package sim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// A history is a database that fails over, again and again, to standbys that lack what was last
// acknowledged. Its replicas come to the next primary one by one, with knowledge of the last one and
// with writes that are still on their way. The old primary goes on until a replica has come to the new
// one. The judge wants:
//
//   - no two terms valid at the same time, and no two jobs;
//   - a job's token above those of all earlier jobs;
//   - no fenced write that lands once a job with a greater token has begun: a failover may lose the
//     steal, and bring back the record of a holder that was cut off beyond its TTL and then writes;
//   - no loss of a term that could be trusted still;
//   - somebody who holds, some time after the last fault.
type history struct {
	t        *testing.T
	dice     *testkit.Dice
	ttl      time.Duration
	replicas []*migrant
	line     *testkit.Timeline
	crossing sync.WaitGroup // writes that are on their way

	mu      sync.Mutex
	servers []*storetest.Mem // the last one is the primary
	copies  []copyOf         // of the primary, the oldest first
	marked  bool             // a replica has come to the primary, so the one before it accepts nothing
	newest  int64            // token of a job
	fenced  map[string]int   // fenced writes, by what became of them
	holding *tenure.Term     // of the last job
	broken  []string
}

type copyOf struct {
	at  time.Time
	mem *storetest.Mem
}

// migrant is a replica, and the store as it sees it.
type migrant struct {
	*history
	name string

	at      int             // the server that it reaches
	seen    *tenure.Lineage // nil: it has to look
	seenAt  time.Time
	cutTill time.Time // until then it reaches no server
	deafTo  time.Time // until then it gets no answers
	lease   *tenure.Lease
	stop    func()
	runs    sync.WaitGroup
}

func (h *history) violated(format string, args ...any) {
	h.broken = append(h.broken, fmt.Sprintf(format, args...))
	h.line.Say("JUDGE", format, args...)
}

// carry sends a call to whatever server the replica reaches when it arrives.
func carry[T any](ctx context.Context, m *migrant, do func(*storetest.Mem) (T, error)) (got T, err error) {
	type answer struct {
		got T
		err error
	}
	answers := make(chan answer, 1)
	request, back := m.dice.UpTo(m.ttl/200), m.dice.UpTo(m.ttl/200)
	if m.dice.One(20) {
		request = m.dice.UpTo(m.ttl)
	}
	lost := m.dice.One(30)
	m.crossing.Go(func() {
		time.Sleep(request)
		m.mu.Lock()
		var a answer
		if time.Now().Before(m.cutTill) || m.at < len(m.servers)-2 || m.at == len(m.servers)-2 && m.marked {
			a.err = errors.New("connection refused")
		} else {
			a.got, a.err = do(m.servers[m.at])
		}
		m.mu.Unlock()
		m.mu.Lock()
		lost = lost || time.Now().Before(m.deafTo)
		m.mu.Unlock()
		if lost {
			a.err = errors.New("connection reset")
		}
		time.Sleep(back)
		answers <- a
	})
	select {
	case a := <-answers:
		return a.got, a.err
	case <-ctx.Done():
		return got, ctx.Err()
	}
}

// lookAt reads a server's lineage. The caller holds mu.
func (m *migrant) lookAt(server *storetest.Mem) tenure.Lineage {
	if server == m.servers[len(m.servers)-1] {
		m.marked = true
	}
	on, err := server.Lineage(context.Background())
	if err != nil {
		panic(err)
	}
	return on
}

// Lineage behaves as a store does that looks only when it has to.
func (m *migrant) Lineage(ctx context.Context) (tenure.Lineage, error) {
	m.mu.Lock()
	seen, at := m.seen, m.seenAt
	m.mu.Unlock()
	if seen != nil {
		on := *seen
		on.Age += time.Since(at)
		return on, nil
	}
	on, err := carry(ctx, m, func(server *storetest.Mem) (tenure.Lineage, error) { return m.lookAt(server), nil })
	if err == nil {
		m.mu.Lock()
		m.seen, m.seenAt = &on, time.Now()
		m.mu.Unlock()
	}
	return on, err
}

func (m *migrant) Traits() tenure.Traits { return tenure.Traits{} }

func (m *migrant) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	type answer struct {
		tenure.Object
		elsewhere bool
	}
	for {
		got, err := carry(ctx, m, func(server *storetest.Mem) (a answer, err error) {
			if is := m.lookAt(server); m.seen != nil && m.seen.Server != is.Server {
				m.seen, a.elsewhere = nil, true
			}
			a.Object, err = server.Get(context.Background(), key)
			return a, err
		})
		if !got.elsewhere {
			return got.Object, err
		}
		if _, err := m.Lineage(ctx); err != nil {
			return got.Object, err
		}
	}
}

func (m *migrant) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	return carry(ctx, m, func(server *storetest.Mem) (tenure.Object, error) {
		stored, err := server.PutIf(context.Background(), obj, cond)
		if errors.Is(err, tenure.ErrMoved) {
			m.seen = nil
		}
		m.line.Say(m.name, "put on %d: version %d, %v", m.at, stored.Version, err)
		return stored, err
	})
}

func (m *migrant) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	_, err := carry(ctx, m, func(server *storetest.Mem) (struct{}, error) {
		m.line.Say(m.name, "delete on %d of version %d", m.at, testkit.VersionOf(cond))
		return struct{}{}, server.DeleteIf(context.WithoutCancel(ctx), key, cond)
	})
	return err
}

// fencedWrite is a statement as a process has made it, perhaps long before it reaches a server.
type fencedWrite struct {
	token  int64
	record []byte
	server string // where the term had been renewed when the statement was made
}

func (m *migrant) fencedWrite(term *tenure.Term) fencedWrite {
	fence, err := term.Fence()
	if err != nil { // the replica knows that its term is lost
		return fencedWrite{}
	}
	return fencedWrite{term.Token(), fence.Record, fence.Server()}
}

// send sends a fenced write to the server that the replica reaches, which compares what the databases' statements compare.
func (m *migrant) send(w fencedWrite) {
	ctx, cancel := context.WithTimeout(context.Background(), m.ttl)
	defer cancel()
	_, _ = carry(ctx, m, func(server *storetest.Mem) (struct{}, error) {
		stands, err := server.Get(context.Background(), leaseKey)
		standing := err == nil && bytes.Equal(stands.Payload, w.record)
		here := m.lookAt(server).Server == w.server
		late := m.newest > w.token
		switch {
		case standing && here && late:
			m.violated("a fenced write of %s's term %d lands on %d after a job has begun under %d", m.name, w.token, m.at, m.newest)
		case standing && here:
			m.fenced["landed"]++
		case standing && late:
			m.fenced["would have been late but for the server"]++
		case late:
			m.fenced["late, its record was gone"]++
		default:
			m.fenced["refused in time"]++
		}
		return struct{}{}, nil
	})
}

// write makes fenced writes for a while, whether the term is over or not, as a process does that was paused: some by a
// statement that it made before.
func (m *migrant) write(term *tenure.Term, before fencedWrite, d time.Duration) {
	for d > 0 {
		pause := m.dice.UpTo(m.ttl / 4)
		d -= pause
		time.Sleep(pause)
		m.send(before)
		if now := m.fencedWrite(term); now.record != nil {
			m.send(now)
		}
	}
}

// job is a replica's.
func (m *migrant) job(ctx context.Context) error {
	term := tenure.TermFromContext(ctx)
	m.mu.Lock()
	if m.holding != nil && m.holding.Valid() {
		m.violated("%s's job begins under %d while %s's term %d is valid", m.name, term.Token(), m.holding.Holder(), m.holding.Token())
	}
	if term.Token() <= m.newest {
		m.violated("%s's job begins under token %d after %d", m.name, term.Token(), m.newest)
	}
	m.newest, m.holding = term.Token(), term
	m.line.Say(m.name, "job begins under %d", term.Token())
	m.mu.Unlock()
	statement := m.fencedWrite(term)
	m.crossing.Go(func() { m.write(term, statement, m.ttl) })
	<-ctx.Done()
	m.crossing.Go(func() { m.write(term, statement, 4*m.ttl) })
	m.mu.Lock()
	defer m.mu.Unlock()
	m.line.Say(m.name, "job ends: %v", context.Cause(ctx))
	if left := time.Until(term.Deadline()); errors.Is(context.Cause(ctx), tenure.ErrLost) && left > 0 {
		m.violated("%s's term %d ends, which could be trusted for %v more: %v", m.name, term.Token(), left, context.Cause(ctx))
	}
	return nil
}

func (m *migrant) start() {
	lease := testkit.NewLease(m.t, m, tenure.LeaseConfig{Key: leaseKey, Holder: m.name, TTL: m.ttl})
	m.lease = lease
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: m.job, Logger: testkit.Quiet})
	if err != nil {
		m.t.Error(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	m.runs.Go(func() { _ = c.Run(ctx) })
	m.stop = func() { cancel(); m.runs.Wait() }
}

// failOver promotes a copy that is up to three TTLs old. The replicas come to it one by one.
func (h *history) failOver() {
	h.mu.Lock()
	i := h.dice.N(len(h.copies))
	h.line.Say("server", "%d is promoted, as of %v ago", len(h.servers), time.Since(h.copies[i].at))
	h.servers, h.copies, h.marked = append(h.servers, h.copies[i].mem), nil, false
	h.copies = []copyOf{{time.Now(), h.servers[len(h.servers)-1].Fork()}}
	next := len(h.servers) - 1
	h.mu.Unlock()
	for _, m := range h.replicas {
		late := h.dice.UpTo(h.ttl * time.Duration(h.dice.N(3)) / 4)
		h.crossing.Go(func() {
			time.Sleep(late)
			h.mu.Lock()
			defer h.mu.Unlock()
			m.at = max(m.at, next)
		})
	}
}

// loseASteal cuts the holder off until another has stolen the lease, and fails over to what there was before: the record of
// the former holder, which then wakes.
func (h *history) loseASteal() {
	h.mu.Lock()
	before := copyOf{time.Now(), h.servers[len(h.servers)-1].Fork()}
	for _, m := range h.replicas {
		if h.holding.Valid() && m.name == h.holding.Holder() {
			m.cutTill = time.Now().Add(3 * h.ttl / 2)
			h.line.Say(m.name, "is cut off until its lease is stolen, which a failover then loses")
		}
	}
	h.mu.Unlock()
	time.Sleep(3*h.ttl/2 + h.dice.UpTo(h.ttl/4))
	h.mu.Lock()
	h.copies = []copyOf{before}
	h.mu.Unlock()
	h.failOver()
}

// runHistory is one history, of a number of faults. It returns how many fenced writes there were of each kind.
func runHistory(t *testing.T, seed uint64, faults int) (fenced map[string]int) {
	dice := testkit.NewDice(seed, 300)
	h := &history{t: t, dice: dice, ttl: 30 * time.Second, line: testkit.NewTimeline(), fenced: make(map[string]int)}
	first := storetest.NewMem()
	first.Lineages = true
	h.servers, h.marked = []*storetest.Mem{first}, true
	h.copies = []copyOf{{time.Now(), first.Fork()}}
	for i := range 2 + dice.N(3) {
		m := &migrant{history: h, name: fmt.Sprint("replica-", i)}
		h.replicas = append(h.replicas, m)
		m.start()
	}
	for range faults {
		for range 1 + dice.N(40) {
			time.Sleep(dice.UpTo(h.ttl / 4))
			h.mu.Lock()
			h.copies = append(h.copies, copyOf{time.Now(), h.servers[len(h.servers)-1].Fork()})
			if len(h.copies) > 12 {
				h.copies = h.copies[1:]
			}
			h.mu.Unlock()
		}
		m := h.replicas[dice.N(len(h.replicas))]
		switch dice.N(9) {
		case 0:
			h.mu.Lock()
			h.servers[len(h.servers)-1].Restart()
			h.line.Say("server", "restarts")
			h.mu.Unlock()
		case 1:
			h.mu.Lock()
			m.cutTill = time.Now().Add(dice.UpTo(2 * h.ttl))
			h.line.Say(m.name, "is cut off for %v", time.Until(m.cutTill))
			h.mu.Unlock()
		case 2:
			h.line.Say(m.name, "is restarted")
			m.stop()
			m.start()
		case 3: // its release lands, and it does not know
			h.line.Say(m.name, "is restarted, gets no answers, and then the database fails over")
			h.mu.Lock()
			m.deafTo = time.Now().Add(h.ttl / 10)
			h.mu.Unlock()
			stopped := make(chan struct{})
			go func() { defer close(stopped); m.stop() }()
			time.Sleep(dice.UpTo(h.ttl / 10))
			h.failOver()
			<-stopped
			m.start()
		case 4:
			ctx, cancel := context.WithTimeout(t.Context(), h.ttl/3)
			h.line.Say("operator", "asks for a release: %v", m.lease.RequestHandover(ctx, h.replicas[0].name))
			cancel()
		case 5:
			h.loseASteal()
		default:
			h.failOver()
		}
	}
	time.Sleep(3 * h.ttl)
	var held bool
	for range 20 { // answers are still lost and late, so that a term may just have ended
		time.Sleep(h.ttl / 20)
		h.mu.Lock()
		held = held || h.holding.Valid()
		h.mu.Unlock()
	}
	if !held {
		h.violated("nobody holds from %v to %v after the last fault", 3*h.ttl, 4*h.ttl)
	}
	for _, m := range h.replicas {
		m.stop()
	}
	h.crossing.Wait()
	for _, b := range h.broken {
		t.Errorf("seed %d: %s", seed, b)
	}
	if len(h.broken) > 0 {
		t.Log(h.line)
	}
	return h.fenced
}

// The hours are those of -sim.hours, as for TestSimulation; without it, this test lasts half as long.
func TestHistoriesThatFailOver(t *testing.T) {
	if *flags.Seed != 0 {
		synctest.Test(t, func(t *testing.T) { runHistory(t, *flags.Seed, 40) })
		return
	}
	began, n, hours, fenced := time.Now(), 0, 0.0, make(map[string]int)
	enough := func() bool {
		if *flags.Hours > 0 {
			return hours >= *flags.Hours
		}
		return time.Since(began) > *flags.For/2
	}
	for seed := *flags.First; !enough() && !t.Failed(); seed++ {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			for what, writes := range runHistory(t, seed, 40) {
				fenced[what] += writes
			}
			hours += time.Since(began).Hours()
		})
		n++
	}
	t.Logf("%d histories of %.0f lease-hours in all; fenced writes: %s", n, hours, testkit.FormatCounts(fenced))
}
