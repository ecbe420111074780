//go:build unix

package pgconns

import (
	"net"
	"syscall"
)

// IsQuiet reports whether nothing has come from the server on an idle
// connection. Before a server hangs up it says so; and a connection that was cut
// reads as its end. It asks the kernel only.
func IsQuiet(conn net.Conn) bool {
	for { // TLS, and ours
		wrapped, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		conn = wrapped.NetConn()
	}
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	// Not raw.Read: it would wait for a reader that the driver has left behind, as
	// it does after a write that took long, until the server says something.
	err = raw.Control(func(fd uintptr) {
		_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK) // the socket does not block
		quiet = err == syscall.EAGAIN
	})
	return err == nil && quiet
}
