//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"strings"
	"time"
)

// storeURL is the URL of a store on several hosts, such as
//
//	nats://user:password@host-a:4222,host-b:4222/path?name=value
type storeURL struct {
	scheme     string
	user       *url.Userinfo // nil: none
	hosts      []string
	path       string // without the slashes around it
	parameters map[string]string
}

var hostAndPort = regexp.MustCompile(`^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?$`)

// parseURL parses what is not quite a URL, because it has several hosts. Its errors quote nothing
// that could be a part of a password.
func parseURL(text string) (storeURL, error) {
	u := storeURL{parameters: make(map[string]string)}
	scheme, rest, _ := strings.Cut(text, "://")
	u.scheme = scheme
	rest, query, _ := strings.Cut(rest, "?")
	if strings.Contains(query, "@") {
		return u, errors.New("the store's URL has an @ after the host: write special characters in user and password as %XX")
	}
	user := ""
	if i := strings.LastIndex(rest, "@"); i >= 0 {
		user, rest = rest[:i], rest[i+1:]
		parsed, err := url.Parse(scheme + "://" + user + "@host")
		if err != nil || parsed.Host != "host" || strings.ContainsAny(user, "@/") {
			return u, errors.New("the store's URL cannot be parsed: write special characters in user and password as %XX")
		}
		u.user = parsed.User
	}
	hosts, path, _ := strings.Cut(rest, "/")
	u.path = strings.Trim(path, "/")
	for host := range strings.SplitSeq(hosts, ",") {
		if !hostAndPort.MatchString(host) {
			return u, fmt.Errorf("the store's URL cannot be parsed: after %s: come // and user:password@host:port, with special characters in user and password as %%XX and other hosts behind a comma", scheme)
		}
		u.hosts = append(u.hosts, host)
	}
	parameters, err := url.ParseQuery(query)
	if err != nil {
		return u, errors.New("the parameters of the store's URL cannot be parsed: write special characters as %XX")
	}
	for name, values := range parameters {
		switch {
		case len(values) > 1:
			return u, fmt.Errorf("the store's URL has %s twice", name)
		case values[0] == "":
			return u, fmt.Errorf("the store's URL has no value for %q", name)
		}
		u.parameters[name] = values[0]
	}
	return u, nil
}

// readable checks the file that a parameter names.
func readable(parameter, file string) error {
	if _, err := os.ReadFile(file); err != nil {
		return fmt.Errorf("%s of the store's URL: %w", parameter, err)
	}
	return nil
}

// whenUp calls connect, again and again while the store is down, until ctx is done.
func whenUp(ctx context.Context, what string, log *slog.Logger, connect func() (down bool, err error)) error {
	waiting := false
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		down, err := connect()
		if err == nil || !down {
			return err
		}
		if !waiting {
			log.Warn("waiting for "+what, "error", oneLine(err))
			waiting = true
		}
		select {
		case <-ctx.Done():
			if cause := context.Cause(ctx); !errors.Is(err, cause) {
				err = fmt.Errorf("%w (%w)", err, cause)
			}
			return err
		case <-time.After(pause):
		}
	}
}
