package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

var rowsMeasure = measure{
	name:  "rows",
	about: "16 workers take rows of a table and finish them, and what becomes of the rows when a process is killed",
	run:   measureRows,
}

func measureRows(ctx context.Context, b *bench) error {
	before := load()
	for _, part := range []struct {
		name string
		run  func(context.Context, *bench) error
	}{
		{"throughput", rowsThroughput},
		{"at rest", rowsAtRest},
		{"killed", func(ctx context.Context, b *bench) error { return rowsKilled(ctx, b, false) }},
		{"killed at work", func(ctx context.Context, b *bench) error { return rowsKilled(ctx, b, true) }},
		{"river's rescue", riverRescue},
	} {
		if err := part.run(ctx, b); err != nil {
			b.failed("rows", part.name, err)
		}
	}
	b.report.note("rows", "machine", "load average "+before+" before, "+load()+" after")
	return ctx.Err()
}

// load returns the load averages of this machine.
func load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}

// rowsThroughput lets the queues work in turns.
func rowsThroughput(ctx context.Context, b *bench) error {
	rounds := b.samples(8)
	sizes := choose(b, [manners]int{batched: 20_000, singly: 4000, singlyTx: 2000}, [manners]int{batched: 2000, singly: 200, singlyTx: 200})
	url, err := b.postgres.database(ctx)
	if err != nil {
		return err
	}
	type turn struct {
		queueing
		queue
		how manner
	}
	var turns []turn
	for _, kind := range queueings {
		q, err := kind.open(ctx, url)
		if err != nil {
			b.failed("rows", kind.name, err)
			continue
		}
		defer q.close()
		for how := range manners {
			turns = append(turns, turn{kind, q, how})
		}
	}
	type figure struct {
		name string
		how  manner
	}
	took, finished := map[figure]time.Duration{}, map[figure]int{}
	clientCPU, serverCPU := map[figure]time.Duration{}, map[figure]time.Duration{}
	server, err := b.postgres.pid(ctx)
	if err != nil {
		return err
	}
	err = inTurns(ctx, rounds+1, turns, func(round int, t turn) error { // the first round opens connections and prepares statements
		n := sizes[t.how]
		if round == 0 {
			n /= 10
		}
		if err := t.fill(ctx, n); err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
		ours, theirs := ownCPU(), cpu(server)
		time, err := t.work(ctx, n, t.how)
		if err != nil {
			return fmt.Errorf("%s, %v: %w", t.name, t.how, err)
		}
		if f := (figure{t.name, t.how}); round > 0 {
			took[f] += time
			finished[f] += n
			clientCPU[f] += ownCPU() - ours
			serverCPU[f] += cpu(server) - theirs
		}
		return nil
	})
	if err != nil {
		return err
	}
	rate := func(name string, how manner) float64 {
		return float64(finished[figure{name, how}]) / took[figure{name, how}].Seconds()
	}
	for how := range manners {
		for _, kind := range queueings {
			if n := finished[figure{kind.name, how}]; n > 0 {
				b.report.add("rows", kind.name, how.String(), rate(kind.name, how), "rows/s", n)
				each := func(cpu map[figure]time.Duration) float64 {
					return float64(cpu[figure{kind.name, how}].Microseconds()) / float64(n)
				}
				b.report.add("rows", kind.name, how.String()+", CPU of the client", each(clientCPU), "µs/row", n)
				b.report.add("rows", kind.name, how.String()+", of the server", each(serverCPU), "µs/row", n)
			}
		}
		if hand := rate(handQueueing.name, how); hand > 0 {
			b.report.add("rows", claimsQueueing.name, "÷ hand-written, "+how.String(), rate(claimsQueueing.name, how)/hand, "", rounds)
		}
	}
	return onceEach(ctx, url, "effects", finished[figure{claimsQueueing.name, singlyTx}]*(rounds*10+1)/(rounds*10)*len(queueings))
}

// onceEach returns an error unless a table has exactly n effects, each of another worker or ID.
func onceEach(ctx context.Context, url, table string, n int) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var all, different int
	err = conn.QueryRow(ctx, `SELECT count(*), count(DISTINCT (id, worker)) FROM `+table).Scan(&all, &different)
	if err == nil && (all != n || different != n) {
		err = fmt.Errorf("%d rows were to be finished once each: there are %d effects, of which %d are different", n, all, different)
	}
	return err
}

// rowsAtRest counts the statements of a process with rows in flight, and of a process without any.
func rowsAtRest(ctx context.Context, b *bench) error {
	n, watch := choose(b, 10_000, 1000), choose(b, 30*time.Second, 3*time.Second)
	url, err := b.postgres.database(ctx)
	if err != nil {
		return err
	}
	var counts statements
	proxy, through, err := newProxy(url, counts.tap)
	if err != nil {
		return err
	}
	defer proxy.Close()
	q, err := openClaimsQueue(ctx, through, fastTTL)
	if err != nil {
		return err
	}
	defer q.close()
	for _, n := range []int{0, n} {
		if err := q.fill(ctx, n); err != nil {
			return err
		}
		for q.held() < n {
			if _, err := q.worker.Take(ctx, 1000); err != nil {
				return err
			}
		}
		if err := pause(ctx, fastTTL); err != nil { // the first looks come at random moments within the TTL
			return err
		}
		before := counts.executed.Load()
		if err := pause(ctx, watch); err != nil {
			return err
		}
		b.report.add("rows", claimsQueueing.name, fmt.Sprintf("%d in flight", n), float64(counts.executed.Load()-before)/watch.Seconds(), "statements/s", n)
	}
	return nil
}
