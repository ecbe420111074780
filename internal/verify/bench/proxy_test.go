package main

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

// echo starts a server that sends back what it is sent.
func echo(t *testing.T) (url string) {
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
	return "echo://" + l.Addr().String()
}

func dialThrough(t *testing.T, p *proxy) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", p.listener.Addr().String())
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

func TestAProxyPassesEverythingOnUntilItIsDark(t *testing.T) {
	p, err := newProxy(echo(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	conn := dialThrough(t, p)
	if got, err := ask(conn, "hello\n", 10*time.Second); err != nil || got != "hello\n" {
		t.Fatalf("got %q, %v", got, err)
	}
	p.blackhole()
	if got, err := ask(conn, "anybody\n", 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("in the dark: got %q, %v, want silence", got, err)
	}
	if got, err := ask(dialThrough(t, p), "anybody\n", 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("in the dark, on a new connection: got %q, %v, want silence", got, err)
	}
}

func TestAClosedProxyBreaksConnectionsAndTakesNone(t *testing.T) {
	p, err := newProxy(echo(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	conn := dialThrough(t, p)
	if _, err := ask(conn, "hello\n", 10*time.Second); err != nil {
		t.Fatal(err)
	}
	p.close()
	p.close() // a second time is harmless
	if _, err := ask(conn, "hello\n", 10*time.Second); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("on the old connection: got %v, want a broken one", err)
	}
	if conn, err := net.Dial("tcp", p.listener.Addr().String()); err == nil {
		conn.Close()
		t.Error("it took another connection")
	}
}

func TestACallBeginsAfterSilenceAndCountsOnceAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // time passes only where the test says so
		var c calls
		began := time.Now().Add(-time.Hour)
		c.sent(began)
		if !c.lastSuccess().IsZero() {
			t.Error("a call that nobody answered counts")
		}
		if !c.unanswered() {
			t.Error("it passes for answered before it is")
		}
		c.sent(began.Add(quiet / 2)) // of the same call
		c.answered()
		if c.unanswered() {
			t.Error("it passes for unanswered after it was answered")
		}
		c.sent(time.Now()) // an acknowledgement, that belongs to it
		if c.unanswered() {
			t.Error("what follows an answer passes for another call")
		}
		if got := c.lastSuccess(); !got.Equal(began) {
			t.Errorf("got %v after it, want its begin", got.Sub(began))
		}
		next := time.Now().Add(time.Hour)
		c.sent(next)
		if got := c.lastSuccess(); !got.Equal(began) {
			t.Error("the next call counts before it is answered")
		}
		c.answered()
		if got := c.lastSuccess(); !got.Equal(next) {
			t.Error("the next call does not count though it is answered")
		}
	})
}
