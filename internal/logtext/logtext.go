// Package logtext makes the texts of errors fit for a log.
package logtext

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// OneLine returns an error whose text is one line, for logs. The errors of pgx have several,
// and so have joined ones.
func OneLine(err error) error {
	if err = Sound(err); err == nil || !strings.Contains(err.Error(), "\n") {
		return err
	}
	return oneLine{err}
}

// Sound returns the error, or one with its text if its methods panic, as those of a nil pointer
// in an error do. Errors of the user's come through it before anything looks at them.
func Sound(err error) (sound error) {
	if err == nil {
		return nil
	}
	defer func() {
		if recover() != nil {
			sound = fmt.Errorf("%v, an error of type %T whose methods panic", err, err)
		}
	}()
	_ = err.Error()
	errors.Is(err, errProbe) // which calls Is and Unwrap of all that it wraps
	errors.As(err, new(*probe))
	return err
}

type probe struct{ error }

var errProbe = errors.New("")

type oneLine struct{ error }

func (e oneLine) Unwrap() error { return e.error }

func (e oneLine) Error() string {
	var text strings.Builder
	for line := range strings.Lines(e.error.Error()) {
		line = strings.TrimSpace(line)
		switch {
		case line == "":
			continue
		case strings.HasSuffix(text.String(), ":"):
			text.WriteString(" ")
		case text.Len() > 0:
			text.WriteString("; ")
		}
		text.WriteString(line)
	}
	return text.String()
}

// Gist returns an error's text without its numbers: a port that differs each time does not
// make it another error.
func Gist(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsDigit(r) {
			return -1
		}
		return r
	}, text)
}
