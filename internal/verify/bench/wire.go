package main

import (
	"encoding/binary"
	"sync/atomic"
)

// statements counts the statements and round trips that clients send to a Postgres
// server. It is safe for concurrent use by the connections of a proxy.
type statements struct {
	executed atomic.Int64 // statements: each Query, and each Execute of a prepared one
	trips    atomic.Int64 // round trips: each Query, and each Sync
}

// connection returns a func that takes the pieces of one connection in order.
func (s *statements) connection() func(piece []byte) {
	var (
		pending []byte
		started bool
	)
	return func(piece []byte) {
		pending = append(pending, piece...)
		for {
			// The first messages of a connection have no type: requests for encryption
			// and the startup message.
			typed := 0
			if started {
				typed = 1
			}
			if len(pending) < typed+4 {
				return
			}
			length := typed + int(binary.BigEndian.Uint32(pending[typed:]))
			if len(pending) < length || length < typed+4 {
				return
			}
			if started {
				s.count(pending[0])
			} else if length >= 8 {
				const version3 = 3
				started = binary.BigEndian.Uint16(pending[4:]) == version3
			}
			pending = pending[length:]
		}
	}
}

func (s *statements) count(message byte) {
	switch message {
	case 'Q':
		s.executed.Add(1)
		s.trips.Add(1)
	case 'E':
		s.executed.Add(1)
	case 'S':
		s.trips.Add(1)
	}
}
