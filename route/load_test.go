package route_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/route"
	"github.com/tenurelib/tenure/storetest"
)

var loadFor = flag.Duration("route.for", 3*time.Second, "how long the load test runs on each database")

// judge is told each request and what became of it.
type judge struct {
	*testing.T
	ran *ran

	mu     sync.Mutex
	fates  map[string]int
	latest map[string]int64 // by tenant, the greatest token of the answers so far
}

func (j *judge) request(addr, tenant, id string) {
	j.mu.Lock()
	least := j.latest[tenant]
	j.mu.Unlock()
	got := ask(addr, "POST", "/"+tenant, id, strings.NewReader("body"))
	token, _ := strconv.ParseInt(got.token, 10, 64)
	times := j.ran.of(id)
	j.mu.Lock()
	defer j.mu.Unlock()
	fate := got.fate
	switch {
	case got.err != nil:
		fate = "broken"
	case fate == "":
		fate = "answered"
		j.latest[tenant] = max(j.latest[tenant], token)
		if got.status != 200 || times != 1 || token < least || j.ran.token(id) != token {
			j.Errorf("%s of %s was answered %v, ran %d times, token %d after %d", id, tenant, got, times, token, least)
		}
	case fate == "refused" && (times != 0 || got.status != 503):
		j.Errorf("%s was refused: %v, and ran %d times", id, got, times)
	}
	j.fates[fate]++
}

// Three processes own twelve tenants, hand them over, and are killed: their servers close under requests, and their
// sessions are cut off.
func TestUnderLoadNoRequestRunsTwiceAndEachOutcomeIsTrue(t *testing.T) {
	testkit.Slow(t)
	t.Run("sqlite", func(t *testing.T) {
		path := newFile(t)
		runLoad(t, func() tenure.Store { return testkit.OpenSQLite(t, path) })
	})
	t.Run("postgres", func(t *testing.T) {
		url := testkit.PostgresURL(t)
		testkit.MigrateClaims(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
		runLoad(t, func() tenure.Store { return testkit.OpenPostgres(t, url, tenure.PostgresConfig{}) })
	})
}

func runLoad(t *testing.T, open func() tenure.Store) {
	const ttl, tenants, clients = 2 * time.Second, 12, 32
	j := &judge{T: t, ran: newRan(), fates: map[string]int{}, latest: map[string]int64{}}
	start := func(link *storetest.FaultyStore) *process {
		return startProcess(t, link, "p", route.Config{MaxWait: ttl + 3*time.Second, Run: func(ctx context.Context, c claims.Claim, serve func(http.Handler) error) error {
			return serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				j.ran.note(r.Header.Get("Id"), claims.ClaimFromContext(r.Context()).Token)
				testkit.Sleep(r.Context(), rand.N(3*time.Millisecond))
			}))
		}}, claims.SessionConfig{TTL: ttl}, nil)
	}
	var mu sync.Mutex
	var procs []*process
	var links []*storetest.FaultyStore
	add := func() {
		link := storetest.Faulty(open(), nil)
		t.Cleanup(func() { link.SetHook(nil) })
		p := start(link)
		mu.Lock()
		defer mu.Unlock()
		procs, links = append(procs, p), append(links, link)
	}
	take := func() (*process, *storetest.FaultyStore) {
		mu.Lock()
		defer mu.Unlock()
		p, link := procs[0], links[0]
		procs, links = procs[1:], links[1:]
		return p, link
	}
	for range 3 {
		add()
	}
	var stop atomic.Bool
	var busy sync.WaitGroup
	for c := range clients {
		busy.Go(func() {
			for n := 0; !stop.Load(); n++ {
				mu.Lock()
				addr := procs[rand.IntN(len(procs))].addr
				mu.Unlock()
				j.request(addr, fmt.Sprint("t", rand.IntN(tenants)), fmt.Sprint(c, "-", n))
			}
		})
	}
	kills, handovers := 0, 0
	for end := time.Now().Add(*loadFor); time.Now().Before(end) || kills == 0; {
		for range 10 { // another process asks for a tenant
			mu.Lock()
			p := procs[rand.IntN(len(procs))]
			mu.Unlock()
			if p.keys.RequestRelease(t.Context(), fmt.Sprint("t", rand.IntN(tenants))) == nil { // a busy machine may be too slow for it
				handovers++
			}
			time.Sleep(20 * time.Millisecond)
		}
		p, link := take()
		link.SetHook(testkit.Hang)
		p.server.Close()
		kills++
		add()
		p, _ = take() // one that stops in order
		p.end()
		require.NoError(t, p.route.Shutdown(t.Context(), p.server))
		add()
	}
	stop.Store(true)
	busy.Wait()
	t.Logf("%v, %d kills, %d requests to hand over", j.fates, kills, handovers)
	j.ran.mu.Lock()
	defer j.ran.mu.Unlock()
	for id, times := range j.ran.times {
		if times > 1 {
			t.Errorf("%s ran %d times", id, times)
		}
	}
	require.Greater(t, j.fates["answered"], 100)
}
