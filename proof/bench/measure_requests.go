package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/proof/kit"
)

var requestsMeasure = measure{
	name:  "requests",
	about: "package route: what a hop costs, how long requests wait in a handover, and what becomes of them when owners are killed",
	named: true,
	run:   measureRequests,
}

func measureRequests(ctx context.Context, b *bench) error {
	postgres, err := b.postgres.database(ctx)
	if err != nil {
		return err
	}
	for name, url := range map[string]string{"Postgres": postgres, "SQLite": filepath.Join(b.files, b.name()+".db")} {
		store, err := tenure.Open(ctx, url)
		if err != nil {
			return err
		}
		err = errors.Join(store.Migrate(ctx), claims.Migrate(ctx, store), store.Close())
		for _, step := range []func(context.Context, *bench, *fleet) error{hop, countRequests, handOver, killOwners} {
			if err == nil {
				before := load()
				f := &fleet{name: name, url: url, ledger: filepath.Join(b.files, b.name()+".ledger")}
				if err = step(ctx, b, f); err == nil {
					b.say("%s: load average %s before, %s after", name, before, load())
				}
				f.end()
			}
		}
		if err != nil {
			b.failed("requests", name, err)
		}
	}
	return ctx.Err()
}

// fleet is some processes that answer requests for the same keys.
type fleet struct {
	name, url string
	ledger    string // to which the handlers write each request that they run

	mu        sync.Mutex
	processes map[string]*player // by address
}

// add starts another process, whose session has the TTL.
func (f *fleet) add(ctx context.Context, ttl time.Duration, scheme string) (addr string, err error) {
	port, err := kit.FreePort()
	if err != nil {
		return "", err
	}
	s := &succession{env: []string{partEnv + "=requests", urlEnv + "=" + f.url, fmt.Sprint(amountEnv, "=", port),
		ledgerEnv + "=" + f.ledger, ttlEnv + "=" + ttl.String(), schemeEnv + "=" + scheme}}
	p, err := s.start()
	if err != nil {
		return "", err
	}
	addr = fmt.Sprint("127.0.0.1:", port)
	f.mu.Lock()
	if f.processes == nil {
		f.processes = map[string]*player{}
	}
	f.processes[addr] = p
	f.mu.Unlock()
	_, err = p.hears(ctx, "serves")
	return addr, err
}

// any returns the address of any process.
func (f *fleet) any() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	for addr := range f.processes { // in random order
		return addr
	}
	return ""
}

// take returns a process that gets no more requests from clients.
func (f *fleet) take(addr string) *player {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.processes[addr]
	delete(f.processes, addr)
	return p
}

func (f *fleet) end() {
	for addr := f.any(); addr != ""; addr = f.any() {
		f.take(addr).end()
	}
}

// asked is a request and what became of it.
type asked struct {
	id       string
	from, to time.Time
	outcome  string // answered, refused, unknown, or broken: its connection
	by       string // the address of the owner that answered
	token    int64
}

// clientOf returns the transport of clients. It repeats no request that may have been written.
func clientOf(scheme string) *http.Transport {
	t := &http.Transport{MaxIdleConnsPerHost: 64, Protocols: new(http.Protocols)}
	t.Protocols.SetHTTP1(scheme == "http")
	t.Protocols.SetUnencryptedHTTP2(scheme == "h2c")
	return t
}

var body = strings.Repeat("x", 200)

// ask sends a request for a path to a process.
func ask(ctx context.Context, by *http.Transport, addr, path, id string) (q asked, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		return q, err
	}
	r.GetBody = nil
	r.Header.Set("Id", id)
	q = asked{id: id, from: time.Now()}
	answer, err := by.RoundTrip(r)
	if err == nil {
		_, err = io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
	}
	q.to = time.Now()
	if err != nil {
		q.outcome = "broken"
		return q, err
	}
	q.by = answer.Header.Get("By")
	q.token, _ = strconv.ParseInt(cmp.Or(answer.Header.Get("Tenure-Token"), answer.Header.Get("Calls")), 10, 64)
	q.outcome = cmp.Or(answer.Header.Get("Tenure-Request"), "answered")
	if q.outcome == "answered" && answer.StatusCode != http.StatusOK {
		err = errors.New(answer.Status)
	}
	return q, err
}

// hop measures what a route adds to a request that its process answers, and what a hop adds to that.
func hop(ctx context.Context, b *bench, f *fleet) error {
	for _, scheme := range []string{"http", "h2c"} {
		owner, err := f.add(ctx, longTTL, scheme)
		other, err2 := f.add(ctx, longTTL, scheme)
		client := clientOf(scheme)
		if err := errors.Join(err, err2, first(ask(ctx, client, owner, "/"+scheme, ""))); err != nil {
			return err
		}
		ways := []struct{ addr, path string }{{owner, "/bare"}, {owner, "/" + scheme}, {other, "/" + scheme}}
		var took [3][]time.Duration
		for n := range b.samples(10_000) {
			for _, i := range rand.Perm(len(ways)) {
				q, err := ask(ctx, client, ways[i].addr, ways[i].path, "")
				if err != nil {
					return err
				}
				if n >= 10 { // the first ones open connections
					took[i] = append(took[i], q.to.Sub(q.from))
				}
			}
		}
		client.CloseIdleConnections()
		f.end()
		for _, p := range []int{50, 99} {
			at := func(i int) time.Duration { return percentile(took[i], p) }
			b.report.add("requests", f.name, fmt.Sprintf("%s: a hop adds p%d", scheme, p), milliseconds(at(2)-at(1)), "ms", len(took[0]))
			b.report.add("requests", f.name, fmt.Sprintf("%s: the route adds p%d", scheme, p), float64((at(1)-at(0)).Nanoseconds())/1000, "µs", len(took[0]))
		}
	}
	return nil
}

func first(_ asked, err error) error { return err }

// countRequests counts the calls of the store that a process makes for requests, by a hook of the store.
func countRequests(ctx context.Context, b *bench, f *fleet) error {
	var addrs [3]string
	for i := range addrs {
		var err error
		if addrs[i], err = f.add(ctx, longTTL, "http"); err != nil {
			return err
		}
	}
	client := clientOf("http")
	defer client.CloseIdleConnections()
	for _, step := range []struct {
		what    string
		process int // that gets the request, and whose calls count
		n       int
		before  string // what it is asked first
	}{
		{"first use of a key that it claims", 0, 1, ""},
		{"first use of a key that another owns", 1, 1, ""},
		{"at rest, 1000 requests", 1, 1000, ""},
		{"(the third process claims it)", 2, 1, "/release"},
		{"after the key has moved", 1, 1, ""},
	} {
		if step.before != "" {
			if err := first(ask(ctx, client, addrs[step.process], step.before, "")); err != nil {
				return err
			}
		}
		if err := pause(ctx, 500*time.Millisecond); err != nil { // what follows by itself
			return err
		}
		before, err := ask(ctx, client, addrs[step.process], "/calls", "")
		for range step.n {
			err = errors.Join(err, first(ask(ctx, client, addrs[step.process], "/x", "")))
		}
		after, err2 := ask(ctx, client, addrs[step.process], "/calls", "")
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		b.report.add("requests", f.name, step.what, float64(after.token-before.token), "calls", step.n)
	}
	return nil
}

// load32 has 32 clients send n requests for a key to any of three processes. disturb is called so many times meanwhile.
func load32(ctx context.Context, b *bench, f *fleet, n, times int, ttl time.Duration, disturb func(owner string) error) (all []asked, at []time.Time, err error) {
	for range 3 {
		if _, err := f.add(ctx, ttl, "http"); err != nil {
			return nil, nil, err
		}
	}
	client := clientOf("http")
	defer client.CloseIdleConnections()
	var mu sync.Mutex
	var owner string
	var sent atomic.Int64
	var clients sync.WaitGroup
	for range 32 {
		clients.Go(func() {
			for i := sent.Add(1); i <= int64(n) && pause(ctx, rand.N(40*time.Millisecond)) == nil; i = sent.Add(1) {
				q, _ := ask(ctx, client, f.any(), "/x", fmt.Sprint(i))
				mu.Lock()
				if all = append(all, q); q.by != "" {
					owner = q.by
				}
				mu.Unlock()
			}
		})
	}
	for len(at) < times && err == nil && ctx.Err() == nil {
		if err = pause(ctx, 10*time.Millisecond); sent.Load()*int64(times) > int64(n)*int64(len(at))+int64(n)/2 {
			mu.Lock()
			from := owner
			mu.Unlock()
			at = append(at, time.Now())
			err = disturb(from)
		}
	}
	clients.Wait()
	return all, at, err
}

// longest returns the longest time of a request in each of the spans, which begin at some times.
func longest(all []asked, at []time.Time, shift, length time.Duration) (times []time.Duration) {
	for _, t := range at {
		from := t.Add(shift)
		var most time.Duration
		for _, q := range all {
			if q.from.Before(from.Add(length)) && q.to.After(from) {
				most = max(most, q.to.Sub(q.from))
			}
		}
		times = append(times, most)
	}
	return times
}

// handOver has a key released while clients ask for it.
func handOver(ctx context.Context, b *bench, f *fleet) error {
	all, at, err := load32(ctx, b, f, b.samples(100_000), 100, 30*time.Second, func(string) error {
		return first(ask(ctx, clientOf("http"), f.any(), "/release", ""))
	})
	if err != nil {
		return err
	}
	const span = 100 * time.Millisecond
	b.report.addQuantiles("requests", f.name, "handover: longest wait of a request", longest(all, at, 0, span))
	b.report.addQuantiles("requests", f.name, "as long without one", longest(all, at, -span, span))
	return f.check(b, "handovers", all, nil)
}

// killOwners kills the owner of a key while clients ask for it, and starts another process.
func killOwners(ctx context.Context, b *bench, f *fleet) error {
	all, at, err := load32(ctx, b, f, b.samples(100_000), 20, fastTTL, func(owner string) error {
		p := f.take(cmp.Or(owner, f.any()))
		if p == nil {
			return nil
		}
		err := p.Process.Kill()
		p.end()
		_, err2 := f.add(ctx, fastTTL, "http")
		return errors.Join(err, err2)
	})
	if err != nil {
		return err
	}
	return f.check(b, "kills", all, at)
}

// check compares what clients were told with what has run.
func (f *fleet) check(b *bench, run string, all []asked, kills []time.Time) error {
	file, err := os.Open(f.ledger)
	if err != nil {
		return err
	}
	defer file.Close()
	runs := map[string][]int64{}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		id, token, _ := strings.Cut(lines.Text(), " ")
		n, _ := strconv.ParseInt(token, 10, 64)
		runs[id] = append(runs[id], n)
	}
	counts := map[string]int{}
	slices.SortFunc(all, func(a, b asked) int { return a.to.Compare(b.to) })
	for _, q := range all {
		counts[q.outcome]++
		inFlight := slices.ContainsFunc(kills, func(t time.Time) bool { return q.from.Before(t.Add(50*time.Millisecond)) && q.to.After(t) })
		for what, is := range map[string]bool{
			"run twice":                     len(runs[q.id]) > 1,
			"answered and not run":          q.outcome == "answered" && !slices.Contains(runs[q.id], q.token),
			"refused and run":               q.outcome == "refused" && len(runs[q.id]) > 0,
			"unknown, not in flight then":   (q.outcome == "unknown" || q.outcome == "broken") && !inFlight,
			"in flight, and it had run":     (q.outcome == "unknown" || q.outcome == "broken") && len(runs[q.id]) == 1,
			"took longer than half the TTL": q.to.Sub(q.from) > fastTTL/2,
		} {
			if is {
				counts[what]++
			}
		}
	}
	for _, what := range []string{"answered", "refused", "unknown", "broken", "unknown, not in flight then", "in flight, and it had run",
		"run twice", "answered and not run", "refused and run"} {
		b.report.add("requests", f.name, run+": "+what, float64(counts[what]), "", len(all))
	}
	return nil
}
