package logtext

import (
	"errors"
	"testing"
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
