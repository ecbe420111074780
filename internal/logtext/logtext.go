// Package logtext makes the texts of errors fit for a log.
package logtext

import (
	"strings"
	"unicode"
)

// OneLine returns an error whose text is one line, for logs. The errors of pgx have several,
// and so have joined ones.
func OneLine(err error) error {
	if err == nil || !strings.Contains(err.Error(), "\n") {
		return err
	}
	return oneLine{err}
}

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
