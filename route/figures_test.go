package route_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/route"
	"github.com/tenurelib/tenure/storetest"
)

func pc(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[min(len(d)-1, int(q*float64(len(d))))]
}

func TestFigures(t *testing.T) {
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	h2c.SetHTTP1(true)
	for name, protocols := range map[string]*http.Protocols{"HTTP/1": nil, "h2c": h2c} {
		path := newFile(t)
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "ok") })
		direct := listen(t, h)
		owner := startProcess(t, kit.OpenSQLite(t, path), "owner", route.Config{}, claims.SessionConfig{}, protocols)
		other := startProcess(t, kit.OpenSQLite(t, path), "other", route.Config{}, claims.SessionConfig{}, protocols)
		owner.serve("x", h)
		lat := map[string][]time.Duration{}
		body := strings.Repeat("x", 200)
		for i := range 4000 {
			for to, addr := range map[string]string{"direct": direct, "owner": owner.addr, "hop": other.addr} {
				began := time.Now()
				if got := ask(addr, "POST", "/x", "1", strings.NewReader(body)); got.status != 200 {
					t.Fatal(got)
				}
				if i > 200 {
					lat[to] = append(lat[to], time.Since(began))
				}
			}
		}
		t.Logf("%s: p50 direct %v, at the owner %v, by a hop %v: the hop adds %v", name, pc(lat["direct"], .5), pc(lat["owner"], .5), pc(lat["hop"], .5), pc(lat["hop"], .5)-pc(lat["owner"], .5))
		if name == "HTTP/1" {
			var plain, routed []time.Duration
			for range 50 {
				began := time.Now()
				for range 200 {
					post(h, "/x")
				}
				plain = append(plain, time.Since(began)/200)
				began = time.Now()
				for range 200 {
					post(owner.route, "/x")
				}
				routed = append(routed, time.Since(began)/200)
			}
			t.Logf("in the process: handler %v, through the route %v (medians of 50 x 200)", pc(plain, .5), pc(routed, .5))
		}
	}
}

func TestFigureStatements(t *testing.T) {
	inBubble(t, func(t *testing.T, store *tenure.SQLiteStore, n *wires) {
		var mu sync.Mutex
		ops := map[string]int{}
		hook := func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			mu.Lock()
			ops[call.Op]++
			mu.Unlock()
			return do(ctx)
		}
		show := func(what string) {
			mu.Lock()
			defer mu.Unlock()
			t.Log(what, ops)
			clear(ops)
		}
		owner := n.start(t, store, "owner", route.Config{Run: answering})
		p := n.start(t, storetest.Faulty(store, hook), "p", route.Config{Run: answering})
		time.Sleep(time.Second)
		post(owner.route, "/x")
		show("before")
		post(p.route, "/x")
		show("first use of an owned key:")
		for range 1000 {
			post(p.route, "/x")
		}
		show("1000 more:")
		post(p.route, "/free")
		show("first use of a free key:")
		o2 := n.start(t, store, "o2", route.Config{Run: answering})
		o2.keys.RequestRelease(t.Context(), "x")
		time.Sleep(100 * time.Millisecond)
		post(o2.route, "/x")
		show("between")
		post(p.route, "/x")
		show("after it moved:")
	})
}

func TestFigureLoad(t *testing.T) {
	for _, kills := range []int{0, 20} {
		for _, on := range []string{"sqlite", "postgres"} {
			if only := os.Getenv("FIG"); only != "" && only != fmt.Sprint(on, kills) {
				continue
			}
			var open func() tenure.Store
			if on == "sqlite" {
				path := newFile(t)
				open = func() tenure.Store { return kit.OpenSQLite(t, path) }
			} else {
				url := kit.PostgresURL(t)
				kit.MigrateClaims(t, kit.OpenPostgres(t, url, tenure.PostgresConfig{}))
				open = func() tenure.Store { return kit.OpenPostgres(t, url, tenure.PostgresConfig{}) }
			}
			figureLoad(t, on, open, kills)
		}
	}
}

func figureLoad(t *testing.T, on string, open func() tenure.Store, kills int) {
	const ttl, total = 2 * time.Second, 100_000
	j := &judge{T: t, ran: newRan(), fates: map[string]int{}, latest: map[string]int64{}}
	var mu sync.Mutex
	var procs []*process
	var links []*storetest.FaultyStore
	add := func() {
		link := storetest.Faulty(open(), nil)
		t.Cleanup(func() { link.SetHook(nil) })
		p := startProcess(t, link, "p", route.Config{MaxWait: ttl + 2*time.Second, Run: func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
			return serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				j.ran.note(r.Header.Get("Id"), claims.ClaimFromContext(r.Context()).Token)
			}))
		}}, claims.SessionConfig{TTL: ttl}, nil)
		mu.Lock()
		procs, links = append(procs, p), append(links, link)
		mu.Unlock()
	}
	for range 3 {
		add()
	}
	var asked atomic.Int32
	var busy sync.WaitGroup
	type span struct {
		at     time.Time
		took   time.Duration
		tenant string
	}
	spans := make([][]span, 32)
	for c := range 32 {
		busy.Go(func() {
			for {
				n := asked.Add(1)
				if n > total {
					return
				}
				mu.Lock()
				addr := procs[rand.IntN(len(procs))].addr
				mu.Unlock()
				tenant := fmt.Sprint("t", rand.IntN(12))
				began := time.Now()
				j.request(addr, tenant, fmt.Sprint(n))
				spans[c] = append(spans[c], span{began, time.Since(began), tenant})
			}
		})
	}
	var moves []span
	killed := 0
	began := time.Now()
	for i := 1; i < 100; i++ {
		for int(asked.Load()) < i*total/100 {
			time.Sleep(time.Millisecond)
		}
		mu.Lock()
		p := procs[rand.IntN(len(procs))]
		mu.Unlock()
		m := span{at: time.Now(), tenant: fmt.Sprint("t", rand.IntN(12))}
		if p.keys.RequestRelease(t.Context(), m.tenant) == nil {
			moves = append(moves, m)
		}
		if kills > 0 && i%5 == 1 && killed < kills {
			mu.Lock()
			p, link := procs[0], links[0]
			procs, links = procs[1:], links[1:]
			mu.Unlock()
			link.SetHook(kit.Hang)
			p.server.Close()
			killed++
			add()
		}
	}
	busy.Wait()
	var all, waits []time.Duration
	for _, c := range spans {
		for _, s := range c {
			all = append(all, s.took)
		}
	}
	for _, m := range moves {
		longest := time.Duration(0)
		for _, c := range spans {
			for _, s := range c {
				if s.tenant == m.tenant && s.at.Before(m.at.Add(500*time.Millisecond)) && s.at.Add(s.took).After(m.at) {
					longest = max(longest, s.took)
				}
			}
		}
		waits = append(waits, longest)
	}
	twice := 0
	for _, n := range j.ran.times {
		if n > 1 {
			twice++
		}
	}
	t.Logf("%s: %v in %v, %d handovers asked, %d kills, %d ran twice; a request p50 %v p99 %v; longest of a moved tenant's requests p50 %v p99 %v", on, j.fates, time.Since(began).Round(time.Second), len(moves), killed, twice, pc(all, .5), pc(all, .99), pc(waits, .5), pc(waits, .99))
}
