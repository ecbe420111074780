package rig_test

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// echo starts a server that sends back what it is sent, and returns its address.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				io.Copy(conn, conn)
			}()
		}
	}()
	return l.Addr().String()
}

func dialThrough(t *testing.T, p *rig.Proxy) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func ask(conn net.Conn, line string, patience time.Duration) (string, error) {
	if _, err := io.WriteString(conn, line); err != nil {
		return "", err
	}
	conn.SetReadDeadline(time.Now().Add(patience))
	return bufio.NewReader(conn).ReadString('\n')
}

func TestAProxyPassesEverythingOnUntilItDropsEverything(t *testing.T) {
	p, err := rig.NewProxy(echo(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	conn := dialThrough(t, p)
	if got, err := ask(conn, "hello\n", 10*time.Second); err != nil || got != "hello\n" {
		t.Fatalf("got %q, %v", got, err)
	}
	p.Set(rig.Weather{Drop: true})
	if got, err := ask(conn, "anybody\n", 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("while it drops: got %q, %v, want silence", got, err)
	}
	if got, err := ask(dialThrough(t, p), "anybody\n", 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("while it drops, on a new connection: got %q, %v, want silence", got, err)
	}
}

func TestAClosedProxyBreaksConnectionsAndTakesNone(t *testing.T) {
	p, err := rig.NewProxy(echo(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	conn := dialThrough(t, p)
	if _, err := ask(conn, "hello\n", 10*time.Second); err != nil {
		t.Fatal(err)
	}
	p.Close()
	p.Close() // a second time is harmless
	if _, err := ask(conn, "hello\n", 10*time.Second); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("on the old connection: got %v, want a broken one", err)
	}
	if conn, err := net.Dial("tcp", p.Addr()); err == nil {
		conn.Close()
		t.Error("it took another connection")
	}
}
