//go:build unix

package pgconns

import (
	"net"
	"syscall"
)

// IsQuiet reports whether nothing has arrived from the server on an idle connection. A
// server sends a message before it closes a connection, and a broken connection reads as
// EOF. It asks only the kernel, not the server.
func IsQuiet(conn net.Conn) bool {
	for { // unwrap TLS and our own wrapper
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
	// raw.Read would wait for a reader that the driver leaves behind after a slow write,
	// until the server sends something.
	err = raw.Control(func(fd uintptr) {
		_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK) // the socket does not block
		quiet = err == syscall.EAGAIN
	})
	return err == nil && quiet
}
