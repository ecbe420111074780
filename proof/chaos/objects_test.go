package main

import (
	"reflect"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/tenurelib/tenure"
)

func TestTheHistoryOfObjectsIsALedger(t *testing.T) {
	lease, fenced := tenure.Key{Type: leaseType, ID: "x"}, tenure.Key{Type: fencedType, ID: "y"}
	record := func(term string) []byte { return []byte(`{"term":"` + term + `"}`) }
	history := []change{
		{key: lease, payload: record("a"), version: 1},
		{key: lease, payload: record("a"), version: 2},
		{key: fenced, payload: []byte(`{"term":"a","token":1,"note":"n"}`), version: 3},
		{key: tenure.Key{Type: registerType, ID: "z"}, payload: []byte("1"), version: 4},
		{key: lease, version: 5},
		{key: lease, version: 6},
		{key: lease, payload: record("a"), version: 7},
		{key: lease, payload: record("b"), version: 8},
	}
	want := []entry{
		{kind: ledgerBegin, lease: "x", term: "a", token: 1},
		{kind: ledgerRenewed, lease: "x", term: "a", token: 2},
		{kind: ledgerFenced, term: "a", token: 1, note: "n"},
		{kind: ledgerEnd, lease: "x", term: "a", token: 2},
		{kind: ledgerBegin, lease: "x", term: "a", token: 7},
		{kind: ledgerBegin, lease: "x", term: "b", token: 8},
	}
	for without, from := range map[int]int{0: 0, 1: 1, 4: 3, 8: 6} {
		got, err := ledgerOf(history, without)
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if got[i].kind == ledgerRenewed {
				got[i].note = ""
			}
		}
		if len(got) != len(want[from:]) || len(got) > 0 && !reflect.DeepEqual(got, want[from:]) {
			t.Errorf("without the first %d: got %v, want %v", without, got, want[from:])
		}
	}
}

func TestAnswersToWritesAreRecognised(t *testing.T) {
	txn := func(succeeded bool) []byte {
		data, err := proto.Marshal(&etcdserverpb.TxnResponse{
			Header:    &etcdserverpb.ResponseHeader{ClusterId: 1 << 63, MemberId: 1 << 40, Revision: 300, RaftTerm: 2},
			Succeeded: succeeded,
		})
		if err != nil {
			t.Fatal(err)
		}
		return append([]byte{0, 0, 0, 0, byte(len(data))}, data...) // as gRPC frames it
	}
	for _, test := range []struct {
		answer  string
		is, may bool
	}{
		{"MSG _INBOX.x 1 35\r\n{\"stream\":\"TENURE\", \"seq\":1795391899811976}\r\n", true, false},
		{"MSG _INBOX.x 1 35\r\n{\"error\":{\"code\":400}}\r\n", false, false},
		{string(txn(true)), false, true},
		{string(txn(false)), false, false},
		{"C\x00\x00\x00\x0fINSERT 0 1\x00", true, false},
	} {
		if is, may := written.MatchString(test.answer), maybeWritten.MatchString(test.answer); is != test.is || may != test.may {
			t.Errorf("%q: %v, %v", test.answer, is, may)
		}
	}
}
