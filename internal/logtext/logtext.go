// Package logtext prepares the texts of errors for a log.
package logtext

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// OneLine returns an error whose text is one line, for logs. Errors of pgx and joined errors have several.
func OneLine(err error) error {
	if err = Sound(err); err == nil || !strings.Contains(err.Error(), "\n") {
		return err
	}
	return oneLine{err}
}

// Text returns the text of an error in one line, or "" for nil. Never call it under a mutex: the error may be the
// user's, and its Error method may do anything.
func Text(err error) string {
	if err == nil {
		return ""
	}
	return OneLine(err).Error()
}

// Sound returns the error, or another one with its text if its methods panic, as the methods of a nil pointer
// do. Every error from the user's code passes through Sound before anything else uses it.
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
	errors.Is(err, errProbe) // calls Is and Unwrap of every error in the chain
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

const uuid = `[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}`

var varying = regexp.MustCompile(uuid + `|\p{Nd}`)

// Gist returns a text without its UUIDs and digits, because a different session or port does not make it a
// different error.
func Gist(text string) string { return varying.ReplaceAllString(text, "") }
