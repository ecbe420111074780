package testkit

import (
	"errors"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// HistoryExample is a history of calls that were made one after another.
type HistoryExample struct {
	Linearizable bool
	Calls        []HistoryCall
}

// History returns the calls with times.
func (e HistoryExample) History() (all []Operation) {
	for i, call := range e.Calls {
		sent := time.Duration(i) * time.Second
		op := Operation{Call: call, Sent: sent, Answered: sent + longest}
		if call.Unknown() {
			op.Answered = Never
		}
		all = append(all, op)
	}
	return all
}

// HistoryExamples returns histories that a test uses to show that its checker works.
func HistoryExamples() map[string]HistoryExample {
	wrote := func(do string, expects, version int64, value string) HistoryCall {
		return HistoryCall{Do: do, Version: expects, Value: value, Read: tenure.Object{Version: version, Payload: []byte(value)}}
	}
	read := func(version int64, value string) HistoryCall {
		return HistoryCall{Do: "get", Read: tenure.Object{Version: version, Payload: []byte(value)}}
	}
	lease := func(c HistoryCall) HistoryCall { c.Lease = true; return c }
	fenced := func(fence int64, c HistoryCall) HistoryCall { c.Fence = fence; return c }
	failed := func(c HistoryCall, err error) HistoryCall { c.Read, c.Err = tenure.Object{}, err; return c }
	noAnswer := errors.New("no answer")
	a, b := wrote("create", 0, 1, "a"), wrote("replace", 1, 2, "b")
	lost := failed(b, noAnswer)
	begun, next := lease(wrote("create", 0, 3, "x")), lease(wrote("replace", 3, 4, "y"))
	return map[string]HistoryExample{
		"in order":                 {true, []HistoryCall{a, b, read(2, "b")}},
		"an outdated read":         {false, []HistoryCall{a, b, read(1, "a")}},
		"a lost write":             {false, []HistoryCall{a, b, wrote("replace", 1, 3, "c")}},
		"a version that goes back": {false, []HistoryCall{wrote("create", 0, 5, "a"), {Do: "delete", Version: 5}, wrote("create", 0, 4, "b")}},
		"a write without an answer that happened":         {true, []HistoryCall{a, lost, read(7, "b")}},
		"a write without an answer that did not happen":   {true, []HistoryCall{a, lost, read(1, "a")}},
		"a write without an answer that happened and not": {false, []HistoryCall{a, lost, read(7, "b"), read(1, "a")}},
		"a conflict of a write that happened":             {false, []HistoryCall{a, failed(b, &objects.Conflict{Wanted: 1, Current: 2}), read(2, "b")}},

		"a fenced write":                            {true, []HistoryCall{a, begun, fenced(3, wrote("replace", 1, 5, "b"))}},
		"a stale write":                             {false, []HistoryCall{a, begun, next, fenced(3, wrote("replace", 1, 5, "b"))}},
		"a stale write after a release":             {false, []HistoryCall{a, begun, lease(HistoryCall{Do: "delete", Version: 3}), fenced(3, wrote("replace", 1, 5, "b"))}},
		"a stale write that is refused":             {true, []HistoryCall{a, begun, next, fenced(3, failed(b, tenure.ErrLost)), read(1, "a")}},
		"a fenced write that is refused for naught": {false, []HistoryCall{a, begun, fenced(3, failed(b, tenure.ErrLost))}},
		"a stale write without an answer":           {false, []HistoryCall{a, begun, next, fenced(3, lost), read(5, "b")}},
		"a fenced write without an answer":          {true, []HistoryCall{a, begun, fenced(3, lost), next, read(5, "b")}},
		"a takeover without an answer and a write of the new term": {true, []HistoryCall{a, begun, failed(next, noAnswer),
			fenced(3, failed(b, tenure.ErrLost)), fenced(6, wrote("replace", 1, 7, "c")), read(7, "c")}},
		"a takeover without an answer and writes of both terms": {false, []HistoryCall{a, begun, failed(next, noAnswer),
			fenced(6, wrote("replace", 1, 7, "c")), fenced(3, wrote("replace", 7, 8, "b"))}},
	}
}
