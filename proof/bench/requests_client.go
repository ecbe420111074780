package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
)

// fleet is some processes that answer requests for the same keys.
type fleet struct {
	name, url, ledger string // the handlers write each request that they run to the ledger

	mu        sync.Mutex
	processes map[string]*player // by address
}

// start starts processes whose sessions have the TTL, and returns their addresses.
func (f *fleet) start(ctx context.Context, n int, ttl time.Duration, scheme string) (addrs []string, err error) {
	for range n {
		port, err := testkit.FreePort()
		if err != nil {
			return nil, err
		}
		s := &succession{env: []string{partEnv + "=requests", urlEnv + "=" + f.url, fmt.Sprint(amountEnv, "=", port),
			ledgerEnv + "=" + f.ledger, ttlEnv + "=" + ttl.String(), schemeEnv + "=" + scheme}}
		p, err := s.start()
		if err == nil {
			_, err = p.hears(ctx, "serves")
		}
		if err != nil {
			return nil, err
		}
		addr := fmt.Sprint("127.0.0.1:", port)
		f.mu.Lock()
		f.processes[addr] = p
		f.mu.Unlock()
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

// any returns the address of any process; empty: there is none.
func (f *fleet) any() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	for addr := range f.processes { // in random order
		return addr
	}
	return ""
}

// take returns a process to which clients send no more requests, or nil.
func (f *fleet) take(addr string) *player {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer delete(f.processes, addr)
	return f.processes[addr]
}

func (f *fleet) end() {
	for addr := f.any(); addr != ""; addr = f.any() {
		f.take(addr).end()
	}
}

// asked is a request and what became of it.
type asked struct {
	id       string
	from, to time.Time
	outcome  string // answered, refused, unknown, or broken: its connection
	by       string // the address of the owner that answered
	token    int64
	err      error
}

// client sends requests, and repeats none that may have been written.
type client struct{ http.Transport }

func clientOf(scheme string) *client {
	c := &client{http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 10 * time.Second, Protocols: new(http.Protocols)}}
	c.Protocols.SetHTTP1(scheme == "http")
	c.Protocols.SetUnencryptedHTTP2(scheme == "h2c")
	return c
}

// ask sends a request for a path to a process.
func (c *client) ask(ctx context.Context, addr, path, id string) (q asked) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, strings.NewReader(strings.Repeat("x", 200)))
	if err != nil {
		return asked{err: err}
	}
	r.GetBody = nil
	r.Header.Set("Id", id)
	q = asked{id: id, from: time.Now()}
	answer, err := c.RoundTrip(r)
	if err == nil {
		_, err = io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
	}
	q.to = time.Now()
	if q.err = err; err != nil {
		q.outcome = "broken"
		return q
	}
	q.by = answer.Header.Get("By")
	q.token, _ = strconv.ParseInt(cmp.Or(answer.Header.Get("Tenure-Token"), answer.Header.Get("Calls")), 10, 64)
	q.outcome = cmp.Or(answer.Header.Get("Tenure-Request"), "answered")
	if answer.StatusCode != http.StatusOK {
		q.err = errors.New(answer.Status)
	}
	return q
}
