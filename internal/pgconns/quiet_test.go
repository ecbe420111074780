//go:build unix

package pgconns

import (
	"net"
	"testing"
	"time"
)

func TestIsQuietDoesNotBlock(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	server, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if !IsQuiet(conn) {
		t.Error("a connection without incoming data is not quiet")
	}

	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	reading, enough, quiet := make(chan struct{}), make(chan struct{}), make(chan bool, 1)
	read := make(chan error, 1)
	go func() { // like a reader that the driver left behind
		read <- raw.Read(func(uintptr) bool { close(reading); <-enough; return true })
	}()
	<-reading
	go func() { quiet <- IsQuiet(conn) }()
	select {
	case is := <-quiet:
		if !is {
			t.Error("a connection with a blocked reader is not quiet")
		}
	case <-time.After(10 * time.Second):
		t.Error("IsQuiet waits for the reader")
	}
	close(enough)
	if err := <-read; err != nil {
		t.Fatal(err)
	}

	server.Close()
	for end := time.Now().Add(10 * time.Second); IsQuiet(conn); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a connection that the server closed is quiet")
		}
	}
}
