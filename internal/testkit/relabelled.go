package testkit

import (
	"io"
	"net"
	neturl "net/url"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"
)

// Relabelled returns the URL of a server that also reports a parameter when a client connects, as other servers
// that speak the Postgres protocol do. Otherwise it is the server at the given URL, whose clients must use neither
// TLS nor a password.
func Relabelled(t testing.TB, url, parameter, value string) string {
	t.Helper()
	u, err := neturl.Parse(url)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	extra, err := (&pgproto3.ParameterStatus{Name: parameter, Value: value}).Encode(nil)
	require.NoError(t, err)
	server := u.Host
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go relabel(client, server, extra)
		}
	}()
	u.Host = l.Addr().String()
	return u.String()
}

// relabel forwards a connection. The extra message follows the first one, which says that no password is needed; the
// answer to a cancel request gets no extra message.
func relabel(client net.Conn, server string, extra []byte) {
	defer client.Close()
	conn, err := net.Dial("tcp", server)
	if err != nil {
		return
	}
	defer conn.Close()
	go func() {
		defer conn.Close()
		_, _ = io.Copy(conn, client)
	}()
	const authenticationOk = 9 // bytes
	if _, err := io.CopyN(client, conn, authenticationOk); err != nil {
		return
	}
	if _, err := client.Write(extra); err == nil {
		_, _ = io.Copy(client, conn)
	}
}
