package pgconns

import (
	"context"
	"net"

	"github.com/jackc/pgx/v5/pgconn"
)

// Cutter closes the sockets of connections by force. The driver gives itself 15 seconds to
// close a connection whose call was cancelled, and if the server hangs, it uses all of them.
type Cutter struct {
	ctx context.Context
	Cut context.CancelFunc // closes them; may be called twice
}

// NewCutter returns a cutter that has nothing to close yet.
func NewCutter() *Cutter {
	c := &Cutter{}
	c.ctx, c.Cut = context.WithCancel(context.Background())
	return c
}

// Dial wraps a dial func so that its connections are closed when c cuts them off.
func (c *Cutter) Dial(dial pgconn.DialFunc) pgconn.DialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(c.ctx, cancel)()
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &cutConn{conn, context.AfterFunc(c.ctx, func() { conn.Close() })}, nil
	}
}

type cutConn struct {
	net.Conn
	closed func() bool
}

func (c *cutConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// NetConn returns the wrapped connection, as [tls.Conn.NetConn] does.
func (c *cutConn) NetConn() net.Conn { return c.Conn }
