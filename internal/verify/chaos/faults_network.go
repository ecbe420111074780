package main

import (
	"context"
	"time"
)

const networkFault = "network " // prefix of the names of network faults

// networkKinds are the faults of the connections to a server, each of which goes through a proxy.
func networkKinds() []faultKind {
	return []faultKind{
		{name: networkFault + "cut", group: "network", weight: 4, begin: network(func(p *phase, w *weather) { w.refuse = true })},
		{name: networkFault + "slow", group: "network", weight: 4, begin: network(func(p *phase, w *weather) {
			w.delayRequests, w.delayAnswer = p.upTo(p.ttl), p.upTo(p.ttl)
			switch p.rand.IntN(3) {
			case 0:
				w.delayRequests = 0
			case 1:
				w.delayAnswer = 0
			}
		})},
		{name: networkFault + "hangs", group: "network", weight: 4, begin: network(func(p *phase, w *weather) {
			n := p.rand.IntN(3)
			w.hangRequests, w.hangAnswers = n != 0, n != 1
		})},
		{name: "answers lost after commit", group: "network", weight: 5, begin: network(func(p *phase, w *weather) {
			w.loseAnswers = 0.3 + 0.7*p.rand.Float64()
		})},
	}
}

func (p *phase) upTo(d time.Duration) time.Duration { return time.Duration(p.rand.Int64N(int64(d))) }

// network does something to the connections of one, several or all replicas.
func network(change func(p *phase, w *weather)) func(context.Context, *phase) (string, ending, error) {
	return func(_ context.Context, p *phase) (string, ending, error) {
		victims := p.victims(1 + p.rand.IntN(replicas))
		var w weather
		change(p, &w)
		for _, v := range victims {
			v.proxy.set(w)
		}
		alsoCut := p.rand.IntN(2) == 0
		return names(victims), func() (time.Duration, error) {
			for _, v := range victims {
				v.proxy.set(weather{})
				if alsoCut {
					v.proxy.cut()
				}
			}
			return 0, nil
		}, nil
	}
}
