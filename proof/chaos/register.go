package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/tenurelib/tenure/internal/testkit"
)

// registerModel judges the operations on one register.
var registerModel = (&porcupine.NondeterministicModel{
	Init: testkit.HistoryInit,
	Step: func(state, _, output any) []any { return testkit.HistoryStep(state, nil, output.(op).call()) },
}).ToModel()

// forever is the return time of an operation whose outcome is unknown: it may still
// happen.
const forever = time.Duration(math.MaxInt64)

// judge checks whether the history of one register is linearizable.
func judge(history []porcupine.Operation) porcupine.CheckResult {
	const longest = 30 * time.Second
	// Most operations with an unknown outcome left no trace. They can be left out, because
	// they may never have happened.
	seen := map[string]bool{}
	for _, o := range history {
		seen[o.Output.(op).Read] = true
	}
	traced := slices.DeleteFunc(slices.Clone(history), func(o porcupine.Operation) bool {
		out := o.Output.(op)
		return out.Outcome == unknown && !seen[out.Value]
	})
	if porcupine.CheckOperationsTimeout(registerModel, traced, longest) == porcupine.Ok {
		return porcupine.Ok
	}
	return porcupine.CheckOperationsTimeout(registerModel, history, longest)
}

// checkRegisters checks that the history of each register is linearizable: there must be
// an order of the operations that explains what all replicas saw.
func (r *result) checkRegisters(p *phase, a *audit) {
	histories := map[string][]porcupine.Operation{}
	begun := map[string]event{}
	last := time.Duration(0)
	name := func(e event) string { return fmt.Sprintf("%s.%d", e.Note, e.Op.ID) }
	add := func(call, back time.Duration, o op) {
		if o.Do == get && (o.Outcome == unknown || o.Outcome == refused) {
			return
		}
		if o.Outcome == unknown {
			r.doubtful++
			back = forever
		}
		histories[o.Key] = append(histories[o.Key], porcupine.Operation{Call: int64(call), Output: o, Return: int64(back)})
	}
	for _, e := range p.record.sorted() {
		switch e.Kind {
		case operation:
			begun[name(e)] = e
		case answer:
			begin, o := begun[name(e)], *e.Op
			if !a.promised(e.At) { // it is unknown which file the answer is about
				o.Outcome = unknown
			}
			add(begin.At, e.At, o)
			delete(begun, name(e))
			r.operations++
		}
		last = max(last, e.At)
	}
	for _, e := range begun { // never answered: the process was killed
		o := *e.Op
		o.Outcome = unknown
		add(e.At, forever, o)
	}
	for key := range histories {
		final, ok := a.registers[key]
		if !ok {
			final = op{Do: get, Key: key, Outcome: notFound}
		}
		add(last+1, last+2, final)
	}
	for key, history := range histories {
		r.registers++
		switch judge(history) {
		case porcupine.Illegal:
			r.violate("register %s is not linearizable:\n%s", key, told(history))
		case porcupine.Unknown:
			r.undecided++
		}
	}
}

func told(history []porcupine.Operation) string {
	slices.SortFunc(history, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var b strings.Builder
	for _, o := range history {
		back := "never"
		if o.Return != int64(forever) {
			back = time.Duration(o.Return).String()
		}
		fmt.Fprintf(&b, "\t%v to %s: %v\n", time.Duration(o.Call), back, o.Output.(op))
	}
	return b.String()
}
