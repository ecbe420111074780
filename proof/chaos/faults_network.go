package main

import (
	"context"
	"math/rand/v2"
	"regexp"
	"time"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

const networkFault = "network " // prefix of the names of network faults

// networkKinds are the faults of the connections to a server, each of which goes through a proxy.
func networkKinds() []faultKind {
	return []faultKind{
		{name: networkFault + "cut", group: "network", weight: 4, begin: weather(toServer, cut)},
		{name: networkFault + "slow", group: "network", weight: 4, begin: weather(toServer, slow)},
		{name: networkFault + "hangs", group: "network", weight: 4, begin: weather(toServer, hang)},
		{name: "answers lost after commit", group: "network", weight: 5, begin: weather(toServer, loseWritten)},
	}
}

func cut(_ *phase, w *rig.Weather) { w.Refuse = true }

func slow(p *phase, w *rig.Weather) {
	w.DelayRequests, w.DelayAnswers = p.upTo(p.ttl), p.upTo(p.ttl)
	switch p.rand.IntN(3) {
	case 0:
		w.DelayRequests = 0
	case 1:
		w.DelayAnswers = 0
	}
}

func hang(p *phase, w *rig.Weather) {
	n := p.rand.IntN(3)
	w.HangRequests, w.HangAnswers = n != 0, n != 1
}

func loseWritten(p *phase, w *rig.Weather) { w.Lose = lost(0.3 + 0.7*p.rand.Float64()) }

func (p *phase) upTo(d time.Duration) time.Duration { return time.Duration(p.rand.Int64N(int64(d))) }

func toServer(p *process) *rig.Proxy { return p.proxy }

// weather does something to the connections of one, several or all replicas, each through its proxy.
func weather(proxy func(*process) *rig.Proxy, change func(p *phase, w *rig.Weather)) func(context.Context, *phase) (string, ending, error) {
	return func(_ context.Context, p *phase) (string, ending, error) {
		victims := p.victims(1 + p.rand.IntN(replicas))
		var w rig.Weather
		change(p, &w)
		for _, v := range victims {
			proxy(v).Set(w)
		}
		alsoCut := p.rand.IntN(2) == 0
		return names(victims), func() (time.Duration, error) {
			for _, v := range victims {
				proxy(v).Set(rig.Weather{})
				if alsoCut {
					proxy(v).Cut()
				}
			}
			return 0, nil
		}, nil
	}
}

// written matches the end of Postgres' answer to a statement that changed something, the
// acknowledgement of a message by NATS, and MySQL's of one or two rows.
var written = regexp.MustCompile(`(INSERT 0 1|UPDATE 1|DELETE 1|COMMIT)\x00|\{"stream": ?"` + natsStreamName + `", ?"seq":|^(?s:.)\x00\x00\x01\x00[\x01\x02]`)

// maybeWritten also matches Postgres' answer to a delete, which counts the rows that it deletes,
// and etcd's answer to a transaction whose conditions were met, which may have read only: the
// header with its four numbers, and "succeeded", and MySQL's to a COMMIT.
var maybeWritten = regexp.MustCompile(`SELECT 1\x00|(?s)\x0a.\x08.{4,10}\x10.{4,10}\x18.{1,5}\x20.\x10\x01|^\x07\x00\x00\x01\x00\x00\x00\x02\x00`)

// lost returns what loses the answers to writes with that probability.
func lost(probability float64) func(piece []byte) bool {
	return func(piece []byte) bool {
		switch {
		case written.Match(piece):
			return rand.Float64() < probability
		case maybeWritten.Match(piece):
			return rand.Float64() < probability/4
		}
		return false
	}
}
