package main

import (
	"io"
	"net/url"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// newProxy starts a proxy to the server at a URL, and returns the URL through it.
func newProxy(server string, tap func() rig.Tap) (proxy *rig.Proxy, through string, err error) {
	u, err := url.Parse(server)
	if err != nil {
		return nil, "", err
	}
	if proxy, err = rig.NewProxy(u.Host, tap); err != nil {
		return nil, "", err
	}
	u.Host = proxy.Addr()
	return proxy, u.String(), nil
}

// statements counts the statements and round trips that clients send to a Postgres
// server. It is safe for concurrent use by the connections of a proxy.
type statements struct {
	executed atomic.Int64 // statements: each Query, and each Execute of a prepared one
	trips    atomic.Int64 // round trips: each Query, and each Sync
}

// tap counts what passes through one connection.
func (s *statements) tap() rig.Tap {
	r, w := io.Pipe()
	go func() { r.CloseWithError(s.count(pgproto3.NewBackend(r, nil))) }()
	return rig.Tap{
		Sent: func(piece []byte) {
			if _, err := w.Write(piece); err != nil {
				panic(err) // too few would be counted
			}
		},
		Closed: func() { w.Close() },
	}
}

// count counts a client's messages until the connection ends.
func (s *statements) count(client *pgproto3.Backend) error {
	for started := false; !started; { // requests for encryption come first
		message, err := client.ReceiveStartupMessage()
		if err != nil {
			return err
		}
		_, started = message.(*pgproto3.StartupMessage)
	}
	_ = client.SetAuthType(pgproto3.AuthTypeSASLContinue) // with it, any answer to a request for a password can be read
	for {
		message, err := client.Receive()
		if err != nil {
			return err
		}
		switch message.(type) {
		case *pgproto3.Query:
			s.executed.Add(1)
			s.trips.Add(1)
		case *pgproto3.Execute:
			s.executed.Add(1)
		case *pgproto3.Sync:
			s.trips.Add(1)
		}
	}
}
