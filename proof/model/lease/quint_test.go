package lease

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
)

// The simulator of Quint takes random steps by lease.qnt, and each must be a step by the rules in Go: the same statement may
// be sent, and has the same effect on the record and on what the process knows. The simulator is run if it is installed:
// npm install @informalsystems/quint@0.33.1, with antlr4ts overridden to 0.5.0-alpha.4, and its directory in PATH.
func TestEachStepOfTheQuintSpecificationIsOneOfTheRules(t *testing.T) {
	quint, err := exec.LookPath("quint")
	if err != nil {
		t.Skip("quint is not installed")
	}
	dir := t.TempDir()
	out, err := exec.Command(quint, "run", "lease.qnt", "--backend", "typescript", "--invariant", "safe", "--max-steps", "40",
		"--max-samples", "100", "--n-traces", "100", "--out-itf", filepath.Join(dir, "run_{seq}.itf.json")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*.itf.json"))
	steps := map[string]int{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var run struct{ States []quintState }
		if err := json.Unmarshal(data, &run); err != nil {
			t.Fatal(err)
		}
		for i, to := range run.States[1:] {
			from := run.States[i]
			if steps[to.Last.What]++; !from.leadsTo(to) {
				t.Fatalf("%s, step %d: %s by P%d is none of the rules:\nfrom %+v\nto   %+v", file, i, to.Last.What, to.Last.Who, from, to)
			}
		}
	}
	if len(steps) < 6 { // the seventh is rare
		t.Errorf("of the seven kinds of steps these were taken: %v", steps)
	}
	t.Log(steps)
}

// quintState is a state of lease.qnt.
type quintState struct {
	Now       number
	Record    quintRecord
	Processes quintMap[quintProcess]
	Calls     quintMap[quintStatement]
	Stray     quintStatement
	Last      struct {
		What string
		Who  number
	}
}

type quintRecord struct{ Payload, Version, TTL, Renewed number }

type quintStatement struct {
	Kind                              string
	Term, Expects, Sent, Version, Age number
	Ran, Done                         bool
	Seen                              quintRecord
}

type quintProcess struct {
	Term, Token, Version, Unanswered, End, Over, OverVersion, Age, Since number
	Seen                                                                 quintRecord
}

// number is an integer, which Quint writes as {"#bigint": "1"}.
type number int32

func (n *number) UnmarshalJSON(data []byte) error {
	var is struct {
		Number string `json:"#bigint"`
	}
	if err := json.Unmarshal(data, &is); err != nil {
		return json.Unmarshal(data, (*int32)(n))
	}
	i, err := strconv.Atoi(is.Number)
	*n = number(i)
	return err
}

// quintMap is a map, which Quint writes as {"#map": [[key, value], …]}.
type quintMap[V any] map[number]V

func (m *quintMap[V]) UnmarshalJSON(data []byte) error {
	var is struct {
		Pairs [][2]json.RawMessage `json:"#map"`
	}
	if err := json.Unmarshal(data, &is); err != nil {
		return err
	}
	*m = quintMap[V]{}
	for _, pair := range is.Pairs {
		var k number
		var v V
		if err := json.Unmarshal(pair[0], &k); err != nil {
			return err
		}
		if err := json.Unmarshal(pair[1], &v); err != nil {
			return err
		}
		(*m)[k] = v
	}
	return nil
}

func (r quintRecord) record() Record {
	return Record{Payload: int32(r.Payload), Version: int32(r.Version), TTL: int32(r.TTL), Renewed: int32(r.Renewed)}
}

func (s quintStatement) statement() Statement {
	kinds := map[string]Kind{"read": Read, "begin": Begin, "renewal": Renew, "release": Release}
	bit := map[bool]int32{true: 1}
	is := Statement{Kind: kinds[s.Kind], Term: int32(s.Term), Expects: int32(s.Expects), Sent: int32(s.Sent), Version: int32(s.Version),
		Age: int32(s.Age), Ran: bit[s.Ran], Done: bit[s.Done], Seen: s.Seen.record()}
	if is.Kind == Begin || is.Kind == Renew {
		is.TTL = 3
	}
	return is
}

func (p quintProcess) process() Process {
	return Process{TTL: 3, Margin: 1, Term: int32(p.Term), Token: int32(p.Token), Version: int32(p.Version), Unanswered: int32(p.Unanswered),
		End: int32(p.End), Over: int32(p.Over), OverVersion: int32(p.OverVersion), Seen: p.Seen.record(), Age: int32(p.Age), Since: int32(p.Since)}
}

// leadsTo reports whether the rules lead from a state to the next one.
func (s quintState) leadsTo(to quintState) bool {
	var rules Rules
	who, now := to.Last.Who, int32(s.Now)
	record, p, c, stray := s.Record.record(), s.Processes[who].process(), s.Calls[who].statement(), s.Stray.statement()
	switch to.Last.What {
	case "sends":
		c = to.Calls[who].statement()
		if !rules.MaySend(&p, &c, now) {
			return false
		}
		p.Send(&c, now)
	case "runs":
		rules.Run(&record, &c, record.Version+1, now)
	case "stray":
		rules.Run(&record, &stray, record.Version+1, now)
		stray = Statement{}
	case "hears":
		rules.Hear(&p, &c, now)
		c = Statement{}
	case "gives up":
		p.GivesUp(&c)
		if c.Ran == 0 && c.Kind != Read {
			stray = c
		}
		c = Statement{}
	case "recognises":
		if !rules.Recognises(&p) {
			return false
		}
	case "tick":
		now++
	}
	for k, is := range to.Processes {
		was := s.Processes[k].process()
		if k == who {
			was = p
		}
		if was.Term != 0 && !was.Trusts(now) {
			was.Ends()
		}
		p, is := was, is.process()
		p.Newest, is.Newest = 0, 0 // lease.qnt has no L5
		if p != is {
			return false
		}
	}
	for k, is := range to.Calls {
		was := s.Calls[k].statement()
		if k == who {
			was = c
		}
		if was != is.statement() {
			return false
		}
	}
	return record == to.Record.record() && stray == to.Stray.statement() && now == int32(to.Now)
}
