package main

import (
	"encoding/binary"
	"testing"
)

func message(kind string, body string) []byte {
	b := []byte(kind)
	b = binary.BigEndian.AppendUint32(b, uint32(4+len(body)))
	return append(b, body...)
}

func TestStatementsAreCountedHoweverTheyAreCutToPieces(t *testing.T) {
	var stream []byte
	for _, m := range [][]byte{
		message("", "\x04\xd2\x16\x2f"),         // asks for encryption
		message("", "\x00\x03\x00\x00user\x00"), // starts
		message("Q", "BEGIN\x00"),
		message("P", "\x00SELECT 1\x00\x00\x00"), message("D", "S\x00"), message("S", ""),
		message("B", "QES"), message("E", "\x00\x00\x00\x00\x00"),
		message("B", ""), message("E", "\x00\x00\x00\x00\x00"), message("S", ""),
		message("X", ""),
	} {
		stream = append(stream, m...)
	}
	for size := 1; size <= len(stream); size++ {
		var s statements
		take := s.connection()
		for rest := stream; len(rest) > 0; {
			n := min(size, len(rest))
			take(rest[:n])
			rest = rest[n:]
		}
		if executed, trips := s.executed.Load(), s.trips.Load(); executed != 3 || trips != 3 {
			t.Fatalf("in pieces of %d: got %d statements in %d round trips, want 3 in 3", size, executed, trips)
		}
	}
}
