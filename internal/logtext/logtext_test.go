package logtext

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestAnErrorOfSeveralLinesIsMadeOneLine(t *testing.T) {
	a, b := errors.New("a:\n\tb\r\n\n\tc"), errors.New("d")
	joined := OneLine(errors.Join(a, b))
	if got, want := joined.Error(), "a: b; c; d"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if !errors.Is(joined, b) {
		t.Error("it does not wrap the error")
	}
	if OneLine(b) != b || OneLine(nil) != nil {
		t.Error("an error of one line is changed")
	}
}

func TestTheErrorsOfOneOutageAreOneClass(t *testing.T) {
	reset := &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}
	for _, err := range []error{
		reset, fmt.Errorf("put a/b: %w", io.ErrUnexpectedEOF), io.EOF, &net.OpError{Op: "write", Err: syscall.EPIPE},
		&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, &pgconn.PgError{Code: "57P03", Message: "the database system is starting up"},
		&pgconn.PgError{Code: "57P01"}, &pgconn.PgError{Code: "08006"}, &pgconn.PgError{Code: "53300"}, context.DeadlineExceeded, net.ErrClosed,
	} {
		if got := Class(err); got != Class(reset) {
			t.Errorf("%v: class %q", err, got)
		}
	}
	for _, err := range []error{
		&pgconn.PgError{Code: "42501"}, &pgconn.PgError{Code: "55P03"}, &pgconn.PgError{Code: "28P01"}, errors.New("anything else"), nil,
	} {
		if got := Class(err); got == Class(reset) {
			t.Errorf("%v: class %q", err, got)
		}
	}
	if Class(errors.New("port 1")) != Class(errors.New("port 22")) || Class(errors.New("a")) == Class(errors.New("b")) {
		t.Error("other errors go by their text without its numbers")
	}
	if Class(errors.New("put s/5d783949-891a-4c82-a90b-6c19a2580b4d: no")) != Class(errors.New("put s/390afbfd-c8ac-4722-992c-577b65c0f9ee: no")) {
		t.Error("the class of an error depends on a UUID in its text")
	}
}

func TestAnErrorThatStaysTheSameIsLoggedOnceAndAgainAfterAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Retries
		var logged []string
		for _, class := range []string{"a", "a", "b", "a", "b", "a"} { // an hour each
			for range 60 {
				time.Sleep(time.Minute)
				if r.IsNew(class) {
					logged = append(logged, class)
				}
			}
		}
		if got := strings.Join(logged, ""); got != "abab"+"a" {
			t.Errorf("logged %q", got)
		}
	})
}

func TestAnOutageIsLoggedOncePerTenMinutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines strings.Builder
		logger := slog.New(slog.NewTextHandler(&lines, nil))
		r := Retries{Repeat: true}
		outage := []error{io.EOF, syscall.ECONNRESET, context.DeadlineExceeded, &pgconn.PgError{Code: "57P03"}}
		for i := range 20 * 60 {
			r.Log(logger, slog.LevelWarn, "not done; retrying", outage[i%len(outage)], "kind", "a")
			time.Sleep(time.Second)
		}
		if n := strings.Count(lines.String(), "not done"); n != 2 {
			t.Errorf("%d lines in 20 minutes", n)
		}
		r.Log(logger, slog.LevelWarn, "not done; retrying", outage[0], "kind", "b")
		r.Log(logger, slog.LevelWarn, "not done; retrying", errors.New("another"), "kind", "a")
		r.Reset()
		r.Log(logger, slog.LevelWarn, "not done; retrying", outage[0], "kind", "a")
		if n := strings.Count(lines.String(), "not done"); n != 5 {
			t.Errorf("%d lines", n)
		}
		for i := range 1000 { // which are no error's class
			r.IsNew(strings.Repeat("x", i))
		}
		if len(r.told) > mostClasses {
			t.Errorf("%d classes are remembered", len(r.told))
		}
	})
}

// broken has methods that panic, as those of most errors do if they are nil pointers.
type broken struct{ err error }

func (e *broken) Error() string { return e.err.Error() }
func (e *broken) Unwrap() error { return e.err }

func TestAnErrorWhoseMethodsPanicIsReplacedByItsText(t *testing.T) {
	var null *broken
	for _, err := range []error{null, fmt.Errorf("a: %w", null), errors.Join(io.EOF, null)} {
		for _, sound := range []error{Sound(err), OneLine(err)} {
			if text := sound.Error(); !strings.Contains(text, "whose methods panic") || errors.Is(sound, io.ErrClosedPipe) {
				t.Errorf("got %q", text)
			}
		}
		Class(err)
	}
	if Sound(nil) != nil || Sound(io.EOF) != io.EOF {
		t.Error("a sound error is changed")
	}
}
