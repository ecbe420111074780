package main

import (
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
)

func TestStatementsAreCountedHoweverTheyAreCutToPieces(t *testing.T) {
	var stream []byte
	for _, m := range []pgproto3.FrontendMessage{
		&pgproto3.SSLRequest{},
		&pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersion30, Parameters: map[string]string{"user": "x"}},
		&pgproto3.SASLResponse{Data: []byte("c=biws,r=nonce,p=proof")},
		&pgproto3.Query{String: "BEGIN"},
		&pgproto3.Parse{Query: "SELECT 1"}, &pgproto3.Describe{ObjectType: 'S'}, &pgproto3.Sync{},
		&pgproto3.Bind{DestinationPortal: "QES"}, &pgproto3.Execute{},
		&pgproto3.Bind{}, &pgproto3.Execute{}, &pgproto3.Sync{},
		&pgproto3.Terminate{},
	} {
		var err error
		if stream, err = m.Encode(stream); err != nil {
			t.Fatal(err)
		}
	}
	for size := 1; size <= len(stream); size++ {
		var s statements
		tap := s.tap()
		for rest := stream; len(rest) > 0; {
			n := min(size, len(rest))
			tap.Sent(rest[:n])
			rest = rest[n:]
		}
		tap.Sent(nil) // returns once the reader wants more
		if executed, trips := s.executed.Load(), s.trips.Load(); executed != 3 || trips != 3 {
			t.Fatalf("in pieces of %d: got %d statements in %d round trips, want 3 in 3", size, executed, trips)
		}
		tap.Closed()
	}
}
